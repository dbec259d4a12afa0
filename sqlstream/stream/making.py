"""One sample: wait for its objects, keep them in the cache while its transforms run, and give them back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from sqlstream.cache.cache import Cache
from sqlstream.cache.holds import AnyHold
from sqlstream.cache.light_hold import LightHold
from sqlstream.stream.cached import CachedChain
from sqlstream.stream.rows import RowReader, Slot, holds_path
from sqlstream.transforms.base import Sample


class Maker:
    """Makes samples of slots.

    Args:
        cache: Objects by URL.
        reader: From slots to samples.
        chain: What every sample goes through.
        num_retained: Samples that left with paths in them whose paths stay valid.
    """

    def __init__(self, cache: Cache, reader: RowReader, chain: CachedChain, num_retained: int) -> None:
        self._acquirer = cache.store.acquirer
        self._holdings = self._acquirer.holdings
        self._fetcher = cache.fetcher
        self._reader = reader
        self._chain = chain
        self._num_retained = num_retained
        self._kept: deque[AnyHold] = deque(maxlen=num_retained)
        self._data_directory = f"{cache.store.disk.root}/data/"
        self._is_plain = not chain.has_points
        self.reads_only = True
        """No sample has left with a path in it: objects are only read between claim and release."""

    def make(self, slot: Slot) -> Sample | Iterator[Sample]:
        """Return what transforms make of a slot: a sample, or an iterator of several, which are made when they are asked for.

        Raises:
            SampleError, StorageError: It cannot be made.
        """
        if slot.error is not None:
            raise slot.error
        hold = slot.hold
        if not (isinstance(hold, LightHold) and self._is_plain):
            self._settle(slot)
            hold = slot.hold
        elif not hold.claim():  # nearly all samples of a warm cache are claimed here
            self.give_back(slot)
            self._settle(slot)
            hold = slot.hold
        try:
            outcome = self._chain.run(slot, self._reader)
            if not isinstance(outcome, dict):
                return self._several(slot, outcome)
            slot.is_single = True
            is_kept = hold is not None and self._keeps_path(hold, outcome)
        except BaseException:
            self._done_with(slot, is_kept=False)
            raise
        if isinstance(hold, LightHold) and not is_kept:
            slot.hold = None
            hold.close()  # nothing of it reaches the ledger
        else:
            self._done_with(slot, is_kept)
        return outcome

    def make_all(self, slot: Slot) -> list[Sample]:
        """Return all samples of a slot."""
        outcome = self.make(slot)
        return [outcome] if isinstance(outcome, dict) else list(outcome)

    def give_back(self, slot: Slot) -> None:
        """Release a slot's objects."""
        if slot.hold is not None:
            self._acquirer.release(slot.hold)
            slot.hold = None

    def close(self, *, release_kept: bool) -> None:
        """End; with `release_kept`, the paths of samples that left are no longer kept valid."""
        if release_kept:
            for hold in self._kept:
                self._acquirer.release(hold)
        self._kept.clear()

    def _several(self, slot: Slot, samples: Iterator[Sample]) -> Iterator[Sample]:
        """Yield samples that are made while they are asked for; the slot's objects are pinned until the last one."""
        is_kept = False
        try:
            for sample in samples:
                is_kept = is_kept or (slot.hold is not None and self._keeps_path(slot.hold, sample))
                yield sample
        finally:
            self._done_with(slot, is_kept)

    def _settle(self, slot: Slot) -> None:
        """Wait until what the slot wants is here and claimed; plan and acquire it again when it was revoked or lost."""
        if self._chain.is_found_now(slot):
            self.give_back(slot)
        lightly = self.reads_only
        while wanted := slot.wanted:
            hold = slot.hold
            if hold is None:
                hold = slot.hold = self._acquirer.acquire_one(wanted, self._fetcher, lightly=lightly)
            if hold.outstanding or hold.error is not None:
                self._acquirer.wait(hold)
                if hold.error is not None:
                    error = hold.error
                    self.give_back(slot)
                    raise error
            if self._holdings.claim(hold) and self._chain.read(slot):
                return
            self.give_back(slot)
            self._chain.look_up([slot])
            lightly = False  # the ledger finds out what is wrong with it

    def _keeps_path(self, hold: AnyHold, sample: Sample) -> bool:
        """Return whether paths in a sample need its hold: they lie in the cache, or past a cache that failed."""
        return hold.files is not None or holds_path(sample, self._data_directory)

    def _done_with(self, slot: Slot, is_kept: bool) -> None:
        hold, slot.hold = slot.hold, None
        if hold is None:
            return
        if is_kept:
            self.reads_only = False
            self._kept.append(self._acquirer.retain(hold, self._num_retained))
        else:
            self._acquirer.release(hold)
