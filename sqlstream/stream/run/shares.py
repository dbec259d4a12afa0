"""The share of one process in an epoch, and its position in that share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from sqlstream.errors import ConfigError
from sqlstream.order import Int64Array, Order, Partition, Steps
from sqlstream.stream.run.partial_steps import DeliveredAhead
from sqlstream.stream.run.positions import WorkerPosition
from sqlstream.world import World

PLANNED_TOGETHER = 64
"""Positions whose samples are planned together: a call of numpy costs little beside 64 samples."""
MOST_TOGETHER = 512
"""Rows of several streams, or of packs, that are planned together at most: they are in memory. Arbitrary."""


def planned_together(num_streams: int) -> int:
    """Return how many positions are planned together: each stream is asked for its rows of them in one go."""
    return min(PLANNED_TOGETHER * num_streams, MOST_TOGETHER)


class Planned(NamedTuple):
    """Neighbouring positions of a share."""

    places: Int64Array
    """Places, counted from the share's start: [n]."""
    positions: Int64Array
    """Positions of the epoch: [n]."""


class DealtPositions(Protocol):
    """The positions that one worker takes: a `Partition`, or a `StepShare`."""

    @property
    def world(self) -> World:
        """The worker."""

    @property
    def num_positions(self) -> int:
        """Positions of the epoch."""

    @property
    def num_samples(self) -> int:
        """Positions of this worker."""

    @property
    def num_steps(self) -> int:
        """Steps of every rank."""

    @property
    def step_size(self) -> int:
        """Positions of a step."""

    @property
    def first_step(self) -> int:
        """The first step of the share."""

    @property
    def first_worker(self) -> int:
        """The worker that takes it."""

    @property
    def consumed(self) -> int:
        """Positions before it."""

    def positions(self, start: int, stop: int) -> Int64Array:
        """Return the positions of this worker's samples `[start, stop)`."""

    def numbers(self, start: int, stop: int) -> Int64Array:
        """Return the numbers of these samples in the order of the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochShare:
    """The share of one process in one epoch."""

    epoch: int
    steps: Steps
    partition: DealtPositions
    fingerprint: str
    """That of the order when the share was made: a share that was planned before a change of weights is another one."""
    taken: int = 0
    """Positions of the share that were taken before."""
    offset: int = 0
    """Samples of the next position that were taken before."""
    beyond: DeliveredAhead | None = None
    """What the saved state, from which the share goes on, says was delivered behind the job's position."""

    @property
    def order(self) -> Order:
        """The rows of all positions."""
        return self.steps.order

    @property
    def current_partition(self) -> Partition:
        """The partition as it is known now: a lazy index learns on the way where the epoch ends."""
        return self.steps.partition(self.epoch, self.partition.world, self.partition.consumed, self.partition.first_worker)

    @property
    def has_delivered(self) -> bool:
        """Samples of a position that is left may have been delivered before."""
        return bool(self.offset) or self.beyond is not None

    def planned(self, start: int, num_places: int = PLANNED_TOGETHER) -> Planned:
        """Return what is left of the `num_places` places from `start` on."""
        stop = min(start + num_places, self.partition.num_samples)
        places, positions = np.arange(start, stop), self.partition.positions(start, stop)
        is_left = positions >= 0  # [n]; others are places that a step smaller than the largest leaves empty
        if self.beyond is not None:
            is_left &= ~self.beyond.is_taken(self.epoch, self.partition.numbers(start, stop))
        elif is_left.all():
            return Planned(places, positions)
        return Planned(places[is_left], positions[is_left])

    def num_delivered(self, place: int) -> int:
        """Return how many samples of the position at `place` were delivered before: its first ones."""
        if place == self.taken and self.offset:
            return self.offset
        if self.beyond is None:
            return 0
        return self.beyond.num_delivered(self.epoch, int(self.partition.numbers(place, place + 1)[0]))


@dataclass(slots=True)
class ShareProgress:
    """Counts what a process takes of its share; the engine moves it on."""

    share: EpochShare
    taken: int
    """Positions of the share that are taken."""
    offset: int = 0
    """Samples of the next position that are taken."""
    _place: int = -1
    """The place whose samples are being made."""
    _num_made: int = 0
    _num_delivered: int = 0
    first_epoch: int = field(init=False)
    """The epoch that the iteration began with; an endless one goes on over others."""

    def __post_init__(self) -> None:
        """Note the epoch."""
        self.first_epoch = self.share.epoch

    def begin(self, share: EpochShare) -> None:
        """Move to the start of an epoch's share."""
        self.share, self.taken, self.offset, self._place = share, share.taken, share.offset, -1

    def come_to(self, share: EpochShare | None, place: int) -> None:
        """Move to a place of a share: the next one, or the same again."""
        if share is not None and share is not self.share and share.epoch != self.share.epoch:
            self.begin(share)
        if place != self._place:
            share = self.share
            self._place, self._num_made = place, 0
            self._num_delivered = share.num_delivered(place) if share.has_delivered else 0
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

    @contextmanager
    def at(self, share: EpochShare, taken: int) -> Iterator[None]:
        """Say for a while that so many positions of a share are taken, and nothing behind them."""
        now = self.share, self.taken, self.offset
        self.share, self.taken, self.offset = share, taken, 0
        yield
        self.share, self.taken, self.offset = now

    def position(self, worker: int) -> WorkerPosition:
        """Return where this process stands, the worker of that number."""
        return WorkerPosition(worker, self.share.epoch, self.taken, self.offset)

    def end(self) -> None:
        """Move to the end of the share."""
        self.taken, self.offset = self.share.partition.num_samples, 0


def check_has_step(partition: DealtPositions) -> None:
    """Raise ConfigError if an endless iteration would look for a step for ever."""
    if not partition.num_steps:
        cure = "lower batch_size, or drop_last=False" if partition.num_positions else "loosen the filter, which keeps no row"
        raise ConfigError(f"an epoch of {partition.num_positions} samples has no step: {cure}")
