"""Lightning: what it takes of a loader ahead of the training step, and what of a checkpoint it does not hand over.

Its fetcher looks one batch ahead, to know which one is the last; a loader with a length tells it so. The batch that it holds is
in no step yet when Lightning asks for the loader's state. Rejected: a length for a run that has no end, which would end it.

From a checkpoint of the end of an epoch, where it has nothing to go on with, it hands no state to the loader: a sampler would
be told the epoch by `set_epoch`, and the loader would begin again with the first one. So the loader takes its state itself.
Rejected: a sampler with `set_epoch`, which Lightning asks only when the resumed epoch has begun.

Its epochs need not be those of a loader: it ends one after `limit_train_batches`, or with the longest of several loaders. It
also iterates a loader twice before the first batch (a second `fit`, a reload, a checkpoint of the end of a validation).
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

from sqlstream.errors import StateError
from sqlstream.stream.run.delivery import Delivery
from sqlstream.stream.run.positions import JobPosition, RunPosition
from sqlstream.stream.run.schedule import Schedule

_FETCHER = "_PrefetchDataFetcher"
"""The class that looks ahead."""
_PACKAGES = ("lightning.pytorch.loops", "pytorch_lightning.loops")
_MODULES = tuple(f"{package}.fetchers" for package in _PACKAGES)
_FIT_LOOPS = tuple(f"{package}.fit_loop" for package in _PACKAGES)
_LENGTHS = (*_FIT_LOOPS, "lightning.fabric.utilities.data", "lightning_fabric.utilities.data")
"""Modules that ask for the length of a loader."""
_MAX_SIZE = "max_size"
"""The mode of a `CombinedLoader` that goes on without the loaders that have ended."""
_COMBINED = ("lightning.pytorch.utilities.combined_loader", "pytorch_lightning.utilities.combined_loader")


def _callers(modules: Sequence[str]) -> Iterator[Any]:
    """Yield the objects in whose methods, of some modules, the calling function runs, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") in modules and (caller := frame.f_locals.get("self")) is not None:
            yield caller  # the frame of a comprehension has none
        frame = frame.f_back


def is_asked_by_lightning() -> bool:
    """Return whether Lightning calls the function that asks, for the length of its epochs."""
    return sys._getframe(2).f_globals.get("__name__") in _LENGTHS


def num_counted_before(loader: object) -> int | None:
    """Return how many batches Lightning counts before those that are left of an iteration; None: it begins none."""
    if next(_callers(_MODULES), None) is None:
        return None
    loop = _training_with(loader)
    return loop.epoch_loop.batch_progress.current.ready if loop is not None and _goes_on_within(loop) else 0


def has_ended(loader: object) -> bool:
    """Return whether a loader that is begun at the start of an epoch gives nothing in the epoch of Lightning that goes on.

    In a `CombinedLoader` with `'max_size'` a shorter one has ended while the others go on, and the state of that end is the
    start of its next epoch.
    """
    loop = _training_with(loader)
    return loop is not None and loop._combined_loader._mode == _MAX_SIZE and _goes_on_within(loop)


def _training_with(loader: object) -> Any:
    """Return the loop of the training that is about to iterate a loader; None: there is none."""
    loop: Any = next(_callers(_FIT_LOOPS), None)
    combined = getattr(loop, "_combined_loader", None)
    return loop if combined is not None and any(one is loader for one in combined.flattened) else None


def _goes_on_within(loop: Any) -> bool:
    """Return whether a training is about to go on, from a checkpoint, in an epoch of which it has had some batches."""
    progress = loop.epoch_loop.batch_progress
    return bool(loop.is_resuming and progress.current.ready and not progress.is_last_batch)


def state_kept_back(loader: object) -> Mapping[str, Any] | None:
    """Return the state of a loader that is begun, from a checkpoint of which Lightning hands over none; None: there is none.

    Raises:
        StateError: The checkpoint is of other loaders.
    """
    loop: Any = next(_callers(_FIT_LOOPS), None)
    states = getattr(loop, "_combined_loader_states_to_load", None)
    if not states or loop.restarting or not getattr(loop, "is_resuming", False) or loop._combined_loader is None:
        return None  # Lightning only looks whether a loader can be iterated, while it has combined none
    stateful = [
        one for one in loop._combined_loader.flattened if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
    ]
    if len(stateful) != len(states):
        raise StateError(
            f"the checkpoint has the state of {len(states)} loaders, and the training has {len(stateful)}: give `fit` the "
            "loaders that it was saved with"
        )
    return next((state for one, state in zip(stateful, states, strict=True) if one is loader), None)


class StatefulLoader(Protocol):
    """A loader that goes on from a state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration go on where `state` says."""


class LookingAhead:
    """What iterates a loader for Lightning, or anything else.

    Args:
        fetcher: Lightning's, which keeps the loader's iterator; None: the caller is another one, which holds nothing back.
        owner: Lightning's iterator, for which the loader's is made; None: the caller is another one.
    """

    def __init__(self, fetcher: Any = None, owner: Any = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self.most_held = int(getattr(fetcher, "prefetch_batches", 0))
        """Batches that it holds at most."""
        self._fetcher = (lambda: None) if fetcher is None else weakref.ref(fetcher)

    @classmethod
    def of_caller(cls) -> LookingAhead:
        """Return the fetcher below which a loader is iterated: its class keeps the loader, and the loader does not know it."""
        fetcher, owner = next(_callers(_MODULES), None), next(_callers(_COMBINED), None)
        return cls(fetcher if any(kind.__name__ == _FETCHER for kind in type(fetcher).__mro__) else None, owner)

    def __reduce__(self) -> tuple[type[LookingAhead], tuple[()]]:
        """Pickle: a copy of a loader is iterated by nothing."""
        return LookingAhead, ()

    def replaces(self, earlier: LookingAhead) -> bool:
        """Return whether both are Lightning, which has made an iterator of its own again."""
        return self._owner is not None and earlier._owner is not None and self._owner() is not earlier._owner()

    def repeats(self, earlier: LookingAhead) -> bool:
        """Return whether both are one iterator of Lightning, which begins a shorter loader again (`'max_size_cycle'`)."""
        return self._owner is not None and earlier._owner is not None and self._owner() is earlier._owner()

    @property
    def num_held(self) -> int:
        """Batches that it holds while it asks for the next one; it knows the loader's length only after it has begun."""
        return self.most_held if getattr(self._fetcher(), "length", 0) is None else 0


class HandedOut:
    """The batches that a loader hands out, which count when the trainer has them.

    Args:
        fetcher: The caller.
    """

    def __init__(self, fetcher: LookingAhead) -> None:
        self.fetcher = fetcher
        self._held: deque[Callable[[], None]] = deque()

    @property
    def has_held(self) -> bool:
        """Some batches are handed out that do not count yet."""
        return bool(self._held)

    def add(self, count: Callable[[], None]) -> None:
        """Hand out a batch, which `count` counts."""
        self._held.append(count)
        self._count(self.fetcher.num_held)

    def end(self) -> None:
        """Count all: no batch follows."""
        self._count(0)

    def _count(self, num_held: int) -> None:
        while len(self._held) > num_held:
            self._held.popleft()()


class Epochs:
    """Where Lightning means the iterations of a loader to begin."""

    def __init__(self) -> None:
        self._fetcher = LookingAhead()
        self._delivery: Delivery | None = None
        """What the last iteration has delivered; None: there was none."""

    def find(self, loader: StatefulLoader, schedule: Schedule, fetcher: LookingAhead) -> bool:
        """Have an iteration that is about to begin do so where Lightning means it to; other callers change nothing.

        Returns:
            Whether there is one; False: the loader has ended in the epoch of Lightning that goes on.

        Raises:
            StateError: The checkpoint is of other loaders.
        """
        if fetcher.repeats(self._fetcher):
            return True
        loop, last = _training_with(loader), schedule.delivery
        is_own = loop is not None or last is self._delivery  # a training may ask for another loader of the same dataset
        if is_own and last is not None and isinstance(last.caller, LookingAhead) and fetcher.replaces(last.caller):
            schedule.take_back(last)
        if (state := state_kept_back(loader)) is not None:
            loader.load_state_dict(state)
        if loop is None:
            return True
        counter, job = schedule.counter, schedule.counter.next
        is_at_start = not job.consumed and not counter.has_more(job)
        if is_at_start and schedule.has_end and not schedule.is_endless and has_ended(loader):
            return False
        if job == JobPosition(0, 0) and counter.serial == 0 and not schedule.is_under_way:  # it is new
            schedule.set_next(RunPosition(JobPosition(loop.epoch_progress.current.processed, 0)))
        elif loop.is_resuming and loop.epoch_loop.batch_progress.is_last_batch and schedule.has_end and not is_at_start:
            schedule.set_next(RunPosition(JobPosition(job.epoch + 1, 0)))
        return True

    def note(self, fetcher: LookingAhead, delivery: Delivery) -> None:
        """Note an iteration that has begun."""
        self._fetcher, self._delivery, delivery.caller = fetcher, delivery, fetcher
