"""The share of one process in an epoch, and its position in that share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sqlstream.order import Int64Array, Partition, Plan
from sqlstream.stream.run.partial_steps import DeliveredAhead
from sqlstream.stream.run.weighting import Weighting

PLANNED_TOGETHER = 64
"""Positions whose rows are computed together: a call of numpy costs little beside 64 samples."""
SHUFFLED_TOGETHER = 1024
"""Positions whose slots are computed together: these hundred calls of numpy take as long for 1024 as for 64.

Rows are computed later, `PLANNED_TOGETHER`, since weights may change meanwhile; slots do not depend on them."""


class Planned(NamedTuple):
    """Neighbouring positions of a share."""

    places: Int64Array
    """Places, counted from the share's start: [n]."""
    positions: Int64Array
    """Positions of the epoch: [n]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochShare:
    """The share of one process in one epoch."""

    epoch: int
    plan: Plan
    partition: Partition
    weighting: Weighting
    """The rows of the plan's slots."""
    version: int
    """Version of the weighting: a share that was planned before a change is another one."""
    taken: int = 0
    """Positions of the share that were taken before."""
    offset: int = 0
    """Samples of the next position that were taken before."""
    beyond: DeliveredAhead | None = None
    """What the saved state, from which the share goes on, says was delivered behind its mark."""

    @property
    def current_partition(self) -> Partition:
        """The partition as it is known now: a lazy index learns on the way where the epoch ends."""
        return self.plan.partition(self.partition.world, self.partition.consumed, self.partition.first_worker)

    def planned(self, start: int, num_places: int = PLANNED_TOGETHER) -> Planned:
        """Return what is left of the `num_places` places from `start` on."""
        stop = min(start + num_places, self.partition.num_samples)
        places, positions = np.arange(start, stop), self.partition.positions(start, stop)
        if self.beyond is None:
            return Planned(places, positions)
        is_left = ~self.beyond.is_taken(self.epoch, self.partition.numbers(start, stop))
        return Planned(places[is_left], positions[is_left])

    def num_delivered(self, place: int) -> int:
        """Return how many samples of the position at `place` were delivered before: its first ones."""
        if place == self.taken and self.offset:
            return self.offset
        if self.beyond is None:
            return 0
        return self.beyond.num_delivered(self.epoch, int(self.partition.numbers(place, place + 1)[0]))

    def slots_at(self, positions: Int64Array) -> Int64Array:
        """Return the slots of the plan that stand at `positions`: [n]."""
        return self.plan.rows_at(self.epoch, positions)

    def rows_at(self, positions: Int64Array, slots: Int64Array | None = None) -> Int64Array:
        """Return the selected rows at `positions`, by the weights of now: [n]; `slots`: what `slots_at` returned for them."""
        slots = self.slots_at(positions) if slots is None else slots
        return self.weighting.rows_at(self.plan.seed, self.epoch, positions, slots)

    def replacements(self, position: int) -> Iterator[int]:
        """Yield selected rows to try instead of a failed position's."""
        place = np.array([position], dtype=np.int64)
        failed = self.rows_at(place)[0]
        for slot in self.plan.replacements(self.epoch, position):
            row = self.weighting.rows_at(self.plan.seed, self.epoch, place, np.array([slot], dtype=np.int64))[0]
            if row != failed:  # with weights, a row may stand at several positions
                yield int(row)


@dataclass(slots=True)
class ShareProgress:
    """The position of a process in its share; the engine moves it on."""

    share: EpochShare
    taken: int
    """Positions of the share that are taken."""
    offset: int = 0
    """Samples of the next position that are taken."""
    _place: int = -1
    """The place whose samples are being made."""
    _num_made: int = 0
    _num_delivered: int = 0

    def begin(self, share: EpochShare) -> None:
        """Move to the start of an epoch's share."""
        self.share, self.taken, self.offset, self._place = share, share.taken, share.offset, -1

    def come_to(self, share: EpochShare | None, place: int) -> None:
        """Move to a place of a share: the next one, or the same again."""
        if share is not None and share is not self.share and share.epoch != self.share.epoch:
            self.begin(share)
        if place != self._place:
            self._place, self._num_made, self._num_delivered = place, 0, self.share.num_delivered(place)
            self.taken, self.offset = place, self._num_delivered

    def is_new(self, *, is_only: bool) -> bool:
        """Count a sample of the place; return False if it was delivered before the state was saved.

        Args:
            is_only: No other sample of the place follows.
        """
        self._num_made += 1
        if self._num_made <= self._num_delivered:
            return False
        self.taken, self.offset = (self._place + 1, 0) if is_only else (self._place, self._num_made)
        return True

    def end(self) -> None:
        """Move to the end of the share."""
        self.taken, self.offset = self.share.partition.num_samples, 0


class WorkerPosition(NamedTuple):
    """The position of a worker after a batch; it goes to the trainer with the batch."""

    worker: int
    epoch: int
    taken: int
    offset: int
