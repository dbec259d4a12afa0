"""From positions to samples: rows of the next window, their objects, transforms, in order; then their pins are released.

Samples are yielded in the order of their positions; their downloads finish in any order. The engine has no thread of its own:
the helper process downloads, the fetcher's receiver publishes. The cache may revoke what is prefetched while the trainer
sleeps; then the sample is acquired again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from sqlstream.cache import Cache
from sqlstream.cache.session import AnyHold
from sqlstream.config import OnError, SampleOptions
from sqlstream.errors import AccessDeniedError, ObjectChangedError, ObjectNotFoundError, SampleError, StorageError
from sqlstream.storage.base.urls import redact
from sqlstream.stream.engine.failures import FailureLog
from sqlstream.stream.engine.row_source import RowSource
from sqlstream.stream.engine.sample_maker import SampleMaker
from sqlstream.stream.engine.slots import PlannedSample, RowReader
from sqlstream.stream.engine.stored_samples import CachedChain
from sqlstream.stream.engine.walk import walk
from sqlstream.stream.engine.window import Window
from sqlstream.stream.run.shares import EpochShare, ShareProgress
from sqlstream.transforms.base import Sample

KEPT_ACCESSES = 8
"""Accesses of many rows each whose paths stay valid: a loader of batches by row has `prefetch_factor` + 1 under way."""


class Engine:
    """Makes the samples of a process.

    Args:
        rows: Rows, in the order of a share.
        cache: Objects by URL.
        reader: From rows to slots and samples.
        chain: What every sample goes through.
        options: Window, failures.
        name: Name of the dataset, in the report of failures.
        num_retained: Yielded samples whose paths stay valid.
        note_given_up: Called when a sample's paths stop to be valid, since there are more samples than `num_retained`.
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
        note_given_up: Callable[[], None] | None = None,
    ) -> None:
        self._rows = rows
        self._cache = cache
        self._reader = reader
        self._chain = chain
        self._options = options
        self._maker = SampleMaker(cache.session, reader, chain, num_retained, note_given_up)
        self._name = name
        self._failures = FailureLog(options, cache.session, name, cache.path)
        self._ahead: Window | None = None
        self._session = cache.session

    # -- a stream -----------------------------------------------------------------------------------------------------

    def stream(
        self, shares: Iterator[EpochShare], progress: ShareProgress, *, is_endless: bool, note_several: Callable[[], None]
    ) -> Iterator[Sample]:
        """Yield the samples of the first share, in order; the objects of what follows are on their way by then.

        Args:
            shares: Shares of consecutive epochs. A second one is prepared, for a next call that begins with it.
            progress: Moved on with each sample.
            is_endless: Yield the samples of all shares, not only of the first.
            note_several: Called when a position does not give exactly one sample.

        Raises:
            SqlStreamError: A sample failed and `on_error` says so, or too many did.
        """
        first = next(shares)
        progress.begin(first)
        self._failures = FailureLog(self._options, self._session, self._name, self._cache.path)
        window, last_epoch, epoch = self._window(first, shares), None if is_endless else first.epoch, first.epoch
        slot: PlannedSample | None = None
        try:
            while not self._cache.is_closed and (slot := window.pop(last_epoch)) is not None:
                if slot.epoch != epoch:
                    self._failures.end_epoch()
                    epoch = slot.epoch
                progress.come_to(slot.share, slot.place)
                outcome = self._outcome(slot)
                if isinstance(outcome, dict) and slot.is_last:
                    if progress.is_new(is_only=True):
                        yield outcome
                else:
                    yield from self._counted(slot, outcome, progress, note_several)
            self._cache.check_open()
            self._failures.end_epoch()
            progress.end()
        except BaseException:
            if slot is not None:
                window.give_back(slot)
            window.close()
            raise
        self._ahead = window

    def _counted(
        self, slot: PlannedSample, outcome: Sample | Iterator[Sample], progress: ShareProgress, note_several: Callable[[], None]
    ) -> Iterator[Sample]:
        """Yield those samples of a slot that were not delivered before, moving `progress` on with each."""
        num_samples = 0
        for num_samples, sample in enumerate([outcome] if isinstance(outcome, dict) else outcome, start=1):  # noqa: B007
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
        access: list[AnyHold] = []
        for slot in slots:
            slot.access = access
        remote = [slot for slot in slots if slot.wanted and slot.error is None]
        try:
            if len(remote) > 1:  # all at once, as far as there is room; a single one is acquired where it is waited for
                groups = [slot.wanted for slot in remote]
                holds = self._session.acquire(groups, for_reading=self._maker.for_reading)
                for slot, hold in zip(remote, holds, strict=False):
                    slot.hold = hold
            made: dict[int, list[Sample]] = {position: [] for position in range(len(selected))}
            for slot in slots:
                made[slot.place] += self._accessed(slot)
            self._maker.keep(access, num_accesses=KEPT_ACCESSES)
        except BaseException:
            for hold in access:
                self._session.release(hold)
            raise
        finally:
            for slot in slots:
                self._maker.give_back(slot)
            self._chain.flush()
        return [samples[0] if len(samples) == 1 else samples for samples in made.values()]

    def _accessed(self, slot: PlannedSample) -> list[Sample]:
        """Return the samples of a slot, trying again where storage fails."""
        for num_left in range(self._options.num_random_access_retries, -1, -1):
            try:
                return self._maker.make_all(slot)
            except StorageError as error:
                if not num_left or isinstance(error, ObjectNotFoundError | AccessDeniedError):
                    raise
        raise AssertionError("the loop returns or raises")

    def close(self, *, release_kept: bool) -> None:
        """End: with `release_kept`, the paths of yielded samples are no longer kept valid."""
        if release_kept:
            if self._ahead is not None:
                self._ahead.close()
            self._rows.close()
        self._maker.close(release_kept=release_kept)
        self._chain.flush()
        self._session.flush()

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
        return Window(planned, self._session, self._options, first, for_reading=lambda: self._maker.for_reading)

    def _plan(self, shares: Iterable[EpochShare]) -> Iterator[PlannedSample]:
        for share in shares:
            for span in walk(share, [self._rows]):
                places = span.places.tolist()
                for slot in self._slots(share.epoch, span.positions.tolist(), span.row_ids):
                    slot.place = places[slot.place]
                    slot.share = span.share
                    yield slot

    def _slots(self, epoch: int, positions: Sequence[int], row_ids: Sequence[int]) -> list[PlannedSample]:
        planned = self._reader.slots(self._rows.rows(row_ids), row_ids, positions, epoch)
        self._chain.look_up(planned)
        self._drop_other_versions(planned)
        return planned

    def _drop_other_versions(self, planned: Sequence[PlannedSample]) -> None:
        """Remove objects from the cache that are there in another version than their listing names; they are fetched again."""
        listed = [ref for slot in planned for ref in slot.refs.values() if ref.is_listed]
        in_use = self._session.drop_other_versions(listed) if listed else ()
        for slot in planned if in_use else ():
            if any(ref.key in in_use for ref in slot.wanted):
                where = ", ".join(redact(ref.url) for ref in slot.wanted if ref.key in in_use)
                slot.wanted, slot.error = (
                    (),
                    ObjectChangedError(
                        f"{where} is in the cache in another version than its listing names, and that one is in use: "
                        "close the dataset that uses it, or give another dst"
                    ),
                )

    # -- one sample ---------------------------------------------------------------------------------------------------

    def _outcome(self, slot: PlannedSample) -> Sample | Iterator[Sample]:
        """Return the sample of a slot, or an iterator of several, or of those that replace it."""
        try:
            outcome = self._maker.make(slot)
        except (SampleError, StorageError) as error:
            return self._instead(slot, error)
        if not isinstance(outcome, dict):
            return self._each(slot, outcome)
        self._failures.num_seen += 1
        return outcome

    def _each(self, slot: PlannedSample, samples: Iterator[Sample]) -> Iterator[Sample]:
        """Yield several samples of a slot; if one fails on the way, those that replace the rest follow."""
        try:
            yield from samples
        except (SampleError, StorageError) as error:
            yield from self._instead(slot, error)
        else:
            self._failures.num_seen += 1

    def _instead(self, slot: PlannedSample, error: Exception) -> Iterator[Sample]:
        """Note a failure, and return an iterator of the samples that replace the failed one."""
        self._failures.note_failure(slot, error)
        if self._options.on_error is OnError.RAISE:
            raise error
        return self._replacement(slot, error) if self._options.on_error is OnError.REPLACE else iter(())

    def _replacement(self, slot: PlannedSample, error: Exception) -> Iterator[Sample]:
        """Yield the samples of the first other row that does not fail."""
        for selected in () if slot.share is None else slot.share.order.replacements(slot.epoch, slot.position):
            row_ids = self._rows.ids_of(np.array([selected], dtype=np.int64))
            samples: list[Sample] = []
            for stand_in in self._slots(slot.epoch, [slot.position], row_ids):
                stand_in.share = slot.share
                try:
                    samples += self._maker.make_all(stand_in)
                except (SampleError, StorageError) as again:
                    self._failures.note_failure(stand_in, again)
                    break
            else:
                slot.is_single = len(samples) == 1
                yield from samples
                return
        raise self._failures.no_replacement(slot) from error
