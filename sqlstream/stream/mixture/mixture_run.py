"""The run of a mixture: its turns, once batch size and ranks are known, places of planned changes, and who gives what when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.order import BucketLanes, Mixed, Order, OrderOfBatches, Steps, TurnLayout
from sqlstream.stream.mixture.batched_streams import check_batched
from sqlstream.stream.mixture.mixing import Mixing, MixtureRule, StreamChange
from sqlstream.stream.mixture.mixture_plan import MixtureUnit, PlannedMixture, Stop, StreamShare, whole_of
from sqlstream.stream.run.order_options import OrderOptions
from sqlstream.stream.run.positions import JobPosition
from sqlstream.stream.run.schedule import Schedule
from sqlstream.stream.run.state import RunIdentity, StreamPart


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """What a step of the whole job takes of each stream."""

    step: int
    """The step, counted from the start of the run."""
    epoch: int
    num_samples: Mapping[str, int]
    """Samples of the global batch, by stream; streams that give none are left out."""


class StreamRun(NamedTuple):
    """One stream of a mixture."""

    share: StreamShare
    schedule: Schedule
    """Its run alone, which has its order and its identity."""


@dataclass(kw_only=True)
class MixtureRun:
    """Order and position of a mixture in this process."""

    streams: Mapping[str, StreamRun]
    """By name, in their order."""
    plan: PlannedMixture
    rule: MixtureRule
    unit: MixtureUnit
    schedule: Schedule
    mixing: Mixing
    lanes: int | None = None
    """Batches of ranks in a step, of the first start of the run; None: not known yet, or a turn is no batch of a rank."""
    planned: Sequence[StreamChange] = ()
    """Changes of weights that the constructor asks for, by their places; empty: the places are not known yet."""
    away: dict[str, StreamPart] = field(default_factory=dict)
    """Streams that a state has and this run has not."""

    @classmethod
    def begin(
        cls,
        streams: Mapping[str, StreamRun],
        plan: PlannedMixture,
        rule: MixtureRule,
        unit: MixtureUnit,
        options: OrderOptions,
        *,
        by_tokens: bool,
    ) -> MixtureRun:
        """Return a run at its start; its turns are known if nothing but `options` is needed for them."""
        identities = [stream.schedule.identity for stream in streams.values()]
        num_parts = identities[0].num_canonical_nodes
        for name, stream in streams.items():
            if 0 < stream.schedule.num_positions < num_parts:  # one without rows may have no weight
                raise ConfigError(f"stream {name!r} has fewer rows than num_canonical_nodes={num_parts}: give a lower number")
        whole = partial(whole_of, shares=[stream.share for stream in streams.values()], by_tokens=by_tokens)
        mixing = Mixing(plan.names, rule, plan.weights, whole)
        orders: tuple[Order, ...] = tuple(stream.schedule.steps.order for stream in streams.values())
        unknown = TurnLayout(epoch_size=num_parts, num_parts=num_parts)
        steps = Steps(
            order=Mixed(orders=orders, weights=mixing, turns=unknown),
            batch_size=options.batch_size,
            tail=options.tail,
            num_canonical_nodes=num_parts,
        )
        seed = options.shuffle_seed
        identity = RunIdentity(
            fingerprint="mixture", shuffle_seed=seed, num_canonical_nodes=num_parts, blocks=None, epoch_size=num_parts
        )
        schedule = Schedule(steps, mixing, options, identity=identity, has_end=plan.stop is not Stop.NEVER)
        schedule.counts_rows = any(isinstance(order, OrderOfBatches) for order in orders)
        run = cls(streams=streams, plan=plan, rule=rule, unit=unit, schedule=schedule, mixing=mixing)
        if unit is MixtureUnit.SAMPLE or options.batch_size is not None:
            run.settle()
        for stream in streams.values():
            stream.schedule.is_mixed = True
        return run

    @property
    def order(self) -> Mixed:
        """The order of all streams."""
        order = self.schedule.steps.order
        assert isinstance(order, Mixed)
        return order

    # -- turns --------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Work out the turns of an epoch, which depend on the batch size and the ranks; again where these have changed.

        Raises:
            ConfigError: The batch size is needed, and nothing has said it; or it does not fit.
        """
        schedule = self.schedule
        self._check_batched()
        turns = self.plan.layout(self.rule, self._turn_size(), schedule.identity.num_canonical_nodes)
        if turns != self.order.turns:
            schedule.steps = replace(schedule.steps, order=replace(self.order, turns=turns))
            schedule.identity = replace(schedule.identity, epoch_size=turns.epoch_size)
        self._place_changes()

    def check_settled(self) -> None:
        """Work out the turns if they are not known.

        Raises:
            ConfigError: They, or the places of changes, depend on a batch size that nothing has said.
        """
        if not self.planned:
            self.settle()
        if not self.planned:
            raise ConfigError("weights that change by step need the batch size: give batch_size=, or use StreamingDataLoader")

    def _check_batched(self) -> None:
        """Raise ConfigError if streams have batches that this mixture does not give."""
        for name, stream in self.streams.items():
            order = stream.schedule.steps.order
            if not isinstance(order, OrderOfBatches | BucketLanes):
                continue
            if self.unit is not MixtureUnit.BATCH or self.schedule.identity.num_canonical_nodes > 1:
                raise ConfigError(
                    f"stream {name!r} has batches=, which a mixture gives whole, to all nodes: give unit='batch', and no "
                    "num_canonical_nodes"
                )
            check_batched(name, order, self.schedule.global_batch_size, "batch_size= x ranks")

    def _turn_size(self) -> int:
        """Return the positions of a turn."""
        if self.unit is MixtureUnit.SAMPLE:
            return 1
        global_batch_size = self.schedule.global_batch_size
        if global_batch_size is None:
            raise ConfigError(f"unit={self.unit.value!r} needs the batch size: give batch_size=, or use StreamingDataLoader")
        if self.unit is MixtureUnit.BATCH:
            return global_batch_size
        if self.schedule.identity.num_canonical_nodes > 1:
            raise ConfigError("unit='rank' and num_canonical_nodes above 1 deal out batches in two ways: use unit='batch'")
        lanes = self.lanes = self.lanes or self.schedule.world.world_size
        if global_batch_size % lanes:
            nearest = max(1, global_batch_size // lanes) * lanes
            raise ConfigError(
                f"unit='rank': the run began with {lanes} ranks, which do not divide the global batch of {global_batch_size} "
                f"samples: give a batch size that makes one of {nearest}"
            )
        return global_batch_size // lanes

    def _place_changes(self) -> None:
        """Find the places of weights that change by step, and have them hold unless something else does by now."""
        if self.plan.changes and self.schedule.global_batch_size is None:
            return
        first = self.planned[0] if self.planned else StreamChange(epoch=0, sample=0, weights=self.plan.weights)
        planned = self._planned_from(first)
        if planned == self.planned:
            return
        is_untouched = self.mixing.changes == tuple(self.planned or planned[:1])
        self.planned = planned
        if is_untouched:
            self.mixing.set(planned)

    def _planned_from(self, first: StreamChange) -> list[StreamChange]:
        """Return the changes of weights that the constructor asks for, behind the first one."""
        later = [(step, weights) for step, weights in self.plan.changes if step > (first.step or 0)]
        places = [self._place_since(first, step) for step, _ in later]
        return [
            first,
            *(
                StreamChange(epoch=place.epoch, sample=place.consumed, weights=weights)
                for place, (_, weights) in zip(places, later, strict=True)
            ),
        ]

    def go_on(self, place: JobPosition, num_steps: int | None, drawn: Mapping[str, int]) -> None:
        """Begin at a place, after draws that other streams have led to, with the weights that the constructor has for its step.

        Args:
            place: Where, in epochs of this run.
            num_steps: Steps that the run has made before; None: they are not known, and no weights change by step.
            drawn: Draws of streams before; 0 of those that are not named.
        """
        self.planned = self.planned_at(place, num_steps)
        self.mixing.go_on(*place, drawn, self.planned)

    def planned_at(self, place: JobPosition, num_steps: int | None) -> list[StreamChange]:
        """Return the changes of weights that the constructor asks for, of a run that goes on at a place."""
        held = [self.plan.weights, *(weights for step, weights in self.plan.changes if step <= (num_steps or 0))]
        first = StreamChange(epoch=place.epoch, sample=place.consumed, weights=held[-1], step=num_steps)
        return self._planned_from(first)

    # -- who gives what -----------------------------------------------------------------------------------------------

    def place_of(self, step: int) -> JobPosition:
        """Return where a step of the run begins, counted from the start of the run.

        Raises:
            ConfigError: The batch size is not known, or the run went on with other streams after that step.
        """
        first = self.mixing.changes[0]
        if step < (first.step or 0):
            raise ConfigError(
                f"the run went on with other streams at step {first.step}: what was before is not known, ask from there on"
            )
        return self._place_since(first, step)

    def _place_since(self, first: StreamChange, step: int) -> JobPosition:
        """Return where a step begins that is not before the place of a change."""
        schedule = self.schedule
        if schedule.global_batch_size is None:
            raise ConfigError("steps need the batch size: give batch_size=, or use StreamingDataLoader")
        epoch, sample, before = (0, 0, 0) if first.step is None else (*first.place, first.step)
        if not schedule.has_end:
            return JobPosition(epoch, sample + (step - before) * schedule.step_size)
        partition = schedule.steps.partition(0, schedule.world)
        if not partition.num_steps:
            raise ConfigError(
                f"an epoch of {partition.num_positions} samples has no step of {partition.step_size}: lower batch_size"
            )
        num_epochs, step_in_epoch = divmod(sample // partition.step_size + step - before, partition.num_steps)
        return JobPosition(epoch + num_epochs, step_in_epoch * partition.step_size)

    def counts(self, step: int) -> dict[str, int]:
        """Return how many samples of each stream the whole job has taken before a step, and left out at ends of epochs."""
        step = check_at_least("step", step, 0)
        self.check_settled()
        return self._counts_at(self.place_of(step))

    def steps(self, first: int, stop: int) -> Iterator[PlannedStep]:
        """Yield what the steps `[first, stop)` of the run take of each stream."""
        first = check_at_least("step", first, 0)
        stop = check_at_least("stop", stop, first)
        self.check_settled()
        for step in range(first, stop):
            begin, schedule = self.place_of(step), self.schedule
            end = begin.consumed + schedule.step_size
            if schedule.has_end:  # with drop_last the next step begins behind some that are left out
                end = min(end, schedule.steps.partition(begin.epoch, schedule.world).num_positions)
            before, after = self._counts_at(begin), self._counts_at(JobPosition(begin.epoch, end))
            given = {name: number - before[name] for name, number in after.items() if number > before[name]}
            yield PlannedStep(step=step, epoch=begin.epoch, num_samples=given)

    def _counts_at(self, place: JobPosition) -> dict[str, int]:
        """Return how many draws of each stream come before a position."""
        return dict(zip(self.streams, self.order.counts(place.epoch, place.consumed), strict=True))
