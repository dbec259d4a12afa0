"""Several datasets as one: their samples in exact proportions, in one order on any layout, resumable after every step."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from sqlstream.config import DEFAULT_PREFETCH, SampleOptions, check_at_least, word_of
from sqlstream.errors import ConfigError
from sqlstream.order import ScheduleType
from sqlstream.stream.dataset import StreamingDataset
from sqlstream.stream.frameworks.plain_loader import warn_of_length, warn_of_ranks
from sqlstream.stream.iterated import IteratedDataset, default_collate_of
from sqlstream.stream.mixed.pipeline import MixedPipeline
from sqlstream.stream.mixed.streams import Leaf, StreamSpec, open_leaves
from sqlstream.stream.mixture.mixing import MixtureRule, NamedWeights
from sqlstream.stream.mixture.mixture_checkpoint import load_mixture, save_mixture
from sqlstream.stream.mixture.mixture_plan import MixtureUnit, MixtureWeights, PlannedMixture, Stop, StreamShare, plan_mixture
from sqlstream.stream.mixture.mixture_run import MixtureRun, PlannedStep, StreamRun
from sqlstream.stream.run.order_options import BatchOptions, Layout, OrderOptions
from sqlstream.stream.run.reweighting import reweight
from sqlstream.stream.run.shares import PLANNED_TOGETHER, planned_together
from sqlstream.transforms.stream_name import STREAM
from sqlstream.world import World

logger = logging.getLogger(__name__)

SHUFFLED_BLOCK = 1024
"""Turns of a block of `random_order`: a drift of some 24 draws, and nearly the variance of independent ones."""


class MixedDataset(IteratedDataset):
    """Mixes datasets: sample by sample, or batch by batch, in exact proportions that may change while the run goes on.

    Each stream goes on over its own epochs, shuffles anew in each, and gives the samples that it gives alone, with their
    `__row__` and `__epoch__`; `__stream__` is its name. docs/mixing.md has the rules.

    Args:
        streams: A `StreamingDataset`, a `Stream` or a `MixedDataset` each; a list, or a dict by name. They are closed with it.
        weights: Weights by name, or in the order of the streams; or a list of (step, weights by name), from which steps on they
            hold. None: by size, so that each row comes once in an epoch.
        temperature: Weights are the sizes to the power of 1 / temperature.
        tokens: A column, or SQL, with the tokens of a row: weights are then shares of tokens.
        unit: What one stream gives in one turn: a `'sample'`, a global `'batch'`, or the batch of a `'rank'`.
        schedule: How turns follow each other: `'proportional'` (evenly), `'random_order'` (shuffled blocks),
            `'fixed_random_order'`, `'consecutive'`, `'consecutive_interleaved'`; by batch or rank also `'random'`.
        block: Turns of a block; None: 1024 for `'random_order'`, else the sum of the whole weights.
        stop: Where an epoch ends: `'never'`, `'first_exhausted'`, `'all_exhausted'` or `'each_once'`; None: after `epoch_size`.
        epoch_size: Samples of an epoch; None: what proportion, repeat and choose say, else the sizes of all streams together.
        batch_size: Samples of a rank's batch, where no StreamingDataLoader says it.
        drop_last: Leave out the last, incomplete global batch.
        shuffle_seed: Seed of the random schedules, and of each `Stream` that has none; -1: random, agreed by all ranks.
        dst: Cache directory of each `Stream` that has none.
        name: Name in messages.
        world: The place of this process in its job; None: from torch.distributed or the launcher, when iteration starts.
        replication: Number of consecutive ranks that take the same samples.
        prefetch: Samples of all streams planned ahead in each reading process; None: 256, within 1 GiB.
        infinite_iteration: One iteration goes on over epochs without end.

    Raises:
        ConfigError: Weights, names or sizes contradict each other; the message names the streams.

    Example:
        >>> mixed = MixedDataset({"web": web, "code": code}, weights={"web": 0.7, "code": 0.3})
        >>> [sample["__stream__"] for sample, _ in zip(mixed, range(10))].count("code")
        3
    """

    _pipeline: MixedPipeline

    def __init__(
        self,
        streams: Sequence[StreamSpec] | Mapping[str, StreamSpec],
        weights: MixtureWeights | None = None,
        *,
        temperature: float | None = None,
        tokens: str | None = None,
        unit: MixtureUnit | str = MixtureUnit.SAMPLE,
        schedule: ScheduleType | str = ScheduleType.PROPORTIONAL,
        block: int | None = None,
        stop: Stop | str | None = None,
        epoch_size: int | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        shuffle_seed: int | None = None,
        dst: str | os.PathLike[str] | None = None,
        name: str | None = None,
        world: World | None = None,
        replication: int = 1,
        prefetch: int | None = None,
        infinite_iteration: bool = False,
    ) -> None:
        kind = word_of("schedule", schedule, ScheduleType)
        end = None if stop is None else word_of("stop", stop, Stop)
        order = OrderOptions(
            shuffle_seed=shuffle_seed,
            shuffle_block_size=None,
            batch_size=batch_size,
            drop_last=drop_last,
            is_endless=infinite_iteration,
            layout=Layout(world=world, replication=replication),
        )
        _check_schedule(kind, word_of("unit", unit, MixtureUnit), end, order)
        self._order_options = order
        seed = order.agreed_seed()
        opened: list[StreamingDataset] = []
        try:
            self._leaves = open_leaves(streams, dst=dst, shuffle_seed=seed, opened=opened)
            shares = [leaf.share(tokens) for leaf in self._leaves]
            plan = plan_mixture(
                shares, weights=weights, temperature=temperature, by_tokens=tokens is not None, stop=end, epoch_size=epoch_size
            )
            _warn_of_lost(shares, plan)
            if block is not None:
                block = check_at_least("block", block, 1)
            elif kind is ScheduleType.RANDOM_ORDER:
                block = SHUFFLED_BLOCK
            self._run = MixtureRun.begin(
                {leaf.name: StreamRun(share, leaf.dataset.schedule) for leaf, share in zip(self._leaves, shares, strict=True)},
                plan,
                MixtureRule(schedule=kind, seed=seed or 0, block=block),
                word_of("unit", unit, MixtureUnit),
                replace(order, shuffle_seed=seed),
                by_tokens=tokens is not None,
            )
            self._schedule = self._run.schedule
            if not isinstance(name, str | None):
                raise ConfigError(f"name={name!r} is no text: give one that messages call the mixture by, or leave it out")
            self.name = name or "+".join(leaf.name for leaf in self._leaves)
            self._pipeline = MixedPipeline(
                names=[leaf.name for leaf in self._leaves],
                pipelines=[leaf.dataset._pipeline for leaf in self._leaves],
                options=SampleOptions(prefetch=DEFAULT_PREFETCH if prefetch is None else prefetch),
                batch_size=batch_size,
            )
        except BaseException:
            for dataset in opened:
                dataset.close()
            raise

    # -- as a stream --------------------------------------------------------------------------------------------------

    def _check_begun(self) -> None:
        self._run.check_settled()

    def _default_collate(self) -> Callable[[list[Any]], Any] | None:
        found = {default_collate_of(leaf.dataset) for leaf in self._leaves}
        return found.pop() if len(found) == 1 else None

    def _prepare(self) -> None:
        self._run.settle()
        schedule = self._schedule
        if not schedule.has_end and schedule.is_under_way:  # there is no next epoch: it goes on
            schedule.set_next(schedule.where())

    def expect_batches(self, options: BatchOptions) -> None:
        """Learn how a loader takes samples (`StreamingDataLoader` calls this).

        Raises:
            ConfigError: The mixture was given another batch size, or its turns do not fit this one.
        """
        super().expect_batches(options)
        self._run.settle()

    def reweight(self, weights: NamedWeights, at_step: int | None = None, at_epoch: int | None = None) -> None:
        """Change how often streams come; call it on every rank, after the same step. States carry it, counts of draws go on.

        Args:
            weights: Weights of all streams by name; 0: the stream pauses, and later goes on where it was.
            at_step: From this step of the epoch under way on. Later changes are dropped.
            at_epoch: From this epoch on. None, and no `at_step`: from the next one on, which with `infinite_iteration` may be
                planned already.

        Raises:
            StateError: That step, or epoch, is handed out or planned already; the message names the first possible one.
            ConfigError: These are no weights of the streams; or `stop="never"` has no next epoch.
        """
        self._run.mixing.whole(weights)
        self._check_begun()
        num_ahead = self._pipeline.options.prefetch + planned_together(len(self._leaves)) - PLANNED_TOGETHER
        reweight(self._schedule, weights, at_step, at_epoch, num_ahead)

    # -- what comes when ----------------------------------------------------------------------------------------------

    @property
    def streams(self) -> dict[str, StreamingDataset]:
        """The datasets, by name, in their order; those of mixtures among them as `mixture/stream`."""
        return {leaf.name: leaf.dataset for leaf in self._leaves}

    @property
    def leaves(self) -> Sequence[Leaf]:
        """The datasets with their names, for a mixture of which this is a stream."""
        return self._leaves

    @property
    def shares_within(self) -> Sequence[Fraction]:
        """The share of each stream, for a mixture of which this is a stream.

        Raises:
            ConfigError: They change, or this mixture says what concerns its run, which is that of the other mixture.
        """
        plan, changes = self._run.plan, self._run.mixing.changes
        if plan.changes or any(change.weights != plan.weights for change in changes):
            raise ConfigError(
                f"the mixture {self.name} has weights that change by step, so it cannot be a stream of another one"
            )
        if given := self._given_for_run:
            raise ConfigError(
                f"the mixture {self.name} is a stream of another one, and has {', '.join(given)}, which concern the whole run: "
                "give them to the outer mixture, or leave them out; its streams share its weight there"
            )
        total = sum(plan.weights)
        return [Fraction(weight, total) for weight in plan.weights]

    @property
    def _given_for_run(self) -> list[str]:
        """The parameters that say how its run goes, as far as they were given."""
        run, order = self._run, self._order_options
        given = {
            "unit": run.unit is not MixtureUnit.SAMPLE,
            "schedule": run.rule.schedule is not ScheduleType.PROPORTIONAL,
            "stop": run.plan.stop is not None,
            "epoch_size": run.plan.epoch_size is not None,
            "batch_size": order.batch_size is not None,
            "drop_last": order.drop_last,
            "world": order.layout.world is not None,
            "replication": order.layout.replication != 1,
            "infinite_iteration": order.is_endless,
        }
        return [name for name, is_given in given.items() if is_given]

    @property
    def weights(self) -> dict[str, int]:
        """The whole weights from the start of the run, by stream."""
        return dict(zip(self._run.plan.names, self._run.plan.weights, strict=True))

    def counts(self, step: int) -> dict[str, int]:
        """Return how many samples of each stream the whole job has taken before a step, counted from the start of the run.

        With `drop_last` this counts what the ends of epochs left out, too: the next epoch goes on behind it.

        Raises:
            ConfigError: The batch size is not known.
        """
        return self._run.counts(step)

    def plan(self, first: int, stop: int) -> Iterator[PlannedStep]:
        """Yield what the steps `[first, stop)` of the run take of each stream, without loading anything.

        Raises:
            ConfigError: The batch size is not known.
        """
        return self._run.steps(first, stop)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the rows of all streams; UnknownLengthError while a lazy one does not know how many its filter keeps."""
        num_rows, given = sum(len(leaf.dataset.index) for leaf in self._leaves), self._pipeline.engines.warnings
        warn_of_ranks(lambda: self._schedule.world, given)
        warn_of_length(num_rows, self._schedule, given)
        return num_rows

    def __getitem__(self, index: Any) -> Any:
        """Return row `index`, counted over the streams in their order; or `mixed["code", 5]`: row 5 of a stream.

        Raises:
            TypeError: `index` is neither.
            KeyError: There is no such stream.
            IndexError: There is no such row.
        """
        if isinstance(index, tuple) and len(index) == 2 and isinstance(index[0], str):
            name, row = index
            if name not in self.streams:
                raise KeyError(f"there is no stream {name!r}: the streams are {', '.join(self.streams)}")
            return _named(self.streams[name][row], name)
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise TypeError(f"mixed[{index!r}]: give a whole number, or a stream's name and a row of it, mixed['name', 5]")
        number, size = index.__index__(), len(self)
        row = number + size if number < 0 else number
        for leaf in self._leaves if row >= 0 else ():
            if row < len(leaf.dataset):
                return _named(leaf.dataset[row], leaf.name)
            row -= len(leaf.dataset)
        raise IndexError(f"index {number} is out of range: the streams have {size} rows")

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self, num_samples: int | None = None) -> dict[str, object]:
        """Return the state of the run, JSON-able; see `StreamingDataset.state_dict`.

        Args:
            num_samples: Samples of the epoch that the whole job has consumed; needed with workers of a plain DataLoader.

        Raises:
            StateError: `num_samples` is needed and was not given.
        """
        self._check_begun()
        return save_mixture(self._run, num_samples).to_dict()

    def load_state_dict(
        self, state: Mapping[str, object], strict: bool = True, streams: str | Mapping[str, str] | None = None
    ) -> None:
        """Go on where `state` says; call it in the trainer before iteration starts, on every rank with the same state.

        Args:
            state: What `state_dict` returned, on any number of ranks and workers.
            strict: False: take epoch and samples from the state of another mixture.
            streams: `'continue'`: streams that the state does not have begin, those that this run does not have pause, and the
                weights are those that this mixture was made with. `{"web": "restart"}`: this one begins anew, too.

        Raises:
            StateError: `state` is of other streams, another schedule, seed or global batch size.
        """
        self._check_begun()
        load_mixture(self._run, state, strict=strict, streams=streams)

    def close(self) -> None:
        """Close all streams: give all pins back, end helper processes and threads, close all files."""
        self._pipeline.engines.close()
        for leaf in self._leaves:
            leaf.dataset.close()

    def __repr__(self) -> str:
        """Return the streams with their weights; nothing is read."""
        weights = ", ".join(f"{name}: {weight}" for name, weight in self.weights.items())
        run, size = self._run, self._run.order.turns.epoch_size
        epoch = "" if not run.planned else f"; epoch_size={size}" if self._schedule.has_end else "; without end"
        return f"{type(self).__name__}({weights}; by {run.unit.value}, {run.rule.schedule.value}{epoch})"


def _check_schedule(schedule: ScheduleType, unit: MixtureUnit, stop: Stop | None, order: OrderOptions) -> None:
    if schedule is ScheduleType.RANDOM and unit is MixtureUnit.SAMPLE:
        raise ConfigError("schedule='random' draws each turn by itself, which is for steps: use 'random_order' for samples")
    is_random = schedule in (ScheduleType.RANDOM, ScheduleType.RANDOM_ORDER, ScheduleType.FIXED_RANDOM_ORDER)
    if is_random and order.shuffle_seed is None:
        raise ConfigError(f"schedule={schedule.value!r} needs a seed: give shuffle_seed=")
    if stop is Stop.NEVER and order.is_endless:
        raise ConfigError("stop='never' and infinite_iteration=True say the same: leave one of them out")


def _warn_of_lost(shares: Sequence[StreamShare], plan: PlannedMixture) -> None:
    """Say which streams have a proportion of which nothing is left in an epoch."""
    lost = [share.name for share, weight in zip(shares, plan.weights, strict=True) if share.proportion and not weight]
    if lost:
        logger.warning(
            "streams %s never come: their proportion of an epoch of %d samples, rounded, is none. Give the mixture weights=, "
            "which hold over epochs, or a larger epoch_size=",
            *(", ".join(map(repr, lost)), sum(plan.weights)),
        )


def _named(sample: Any, name: str) -> Any:
    """Return a sample, or several, or lists of several, with the name of their stream."""
    if isinstance(sample, list):
        return [_named(one, name) for one in sample]
    sample[STREAM] = name
    return sample
