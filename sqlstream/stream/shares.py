"""What one process takes of an epoch, and how far it has come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sqlstream.order import Int64Array, Partition, Plan
from sqlstream.stream.weighting import Weighting

PLANNED_TOGETHER = 64
"""Positions whose rows are worked out in one go: a call of numpy costs little beside 64 samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochShare:
    """What one process takes of one epoch."""

    epoch: int
    plan: Plan
    partition: Partition
    weighting: Weighting
    """From the plan's slots to rows."""
    version: int
    """Of the weighting: a share that was planned before a change is another one."""
    taken: int = 0
    """Positions of the share that lie behind it."""

    def blocks(self) -> Iterator[Int64Array]:
        """Yield the positions that are left, in order: [n] each."""
        return self.partition.blocks(self.taken, PLANNED_TOGETHER)

    def rows_at(self, positions: Int64Array) -> Int64Array:
        """Return the selected rows at `positions`: [n]."""
        slots = self.plan.rows_at(self.epoch, positions)
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
class Progress:
    """How far a process has come in its share; the engine moves it on."""

    share: EpochShare
    taken: int
    """Positions of the share behind it."""

    def begin(self, share: EpochShare) -> None:
        """Come to an epoch."""
        self.share, self.taken = share, share.taken
