"""One sample: wait for its objects, keep them in the cache while its transforms run, and release them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from torch.utils.data import get_worker_info

from sqlstream.cache.session import AnyHold, CacheSession
from sqlstream.stream.engine.held_paths import holds_path
from sqlstream.stream.engine.slots import PlannedSample
from sqlstream.transforms.base import Sample


class SampleMaker:
    """Makes samples of slots.

    Args:
        session: Holds their objects.
        num_retained: Yielded samples whose paths stay valid.
        note_given_up: Called when a sample's paths stop to be valid, since there are more samples than `num_retained`.
    """

    def __init__(
        self,
        session: CacheSession,
        num_retained: int,
        note_given_up: Callable[[], None] | None = None,
    ) -> None:
        self._session = session
        self._directories = session.directories
        self._num_retained = num_retained
        self._note_given_up = note_given_up
        self._kept: deque[list[AnyHold]] = deque()
        """Holds of yielded samples with paths, by access; in a stream each sample is an access."""
        self._num_kept = 0
        self._promises = get_worker_info() is not None
        """Samples go to a trainer in another process, after this one has yielded them."""
        self.for_reading = True
        """No sample was yielded with a path in it: objects are only read between claim and release."""

    def make(self, slot: PlannedSample) -> Sample | Iterator[Sample]:
        """Return what transforms make of a slot: a sample, or an iterator of several, which are made when they are asked for.

        Raises:
            SampleError, StorageError: The sample cannot be made.
        """
        if slot.error is not None:
            raise slot.error
        hold, recipe = slot.hold, slot.recipe
        if hold is None or hold.outstanding or hold.error is not None or recipe.has_points:
            self._settle(slot)
            hold = slot.hold
        elif not self._session.open(hold):  # the slot is acquired again
            self.give_back(slot)
            self._settle(slot)
            hold = slot.hold
        try:
            sample = recipe.chain.run_points(slot, recipe.reader) if recipe.has_points else recipe.reader.finish(slot)
            rest = recipe.chain.rest
            outcome = rest.run(sample, (rest.seed, slot.epoch, slot.position), files=hold)
            if not isinstance(outcome, dict):
                return self._several(slot, outcome)
            slot.is_single = True
            is_kept = hold is not None and holds_path(outcome, self._directories)
        except BaseException:
            self.give_back(slot)
            raise
        if is_kept:
            self._keep(slot)
        else:
            self.give_back(slot)
        return outcome

    def make_all(self, slot: PlannedSample) -> list[Sample]:
        """Return all samples of a slot."""
        outcome = self.make(slot)
        return [outcome] if isinstance(outcome, dict) else list(outcome)

    def give_back(self, slot: PlannedSample) -> None:
        """Release a slot's objects."""
        if slot.hold is not None:
            self._session.release(slot.hold)
            slot.hold = None

    def close(self, *, release_kept: bool) -> None:
        """End; with `release_kept`, the paths of yielded samples are no longer kept valid."""
        if release_kept:
            while self._kept:
                self._release_oldest()

    def keep(self, holds: list[AnyHold], *, num_accesses: int = 1) -> None:
        """Keep the paths of an access's samples valid, and release the oldest, but none of the last `num_accesses`."""
        if not holds:
            return
        if self._promises or num_accesses > 1:
            with contextlib.suppress(IndexError):  # another thread has released the oldest
                oldest = self._kept[0][0]
                if oldest.is_released:  # since this process's share of the limit was too small
                    self._session.warn_of_paths()
        self._kept.append(holds)
        self._num_kept += len(holds)
        while self._num_kept > self._num_retained and len(self._kept) > num_accesses:
            if self._note_given_up is not None:
                self._note_given_up()
            self._release_oldest()

    def _release_oldest(self) -> None:
        try:
            holds = self._kept.popleft()
        except IndexError:  # another thread did
            return
        self._num_kept -= len(holds)
        for hold in holds:
            self._session.release(hold)

    def _several(self, slot: PlannedSample, samples: Iterator[Sample]) -> Iterator[Sample]:
        """Yield samples that are made while they are asked for; the slot's objects are pinned until the last one."""
        is_kept = False
        try:
            for sample in samples:
                is_kept = is_kept or (slot.hold is not None and holds_path(sample, self._directories))
                yield sample
        finally:
            if is_kept:
                self._keep(slot)
            else:
                self.give_back(slot)

    def _settle(self, slot: PlannedSample) -> None:
        """Wait until all that the slot wants is in the cache and claimed; acquire it again when it was revoked or lost."""
        recipe, for_reading = slot.recipe, self.for_reading
        if recipe.has_points and recipe.chain.is_found_now(slot):
            self.give_back(slot)
        while wanted := slot.wanted:
            hold = slot.hold
            if hold is None:
                hold = slot.hold = self._session.acquire_one(wanted, slot.next_use, for_reading=for_reading)
            if hold.outstanding or hold.error is not None:
                hold = slot.hold = self._session.wait(hold)
                if hold.error is not None:
                    error = slot.with_own_text(hold.error)
                    self.give_back(slot)
                    raise error
            if self._session.open(hold) and (not recipe.has_points or recipe.chain.read(slot)):
                return
            self.give_back(slot)
            recipe.chain.look_up([slot])
            for_reading = False  # the ledger shows what is wrong with the object

    def _keep(self, slot: PlannedSample) -> None:
        """Keep the objects of a slot whose sample has their paths."""
        hold, slot.hold = slot.hold, None
        if hold is None:
            return
        self.for_reading = False
        kept = self._session.retain(hold)
        if slot.access is None:
            self.keep([kept])
        else:
            slot.access.append(kept)
