"""Several datasets as one order, step by step, where each stream has batches of its own.

    position ─ divmod by the largest global batch → step, place ─ weights → stream, draw of it ─ that stream's order → row

A run has one epoch without end. Places that a step's stream does not fill are no positions of anybody's share. With lanes,
place = lane x (largest lane) + number in the lane.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sqlstream.order.order import Draws, Order, check_positions
from sqlstream.order.permute import Int64Array
from sqlstream.order.streams.mixed import ENDLESS, MixtureSince, StreamWeights, TurnLayout
from sqlstream.order.streams.schedules import StreamSchedule
from sqlstream.order.streams.step_partition import Lanes, MicroBatch, StepPartition, StreamBatches, group_streams
from sqlstream.order.streams.stream_rows import StreamRows
from sqlstream.world import World

STEPS_AS_TURNS = TurnLayout(epoch_size=ENDLESS)
"""Each step is a turn of the weights."""
NUM_STEPS = 1 << 40
"""Steps of a run: more than any takes."""
_BLOCK = 64  # micro-batches that are worked out together
_KEPT_BLOCKS = 8  # positions are asked for nearly in order, and some far ahead for lazy indexes


class StepSchedule(NamedTuple):
    """Whose turn each step is, from a step of the run on."""

    first_step: int
    """The step of the run that is the first one here."""
    before: tuple[int, ...]
    """Draws of each stream before it: [S]."""
    steps: StreamSchedule
    """Streams of the steps; with lanes their groups."""
    lanes: Lanes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """Rows of several streams, one stream, or one group of streams, at each step."""

    orders: tuple[Order, ...]
    """The order of each stream."""
    weights: StreamWeights
    batches: tuple[StreamBatches, ...]
    """Batches of each stream."""
    group_of: tuple[int, ...] | None
    """Group of each stream; None: each step has one stream."""
    num_lanes: int = 1
    """Lanes of a step, where there are groups."""
    _rows: StreamRows = field(init=False, repr=False, compare=False)
    _made: list[tuple[MixtureSince, StepSchedule]] = field(init=False, repr=False, compare=False, default_factory=list)
    """The schedule of now, with what it was made of; empty: none was asked for."""

    def __post_init__(self) -> None:
        """Ask the streams for their sizes."""
        object.__setattr__(self, "_rows", StreamRows(self.orders))

    @property
    def fingerprint(self) -> str:
        """A text for streams, weights and batches."""
        lanes = "" if self.group_of is None else f", groups {self.group_of} in {self.num_lanes} lanes"
        batches = [stream.global_batch for stream in self.batches]
        return f"steps {self._rows.fingerprint}, weights {self.weights.fingerprint}, batches {batches}{lanes}"

    @property
    def step_size(self) -> int:
        """Positions of a step, as many of which as its stream has samples are in use."""
        return max(1, *(stream.global_batch for stream in self.batches))

    @property
    def schedule(self) -> StepSchedule:
        """Whose turn each step is, by the weights of now."""
        since = self.weights.since(STEPS_AS_TURNS)
        if not self._made or self._made[0][0] is not since:
            steps: StreamSchedule = since.mixture
            lanes = None
            if self.group_of is not None:
                steps, lanes = group_streams(since.mixture, self.group_of, self.num_lanes)
            self._made[:] = [(since, StepSchedule(since.turn, since.before, steps, lanes))]
        return self._made[0][1]

    def num_positions(self, epoch: int) -> int:  # noqa: ARG002 - there is one
        """Return the positions of the run."""
        return NUM_STEPS * self.step_size

    def rows_at(self, epoch: int, positions: Int64Array) -> Draws:
        """Return the rows at `positions`, by the weights of now."""
        check_positions(positions, self.num_positions(epoch))
        return self._rows.rows_of(*self.draws_at(positions))

    def draws_at(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the stream of each position, and its earlier draws: [n], [n]."""
        schedule = self.schedule
        step, place = np.divmod(positions, self.step_size)
        turns = schedule.steps.at(step - schedule.first_step)
        before = np.array(schedule.before, dtype=np.int64)  # [S]
        if schedule.lanes is None:
            sizes = np.array([stream.global_batch for stream in self.batches], dtype=np.int64)  # [S]
            return turns.stream, before[turns.stream] + turns.draw * sizes[turns.stream] + place
        lane, within = np.divmod(place, self._lane_size)
        numbers = turns.draw * schedule.lanes.num_lanes + lane  # [n]
        stream, draw = np.empty_like(numbers), np.empty_like(numbers)  # [n]
        for group in np.unique(turns.stream).tolist():
            here = np.flatnonzero(turns.stream == group)  # [m]
            of_lanes = schedule.lanes.schedules[group].at(numbers[here])
            stream[here], draw[here] = of_lanes.stream, of_lanes.draw
        sizes = np.array([self._of_lane(stream) for stream in self.batches], dtype=np.int64)  # [S]
        return stream, before[stream] + draw * sizes[stream] + within

    def counts(self, step: int) -> tuple[int, ...]:
        """Return how many draws of each stream the run has before a step, which is not before the schedule's first: [S]."""
        schedule = self.schedule
        units = schedule.steps.counts(step - schedule.first_step)
        if schedule.lanes is None:
            sizes = zip(schedule.before, units, self.batches, strict=True)
            return tuple(before + count * stream.global_batch for before, count, stream in sizes)
        counts = list(schedule.before)
        for lanes, num_steps in zip(schedule.lanes.schedules, units, strict=True):
            for stream, count in enumerate(lanes.counts(num_steps * schedule.lanes.num_lanes)):
                counts[stream] += count * self._of_lane(self.batches[stream])
        return tuple(counts)

    def position_of(self, batch: MicroBatch) -> int:
        """Return the first position of a micro-batch, whose step is counted from the first one of the schedule."""
        stream, start = self.batches[batch.stream], (self.schedule.first_step + batch.step) * self.step_size
        if self.group_of is None:
            return start + batch.first_draw % stream.global_batch
        return start + batch.lane * self._lane_size + batch.first_draw % self._of_lane(stream)

    def permutation(self, epoch: int) -> None:  # noqa: ARG002 - each stream has one
        """Return None: each stream has its own."""
        return

    def positions_of(self, epoch: int, rows: Int64Array) -> None:  # noqa: ARG002 - a number is a row of each stream
        """Return None: streams come round at times of their own."""
        return

    def replacements(self, epoch: int, position: int, draw: int = 0) -> Iterator[int]:
        """Yield rows to try instead of a failed one, as its stream has them."""
        check_positions(positions := np.array([position], dtype=np.int64), self.num_positions(epoch))
        return self._rows.replacements(*self.draws_at(positions), draw)

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:
        """Return the chunks that streams which learn their size need for what is drawn of them up to `position`."""
        if not self._rows.learning:
            return {}
        step = position // self.step_size + 1
        if step >= NUM_STEPS:  # of the whole run; independent draws cannot be counted so far
            return self._rows.needs([self.num_positions(epoch)] * len(self.orders))
        return self._rows.needs(self.counts(step))

    @property
    def _lane_size(self) -> int:
        """Positions of a lane."""
        return max(1, *map(self._of_lane, self.batches))

    def _of_lane(self, stream: StreamBatches) -> int:
        """Return the samples of a stream in a lane."""
        return stream.global_batch // self.num_lanes


@dataclass(kw_only=True, eq=False)
class StepShare:
    """The positions of one worker, micro-batch by micro-batch, from a step on: what `Partition` is where all have one size."""

    order: Stepped
    world: World
    """The worker."""
    first_step: int
    """Step of the run at which it goes on."""
    first_round: int = 0
    """Round of that step."""
    first_worker: int = 0
    """The worker that takes the first micro-batch: a loader that starts asks worker 0 first."""
    consumed: int = 0
    """Positions are those of the run: none is left out before."""
    _partition: StepPartition | None = field(init=False, default=None)
    _schedule: StepSchedule | None = field(init=False, default=None)
    """What the partition was made of."""
    _starts: list[tuple[int, int]] = field(init=False, default_factory=lambda: [(0, 0)])
    """Before each block of micro-batches: samples of this worker, and the step that its first one belongs to."""
    _blocks: OrderedDict[int, list[MicroBatch]] = field(init=False, default_factory=OrderedDict)
    """Some blocks that were worked out last."""

    @property
    def num_positions(self) -> int:
        """Positions of the run."""
        return self.order.num_positions(0)

    @property
    def num_samples(self) -> int:
        """Samples of this worker: no end is known, who takes them knows where to stop."""
        return self.num_positions

    @property
    def step_size(self) -> int:
        """Positions of a step."""
        return self.order.step_size

    @property
    def num_steps(self) -> int:
        """Steps of the run."""
        return NUM_STEPS

    @property
    def partition(self) -> StepPartition:
        """The micro-batches of this worker, by the weights of now."""
        schedule = self.order.schedule
        if self._partition is None or schedule is not self._schedule:
            made = StepPartition(
                schedule=schedule.steps,
                streams=self.order.batches,
                world=self.world,
                lanes=schedule.lanes,
                first_step=self.first_step - schedule.first_step,
                first_round=self.first_round,
            )
            self._forget_changed(schedule)
            self._partition, self._schedule = made, schedule
        return self._partition

    def micro_batch(self, index: int) -> MicroBatch:
        """Return this worker's micro-batch number `index`; its step is counted from the first one of the schedule."""
        return self._block(index // _BLOCK)[index % _BLOCK]

    def positions(self, start: int, stop: int) -> Int64Array:
        """Return the positions of this worker's samples `[start, stop)`, counted from where it goes on."""
        self.partition  # noqa: B018 - forgets what other weights have led to
        while self._starts[-1][0] <= start:
            self._block(len(self._starts) - 1)
        block = bisect_right(self._starts, start, key=lambda known: known[0]) - 1
        place, pieces = self._starts[block][0], []
        while place < stop:
            for batch in self._block(block):
                num = batch.stop_draw - batch.first_draw
                if place + num > start and place < stop:
                    first = self.order.position_of(batch)
                    pieces.append(np.arange(first + max(0, start - place), first + min(num, stop - place)))
                place += num
            block += 1
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def numbers(self, start: int, stop: int) -> Int64Array:
        """Return the numbers of this worker's samples."""
        return np.arange(start, max(start, stop))

    def _block(self, number: int) -> Sequence[MicroBatch]:
        """Return some micro-batches; the blocks before them are known, or worked out."""
        partition, known = self.partition, self._blocks.get(number)
        if known is not None:
            return known
        while len(self._starts) <= number:
            self._block(len(self._starts) - 1)
        made = partition.micro_batches(number * _BLOCK, (number + 1) * _BLOCK)
        self._blocks[number] = made
        if len(self._blocks) > _KEPT_BLOCKS:
            self._blocks.popitem(last=False)
        if len(self._starts) == number + 1:
            num = sum(batch.stop_draw - batch.first_draw for batch in made)
            self._starts.append((self._starts[number][0] + num, made[-1].step + 1))
        return made

    def _forget_changed(self, schedule: StepSchedule) -> None:
        """Forget blocks that other weights have changed."""
        self._blocks.clear()
        if self._schedule is not None:
            changed = _first_difference(self._schedule, schedule)
            while len(self._starts) > 1 and self._starts[-1][1] > changed:
                self._starts.pop()


def _first_difference(before: StepSchedule, after: StepSchedule) -> int:
    """Return the first step, counted from the first one of the schedules, at which they may differ."""
    ours, theirs = (getattr(schedule.steps, "changes", ()) for schedule in (before, after))
    streams = [of.lanes.schedules if of.lanes is not None else () for of in (before, after)]
    differing = [change[0] for change in set(ours) ^ set(theirs)]
    if before.first_step != after.first_step or before.before != after.before or (not differing and streams[0] != streams[1]):
        return 0
    return min(differing, default=NUM_STEPS)
