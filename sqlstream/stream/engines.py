"""The engines of a dataset in this process: one for each iteration, or for all those of a worker, and one of random access."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch.utils.data import get_worker_info

from sqlstream.cache import Cache
from sqlstream.config import DEFAULT_RETAINED
from sqlstream.process import interrupts
from sqlstream.stream.engine.engine import Engine
from sqlstream.stream.frameworks.plain_loader import warn_of_paths
from sqlstream.stream.run.order_options import BatchOptions
from sqlstream.stream.transport.handover import Handover, LoaderHandovers


class EngineMaker(Protocol):
    """The parts of a dataset, or of a mixture, of which its engines are made."""

    @property
    def engines(self) -> Engines:
        """Those of this process."""

    def make_engine(self, num_retained: int, note_given_up: Callable[[], None] | None) -> Engine:
        """Return an engine that keeps the paths of so many samples valid, and notes when it gives one up beyond these."""

    def num_retained(self, batches: BatchOptions | None) -> int | None:
        """Return how many samples of a worker keep their paths valid; None: how many are under way is not known."""


class EndedIterations:
    """What keeps the paths of samples valid whose iteration has ended in this process: their batch may be in hand.

    A loader without workers collates its last batch when the iteration has ended, and a loop may be left with a batch in hand.
    """

    def __init__(self) -> None:
        self._releases = deque[Callable[[], None]]()
        weakref.finalize(self, interrupts.call_outside, partial(_call_all, self._releases)).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for a worker, which has no part in them."""
        return (EndedIterations, ())

    def add(self, release: Callable[[], None]) -> None:
        """Note what releases the paths of an iteration."""
        self._releases.append(release)

    def release(self) -> None:
        """Keep none of these paths any more."""
        _call_all(self._releases)


@dataclass(kw_only=True)
class Engines:
    """Begins the engines of a dataset, or of a mixture, and keeps those that outlive an iteration; picklable."""

    caches: Sequence[Cache]
    """The caches that the samples come through, each once."""
    handover: Handover | None = field(compare=False)
    """Where DataLoader workers leave their pins as they end; None: there are no objects, or no descriptors left."""
    iterations: set[object] = field(default_factory=set, compare=False)
    """Those under way; a set, to which several threads add in one step each."""
    loader_handovers: LoaderHandovers = field(default_factory=LoaderHandovers, compare=False)
    ended: EndedIterations = field(default_factory=EndedIterations, compare=False)
    of_worker: Engine | None = field(default=None, compare=False)
    """A DataLoader worker's engine: it outlives an iteration, with what it has prepared for the next one."""
    warnings: set[str] = field(default_factory=set, compare=False)
    """Texts of the warnings about loaders that this process has given for the dataset, each of them once."""

    @contextlib.contextmanager
    def iterating(
        self, maker: EngineMaker, ranks_on_node: int, batches: BatchOptions | None, *, has_loader: bool
    ) -> Iterator[Engine]:
        """Give an engine for one iteration; in the trainer's process its helper and threads end with the iteration.

        The paths of its last samples stay pinned until the next iteration here. In a DataLoader worker the helper stays for the
        next epoch, and so do the paths of batches under way.

        Args:
            maker: Makes it, unless this worker has one; not kept, since it keeps these engines.
            ranks_on_node: Trainer processes of this node: they and their workers share the cache's limit.
            batches: How a loader takes samples; None: not known.
            has_loader: A loader takes them, which makes batches: of samples that are taken one by one, the last is in hand.
        """
        for cache in self.caches:
            cache.check_open()
        info = get_worker_info()
        is_worker = info is not None
        if info is not None:
            for cache in self.caches:
                cache.session.expect(info.num_workers * ranks_on_node)
            if self.of_worker is None:
                gc.freeze()  # else the first collection copies all pages that a worker shares with its trainer
        else:
            self.ended.release()
        engine = self.of_worker
        if engine is None:
            num_retained = maker.num_retained(batches)
            note = None
            if has_loader and num_retained is None:
                note = partial(warn_of_paths, None if self.handover is None else self.handover.may_warn, self.warnings)
            engine = self.begin(maker, num_retained or DEFAULT_RETAINED, note)
        if is_worker:
            self.of_worker = engine
        iteration = object()
        self.iterations.add(iteration)
        try:
            yield engine
        finally:  # the garbage collector may end an iteration that was left in the middle of a transaction
            if all(cache.session.is_closed for cache in self.caches):  # as Python ends modules may be empty by then
                self._end(engine, iteration, is_worker=is_worker)
            else:
                interrupts.call_outside(partial(self._end, engine, iteration, is_worker=is_worker))

    def begin(self, maker: EngineMaker, num_retained: int, note_given_up: Callable[[], None] | None = None) -> Engine:
        """Return a new engine of this process, whose pins go to the trainer when this is a worker and ends."""
        if self.handover is not None:
            self.handover.begin([cache.session for cache in self.caches])
        return maker.make_engine(num_retained, note_given_up)

    def _end(self, engine: Engine, iteration: object, *, is_worker: bool) -> None:
        self.iterations.discard(iteration)
        if is_worker:
            engine.rest()
            return
        self.ended.add(engine.release_kept)
        engine.close()
        if not self.iterations:
            for cache in self.caches:
                cache.rest()

    def handover_of(self, loader: object) -> Handover | None:
        """Return where the workers of a loader leave their pins, apart from those of other loaders."""
        return None if self.handover is None else self.loader_handovers.of(loader) or self.handover

    def close(self) -> None:
        """Release all pins that ended workers have sent, and those of iterations that ended here."""
        self.ended.release()
        if self.handover is not None:
            self.handover.close()
        self.loader_handovers.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for a worker, which makes its own engines."""
        return {**self.__dict__, "of_worker": None, "iterations": set()}


def _call_all(functions: deque[Callable[[], None]]) -> None:
    """Call each function once, also where several threads do so."""
    while functions:
        try:
            function = functions.popleft()
        except IndexError:  # another thread has called the last one
            return
        function()
