"""From positions to samples: rows of the next window, their objects, transforms, in order; then their pins are released.

Samples are yielded in the order of their positions; their downloads finish in any order. The engine has no thread of its own:
the helper process downloads, the fetcher's receiver publishes. The cache may revoke what is prefetched while the trainer
sleeps; then the sample is acquired again.
"""

from __future__ import annotations

import operator
import reprlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain
from typing import SupportsIndex

import numpy as np

from sqlstream.cache import Cache
from sqlstream.cache.session import AnyHold, CacheSession
from sqlstream.config import OnError, SampleOptions
from sqlstream.errors import SampleError, StorageError, TransformError
from sqlstream.stream.engine.failures import FailureLog
from sqlstream.stream.engine.forecast import is_wanted
from sqlstream.stream.engine.packer import Packer
from sqlstream.stream.engine.recipes import MOST_WITHOUT, Recipes
from sqlstream.stream.engine.row_source import RowSource
from sqlstream.stream.engine.sample_maker import LostFileError, SampleMaker
from sqlstream.stream.engine.slots import PlannedSample, Recipe
from sqlstream.stream.engine.walk import planned_slots
from sqlstream.stream.engine.window import Window
from sqlstream.stream.run.shares import EpochShare, ShareProgress
from sqlstream.transforms.base import Sample

_PART_SHIFT = 48
"""Positions of an order have so many bits: with the first row of a pack, which part of it is there, or which of the packs of a
window begins there, names the pack."""
KEPT_ACCESSES = 8
"""Accesses of many rows each whose paths stay valid: a loader of batches by row has `prefetch_factor` + 1 under way."""


class Engine:
    """Makes the samples of a process.

    Args:
        makers: What makes the recipe of each stream, when its first row is wanted.
        caches: The caches of all streams, each once.
        options: The window, and how often an access by row is tried.
        num_retained: Yielded samples whose paths stay valid.
        note_given_up: Called when a sample's paths stop to be valid, since there are more samples than `num_retained`.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[], Recipe]],
        caches: Sequence[Cache],
        options: SampleOptions,
        *,
        num_retained: int,
        note_given_up: Callable[[], None] | None = None,
    ) -> None:
        self._recipes = Recipes(makers)
        self._caches = tuple(caches)
        self._cache, *self._others = self._caches
        self._options = options
        directories = tuple(directory for cache in self._caches for directory in cache.session.directories)
        self._maker = SampleMaker(directories, num_retained, note_given_up)
        self.release_kept = self._maker.release_kept  # of its own: who keeps it keeps neither engine nor dataset
        self._num_retained = num_retained
        self._failures: dict[Recipe, FailureLog] = {}
        """The failures of the iteration under way, by stream."""
        self._ahead: Window | None = None

    # -- a stream -----------------------------------------------------------------------------------------------------

    def stream(
        self,
        shares: Iterator[EpochShare],
        progress: ShareProgress,
        *,
        is_endless: bool,
        note_several: Callable[[], None],
        has_end: bool = True,
    ) -> Iterator[Sample]:
        """Yield the samples of the first share, in order; the objects of what follows are on their way by then.

        Args:
            shares: Shares of consecutive epochs. A second one is prepared, for a next call that begins with it.
            progress: Moved on with each sample.
            is_endless: Yield the samples of all shares, not only of the first.
            note_several: Called when a position does not give exactly one sample.
            has_end: The iteration has an end.

        Raises:
            ConfigError: There is no end, and no row gives a sample.
            SqlStreamError: A sample failed and `on_error` says so, or too many did.
        """
        first = next(shares)
        progress.begin(first)
        self._failures = {}
        window, last_epoch = self._window(first, shares, has_end=has_end), None if is_endless else first.epoch
        slot: PlannedSample | None = None
        share: EpochShare | None = None
        has_delivered, num_without = False, 0
        try:
            while not self._is_closed and (slot := window.pop(last_epoch)) is not None:
                if num_without > MOST_WITHOUT and not has_end:
                    self._recipes.check_given(num_without, progress.share.partition.world)
                if slot.share is not share:
                    share, has_delivered = slot.share, self._come_to_share(slot, progress)
                if slot.recipe.packer is not None:
                    packs = self._packs(slot, window, slot.recipe.packer)
                    num_made = yield from self._counted(slot, packs, progress, note_several)
                    num_without = 0 if num_made else num_without + 1
                    continue
                try:
                    outcome = self._maker.make(slot)
                except (SampleError, StorageError) as error:
                    outcome = self._instead(slot, error)
                else:
                    if isinstance(outcome, dict):
                        self._log_of(slot).num_seen += 1
                    else:
                        outcome = self._each(slot, outcome)
                if isinstance(outcome, dict) and slot.is_last and not has_delivered:
                    progress.taken, progress.offset, num_without = slot.place + 1, 0, 0
                    yield outcome
                else:
                    num_made = yield from self._counted(slot, outcome, progress, note_several)
                    num_without = 0 if num_made else num_without + 1
            self._check_open()
            self._end_epoch()
            progress.end()
        except BaseException:
            if slot is not None:
                window.give_back(slot)
            window.close()
            raise
        self._ahead = window

    @property
    def _is_closed(self) -> bool:
        """A cache of this engine was closed."""
        return self._cache.is_closed or (bool(self._others) and any(cache.is_closed for cache in self._others))

    def _check_open(self) -> None:
        """Raise ConfigError if one of its caches was closed."""
        for cache in self._caches:
            cache.check_open()

    def _log_of(self, slot: PlannedSample) -> FailureLog:
        """Return the failures of the dataset that a slot is of."""
        log = self._failures.get(slot.recipe)
        if log is None:
            log = self._failures[slot.recipe] = FailureLog(slot.recipe)
        return log

    def _end_epoch(self) -> None:
        for log in self._failures.values():
            log.end_epoch()

    def _come_to_share(self, slot: PlannedSample, progress: ShareProgress) -> bool:
        """Move to the share of a slot; return True if some of its samples may have been delivered before."""
        assert slot.share is not None, "it was asked for by row"
        if slot.share.epoch != progress.share.epoch:
            self._end_epoch()
        progress.come_to(slot.share, slot.place)
        return slot.share.has_delivered

    def _counted(
        self, slot: PlannedSample, outcome: Sample | Iterator[Sample], progress: ShareProgress, note_several: Callable[[], None]
    ) -> Generator[Sample, None, int]:
        """Yield those samples of a slot that were not delivered before, moving `progress` on; return how many it has in all."""
        progress.come_to(slot.share, slot.place)
        num_samples = 0
        for num_samples, sample in enumerate([outcome] if isinstance(outcome, dict) else outcome, start=1):  # noqa: B007
            if progress.is_new(is_only=slot.is_single and slot.is_last):
                yield sample
        if num_samples != 1 or not slot.is_last:
            note_several()
        return num_samples

    def rows(self, indices: Sequence[SupportsIndex], epoch: int, stream: int = 0) -> list[Sample | list[Sample]]:
        """Return the samples of a stream's selected rows, in the order asked; a list where transforms make several of one row.

        Raises:
            TypeError: One of `indices` is no whole number.
            IndexError: There is no such row.
            SampleError, StorageError: One of them cannot be made; never another row in its place.
        """
        if self._is_closed:
            self._check_open()
        recipe = self._recipes.made[stream] or self._recipes[stream]
        selected = _from_start(indices, recipe.rows)
        row_ids = selected if recipe.rows.ids_are_numbers else recipe.rows.ids_at(selected)
        slots = recipe.slots(row_ids, selected, [epoch] * len(selected))
        access: list[AnyHold] = []
        made: defaultdict[int, list[Sample]] = defaultdict(list)
        try:
            if len(slots) > 1:  # all at once, as far as there is room; a single one is acquired where it is waited for
                _acquire_together(slots, recipe.session, for_reading=self._maker.for_reading)
            for slot in slots:
                slot.access = access
                made[slot.place] += self._accessed(slot)
            if access:
                self._maker.keep(access, recipe.session, num_accesses=KEPT_ACCESSES)
        except BaseException:
            for slot in slots:
                self._maker.give_back(slot)
            for hold in access:
                recipe.session.release(hold)
            raise
        finally:
            if recipe.has_points:
                recipe.chain.flush()
        return [made[place][0] if len(made[place]) == 1 else made[place] for place in range(len(selected))]

    def _accessed(self, slot: PlannedSample) -> list[Sample]:
        """Return the samples of a slot that was asked for by row; where only a file went, of objects acquired again."""
        num_retries = self._options.num_random_access_retries
        try:
            return self._maker.make_all(slot, num_retries)
        except LostFileError:
            again = _planned_again(slot)
            again.access = slot.access
            return self._maker.make_all(again, num_retries)

    def rest(self) -> None:
        """Write down what samples have noted; what is prepared for the next stream stays."""
        for _, recipe in self._recipes.known():
            recipe.chain.flush()
        for cache in self._caches:
            cache.session.flush()

    def close(self) -> None:
        """End; the paths of the last samples that were yielded stay valid until `release_kept` is called."""
        if self._ahead is not None:
            self._ahead.close()
        for _, recipe in self._recipes.known():
            recipe.rows.close()
        self.rest()

    def renew(self, makers: Sequence[Callable[[], Recipe]]) -> None:
        """Make samples in another manner from now on; what is yielded keeps its paths."""
        for _, recipe in self._recipes.known():
            recipe.rows.close()
            recipe.chain.flush()
        self._recipes = Recipes(makers)

    def _window(self, first: EpochShare, following: Iterator[EpochShare], *, has_end: bool) -> Window:
        """Return the window that the last stream left, if it goes on with `first`, else a new one."""
        window, self._ahead = self._ahead, None
        if window is not None:
            if window.next_share == first:
                window.extend(planned_slots(following, self._recipes, has_end=has_end))
                return window
            window.close()
        planned = planned_slots(chain((first,), following), self._recipes, has_end=has_end)
        foresees = any(is_wanted(cache.policy, first) for cache in self._caches)
        return Window(planned, self._options, foresees=foresees, for_reading=lambda: self._maker.for_reading)

    # -- packs --------------------------------------------------------------------------------------------------------

    def _packs(self, first: PlannedSample, window: Window, packer: Packer) -> Iterator[Sample]:
        """Yield the packs of a position, whose first slot is given, and take the others out of the window; none for no part.

        The files of its rows are kept until all are made, as far as their paths are in the samples.
        """
        access: list[AnyHold] = []
        session, parts, slot, has_paths = first.recipe.session, list[Sample](), first, False
        try:
            while True:
                slot.access = access
                parts += self._parts(slot, packer)
                if slot.is_last:
                    break
                following = window.pop(None)
                assert following is not None, "the rows of a position are planned together"
                slot = following
            first.is_last = True
            groups = packer.groups(parts, (first.epoch, first.position))
            for number, group in enumerate(groups):
                first.is_single = number == len(groups) - 1
                try:
                    pack = packer.pack(group, first.epoch, first.position + (first.part + number << _PART_SHIFT))
                except SampleError as error:  # of the pack function: no other row would mend it
                    self._log_of(first).note_failure(first, error)
                    if first.recipe.options.on_error is not OnError.SKIP:
                        raise
                    continue
                has_paths = has_paths or bool(access and self._maker.has_path(pack))
                yield pack
        finally:
            window.give_back(slot)
            if has_paths:
                self._maker.keep(access, session, num_accesses=self._num_retained)
            else:
                for hold in access:
                    session.release(hold)

    def _parts(self, slot: PlannedSample, packer: Packer) -> list[Sample]:
        """Return what a row gives its packs: its sample, or one in its place, or none; several where they are measured here."""
        try:
            samples = self._maker.make_all(slot)
            if len(samples) != 1 and packer.lengths is not None:
                raise TransformError(
                    f"row {slot.row_id} gives {len(samples)} samples, and a pack takes one of each row: leave rows out with "
                    "where=, and make several of one before the table is written"
                )
            parts = [packer.part(sample, slot.row_id, slot.length, slot.part) for sample in samples]
        except (SampleError, StorageError) as error:
            return list(self._instead(slot, error))
        self._log_of(slot).num_seen += 1
        return parts

    # -- one sample ---------------------------------------------------------------------------------------------------

    def _each(self, slot: PlannedSample, samples: Iterator[Sample]) -> Iterator[Sample]:
        """Yield several samples of a slot; if one fails on the way, those that replace the rest follow."""
        try:
            yield from samples
        except (SampleError, StorageError) as error:
            yield from self._instead(slot, error)
        else:
            self._log_of(slot).num_seen += 1

    def _instead(self, slot: PlannedSample, error: Exception) -> Iterator[Sample]:
        """Return an iterator of the samples in place of a failed one: its own where only a file went, else of another row."""
        return self._anew(slot) if isinstance(error, LostFileError) else self._failed(slot, error)

    def _anew(self, slot: PlannedSample) -> Iterator[Sample]:
        """Yield the samples of a slot again, of objects that are acquired again."""
        try:
            samples = self._stand_in(_planned_again(slot), slot, slot.part)
        except (SampleError, StorageError) as error:
            yield from self._failed(slot, error)
            return
        self._log_of(slot).num_seen += 1
        slot.is_single = len(samples) == 1
        yield from samples

    def _stand_in(self, other: PlannedSample, slot: PlannedSample, part: int) -> list[Sample]:
        """Return the samples of a slot in the place of another's, as parts of packs where there are packs."""
        other.share, other.share_position, other.access = slot.share, slot.share_position, slot.access
        made, packer = self._maker.make_all(other), slot.recipe.packer
        return made if packer is None else [packer.part(sample, other.row_id, other.length, part) for sample in made]

    def _failed(self, slot: PlannedSample, error: Exception) -> Iterator[Sample]:
        """Note a failure, and return an iterator of the samples that replace the failed one."""
        self._log_of(slot).note_failure(slot, error)
        on_error = slot.recipe.options.on_error
        if on_error is OnError.RAISE:
            raise error
        return self._replacement(slot, error) if on_error is OnError.REPLACE else iter(())

    def _replacement(self, slot: PlannedSample, error: Exception) -> Iterator[Sample]:
        """Yield the samples of the first other row that does not fail."""
        recipe, share = slot.recipe, slot.share
        others = iter(()) if share is None else share.order.replacements(share.epoch, slot.share_position, slot.draw)
        for selected in others:
            row_ids = recipe.rows.ids_of(np.array([selected], dtype=np.int64))
            samples: list[Sample] = []
            for stand_in in recipe.slots(row_ids, [slot.position], [slot.epoch]):
                try:
                    samples += self._stand_in(stand_in, slot, 0)
                except (SampleError, StorageError) as again:
                    self._log_of(slot).note_failure(stand_in, again)
                    break
            else:
                slot.is_single = len(samples) == 1
                yield from samples
                return
        raise self._log_of(slot).no_replacement(slot) from error


def _from_start(indices: Sequence[SupportsIndex], rows: RowSource) -> list[int]:
    """Return numbers of selected rows, those from the end counted from the start.

    Raises:
        TypeError: One of them is no whole number.
        IndexError: There is no such row. While a lazy index does not know how many it has, `ids_at` finds out.
        UnknownLengthError: It does not know, and a number is counted from the end.
    """
    size, numbers = rows.known_length, []
    for given in indices:
        try:
            number = place = operator.index(given)
        except TypeError:  # torch says only that tensors of integers can be an index
            field = f"; a field of row 0 is dataset[0][{given!r}]" if isinstance(given, str) else ""
            raise TypeError(
                f"dataset[{reprlib.repr(given)}]: a row is a whole number, not {type(given).__name__}; several rows are a "
                f"slice or a list, dataset[0:3], dataset[[5, 7]]{field}"
            ) from None
        if number < 0:
            size = len(rows) if size is None else size
            place += size
        if place < 0 or (size is not None and place >= size):
            raise IndexError(f"index {number} is out of range: the dataset has {size} samples")
        numbers.append(place)
    return numbers


def _planned_again(slot: PlannedSample) -> PlannedSample:
    """Return a slot of the same sample, of which nothing is acquired or made."""
    planned = slot.recipe.slots([slot.row_id], [slot.position], [slot.epoch])
    return next(other for other in planned if other.part == slot.part)


def _acquire_together(slots: Sequence[PlannedSample], session: CacheSession, *, for_reading: bool) -> None:
    """Acquire the objects of slots of one dataset, as far as there is room."""
    remote = [slot for slot in slots if slot.wanted and slot.error is None]
    if not remote:
        return
    holds = session.acquire([slot.wanted for slot in remote], for_reading=for_reading)
    for slot, hold in zip(remote, holds, strict=False):
        slot.hold = hold
