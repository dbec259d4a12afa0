"""From positions to samples: rows of the next window, their objects, transforms, in order; then their pins are released.

Samples are yielded in the order of their positions; their downloads finish in any order. The engine has no thread of its own:
the helper process downloads, the fetcher's receiver publishes. The cache may revoke what is prefetched while the trainer
sleeps; then the sample is acquired again.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

import numpy as np

from sqlstream.cache import Cache
from sqlstream.cache.session import AnyHold
from sqlstream.config import OnError, SampleOptions
from sqlstream.errors import AccessDeniedError, ObjectChangedError, ObjectNotFoundError, SampleError, StorageError
from sqlstream.storage.base.urls import redact
from sqlstream.stream.engine.failures import FailureLog
from sqlstream.stream.engine.recipe import Recipe
from sqlstream.stream.engine.sample_maker import SampleMaker
from sqlstream.stream.engine.slots import PlannedSample
from sqlstream.stream.engine.walk import PlannedSpan, announce, walk
from sqlstream.stream.engine.window import Window
from sqlstream.stream.run.shares import EpochShare, ShareProgress
from sqlstream.transforms.base import Sample

KEPT_ACCESSES = 8
"""Accesses of many rows each whose paths stay valid: a loader of batches by row has `prefetch_factor` + 1 under way."""


class Engine:
    """Makes the samples of a process.

    Args:
        recipes: How the samples of each stream are made.
        cache: Objects by URL.
        options: Window, failures.
        name: Name of the dataset, or of all that it mixes, in messages.
        num_retained: Yielded samples whose paths stay valid.
        note_given_up: Called when a sample's paths stop to be valid, since there are more samples than `num_retained`.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        cache: Cache,
        options: SampleOptions,
        *,
        name: str,
        num_retained: int,
        note_given_up: Callable[[], None] | None = None,
    ) -> None:
        self._recipes = tuple(recipes)
        self._cache = cache
        self._options = options
        self._maker = SampleMaker(cache.session, num_retained, note_given_up)
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
                share = slot.share
                if share is not None and share.epoch != epoch:
                    self._failures.end_epoch()
                    epoch = share.epoch
                progress.come_to(share, slot.place)
                try:
                    outcome = self._maker.make(slot)
                except (SampleError, StorageError) as error:
                    outcome = self._instead(slot, error)
                else:
                    if isinstance(outcome, dict):
                        self._failures.num_seen += 1
                    else:
                        outcome = self._each(slot, outcome)
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

    def rows(self, selected: Sequence[int], epoch: int, stream: int = 0) -> list[Sample | list[Sample]]:
        """Return the samples of a stream's selected rows, in the order asked; a list where transforms make several of one row.

        Raises:
            SampleError, StorageError: One of them cannot be made; never another row in its place.
        """
        recipe = self._recipes[stream]
        slots = self._slots(recipe, recipe.rows.ids_at(selected), selected, [epoch] * len(selected))
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
            recipe.chain.flush()
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
            for recipe in self._recipes:
                recipe.rows.close()
        self._maker.close(release_kept=release_kept)
        for recipe in self._recipes:
            recipe.chain.flush()
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
        sources = [recipe.rows for recipe in self._recipes]
        for share in shares:
            for span in walk(share, sources):
                planned = self._of_span(span)
                if span.places.size:
                    announce(span.share, int(span.places[0]), sources)
                yield from planned

    def _of_span(self, span: PlannedSpan) -> list[PlannedSample]:
        """Return the slots of a span, in the order of its positions and of the draws of each."""
        draws, share = span.draws, span.share
        planned: list[PlannedSample] = []
        for stream, recipe in enumerate(self._recipes):
            numbers = np.flatnonzero(draws.stream == stream)
            row_ids = recipe.rows.ids_of(draws.row[numbers])
            of_stream = self._slots(recipe, row_ids, draws.position[numbers].tolist(), draws.epoch[numbers].tolist())
            for slot in of_stream if len(self._recipes) > 1 else ():
                slot.place = int(numbers[slot.place])
            planned += of_stream
        planned.sort(key=attrgetter("place"))
        places, positions, starts = span.places.tolist(), span.positions.tolist(), draws.starts.tolist()
        if draws.is_one_each:
            for slot in planned:
                slot.share, slot.share_position, slot.place = share, positions[slot.place], places[slot.place]
            return planned
        for slot in planned:
            number = bisect_right(starts, slot.place) - 1
            slot.draw = slot.place - starts[number]
            slot.share, slot.share_position, slot.place = share, positions[number], places[number]
        for slot, following in itertools.pairwise(planned):
            slot.is_last = slot.place != following.place
        return planned

    def _slots(
        self, recipe: Recipe, row_ids: Sequence[int], positions: Sequence[int], epochs: Sequence[int]
    ) -> list[PlannedSample]:
        planned = recipe.slots(row_ids, positions, epochs)
        if recipe.reader.listed is not None:
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
        recipe, share = slot.recipe, slot.share
        others = iter(()) if share is None else share.order.replacements(share.epoch, slot.share_position, slot.draw)
        for selected in others:
            row_ids = recipe.rows.ids_of(np.array([selected], dtype=np.int64))
            samples: list[Sample] = []
            for stand_in in self._slots(recipe, row_ids, [slot.position], [slot.epoch]):
                stand_in.share, stand_in.share_position = share, slot.share_position
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
