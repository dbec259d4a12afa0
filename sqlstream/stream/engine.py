"""From positions to samples: rows of the next window, their objects, transforms, in order, with the pins given back.

Samples leave in the order of their positions; their downloads finish in any order. The engine has no thread of its own: the
helper process downloads, the fetcher's receiver publishes, and what is prefetched here may be revoked by the cache while
the trainer sleeps (then the sample is acquired again).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from sqlstream.cache.cache import Cache
from sqlstream.cache.fetch import Acquirer
from sqlstream.cache.holds import Hold
from sqlstream.config import OnError, SampleOptions
from sqlstream.errors import AccessDeniedError, ObjectNotFoundError, SampleError, StorageError
from sqlstream.stream.cached import CachedChain
from sqlstream.stream.failures import FailureLog
from sqlstream.stream.row_source import RowSource
from sqlstream.stream.rows import RowReader, Slot, keeps_path
from sqlstream.stream.shares import EpochShare, Progress
from sqlstream.stream.window import Window
from sqlstream.transforms.base import Sample


class Engine:
    """Makes the samples of a process.

    Args:
        rows: Rows, in the order of a share.
        cache: Objects by URL.
        reader: From rows to slots and samples.
        chain: What every sample goes through.
        options: Window, failures.
        name: Of the dataset, in the report of failures.
        num_retained: Yielded samples whose paths stay valid.
    """

    def __init__(
        self,
        rows: RowSource,
        cache: Cache,
        reader: RowReader,
        chain: CachedChain,
        options: SampleOptions,
        *,
        name: str,
        num_retained: int,
    ) -> None:
        self._rows = rows
        self._cache = cache
        self._reader = reader
        self._chain = chain
        self._options = options
        self._num_retained = num_retained
        self._kept: deque[Hold] = deque(maxlen=num_retained)
        self._data_directory = f"{cache.store.disk.root}/data/"
        self._name = name
        self._failures = FailureLog(options, cache.store.ledger, name)
        self._ahead: Window | None = None

    @property
    def _acquirer(self) -> Acquirer:
        return self._cache.store.acquirer

    # -- a stream -----------------------------------------------------------------------------------------------------

    def stream(
        self, shares: Iterator[EpochShare], progress: Progress, *, is_endless: bool, note_several: Callable[[], None]
    ) -> Iterator[Sample]:
        """Yield the samples of the first share, in order; the objects of what follows are on their way by then.

        Args:
            shares: Of consecutive epochs. A second one is prepared for the next call, in case that it begins with it.
            progress: Moved on with each sample.
            is_endless: Yield the samples of all shares, not only of the first.
            note_several: Called when a position does not give exactly one sample.

        Raises:
            SqlStreamError: A sample failed and `on_error` says so, or too many did.
        """
        first = next(shares)
        progress.begin(first)
        self._failures = FailureLog(self._options, self._cache.store.ledger, self._name)
        window = self._window(first, shares)
        slot: Slot | None = None
        try:
            while (slot := window.pop(None if is_endless else first.epoch)) is not None:
                yield from self._counted(slot, progress, note_several)
            progress.end()
        except BaseException:
            if slot is not None:
                window.give_back(slot)
            window.close()
            raise
        self._ahead = window

    def _counted(self, slot: Slot, progress: Progress, note_several: Callable[[], None]) -> Iterator[Sample]:
        """Yield the samples of a slot that were not delivered before, moving `progress` on with each."""
        progress.come_to(slot.share, slot.place)
        num_samples = 0
        for num_samples, sample in enumerate(self._outcome(slot), start=1):  # noqa: B007 - read after the loop
            if progress.is_new(is_only=slot.is_single and slot.is_last):
                yield sample
        if num_samples != 1 or not slot.is_last:
            note_several()

    def rows(self, selected: Sequence[int], epoch: int) -> list[Sample | list[Sample]]:
        """Return the samples of selected rows, in the order asked; a list where transforms make several of one row.

        Raises:
            SampleError, StorageError: One of them cannot be made; never another row in its place.
        """
        row_ids = self._rows.ids_at(selected)
        slots = self._slots(epoch, selected, row_ids)
        remote = [slot for slot in slots if slot.wanted and slot.error is None]
        try:
            if len(remote) > 1:  # all at once, as far as there is room; a single one is acquired where it is waited for
                holds = self._acquirer.acquire([slot.wanted for slot in remote], self._cache.fetcher)
                for slot, hold in zip(remote, holds, strict=False):
                    slot.hold = hold
            made: dict[int, list[Sample]] = {position: [] for position in range(len(selected))}
            for slot in slots:
                made[slot.place] += self._accessed(slot)
        finally:
            for slot in slots:
                self._give_back(slot)
            self._chain.flush()
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
            if self._ahead is not None:
                self._ahead.close()
            self._rows.close()
        self._kept.clear()
        self._chain.flush()
        self._acquirer.flush()

    # -- planning -----------------------------------------------------------------------------------------------------

    def _window(self, first: EpochShare, following: Iterator[EpochShare]) -> Window:
        """Return the window that the last stream left, if it goes on with `first`, else a new one."""
        window, self._ahead = self._ahead, None
        if window is not None:
            if window.next_share == first:
                window.extend(self._plan(following))
                return window
            window.close()
        planned = self._plan(itertools.chain((first,), following))
        return Window(planned, self._acquirer, self._cache, self._options, first)

    def _plan(self, shares: Iterable[EpochShare]) -> Iterator[Slot]:
        for share in shares:
            for stretch in self._rows.walk(share):
                places = stretch.places.tolist()
                for slot in self._slots(share.epoch, stretch.positions.tolist(), stretch.row_ids):
                    slot.place = places[slot.place]
                    slot.share = stretch.share
                    yield slot

    def _slots(self, epoch: int, positions: Sequence[int], row_ids: Sequence[int]) -> list[Slot]:
        planned: list[Slot] = []
        rows = self._rows.rows(row_ids)
        for place, (position, row_id, row) in enumerate(zip(positions, row_ids, rows, strict=True)):
            slots = list(self._reader.slots(row, row_id=row_id, epoch=epoch, position=position))
            for slot in slots:
                slot.place, slot.is_last = place, slot is slots[-1]
            planned += slots
        self._chain.look_up(planned)
        return planned

    # -- one sample ---------------------------------------------------------------------------------------------------

    def _outcome(self, slot: Slot) -> Iterator[Sample]:
        """Yield the samples of a slot, or what stands in for them."""
        try:
            yield from self._samples(slot)
        except (SampleError, StorageError) as error:
            self._failures.note_failure(slot, error)
            if self._options.on_error is OnError.RAISE:
                raise
            if self._options.on_error is OnError.REPLACE:
                yield from self._replacement(slot, error)
        else:
            self._failures.note_success()

    def _samples(self, slot: Slot) -> Iterator[Sample]:
        """Yield what transforms make of one slot: wait for its objects, pin them meanwhile, keep or release them after."""
        if slot.error is not None:
            raise slot.error
        self._settle(slot)
        is_kept = False
        try:
            outcome = self._chain.run(slot, self._reader)
            slot.is_single = isinstance(outcome, dict)
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
        """Wait until what the slot wants is here and claimed; plan and acquire it again when it was revoked or lost."""
        if self._chain.is_found_now(slot):
            self._give_back(slot)
        while slot.wanted:
            if slot.hold is None:
                slot.hold = self._acquirer.acquire_one(slot.wanted, self._cache.fetcher)
            self._acquirer.wait(slot.hold)
            if slot.hold.error is not None:
                error = slot.hold.error
                self._give_back(slot)
                raise error
            if self._acquirer.holdings.claim(slot.hold) and self._chain.read(slot):
                return
            self._give_back(slot)
            self._chain.look_up([slot])

    def _replacement(self, slot: Slot, error: Exception) -> Iterator[Sample]:
        """Yield another row's sample in the place of a failed one; the first that works."""
        for selected in () if slot.share is None else slot.share.replacements(slot.position):
            row_ids = self._rows.ids_of(np.array([selected], dtype=np.int64))
            samples: list[Sample] = []
            for stand_in in self._slots(slot.epoch, [slot.position], row_ids):
                stand_in.share = slot.share
                try:
                    samples += self._samples(stand_in)
                except (SampleError, StorageError) as again:
                    self._failures.note_failure(stand_in, again)
                    break
            else:
                slot.is_single = len(samples) == 1
                yield from samples
                return
        raise error

    # -- giving back --------------------------------------------------------------------------------------------------

    def _keeps_path(self, slot: Slot, sample: Sample) -> bool:
        return slot.hold is not None and keeps_path(slot.hold, sample, self._data_directory)

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
