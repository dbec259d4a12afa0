"""The run of streams with batches of their own: its steps, where it stands, and what its workers read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError, StateError
from sqlstream.order import Order, StepPartition, Stepped, Steps, StepShare, StreamBatches
from sqlstream.stream.mixture.batched_streams import check_batched
from sqlstream.stream.mixture.mixing import Mixing, NamedWeights, StreamChange
from sqlstream.stream.mixture.mixture_run import PlannedStep
from sqlstream.stream.mixture.step_sizes import AskedBatches, fit_batches
from sqlstream.stream.mixture.stepped_state import SteppedPart
from sqlstream.stream.run.order_options import BatchOptions, Layout
from sqlstream.stream.run.schedule import Schedule
from sqlstream.stream.run.shared.text import SharedText
from sqlstream.stream.run.shares import EpochShare, planned_together
from sqlstream.world import World

_BEGINNING_BYTES = 1 << 20
"""Room for the batches of some ten thousand streams."""


class StepPlace(NamedTuple):
    """Where a run stands."""

    step: int
    """Steps that are done."""
    round: int = 0
    """Rounds of the next step that are done."""


class Beginning(NamedTuple):
    """An iteration, as a worker finds it."""

    order: Stepped
    share: EpochShare
    steps: StepShare
    stop_step: int | None
    """Step of the run before which the iteration ends; None: it has no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedOptions:
    """What is asked of a run beside its streams."""

    asked: Callable[[int], Sequence[AskedBatches]]
    """Returns the batches of all streams on a number of ranks."""
    group_of: tuple[int, ...] | None
    """Mixing group of each stream; None: each step has one stream."""
    lanes: int | None
    """Lanes of a step; None: the ranks of the first start."""
    epoch_size: int | None
    """Steps after which an iteration ends; None: it has no end."""
    layout: Layout
    prefetch: int
    """Samples that a worker plans ahead."""
    planned: tuple[StreamChange, ...]
    """Weights by steps, as the constructor has them."""

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("epoch_size", "lanes"):
            if (number := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_at_least(name, number, 1))


class SteppedRun:
    """Steps and position of a run in this process; a worker has a copy, which reads where an iteration begins.

    Args:
        schedules: The run of each stream alone, by name, in their order.
        mixing: Their weights.
        options: What is asked for.
    """

    def __init__(self, schedules: Mapping[str, Schedule], mixing: Mixing, options: SteppedOptions) -> None:
        self.schedules = schedules
        self.mixing = mixing
        self.options = options
        self.place = StepPlace(0)
        """What the trainer was given."""
        self.lanes = options.lanes
        """Lanes of a step, of the first start of the run; None: it has not begun, and they were not given."""
        self.begun: dict[str, int] = {}
        """Global batches with which streams began, by name."""
        self.away: dict[str, SteppedPart] = {}
        """Streams that a state has and this run has not, as the state has them."""
        self._stop: int | None = None
        """Step before which the iteration under way ends."""
        self.batch_options: BatchOptions | None = None
        """How the loader takes samples; None: it has not begun."""
        self._beginning = SharedText(_BEGINNING_BYTES)
        orders: tuple[Order, ...] = tuple(schedule.steps.order for schedule in schedules.values())
        unknown = tuple(StreamBatches(name=name, global_batch=0, micro_batch=0) for name in schedules)
        self.order = Stepped(orders=orders, weights=mixing, batches=unknown, group_of=options.group_of)
        self.settle()
        for schedule in schedules.values():
            schedule.is_mixed = True

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the streams."""
        return self.mixing.names

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for a worker, which does not need the runs of streams alone."""
        return {**self.__dict__, "schedules": {}, "away": {}}

    @property
    def world(self) -> World:
        """The place of this process in its job; ranks that take the same samples count as one."""
        return self.options.layout.effective

    # -- steps --------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Work out batches and lanes, which depend on the ranks; again where these have changed.

        Raises:
            ConfigError: Ranks, lanes and batches do not divide.
        """
        num_ranks, is_grouped = self.world.world_size, self.options.group_of is not None
        lanes = (self.lanes or num_ranks) if is_grouped else 1
        batches = fit_batches(
            self.options.asked(num_ranks), self.begun, lanes if is_grouped else num_ranks, is_grouped=is_grouped
        )
        for one, rows in zip(batches, self.order.orders, strict=True):
            check_batched(one.name, rows, one.global_batch, "batch_size= of its StreamOptions")
        if (batches, lanes) != (self.order.batches, self.order.num_lanes):
            self.order = replace(self.order, batches=batches, num_lanes=lanes)
        self.partition()

    def partition(self, place: StepPlace | None = None) -> StepPartition:
        """Return the micro-batches of this rank from a place on; None: from the first step of the weights of now on.

        Raises:
            ConfigError: Ranks, lanes and batches do not divide.
            StateError: The step has no such round, or the run went on with other streams after it.
        """
        schedule = self.order.schedule
        step, round_ = (schedule.first_step, 0) if place is None else place
        if step < schedule.first_step:
            raise StateError(
                f"the run went on with other streams at step {schedule.first_step}: what was before is not known, so it cannot "
                f"go to step {step}; make the loader anew, and load the state into that"
            )
        return StepPartition(
            schedule=schedule.steps,
            streams=self.order.batches,
            world=self.world.with_worker(0, 1),
            lanes=schedule.lanes,
            first_step=step - schedule.first_step,
            first_round=round_,
        )

    def counts(self, step: int) -> dict[str, int]:
        """Return how many samples of each stream the whole job has taken before a step of the run.

        Raises:
            ConfigError: The run went on with other streams after that step, so its weights are not known.
        """
        step = check_at_least("step", step, 0)
        self.settle()
        first = self.order.schedule.first_step
        if step < first:
            raise ConfigError(
                f"the run went on with other streams at step {first}: what was before is not known, ask from there on"
            )
        return dict(zip(self.names, self.order.counts(step), strict=True))

    def planned_steps(self, first: int, stop: int) -> Iterator[PlannedStep]:
        """Yield what the steps `[first, stop)` of the run take of each stream."""
        first = check_at_least("step", first, 0)
        stop = check_at_least("stop", stop, first)
        before = self.counts(first)
        for step in range(first, stop):
            after = self.counts(step + 1)
            given = {name: number - before[name] for name, number in after.items() if number > before[name]}
            yield PlannedStep(step=step, epoch=step // (self.options.epoch_size or step + 1), num_samples=given)
            before = after

    # -- an iteration -------------------------------------------------------------------------------------------------

    @property
    def stop_step(self) -> int | None:
        """The step before which the next iteration ends; None: it has no end."""
        size = self.options.epoch_size
        return None if size is None else (self.place.step // size + 1) * size

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of this rank that are left of the next iteration, which has an end."""
        assert self.stop_step is not None, "the loader asks where it has an end"
        return self._num_between(self.place, self.stop_step)

    @property
    def num_whole(self) -> int:
        """Micro-batches of this rank in the next iteration, from the start of its epoch on."""
        stop, size = self.stop_step, self.options.epoch_size
        assert stop is not None, "the loader asks where it has an end"
        assert size is not None, "and only an epoch's size gives it one"
        return self._num_between(StepPlace(max(stop - size, self.order.schedule.first_step)), stop)

    @property
    def is_at_start(self) -> bool:
        """The next iteration begins with the first step of an epoch."""
        size = self.options.epoch_size
        return size is not None and not self.place.step % size and not self.place.round

    @property
    def is_over(self) -> bool:
        """This rank was given all micro-batches of the iteration that was begun last."""
        stop = self._stop
        return stop is not None and (self.place.step >= stop or not self._num_between(self.place, stop))

    def _num_between(self, place: StepPlace, stop: int) -> int:
        """Return the micro-batches of this rank from a place up to a step."""
        partition, first = self.partition(place), self.order.schedule.first_step
        return partition.num_before(stop - first) - partition.num_before(place.step - first) - place.round

    def begin(self, options: BatchOptions) -> None:
        """Begin an iteration in the trainer; its workers read where.

        Raises:
            ConfigError: Ranks, lanes and batches do not divide.
            StateError: The state is one within a step, of another layout.
        """
        self.settle()
        self.partition(self.place)
        self.batch_options, self._stop = options, self.stop_step
        if self.options.group_of is not None:
            self.lanes = self.order.num_lanes
        self.begun = {stream.name: stream.global_batch for stream in self.order.batches}
        beginning = {
            "place": self.place,
            "stop": self._stop,
            "lanes": self.order.num_lanes,
            "batches": [[stream.global_batch, stream.micro_batch] for stream in self.order.batches],
        }
        self._beginning.write(json.dumps(beginning).encode())

    def begun_iteration(self) -> Beginning:
        """Return the iteration that the trainer has begun last, for this process, a worker or the trainer."""
        said = json.loads(self._beginning.read().text)
        batches = tuple(
            StreamBatches(name=name, global_batch=size, micro_batch=micro)
            for name, (size, micro) in zip(self.names, said["batches"], strict=True)
        )
        order = replace(self.order, batches=batches, num_lanes=said["lanes"])
        info = get_worker_info()
        world = self.world if info is None else self.world.with_worker(info.id, info.num_workers)
        step, round_ = said["place"]
        steps = StepShare(order=order, world=world, first_step=step, first_round=round_)
        share = EpochShare(
            epoch=0, steps=Steps(order=order, batch_size=None), partition=steps, fingerprint=order.fingerprint
        )  # fmt: skip
        return Beginning(order, share, steps, said["stop"])

    def note(self, step: int, num_rounds_left: int) -> None:
        """Count a micro-batch that the trainer was given."""
        done = self.place.round + 1 if step == self.place.step else 1
        self.place = StepPlace(step, done) if num_rounds_left else StepPlace(step + 1)

    def note_end(self) -> None:
        """Count the steps up to the end of an iteration, whose last ones may be empty."""
        if self._stop is not None and self.place.step < self._stop:
            self.place = StepPlace(self._stop)

    # -- weights ------------------------------------------------------------------------------------------------------

    def reweight(self, weights: NamedWeights, at_step: int | None) -> None:
        """Make streams weigh `weights` from a step on; None: from the first one that nothing has planned.

        Raises:
            StateError: The step is handed out or planned already.
        """
        first = self._first_free()
        start = first if at_step is None else check_at_least("at_step", at_step, 0)
        if start < first:
            raise StateError(
                f"the weights cannot change at_step={at_step}: the first possible step is {first}, since what comes before is "
                "handed out or planned; leave at_step out to change them there"
            )
        self.mixing.add(0, start, weights)

    def _first_free(self) -> int:
        """Return the first step that no process can have planned, the same on every rank."""
        place, options = self.place, self.batch_options
        if options is None:
            return place.step + (place.round > 0)
        smallest = min(stream.micro_batch for stream in self.order.batches if stream.micro_batch)
        planned = 2 + -(-(self.options.prefetch + planned_together(len(self.order.batches))) // smallest)
        per_worker = planned + (options.prefetch_factor if options.num_workers else 0)
        last = self.partition(place).micro_batch(max(1, options.num_workers) * per_worker + options.num_held)
        return self.order.schedule.first_step + last.step + 1
