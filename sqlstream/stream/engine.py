"""From positions to samples: rows of the next window, their objects, transforms, in order, with the pins given back.

Samples leave in the order of their positions; their downloads finish in any order. The engine has no thread of its own: the
helper process downloads, the fetcher's receiver publishes, and what is prefetched here may be revoked by the cache while
the trainer sleeps (then the sample is acquired again).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from sqlstream.cache.cache import Cache
from sqlstream.cache.fetch import Acquirer
from sqlstream.cache.holds import Hold
from sqlstream.config import OnError, SampleOptions
from sqlstream.errors import AccessDeniedError, ObjectNotFoundError, SampleError, StorageError
from sqlstream.index.store import Index
from sqlstream.stream.failures import FailureLog
from sqlstream.stream.rows import RowReader, Slot, holds_path
from sqlstream.transforms.base import Sample, Transform, apply

Positions = npt.NDArray[np.int64]


class Engine:
    """Produces the samples of one iteration.

    Args:
        index: Rows by id.
        cache: Objects by URL.
        reader: From rows to slots and samples.
        transforms: What every sample goes through.
        options: Window, failures, retention.
        num_retained: Yielded samples whose paths stay valid.
    """

    def __init__(
        self,
        index: Index,
        cache: Cache,
        reader: RowReader,
        transforms: Sequence[Transform],
        options: SampleOptions,
        *,
        num_retained: int,
    ) -> None:
        self._index = index
        self._cache = cache
        self._reader = reader
        self._transforms = tuple(transforms)
        self._options = options
        self._num_retained = num_retained
        self._kept: deque[Hold] = deque(maxlen=num_retained)
        self._data_directory = f"{cache.store.disk.root}/data/"
        self._failures = FailureLog(options)
        self._window = options.prefetch

    @property
    def _acquirer(self) -> Acquirer:
        return self._cache.store.acquirer

    # -- a stream -----------------------------------------------------------------------------------------------------

    def stream(
        self,
        epoch: int,
        blocks: Iterable[Positions],
        rows_at: Callable[[Positions], Positions],
        replacements: Callable[[int], Iterator[int]],
    ) -> Iterator[Sample]:
        """Yield the samples at the positions in `blocks`, in that order.

        Args:
            epoch: Put into each sample, and part of every choice.
            blocks: Positions of the epoch. # [n] each
            rows_at: From positions to selected rows.
            replacements: Selected rows to try instead of a failed position's.

        Raises:
            SqlStreamError: A sample failed and `on_error` says so, or too many did.
        """
        planned = self._plan(epoch, blocks, rows_at)
        ahead: deque[Slot] = deque()
        try:
            while True:
                self._look_ahead(ahead, planned)
                if not ahead:
                    return
                slot = ahead.popleft()
                try:
                    yield from self._samples(slot)
                    self._failures.note_success()
                except (SampleError, StorageError) as error:
                    self._failures.note_failure(slot.position, slot.row_id, error)
                    if self._options.on_error is OnError.RAISE:
                        raise
                    if self._options.on_error is OnError.REPLACE:
                        yield from self._replacement(slot, replacements(slot.position), error)
        finally:
            for slot in ahead:
                self._give_back(slot)

    def rows(self, selected: Sequence[int], epoch: int) -> list[Sample | list[Sample]]:
        """Return the samples of selected rows, in the order asked; a list where transforms make several of one row.

        Raises:
            SampleError, StorageError: One of them cannot be made; never another row in its place.
        """
        row_ids = self._index.row_ids(np.array(selected, dtype=np.int64)).tolist()
        slots = list(self._slots(epoch, selected, row_ids))
        remote = [slot for slot in slots if slot.refs and slot.error is None]
        try:
            if len(remote) > 1:  # all at once, as far as there is room; a single one is acquired where it is waited for
                holds = self._acquirer.acquire([list(slot.refs.values()) for slot in remote], self._cache.fetcher)
                for slot, hold in zip(remote, holds, strict=False):
                    slot.hold = hold
            made: dict[int, list[Sample]] = {position: [] for position in range(len(selected))}
            for slot in slots:
                made[slot.place] += self._accessed(slot)
        finally:
            for slot in slots:
                self._give_back(slot)
        return [samples[0] if len(samples) == 1 else samples for samples in made.values()]

    def _accessed(self, slot: Slot) -> list[Sample]:
        """Return the samples of a slot; storage gets a few more chances."""
        for num_left in range(self._options.num_random_access_retries, -1, -1):
            try:
                return list(self._samples(slot))
            except StorageError as error:
                if not num_left or isinstance(error, ObjectNotFoundError | AccessDeniedError):
                    raise
        raise AssertionError("the loop returns or raises")

    def close(self, *, release_kept: bool) -> None:
        """End: with `release_kept`, the paths of yielded samples are no longer kept valid."""
        if release_kept:
            for hold in self._kept:
                self._acquirer.release(hold)
        self._kept.clear()
        self._acquirer.owner.flush()

    def _plan(self, epoch: int, blocks: Iterable[Positions], rows_at: Callable[[Positions], Positions]) -> Iterator[Slot]:
        for positions in blocks:
            row_ids = self._index.row_ids(rows_at(positions)).tolist()
            yield from self._slots(epoch, positions.tolist(), row_ids)

    def _slots(self, epoch: int, positions: Sequence[int], row_ids: Sequence[int]) -> Iterator[Slot]:
        rows = self._index.rows(row_ids)
        for place, (position, row_id, row) in enumerate(zip(positions, row_ids, rows, strict=True)):
            for slot in self._reader.slots(row, row_id=row_id, epoch=epoch, position=position):
                slot.place = place
                yield slot

    # -- the window ---------------------------------------------------------------------------------------------------

    def _look_ahead(self, ahead: deque[Slot], planned: Iterator[Slot]) -> None:
        """Keep `prefetch` samples planned, and as many of them acquired as there is room for, half a window at a time."""
        if len(ahead) <= self._options.prefetch // 2:
            ahead.extend(islice(planned, self._options.prefetch - len(ahead)))
        num_acquired = sum(slot.hold is not None for slot in ahead)
        if num_acquired > self._window // 2:
            return
        bare = [slot for slot in ahead if slot.refs and slot.hold is None][: self._window - num_acquired]
        if not bare:
            return
        holds = self._acquirer.acquire([list(slot.refs.values()) for slot in bare], self._cache.fetcher)
        for slot, hold in zip(bare, holds, strict=False):
            slot.hold = hold
        # With no room for all, the window shrinks to what there is room for; it grows again as fast.
        short = num_acquired + len(holds)
        self._window = self._options.prefetch if len(holds) == len(bare) else max(1, short)

    # -- one sample ---------------------------------------------------------------------------------------------------

    def _samples(self, slot: Slot) -> Iterator[Sample]:
        """Yield what transforms make of one slot: wait for its objects, pin them meanwhile, keep or release them after."""
        if slot.error is not None:
            raise slot.error
        if slot.refs:
            self._settle(slot)
        is_kept = False
        try:
            outcome = apply(self._transforms, self._reader.finish(slot, self._cache))
            if isinstance(outcome, dict):
                is_kept = self._keeps_path(slot, outcome)
                self._done_with(slot, is_kept)
                yield outcome
                return
            for sample in outcome:
                is_kept = is_kept or self._keeps_path(slot, sample)
                yield sample
        finally:
            self._done_with(slot, is_kept)

    def _settle(self, slot: Slot) -> None:
        """Wait until the slot's objects are here and claimed; acquire them again when they were revoked or lost."""
        while True:
            if slot.hold is None:
                slot.hold = self._acquirer.acquire_one(list(slot.refs.values()), self._cache.fetcher)
            self._acquirer.wait(slot.hold)
            if slot.hold.error is not None:
                error = slot.hold.error
                self._give_back(slot)
                raise error
            if self._acquirer.holdings.claim(slot.hold):
                return
            self._give_back(slot)

    def _replacement(self, slot: Slot, rows: Iterator[int], error: Exception) -> Iterator[Sample]:
        """Yield another row's sample in the place of a failed one; the first that works."""
        for selected in rows:
            row_ids = self._index.row_ids(np.array([selected], dtype=np.int64)).tolist()
            for stand_in in self._slots(slot.epoch, [slot.position], row_ids):
                try:
                    samples = list(self._samples(stand_in))
                except (SampleError, StorageError) as again:
                    self._failures.note_failure(slot.position, stand_in.row_id, again)
                    break
                yield from samples
            else:
                return
        raise error

    # -- giving back --------------------------------------------------------------------------------------------------

    def _keeps_path(self, slot: Slot, sample: Sample) -> bool:
        return slot.hold is not None and any(holds_path(value, self._data_directory) for value in sample.values())

    def _done_with(self, slot: Slot, is_kept: bool) -> None:
        hold: Hold | None = slot.hold
        slot.hold = None
        if hold is None:
            return
        if is_kept:
            self._acquirer.retain(hold, self._num_retained)
            self._kept.append(hold)
        else:
            self._acquirer.release(hold)

    def _give_back(self, slot: Slot) -> None:
        if slot.hold is not None:
            self._acquirer.release(slot.hold)
            slot.hold = None
