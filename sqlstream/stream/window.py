"""What is planned and acquired ahead of the sample that is being yielded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, islice

from sqlstream.cache.cache import Cache
from sqlstream.cache.fetch import Acquirer
from sqlstream.stream.forecast import foresee, is_wanted
from sqlstream.stream.rows import Slot
from sqlstream.stream.shares import EpochShare


class Window:
    """Slots in the order of their positions, as many of them acquired as there is room for.

    Args:
        planned: Slots, made when they are asked for.
        acquirer: Brings and pins their objects.
        cache: Whose objects they are, and whose policy may ask when they are used again.
        prefetch: Slots ahead.
        first: The share that the slots begin with.
    """

    def __init__(self, planned: Iterator[Slot], acquirer: Acquirer, cache: Cache, prefetch: int, first: EpochShare) -> None:
        self._planned = planned
        self._acquirer = acquirer
        self._fetcher = cache.fetcher
        self._prefetch = prefetch
        self._foresees = is_wanted(cache.policy, first)
        self._ahead: deque[Slot] = deque()
        self._width = prefetch

    @property
    def next_share(self) -> EpochShare | None:
        """The share that it goes on with; None: nothing is left."""
        return self._ahead[0].share if self._ahead else None

    def extend(self, planned: Iterator[Slot]) -> None:
        """Have further slots follow."""
        self._planned = chain(self._planned, planned)

    def pop(self, last_epoch: int | None) -> Slot | None:
        """Return the next slot; None if there is none, or none up to `last_epoch` (None: any epoch)."""
        self._look_ahead()
        if not self._ahead or (last_epoch is not None and self._ahead[0].epoch > last_epoch):
            return None
        return self._ahead.popleft()

    def close(self) -> None:
        """Give back what is acquired."""
        for slot in self._ahead:
            self.give_back(slot)
        self._ahead.clear()

    def give_back(self, slot: Slot) -> None:
        """Release a slot's objects."""
        if slot.hold is not None:
            self._acquirer.release(slot.hold)
            slot.hold = None

    def _look_ahead(self) -> None:
        """Keep `prefetch` samples planned, and as many of them acquired as there is room for, half a window at a time."""
        ahead = self._ahead
        if len(ahead) <= self._prefetch // 2:
            planned = list(islice(self._planned, self._prefetch - len(ahead)))
            if self._foresees:
                foresee(planned)
            ahead.extend(planned)
        num_acquired = sum(slot.hold is not None for slot in ahead)
        if num_acquired > self._width // 2:
            return
        bare = [slot for slot in ahead if slot.wanted and slot.hold is None][: self._width - num_acquired]
        if not bare:
            return
        holds = self._acquirer.acquire([slot.wanted for slot in bare], self._fetcher)
        for slot, hold in zip(bare, holds, strict=False):
            slot.hold = hold
        # With no room for all, the window shrinks to what there is room for; it grows again as fast.
        short = num_acquired + len(holds)
        self._width = self._prefetch if len(holds) == len(bare) else max(1, short)
