"""Batches with the place of their worker beside them: put there as samples are collated, counted as the trainer takes them."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from sqlstream.errors import ConfigError
from sqlstream.process.children import end_with_parent
from sqlstream.stream.chain.global_rng import GeneratorLoan
from sqlstream.stream.frameworks.lightning import HandedOut, LookingAhead
from sqlstream.stream.run.delivery import Delivery
from sqlstream.stream.run.positions import WorkerPosition
from sqlstream.stream.run.schedule import Schedule
from sqlstream.stream.run.shares import ShareProgress
from sqlstream.stream.transport.packed_collate import PackedCollate, collated


class InitWorker:
    """Called in each worker first: gives its copy of a dataset what belongs to this loader, which changed nothing in its own.

    Args:
        join: Takes the copy.
        then: The user's `worker_init_fn`.
    """

    def __init__(self, join: Callable[[Any], None], then: Callable[[int], None] | None) -> None:
        self._join = join
        self._then = then

    def __call__(self, worker: int) -> None:
        """Begin a worker."""
        end_with_parent()
        info = get_worker_info()
        assert info is not None
        self._join(info.dataset)
        if self._then is not None:
            self._then(worker)


class _PlacedBatch(NamedTuple):
    """A batch for the trainer, and the position of its worker; a named tuple, whose parts torch pins."""

    batch: Any
    place: WorkerPosition


class CollateWithPlace:
    """Collates samples, and puts the position of this process after them beside the batch.

    Args:
        collate_fn: What makes batches.
        schedule: The schedule of the dataset, or of the worker's copy.
        loan: Generators of the trainer that samples have taken; they are put back before `collate_fn` runs.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], schedule: Schedule, loan: GeneratorLoan) -> None:
        self._collate_fn = collate_fn
        self._schedule = schedule
        self._loan = loan
        self.progress: ShareProgress | None = None
        """What counts the samples of this iteration; None: it is made by workers, which have one at a time."""

    def __call__(self, samples: Any) -> _PlacedBatch:
        """Return the batch and the place."""
        self._loan.put_back()
        place = self._schedule.place_of_worker(self.progress)
        return _PlacedBatch(collated(self._collate_fn, samples), place)


class CountedBatches:
    """Torch's iterator; it counts the batches that it hands out.

    Args:
        batches: Torch's iterator.
        delivery: Counts them.
        packing: What packs the batches of workers.
        around: Entered for each batch.
        is_current: Whether persistent workers, which make one iteration at a time, still make this one; None: there are none.
        fetcher: The caller, which may hold batches back.
    """

    def __init__(
        self,
        batches: _BaseDataLoaderIter,
        delivery: Delivery,
        packing: PackedCollate | None,
        around: contextlib.AbstractContextManager[None],
        is_current: Callable[[], bool] | None,
        fetcher: LookingAhead,
    ) -> None:
        self._handed = HandedOut(fetcher)
        self._is_current = is_current
        self._batches = batches
        self._delivery = delivery
        self._around = around
        self._packing = packing  # kept: batches on their way lie in its memory
        self._has_failed = False
        """An error has come in place of a batch: what is behind it never comes."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._is_current is not None and not self._is_current() and not self._delivery.is_over:
            raise ConfigError(
                "the loader has begun another iteration, which its workers make now (persistent_workers=True): end one loop "
                "before the next one begins, or give persistent_workers=False"
            )
        try:
            with self._around:
                batch, place = next(self._batches)
        except StopIteration:
            self._handed.end()
            self._delivery.is_over = not self._has_failed
            raise
        except BaseException as error:
            self._has_failed = True
            if self._batches._num_workers:
                forget_frames(error)
            raise
        self._handed.add(partial(self._delivery.note, place))
        return batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of torch's iterator: frameworks ask for them."""
        return getattr(self._batches, name)


def forget_frames(error: BaseException) -> None:
    """Clear the variables of torch's frames, below the caller's: one of them names the error, whose traceback has this frame.

    Torch's iterator is in that circle. Else the garbage collector ends its workers at any later time, and waits for them 5 s
    each: if it comes within a transaction of the cache, they wait for that.
    """
    if error.__traceback__ is not None:
        traceback.clear_frames(error.__traceback__.tb_next)
