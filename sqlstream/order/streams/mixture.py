"""The schedule of a run: whose turn each number is, with weights that change and counts that go on.

    changes    from turn 0 on 7 : 3 : 0 | from turn 1000 on 1 : 1 : 1 | from turn 1700 on 0 : 1 : 1
    counts(k)  = counts when the change began + counts of its own schedule, which begins there

A stream that pauses (weight 0) keeps its count, so the draws of each stream are 0, 1, 2, … over the whole run. `at` depends on
(changes, schedule, seed, block, number) alone. Each change may add less than 2 to the drift of the even schedule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from hashlib import blake2b
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError, StateError
from sqlstream.order.permute import Int64Array
from sqlstream.order.streams.even import Turns
from sqlstream.order.streams.schedules import (
    IndependentDraws,
    ReorderedBlocks,
    ScheduleType,
    StreamSchedule,
    schedule_of,
)
from sqlstream.order.streams.whole_weights import Number, whole_weights

__all__ = [
    "MIXTURE_VERSION",
    "Change",
    "IndependentDraws",
    "Mixture",
    "ReorderedBlocks",
    "ScheduleType",
    "StreamSchedule",
    "all_exhausted",
    "first_exhausted",
    "ramp",
]

MIXTURE_VERSION = 1
"""Changes whenever any turn would change; states carry it, golden values in the tests guard it."""
MAX_RAMP_CHANGES = 64
"""Changes of a ramp: each may add less than 2 to the drift, and costs O(S) at a resume."""

Change: TypeAlias = tuple[int, tuple[int, ...]]
"""A turn, and the whole weights of all streams from it on."""


@dataclass(frozen=True, slots=True)
class _Span:
    """The turns from one change to the next."""

    start: int
    """First turn."""
    schedule: StreamSchedule
    """Schedule, which counts from 0 at `start`."""
    base: tuple[int, ...]
    """Turns of each stream before `start`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Whose turn each number of a run is, by weights that may change.

    Example:
        >>> mixture = Mixture(num_streams=2, changes=((0, (2, 1)), (6, (0, 1))), schedule=ScheduleType.PROPORTIONAL, seed=0)
        >>> turns = mixture.at(np.arange(8))
        >>> turns.stream.tolist(), turns.draw.tolist()
        ([0, 1, 0, 0, 1, 0, 1, 1], [0, 0, 1, 2, 1, 3, 2, 3])
    """

    num_streams: int
    """Streams, whether they have a weight or not."""
    changes: tuple[Change, ...]
    """Weights from turns on, in the order of the turns; the first ones hold from turn 0 on."""
    schedule: ScheduleType
    """How the turns follow each other between changes."""
    seed: int
    """Seed of the random schedules."""
    block: int | None = None
    """Turns of a block of the schedules that have blocks; None: `schedule_of` says how many."""
    _pieces: tuple[_Span, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the changes, and count up to each of them: O(changes x S log S)."""
        check_at_least("num_streams", self.num_streams, 1)
        if self.block is not None:
            check_at_least("block", self.block, 1)
        starts = [start for start, _ in self.changes]
        if starts[:1] != [0] or any(later <= earlier for earlier, later in pairwise(starts)):
            raise ConfigError(f"changes of weights at {starts}: give the first at 0 and each later than the one before")
        pieces: list[_Span] = []
        for start, weights in self.changes:
            if len(weights) != self.num_streams:
                raise ConfigError(f"{len(weights)} weights from {start} on for {self.num_streams} streams: give one a stream")
            base = _counts(pieces[-1], start) if pieces else (0,) * self.num_streams
            schedule = schedule_of(tuple(weights), ScheduleType(self.schedule), self.seed, self.block, start)
            pieces.append(_Span(start, schedule, base))
        object.__setattr__(self, "_pieces", tuple(pieces))

    @property
    def total(self) -> int:
        """Sum of the weights that hold at the end."""
        return self._pieces[-1].schedule.total

    @property
    def fingerprint(self) -> str:
        """A text for the whole schedule."""
        changes = blake2b(repr(self.changes).encode(), digest_size=8).hexdigest()
        return (
            f"mixture {MIXTURE_VERSION} of {self.num_streams} streams, {ScheduleType(self.schedule)}, block {self.block}, "
            f"seed {self.seed}, weights {changes}"
        )

    def at(self, numbers: Int64Array) -> Turns:
        """Return whose turn each of `numbers` is, and how many turns that stream had before.

        Args:
            numbers: Numbers of turns, 0 or more, in any order: [n].
        """
        if len(self._pieces) == 1:
            return self._pieces[0].schedule.at(numbers)
        numbers = np.asarray(numbers, np.int64)  # [n]
        starts = np.array([piece.start for piece in self._pieces])  # [changes]
        pieces = np.searchsorted(starts, numbers, side="right") - 1  # [n]
        stream, draw = np.empty_like(numbers), np.empty_like(numbers)  # [n]
        for index in np.unique(pieces).tolist():
            piece, here = self._pieces[index], np.flatnonzero(pieces == index)  # [m]
            turns = piece.schedule.at(numbers[here] - piece.start)
            stream[here] = turns.stream
            draw[here] = turns.draw + np.array(piece.base, np.int64)[turns.stream]
        return Turns(stream, draw)

    def counts(self, number: int) -> tuple[int, ...]:
        """Return how many of the first `number` turns are each stream's."""
        return _counts(self._piece(number), number)

    def remember(self, number: int, counts: tuple[int, ...]) -> None:
        """Take the counts of the first `number` turns as known, as a state has them.

        Only independent draws need it: a run then goes on without counting 30 ns for each earlier turn since the last change.

        Raises:
            StateError: The counts do not add up to `number`, or contradict those at the last change.
        """
        piece = self._piece(number)
        own = tuple(count - before for count, before in zip(counts, piece.base, strict=True))
        if min(own) < 0 or sum(counts) != number:
            raise StateError(
                f"the state's draws {list(counts)} are not those of {number} turns: at turn {piece.start} they were "
                f"{list(piece.base)}; load the state into the mixture that it comes from"
            )
        if isinstance(piece.schedule, IndependentDraws):
            piece.schedule.remember(number - piece.start, own)

    def weights_at(self, number: int) -> tuple[int, ...]:
        """Return the whole weights that hold at a turn."""
        return self.changes[bisect_right([start for start, _ in self.changes], number) - 1][1]

    def with_change(self, start: int, weights: tuple[int, ...]) -> Mixture:
        """Return the mixture with other weights from `start` on, up to the next change.

        Counts go on, also those of streams that pause. A change at the same turn is replaced.
        """
        check_at_least("start", start, 0)
        others = [change for change in self.changes if change[0] != start]
        return replace(self, changes=tuple(sorted([*others, (start, tuple(weights))])))

    def _piece(self, number: int) -> _Span:
        """Return the piece that a turn is in."""
        return self._pieces[bisect_right([piece.start for piece in self._pieces], number) - 1]


def _counts(piece: _Span, number: int) -> tuple[int, ...]:
    """Return the counts of all streams before a turn of a piece, or at its end."""
    own = piece.schedule.counts(number - piece.start)
    return tuple(before + here for before, here in zip(piece.base, own, strict=True))


def ramp(start: int, stop: int, first_weights: Sequence[Number], last_weights: Sequence[Number]) -> list[Change]:
    """Return changes from one proportion to another: a staircase of at most 64 steps.

    Args:
        start: Turn from which `first_weights` hold: the first change.
        stop: Turn from which `last_weights` hold: the last change.
        first_weights: Proportions at the start.
        last_weights: Proportions at the end.

    Raises:
        ConfigError: `stop` is not after `start`, or the weights are not of the same streams.

    Example:
        >>> ramp(0, 2, [1, 1], [3, 1])
        [(0, (1, 1)), (1, (5, 3)), (2, (3, 1))]
    """
    start, stop = check_at_least("start", start, 0), check_at_least("stop", stop, 0)
    if stop <= start:
        raise ConfigError(f"a ramp from {start} to {stop} has no steps: give a stop after the start")
    if len(first_weights) != len(last_weights):
        raise ConfigError(f"a ramp from {len(first_weights)} weights to {len(last_weights)}: give one a stream in both")
    num_steps = min(MAX_RAMP_CHANGES - 1, stop - start)
    first, last = (_shares(weights) for weights in (first_weights, last_weights))
    changes = []
    for step in range(num_steps + 1):
        share = Fraction(step, num_steps)
        weights = whole_weights([a + (b - a) * share for a, b in zip(first, last, strict=True)])
        changes.append((start + step * (stop - start) // num_steps, weights))
    return changes


def _shares(weights: Sequence[Number]) -> list[Fraction]:
    """Return whole weights as parts of their sum."""
    whole = whole_weights(weights)
    return [Fraction(weight, sum(whole)) for weight in whole]


def first_exhausted(mixture: Mixture, sizes: Sequence[int]) -> int:
    """Return the largest number of turns that asks no stream for more than it has.

    Args:
        mixture: The mixture; its counts must be known in advance.
        sizes: Rows of each stream.

    Raises:
        ConfigError: The schedule is random.
    """
    _check_end("first_exhausted", mixture, sizes)

    def is_beyond(number: int) -> bool:
        return any(count > size for count, size in zip(mixture.counts(number), sizes, strict=True))

    return _first(is_beyond, mixture) - 1


def all_exhausted(mixture: Mixture, sizes: Sequence[int]) -> int:
    """Return the smallest number of turns after which each stream that ever has a turn was drawn whole.

    Args:
        mixture: The mixture; its counts must be known in advance.
        sizes: Rows of each stream.

    Raises:
        ConfigError: The schedule is random, or a stream pauses for ever before its end.
    """
    _check_end("all_exhausted", mixture, sizes)
    drawn = [any(weights[stream] for _, weights in mixture.changes) for stream in range(mixture.num_streams)]
    start, last = mixture.changes[-1]
    for stream, (count, size) in enumerate(zip(mixture.counts(start), sizes, strict=True)):
        if drawn[stream] and not last[stream] and count < size:
            raise ConfigError(
                f"stop='all_exhausted' never comes: stream {stream} has weight 0 from turn {start} on and was drawn {count} "
                f"times of {size}; give it a weight, or another stop"
            )

    def is_whole(number: int) -> bool:
        counts = zip(mixture.counts(number), sizes, drawn, strict=True)
        return all(count >= size for count, size, is_drawn in counts if is_drawn)

    return _first(is_whole, mixture)


def _check_end(name: str, mixture: Mixture, sizes: Sequence[int]) -> None:
    """Raise ConfigError where the end of an epoch is not defined."""
    if mixture.schedule == ScheduleType.RANDOM:
        raise ConfigError(
            f"stop={name!r} is not known in advance with schedule='random': give epoch_size=, or schedule='random_order'"
        )
    if len(sizes) != mixture.num_streams:
        raise ConfigError(f"{len(sizes)} sizes for {mixture.num_streams} streams: give one a stream")


def _first(holds: Callable[[int], bool], mixture: Mixture) -> int:
    """Return the first number for which a condition holds that never ceases to hold."""
    low, high = -1, mixture.changes[-1][0] + mixture.total
    while not holds(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
