"""The micro-batches that a DataLoader worker of a rank makes, where each stream has batches of its own: arithmetic only.

    step k                  a stream and its earlier steps i: draws [i * B, (i + 1) * B), B its global batch
      round a, rank r       micro-batch a * R + r of the step, of B / (micro * R) rounds on R ranks
    step k with lanes       a group and its earlier steps i; lane l of L: a stream and its earlier lanes j: draws
                            [j * B / L, (j + 1) * B / L); rank r has the lanes l = r (mod R), one after the other
    worker w of W           each W-th micro-batch of its rank, counted from the one at which the run went on

Global steps are the same on any number of ranks and workers: rounds are what gives way. In a group all streams take as many
rounds, so all ranks make as many forward passes in a step. The micro-batches of a rank before step k are the sum of
counts(k) x rounds, so a run goes on at any step without walking there.

Rejected: a stream for each rank by its own generator (sds): shares are then another mixture on another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError, StateError
from sqlstream.order.permute import MAX_SIZE, Int64Array
from sqlstream.order.streams.mixture import Change, Mixture
from sqlstream.order.streams.schedules import ScheduleType, StreamSchedule
from sqlstream.order.streams.whole_weights import whole_weights
from sqlstream.world import World

_WINDOW = 64  # steps that are looked up together


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBatches:
    """The batches of one stream."""

    name: str
    """Name, for errors."""
    global_batch: int
    """Samples of all ranks in a step; 0: none, steps of this stream are empty."""
    micro_batch: int
    """Samples of a rank in a round."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_at_least(f"batch_size of stream {self.name!r}", self.global_batch, 0)
        check_at_least(f"batch_gpu of stream {self.name!r}", self.micro_batch, 1 if self.global_batch else 0)

    def num_parts(self, num_ways: int, what: str) -> int:
        """Return the micro-batches of each of the ways that a step is divided into.

        Raises:
            ConfigError: The global batch is not divisible.
        """
        if not self.global_batch:
            return 0
        unit = self.micro_batch * num_ways
        if self.global_batch % unit:
            below = self.global_batch // unit * unit
            nearest = f"{below} or {below + unit}" if below else f"{unit}"
            raise ConfigError(
                f"stream {self.name!r}: batch_size={self.global_batch} is not divisible by batch_gpu={self.micro_batch} x "
                f"{num_ways} {what}: give batch_size={nearest}, or another batch_gpu"
            )
        return self.global_batch // unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """The lanes of steps that belong to groups of streams."""

    num_lanes: int
    """Lanes of a step: the ranks of the first start, or what the user says; it never changes in a run."""
    members: tuple[tuple[int, ...], ...]
    """Streams of each group."""
    schedules: tuple[StreamSchedule, ...]
    """For each group whose turn each lane is: lane l of the group's step i is turn i * num_lanes + l, over all streams."""

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ConfigError if the lanes cannot be divided among ranks."""
        if self.num_lanes % num_ranks:
            divisors = [ranks for ranks in range(1, self.num_lanes + 1) if self.num_lanes % ranks == 0]
            below, above = ([n for n in divisors if n < num_ranks][-1:], [n for n in divisors if n > num_ranks][:1])
            nearest = " or ".join(map(str, below + above))
            raise ConfigError(
                f"{self.num_lanes} lanes are not divisible by {num_ranks} ranks: run on {nearest} ranks "
                f"(lanes are fixed at the first start, by lanes= or its number of ranks)"
            )


class Grouped(NamedTuple):
    """Streams in groups."""

    groups: Mixture
    """Whose turn each step is: a group's."""
    lanes: Lanes
    """Whose turn each lane of such a step is: a stream's."""


def group_streams(streams: Mixture, group_of: Sequence[int], num_lanes: int) -> Grouped:
    """Return the schedules of steps and lanes for streams in groups.

    A group weighs what its streams weigh. Lanes are in random order, in the exact proportion of the streams' weights.

    Args:
        streams: Weights of streams by step, and the schedule of the steps.
        group_of: Group of each stream, in [0, number of groups).
        num_lanes: Lanes of a step.
    """
    check_at_least("lanes", num_lanes, 1)
    members = tuple(tuple(stream for stream, own in enumerate(group_of) if own == group) for group in range(max(group_of) + 1))
    changes = tuple(
        (start, whole_weights([sum(weights[stream] for stream in group) for group in members]))
        for start, weights in streams.changes
    )
    groups = replace(streams, num_streams=len(members), changes=changes)
    schedules = tuple(
        Mixture(
            num_streams=streams.num_streams,
            changes=_lane_changes(streams, groups, group, own, num_lanes),
            schedule=ScheduleType.RANDOM_ORDER,
            seed=streams.seed + ((group + 1) << 70),  # no group's lanes follow another's, or the order of the groups
        )
        for group, own in enumerate(members)
    )
    return Grouped(groups, Lanes(num_lanes=num_lanes, members=members, schedules=schedules))


def _lane_changes(
    streams: Mixture, groups: Mixture, group: int, members: tuple[int, ...], num_lanes: int
) -> tuple[Change, ...]:
    """Return the weights of a group's streams by the turns of its lanes."""
    changes: dict[int, tuple[int, ...]] = {}
    for start, weights in streams.changes:
        own = [weight if stream in members else 0 for stream, weight in enumerate(weights)]
        if any(own):
            changes[groups.counts(start)[group] * num_lanes if changes else 0] = whole_weights(own)
    if not changes:  # the group has no turn, so nothing asks for its lanes until a change gives it one
        changes[0] = tuple(int(stream in members) for stream in range(streams.num_streams))
    turns = sorted(changes)
    return tuple((turn, changes[turn]) for at, turn in enumerate(turns) if not at or changes[turn] != changes[turns[at - 1]])


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one rank gives in one round of a step."""

    step: int
    """Step of the run."""
    round: int
    """Round within the step."""
    lane: int
    """Lane within the step, 0 without lanes."""
    stream: int
    """Stream."""
    first_draw: int
    """First draw of the stream."""
    stop_draw: int
    """End of the draws, exclusive."""
    num_rounds_left: int
    """Rounds of the step after this one."""
    num_samples_in_round: int
    """Samples of all ranks in the round."""
    num_samples_in_step: int
    """Samples of all ranks in the step."""


@dataclass(frozen=True, slots=True)
class _LanesOfStep:
    """The lanes of one step."""

    streams: list[int]
    """Stream of each lane."""
    draws: list[int]
    """Earlier lanes of that stream."""
    num_samples: int
    """Samples of all lanes."""


@dataclass(frozen=True, slots=True)
class _StepWindow:
    """Some steps that follow each other."""

    first_step: int
    """First step."""
    unit: Int64Array
    """Stream or group of each step: [steps]."""
    earlier: Int64Array
    """Earlier steps of that stream or group: [steps]."""
    stops: Int64Array
    """Micro-batches of the rank up to and with each step: [steps]."""
    first: int
    """Micro-batches of the rank before the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPartition:
    """One worker's micro-batches from a step on; the n-th of them is found alone, and the sequence has no end.

    Example:
        >>> from sqlstream.order import Even
        >>> batches = [StreamBatches(name=name, global_batch=batch, micro_batch=1) for name, batch in (("a", 4), ("b", 2))]
        >>> share = StepPartition(schedule=Even((1, 1)), streams=tuple(batches), world=World(rank=1, world_size=2))
        >>> [(made.step, made.stream, made.first_draw, made.num_rounds_left) for made in share.micro_batches(0, 4)]
        [(0, 0, 1, 1), (0, 0, 3, 0), (1, 1, 1, 0), (2, 0, 5, 1)]
    """

    schedule: StreamSchedule
    """Whose turn each step is: a stream's, with lanes a group's."""
    streams: tuple[StreamBatches, ...]
    """Batches of each stream."""
    world: World
    """The worker."""
    lanes: Lanes | None = None
    """Lanes of groups; None: each step has one stream."""
    first_step: int = 0
    """Step at which the run goes on."""
    first_round: int = 0
    """Round of that step at which it goes on, on the layout that made the rounds before."""
    _rounds: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Rounds of a step of each stream or group."""
    _start: int = field(init=False, repr=False, compare=False)
    """Micro-batches of this rank before the first one of now."""
    _windows: dict[int, _StepWindow] = field(init=False, repr=False, compare=False, default_factory=dict)
    """The latest window, by its number."""
    _lanes_of: dict[int, _LanesOfStep] = field(init=False, repr=False, compare=False, default_factory=dict)
    """The lanes of the latest step, by its number."""

    def __post_init__(self) -> None:
        """Check that batches and lanes divide, and count what was before."""
        object.__setattr__(self, "_rounds", self._rounds_of_units())
        before = self.num_before(self.first_step)
        rounds = self._rounds[int(self.schedule.at(np.array([self.first_step])).stream[0])]
        if not 0 <= self.first_round < max(1, rounds):
            raise StateError(
                f"cannot go on at round {self.first_round} of step {self.first_step}: it has {rounds} rounds on "
                f"{self.world.world_size} ranks; go on with the layout of the state, or at the step's start"
            )
        object.__setattr__(self, "_start", before + self.first_round)

    def num_before(self, step: int) -> int:
        """Return the micro-batches of this rank in earlier steps, of all its workers."""
        return sum(count * rounds for count, rounds in zip(self.schedule.counts(step), self._rounds, strict=True))

    def num_rounds(self, step: int) -> int:
        """Return the rounds of a step."""
        window = self._window(step // _WINDOW)
        return self._rounds[int(window.unit[step - window.first_step])]

    def worker_of(self, step: int, round: int = 0) -> int:  # noqa: A002  # the word for it
        """Return the worker that makes a round of a step, which is not before the first one."""
        return (self.num_before(step) + round - self._start) % self.world.num_workers

    def micro_batch(self, index: int) -> MicroBatch:
        """Return this worker's micro-batch number `index`, counted from 0 at the step where the run goes on."""
        number = self._start + self.world.worker + index * self.world.num_workers
        window = self._window_of(number)
        at = int(np.searchsorted(window.stops, number, side="right"))
        unit, step = int(window.unit[at]), window.first_step + at
        round_ = number - (int(window.stops[at]) - self._rounds[unit])
        if self.lanes is None:
            return self._of_stream(step, round_, unit, int(window.earlier[at]))
        return self._of_lane(self.lanes, step, round_, unit, int(window.earlier[at]))

    def micro_batches(self, start: int, stop: int) -> list[MicroBatch]:
        """Return this worker's micro-batches `[start, stop)`."""
        return [self.micro_batch(index) for index in range(start, stop)]

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield this worker's micro-batches, without end."""
        index = 0
        while True:
            yield self.micro_batch(index)
            index += 1

    def _rounds_of_units(self) -> tuple[int, ...]:
        """Return the rounds of a step of each stream, or of each group: the same for all its streams."""
        ranks = self.world.world_size
        if self.lanes is None:
            return tuple(stream.num_parts(ranks, "ranks") for stream in self.streams)
        self.lanes.check_ranks(ranks)
        parts = [stream.num_parts(self.lanes.num_lanes, "lanes") for stream in self.streams]
        for group, members in enumerate(self.lanes.members):
            if len({parts[stream] for stream in members}) > 1:
                rounds = ", ".join(f"{self.streams[stream].name!r} {parts[stream]}" for stream in members)
                raise ConfigError(
                    f"streams of mixing group {group} take different numbers of rounds in a lane ({rounds}), so ranks would "
                    f"make different numbers of forward passes in a step: give them batch_size / batch_gpu in one proportion"
                )
        return tuple(parts[members[0]] * self.lanes.num_lanes // ranks for members in self.lanes.members)

    def _of_stream(self, step: int, round_: int, stream: int, earlier: int) -> MicroBatch:
        """Return a micro-batch of a step that has one stream."""
        batches, ranks = self.streams[stream], self.world.world_size
        first = earlier * batches.global_batch + (round_ * ranks + self.world.rank) * batches.micro_batch
        return MicroBatch(
            step=step,
            round=round_,
            lane=0,
            stream=stream,
            first_draw=first,
            stop_draw=first + batches.micro_batch,
            num_rounds_left=self._rounds[stream] - 1 - round_,
            num_samples_in_round=batches.micro_batch * ranks,
            num_samples_in_step=batches.global_batch,
        )

    def _of_lane(self, lanes: Lanes, step: int, round_: int, group: int, earlier: int) -> MicroBatch:
        """Return a micro-batch of a step that has lanes."""
        ranks, num_lanes = self.world.world_size, lanes.num_lanes
        nth, within = divmod(round_, self._rounds[group] * ranks // num_lanes)
        of_step = self._lanes_of.get(step)
        if of_step is None:
            of_step = self._lanes(lanes, group, earlier)
            self._lanes_of.clear()
            self._lanes_of[step] = of_step
        lane = nth * ranks + self.world.rank
        stream = of_step.streams[lane]
        batches = self.streams[stream]
        first = of_step.draws[lane] * (batches.global_batch // num_lanes) + within * batches.micro_batch
        together = of_step.streams[nth * ranks : (nth + 1) * ranks]
        return MicroBatch(
            step=step,
            round=round_,
            lane=lane,
            stream=stream,
            first_draw=first,
            stop_draw=first + batches.micro_batch,
            num_rounds_left=self._rounds[group] - 1 - round_,
            num_samples_in_round=sum(self.streams[other].micro_batch for other in together),
            num_samples_in_step=of_step.num_samples,
        )

    def _lanes(self, lanes: Lanes, group: int, earlier: int) -> _LanesOfStep:
        """Return the lanes of a group's step, before which it had so many."""
        first = earlier * lanes.num_lanes
        turns = lanes.schedules[group].at(np.arange(first, first + lanes.num_lanes))
        streams = turns.stream.tolist()
        num_samples = sum(self.streams[stream].global_batch // lanes.num_lanes for stream in streams)
        return _LanesOfStep(streams, turns.draw.tolist(), num_samples)

    def _window_of(self, number: int) -> _StepWindow:
        """Return the window that holds a micro-batch of this rank: mostly the latest one, or the next."""
        for latest in list(self._windows.values()):
            if latest.first <= number < latest.stops[-1]:
                return latest
            if number >= latest.stops[-1]:
                following = self._window(latest.first_step // _WINDOW + 1)
                if number < following.stops[-1]:
                    return following
        low, high = 0, self.first_step // _WINDOW + 1
        while self.num_before(high * _WINDOW) <= number:
            low, high = high, high * 2
            if high * _WINDOW > MAX_SIZE:
                raise ConfigError("no stream that has turns has a batch: give one of them batch_size= or batch_gpu=")
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.num_before(middle * _WINDOW) <= number else (low, middle)
        return self._window(low)

    def _window(self, index: int) -> _StepWindow:
        """Return a window, built or the latest one."""
        window = self._windows.get(index)
        if window is None:
            first_step = index * _WINDOW
            turns = self.schedule.at(np.arange(first_step, first_step + _WINDOW))
            first = self.num_before(first_step)
            stops = first + np.cumsum(np.array(self._rounds, np.int64)[turns.stream])  # [steps]
            window = _StepWindow(first_step, turns.stream, turns.draw, stops, first)
            self._windows.clear()
            self._windows[index] = window
        return window
