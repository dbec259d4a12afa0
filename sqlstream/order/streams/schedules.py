"""Schedules: whose turn number k is, and how many turns that stream had before, for weights that never change.

`Even` spreads turns evenly; `ReorderedBlocks` gives each block of turns the even schedule's composition, in another order;
`IndependentDraws` keep proportions only on average. All are functions of the number: nothing is state.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple, Protocol

import numpy as np

from sqlstream.errors import ConfigError
from sqlstream.order.permute import Int64Array, Permutation
from sqlstream.order.streams.even import Even, Turns

MAX_PERIOD = 100_000
"""The longest period W that is a block by itself (sds refuses longer ones); beyond it a block has `DEFAULT_BLOCK` turns."""
DEFAULT_BLOCK = 1024
"""Batches of 64 are then nearly as random as independent draws (variance 12.0 of 13.4), and no count drifts by over 260."""
MAX_BLOCK = 1 << 20
"""Turns of the largest block: its table takes 16 MiB."""
MAX_INDEPENDENT = 1 << 31
"""Sum of weights of independent draws (exclusive): a hash gives 31 bits."""
_KEPT_TURNS = 1 << 14  # of the latest blocks, and two at least: numbers are asked for nearly in order
_BLOCK_KEY = 201  # what a permutation is for; rows have other keys
_CHUNK = 1 << 12  # draws that are counted at once, and so many at most again for each lookup
_KEPT_CHUNKS = 16
"""The latest chunks before which counts are kept, and every sixteenth of the others: a number in memory for each stream."""
_GOLDEN_RATIO = 0x9E3779B97F4A7C15


class ScheduleType(StrEnum):
    """How the turns of streams follow each other."""

    PROPORTIONAL = "proportional"
    """Evenly: as near to the proportions as can be at every turn."""
    CONSECUTIVE = "consecutive"
    """In blocks, stream after stream: weights 2, 3, 4 are 0 0 1 1 1 2 2 2 2."""
    CONSECUTIVE_INTERLEAVED = "consecutive_interleaved"
    """In blocks, round after round: 0 1 2 0 1 2 1 2 2."""
    RANDOM_ORDER = "random_order"
    """In blocks, each shuffled in its own way."""
    FIXED_RANDOM_ORDER = "fixed_random_order"
    """In blocks, all shuffled in the same way."""
    RANDOM = "random"
    """Independent draws, whose counts drift like a square root."""


class StreamSchedule(Protocol):
    """Whose turn each number is. `at` depends on the number alone, and the turns of a stream count 0, 1, 2, …."""

    @property
    def total(self) -> int:
        """Sum of the whole weights, W."""

    def at(self, numbers: Int64Array) -> Turns:
        """Return whose turns `numbers` are, in any order: [n]."""

    def counts(self, number: int) -> tuple[int, ...]:
        """Return how many of the first `number` turns are each stream's."""


def schedule_of(
    weights: tuple[int, ...], schedule: ScheduleType, seed: int, block: int | None = None, start: int = 0
) -> StreamSchedule:
    """Return the schedule of some weights.

    Args:
        weights: Whole weights.
        schedule: The kind.
        seed: Seed of the random kinds.
        block: Turns of a block; None: the sum of the weights, or `DEFAULT_BLOCK` where that is over `MAX_PERIOD`.
        start: Turn of the run at which the schedule begins: it is part of the random kinds' keys, so that a run that is
            resumed with other weights again and again does not see one block again and again.
    """
    if schedule is ScheduleType.PROPORTIONAL:
        return Even(weights)
    if schedule is ScheduleType.RANDOM:
        return IndependentDraws(weights=weights, seed=seed, start=start)
    total = sum(weights)
    size = block or (total if total <= MAX_PERIOD else DEFAULT_BLOCK)
    return ReorderedBlocks(weights=weights, schedule=schedule, seed=seed, size=size, start=start)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReorderedBlocks:
    """The even schedule, reordered within blocks: |count - ideal| <= block / 4 + 2, for any size of block and any weights."""

    weights: tuple[int, ...]
    """Whole weights."""
    schedule: ScheduleType
    """One of the four kinds that have blocks."""
    seed: int
    """Seed of the random orders."""
    size: int
    """Turns of a block."""
    start: int = 0
    """Turn of the run at which the schedule begins."""
    _even: Even = field(init=False, repr=False, compare=False)
    _tables: dict[int, Turns] = field(init=False, repr=False, compare=False, default_factory=dict)
    """The latest blocks: within each the stream of each turn, and its earlier turns in the block: [size] each."""

    def __post_init__(self) -> None:
        """Check weights and size."""
        object.__setattr__(self, "_even", Even(self.weights))
        if not 1 <= self.size <= MAX_BLOCK:
            raise ConfigError(f"block={self.size} is out of range: give 1 to 2**20 = {MAX_BLOCK} turns")

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild without the tables."""
        return (_blocks, (self.weights, self.schedule, self.seed, self.size, self.start))

    @property
    def total(self) -> int:
        """Sum of the weights."""
        return self._even.total

    def at(self, numbers: Int64Array) -> Turns:
        """Return whose turns `numbers` are; O(1) each, and O(size) for each block that is not one of the latest."""
        numbers = np.asarray(numbers, np.int64)  # [n]
        block = numbers // self.size  # [n]
        within = numbers - block * self.size  # [n]
        if self._is_periodic:
            table = self._table(0)
            stream = table.stream[within]  # [n]
            return Turns(stream, table.draw[within] + block * self._shares[stream])
        stream, draw = np.empty_like(within), np.empty_like(within)  # [n]
        by_block = np.argsort(block, kind="stable")  # [n]
        borders = np.flatnonzero(np.diff(block[by_block])) + 1  # [b]
        for here in np.split(by_block, borders) if len(block) else ():
            number = int(block[here[0]])
            table, before = self._table(number), np.array(self._even.counts(number * self.size), np.int64)  # [S]
            stream[here] = table.stream[within[here]]
            draw[here] = table.draw[within[here]] + before[stream[here]]
        return Turns(stream, draw)

    def counts(self, number: int) -> tuple[int, ...]:
        """Return how many of the first `number` turns are each stream's."""
        block, within = divmod(number, self.size)
        before = self._even.counts(block * self.size)
        if not within:
            return before
        here = np.bincount(self._table(0 if self._is_periodic else block).stream[:within], minlength=len(self.weights))  # [S]
        return tuple(a + b for a, b in zip(before, here.tolist(), strict=True))

    @property
    def _is_periodic(self) -> bool:
        """All blocks are alike: counts are exact at their borders, and their order is the same."""
        return self.size % self.total == 0 and self.schedule is not ScheduleType.RANDOM_ORDER

    @property
    def _shares(self) -> Int64Array:
        """Turns of each stream in each of the blocks that are alike: [S]."""
        return np.array(self.weights, np.int64) * (self.size // self.total)

    def _table(self, number: int) -> Turns:
        """Return a block, built or one of the latest."""
        table = self._tables.get(number)
        if table is None:
            table = self._tables[number] = self._built(number)
            for old in list(self._tables)[: -max(2, _KEPT_TURNS // self.size)]:
                self._tables.pop(old, None)
        return table

    def _built(self, number: int) -> Turns:
        """Return the streams of a block, in its order, and the turns of each in it."""
        bounds = [self._even.counts(edge * self.size) for edge in (number, number + 1)]
        shares = np.array([after - before for before, after in zip(*bounds, strict=True)], np.int64)  # [S]
        stream = np.repeat(np.arange(len(shares)), shares)  # [size], sorted
        draw = np.arange(self.size) - np.repeat(np.cumsum(shares) - shares, shares)  # [size]
        if self.schedule is ScheduleType.CONSECUTIVE_INTERLEAVED:
            order = np.lexsort((stream, draw))  # [size]
            return Turns(stream[order], draw[order])
        if self.schedule is ScheduleType.CONSECUTIVE:
            return Turns(stream, draw)
        key = number if self.schedule is ScheduleType.RANDOM_ORDER else 0
        keys = (_BLOCK_KEY, self.seed, key, self.start) if self.start else (_BLOCK_KEY, self.seed, key)
        stream = stream[Permutation.keyed(self.size, *keys).forward(np.arange(self.size))]
        in_order = np.empty_like(draw)  # [size]
        in_order[np.argsort(stream, kind="stable")] = draw
        return Turns(stream, in_order)


def _blocks(weights: tuple[int, ...], schedule: ScheduleType, seed: int, size: int, start: int) -> ReorderedBlocks:
    """Return blocks from what they are made of, for pickle."""
    return ReorderedBlocks(weights=weights, schedule=schedule, seed=seed, size=size, start=start)


class _Mark(NamedTuple):
    """What is known of the turns before a number."""

    number: int
    counts: Int64Array
    """Turns of each stream: [S]."""

    @property
    def is_kept(self) -> bool:
        """It stays however far back it is: a state said it, or it is one of every sixteenth chunk."""
        return self.number % _CHUNK != 0 or self.number % (_KEPT_CHUNKS * _CHUNK) == 0


_NUMBER_OF = attrgetter("number")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndependentDraws:
    """Each turn is drawn by itself. Earlier turns are counted, some 30 ns each: for steps, not for samples.

    Rejected: counts in O(log k) by splitting binomially, which needs a hypergeometric sampler that agrees on all machines.
    """

    weights: tuple[int, ...]
    """Whole weights, together below 2**31."""
    seed: int
    """Seed of the draws."""
    start: int = 0
    """Turn of the run at which the schedule begins."""
    _marks: list[_Mark] = field(init=False, repr=False, compare=False, default_factory=list)
    """What is known, in the order of the numbers; it is a cache."""

    def __post_init__(self) -> None:
        """Check the weights."""
        Even(self.weights)
        if self.total >= MAX_INDEPENDENT:
            raise ConfigError(
                f"whole weights {self.weights} add up to {self.total}: independent draws take fewer than 2**31 in all"
            )

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild without the counts."""
        return (_draws, (self.weights, self.seed, self.start))

    @property
    def total(self) -> int:
        """Sum of the weights."""
        return sum(self.weights)

    def at(self, numbers: Int64Array) -> Turns:
        """Return whose turns `numbers` are; the largest of them decides how much is counted."""
        numbers = np.asarray(numbers, np.int64)  # [n]
        stream, draw = self._streams(numbers), np.empty_like(numbers)  # [n]
        chunk = numbers // _CHUNK  # [n]
        for number in np.unique(chunk).tolist():
            here = np.flatnonzero(chunk == number)  # [m]
            first, before = self._known(int(numbers[here].min()))
            drawn = self._streams(np.arange(first, int(numbers[here].max()) + 1))  # [c]
            earlier = np.empty_like(drawn)  # [c]
            order = np.argsort(drawn, kind="stable")  # [c]
            shares = np.bincount(drawn, minlength=len(self.weights))  # [S]
            earlier[order] = np.arange(len(drawn)) - np.repeat(np.cumsum(shares) - shares, shares)
            draw[here] = earlier[numbers[here] - first] + before[stream[here]]
        return Turns(stream, draw)

    def counts(self, number: int) -> tuple[int, ...]:
        """Return how many of the first `number` turns are each stream's."""
        first, before = self._known(number)
        return tuple((before + self._counted(first, number)).tolist())

    def remember(self, number: int, counts: tuple[int, ...]) -> None:
        """Take the counts of the first `number` turns as known, as a state has them: nothing is counted from the start."""
        insort(self._marks, _Mark(number, np.array(counts, np.int64)), key=_NUMBER_OF)

    def _known(self, number: int) -> _Mark:
        """Return the counts before a number less than a chunk before `number`, counted on from the nearest that is known."""
        place = bisect_right(self._marks, number, key=_NUMBER_OF)
        known = self._marks[place - 1] if place else _Mark(0, np.zeros(len(self.weights), np.int64))
        while (following := (known.number // _CHUNK + 1) * _CHUNK) <= number:
            known = _Mark(following, known.counts + self._counted(known.number, following))
            insort(self._marks, known, key=_NUMBER_OF)
            oldest = following - _KEPT_CHUNKS * _CHUNK
            self._marks[:] = [mark for mark in self._marks if mark.number >= oldest or mark.is_kept]
        return known

    def _counted(self, first: int, stop: int) -> Int64Array:
        """Return how many of the turns `[first, stop)` are each stream's: [S]."""
        return np.bincount(self._streams(np.arange(first, stop)), minlength=len(self.weights))

    def _streams(self, numbers: Int64Array) -> Int64Array:
        """Return the stream of each number: a hash of 31 bits, laid out over the weights."""
        shift = self.seed * _GOLDEN_RATIO % (1 << 64)
        mixed = _mix(_mix((numbers + self.start).astype(np.uint64) + np.uint64(shift)))  # [n]
        points = ((mixed >> np.uint64(33)) * np.uint64(self.total) >> np.uint64(31)).astype(np.int64)  # [n]
        return np.searchsorted(np.cumsum(self.weights), points, side="right").astype(np.int64)


def _draws(weights: tuple[int, ...], seed: int, start: int) -> IndependentDraws:
    """Return draws from what they are made of, for pickle."""
    return IndependentDraws(weights=weights, seed=seed, start=start)


def _mix(numbers: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return hashes of numbers: the finish of splitmix64 (Steele, Lea, Flood 2014)."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # [n]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)  # [n]
    return mixed ^ (mixed >> np.uint64(31))
