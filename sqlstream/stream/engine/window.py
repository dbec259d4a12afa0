"""The samples ahead of an iteration: planned, and acquired as far as there is room for them."""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice

from sqlstream.cache.session import CacheSession
from sqlstream.config import SampleOptions
from sqlstream.stream.engine.forecast import foresee
from sqlstream.stream.engine.slots import PlannedSample
from sqlstream.stream.run.shares import EpochShare

FIRST_WIDTH = 64
"""Samples ahead at first, before sizes are known; then it doubles with every half of it that is used."""

SIZES_LOOKED_AT = 32
"""Samples whose entries' mean size counts for all that are ahead: as many of the last used, and as many of the next."""
MAX_ENTRIES = 4096
"""Distinct entries ahead, where samples have many objects each: one that is on its way keeps a file open. Arbitrary."""
_WANTED_OF = operator.attrgetter("wanted")


class Window:
    """Slots in the order of their positions, as many of them acquired as there is room for.

    Args:
        planned: Slots, made when they are asked for.
        options: Slots ahead at most, and bytes that the acquired ones may have, as far as sizes are known.
        foresees: The policy of a cache needs to know when the objects are used again.
        for_reading: Returns True while objects are only read between claim and release; see `CacheSession.acquire`.
    """

    def __init__(
        self,
        planned: Iterator[PlannedSample],
        options: SampleOptions,
        *,
        foresees: bool,
        for_reading: Callable[[], bool],
    ) -> None:
        self._planned = planned
        self._for_reading = for_reading
        self._prefetch = options.prefetch
        self._prefetch_bytes = options.prefetch_bytes
        self._foresees = foresees
        self._ahead: deque[PlannedSample] = deque()
        self._used: deque[Mapping[bytes, int]] = deque(maxlen=SIZES_LOOKED_AT)
        """Bytes on disk of the objects of the last slots: where samples are used as they come, no others are known."""
        self._has_more = True
        """More slots may be planned."""
        self._num_acquired = self._num_bare = 0
        """Slots ahead that have a hold, and slots ahead that need one."""
        self._mean_bytes = 0.0
        self._width = self._next_width = min(options.prefetch, FIRST_WIDTH)

    @property
    def next_share(self) -> EpochShare | None:
        """The share of the next slot; None: no slot is left."""
        return self._ahead[0].share if self._ahead else None

    def extend(self, planned: Iterator[PlannedSample]) -> None:
        """Append further slots."""
        self._planned, self._has_more = chain(self._planned, planned), True

    def pop(self, last_epoch: int | None) -> PlannedSample | None:
        """Return the next slot; None if there is none, or none up to `last_epoch` (None: any epoch)."""
        ahead, enough = self._ahead, self._width // 2
        if (self._has_more and len(ahead) <= enough) or (self._num_bare and self._num_acquired <= enough):
            self._look_ahead()
        if not ahead:
            return None
        share = ahead[0].share
        if last_epoch is not None and share is not None and share.epoch > last_epoch:
            return None
        slot = ahead.popleft()
        if slot.hold is not None:
            self._num_acquired -= 1
            if not slot.hold.is_read_hold:  # they have the sizes
                self._used.append(slot.hold.charges)
        elif slot.wanted:
            self._num_bare -= 1
        return slot

    def close(self) -> None:
        """Release all that is acquired."""
        for slot in self._ahead:
            self.give_back(slot)
        self._ahead.clear()
        self._num_acquired = self._num_bare = 0

    def give_back(self, slot: PlannedSample) -> None:
        """Release a slot's objects."""
        if slot.hold is not None:
            slot.recipe.session.release(slot.hold)
            slot.hold = None

    def _look_ahead(self) -> None:
        """Keep a window of samples planned, and as many of them acquired as there is room for, half of it at a time."""
        ahead = self._ahead
        if self._has_more and len(ahead) <= self._width // 2:
            num_wanted = self._next_width - len(ahead)
            planned = list(islice(self._planned, num_wanted))
            if self._foresees:
                foresee(planned)
            ahead.extend(planned)
            self._has_more = len(planned) == num_wanted
            self._num_bare += sum(map(bool, map(_WANTED_OF, planned)))
        if not self._num_bare or self._num_acquired > self._width // 2:
            return
        bare = [slot for slot in ahead if slot.hold is None and slot.wanted][: self._next_width - self._num_acquired]
        affordable = bare[: self._num_affordable(bare)]
        if not affordable:
            return
        num_held = self._acquire(affordable)
        self._num_acquired += num_held
        self._num_bare -= num_held
        # Without room for all, the window shrinks to the number of slots that have room; then it doubles again.
        is_short = num_held < len(bare)
        self._width = max(1, self._num_acquired) if is_short else self._next_width
        self._next_width = min(self._prefetch, 2 * self._width)

    def _acquire(self, slots: Sequence[PlannedSample]) -> int:
        """Acquire the objects of slots, those of each cache together, as far as it has room; return for how many it has."""
        num_held, for_reading = 0, self._for_reading()
        by_session: defaultdict[CacheSession, list[PlannedSample]] = defaultdict(list)
        for slot in slots:
            by_session[slot.recipe.session].append(slot)
        for session, some in by_session.items():
            next_uses = [slot.next_use for slot in some] if self._foresees else None
            holds = session.acquire([slot.wanted for slot in some], next_uses, for_reading=for_reading)
            for slot, hold in zip(some, holds, strict=False):
                slot.hold = hold
            num_held += len(holds)
        return num_held

    def _num_affordable(self, bare: Sequence[PlannedSample]) -> int:
        """Return how many of `bare` may be acquired: by the distinct entries ahead, and their mean size as far as known."""
        settled = (slot.hold for slot in islice(self._ahead, SIZES_LOOKED_AT) if slot.hold is not None and slot.hold.is_settled)
        sizes: dict[bytes, int] = {}
        for charges in chain(self._used, [hold.charges for hold in settled]):
            sizes.update(charges)
        if sizes:
            self._mean_bytes = sum(sizes.values()) / len(sizes)
        most = min(MAX_ENTRIES, int(self._prefetch_bytes / max(self._mean_bytes, 1.0)))
        if sum(map(len, map(_WANTED_OF, self._ahead))) <= most:  # as a rule; then how many are the same matters not
            return len(bare)
        entries = {ref.key for slot in self._ahead if slot.hold is not None for ref in slot.wanted}
        for number, slot in enumerate(bare):
            entries.update(ref.key for ref in slot.wanted)
            if len(entries) > most and (number or self._num_acquired):
                return number
        return len(bare)
