"""A loader of several streams, each with batches of its own: one stream, or one group of streams, at each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, Unpack

from torch.utils.data import DataLoader

from sqlstream.config import DEFAULT_PREFETCH, SampleOptions, check_at_least, flag_of, list_of, word_of
from sqlstream.errors import ConfigError, UnknownLengthError
from sqlstream.order import ScheduleType
from sqlstream.stream.chain.global_rng import GeneratorLoan
from sqlstream.stream.dataset import StreamingDataset
from sqlstream.stream.frameworks.lightning import (
    HandedOut,
    LookingAhead,
    has_ended,
    is_asked_by_lightning,
    num_counted_before,
    state_kept_back,
)
from sqlstream.stream.mixed.pipeline import MixedPipeline
from sqlstream.stream.mixture.mixing import Mixing, MixtureRule, NamedWeights, StreamChange
from sqlstream.stream.mixture.mixture_plan import MixtureWeights, scheduled
from sqlstream.stream.mixture.mixture_run import PlannedStep
from sqlstream.stream.mixture.stepped_checkpoint import load_stepped, save_stepped
from sqlstream.stream.mixture.stepped_run import SteppedOptions, SteppedRun
from sqlstream.stream.multi.batches import CollateStreams, MicroBatches, join_worker
from sqlstream.stream.multi.options import Batch, StreamOptions, check_names, group_indices, main_stream_index
from sqlstream.stream.multi.streams import (
    BatchesOfRanks,
    LoadedStream,
    LoaderArguments,
    agreed_seed,
    check_datasets,
    merged_arguments,
    whole_of_named,
)
from sqlstream.stream.run.iteration_start import IterationStart
from sqlstream.stream.run.order_options import TORCH_PREFETCH_FACTOR, BatchOptions, Layout
from sqlstream.stream.transport.counted_batches import InitWorker, forget_frames
from sqlstream.stream.transport.packed_collate import PackedCollate
from sqlstream.world import World


class MultiStreamDataLoader:
    """Batches of several streams in exact proportions: the same steps on any ranks that divide them and any workers.

    It goes on without end, and iterating again goes on where the trainer stopped. docs/mixing.md has the rules.

    Args:
        datasets: The streams; the same dataset may be given twice. They are closed with the loader.
        stream_opts: Name, ratio, batches and mixing group of each.
        num_workers: Processes that make batches of all streams; a list: its sum. 0: this process does.
        shuffle_seed: Seed of the order of steps; None: there is none, for schedules that do not shuffle; -1: random, agreed by
            all ranks. Each dataset has the seed of its rows.
        schedule: How the steps of streams follow each other.
        counts_precision: Digits to which ratios are taken as fractions.
        reweight_workers: Taken for scripts of sds: workers are those of all streams.
        persistent_workers: Keep the workers where an iteration ends, or a state is loaded; without workers nothing is kept.
        lanes: Parts of a step of a mixing group, each of which has one stream; None: the ranks of the first start.
        weights: Weights by name instead of the ratios; or a list of (step, weights by name), from which steps on they hold.
        epoch_size: Steps after which an iteration ends; None: it has no end.
        world: The place of this process in its job; None: from torch.distributed or the launcher.
        replication: Number of consecutive ranks that take the same batches.
        prefetch: Samples of all streams planned ahead in each reading process; None: 256, within 1 GiB.
        common_dataloader_kwargs: Arguments of torch's DataLoader for all streams, and `pack_bytes` of StreamingDataLoader.

    Raises:
        ConfigError: Ratios, groups, batches or ranks contradict each other; the message names the streams.

    Example:
        >>> configs = [{"name": "web", "ratio": 3, "batch_gpu": 2}, {"name": "code", "ratio": 2, "batch_gpu": 4}]
        >>> opts = StreamOptions.init_group(configs)
        >>> loader = MultiStreamDataLoader([web, code], opts)
        >>> batch = next(iter(loader))
        >>> batch.stream_name, batch.num_accum_rounds_left, batch.step
        ('web', 0, 0)
    """

    def __init__(
        self,
        datasets: Sequence[StreamingDataset],
        stream_opts: Sequence[StreamOptions],
        num_workers: int | Sequence[int] = 0,
        shuffle_seed: int | None = 42,
        schedule: ScheduleType | str = ScheduleType.FIXED_RANDOM_ORDER,
        counts_precision: int = 6,
        reweight_workers: bool = True,  # noqa: ARG002 - workers are those of all streams
        persistent_workers: bool = True,
        *,
        lanes: int | None = None,
        weights: MixtureWeights | None = None,
        epoch_size: int | None = None,
        world: World | None = None,
        replication: int = 1,
        prefetch: int | None = None,
        **common_dataloader_kwargs: Unpack[LoaderArguments],
    ) -> None:
        self.num_workers = _num_workers(num_workers)
        options = tuple(list_of("stream_opts", stream_opts, "give StreamOptions.init_group([…])"))
        if wrong := [one for one in options if not isinstance(one, StreamOptions)]:
            raise ConfigError(f"stream_opts has {wrong[0]!r}, which is no StreamOptions: give StreamOptions.init_group([…])")
        names = [one.name for one in options]
        if not names:
            raise ConfigError("stream_opts is empty: give at least one stream")
        check_names(names)
        whole = partial(whole_of_named, names, counts_precision)
        (_, first), *later = scheduled(weights, names) if weights is not None else [(0, _ratios(options))]
        planned = [StreamChange(epoch=0, sample=0, weights=whole(first))]
        planned += [StreamChange(epoch=0, sample=step, weights=whole(named)) for step, named in later]
        check_datasets(datasets, options, planned[0].weights)
        groups = group_indices(options)
        is_grouped = len(set(groups)) < len(groups)
        layout = Layout(world=world, replication=replication)
        rule = MixtureRule(
            schedule=(kind := word_of("schedule", schedule, ScheduleType)),
            seed=agreed_seed(shuffle_seed, kind, layout, is_grouped=is_grouped),
            block=None,
        )
        mixing = Mixing(names, rule, planned[0].weights, whole)
        mixing.set(planned)
        self._arguments, collates = merged_arguments(options, datasets, common_dataloader_kwargs)
        samples = SampleOptions(prefetch=DEFAULT_PREFETCH if prefetch is None else prefetch)
        asked = BatchesOfRanks(options, groups)
        self._run = SteppedRun(
            {name: dataset.schedule for name, dataset in zip(names, datasets, strict=True)},
            mixing,
            SteppedOptions(
                asked=asked,
                group_of=groups if is_grouped else None,
                lanes=lanes,
                epoch_size=epoch_size,
                layout=layout,
                prefetch=samples.prefetch,
                planned=tuple(planned),
            ),
        )
        self.streams = [
            LoadedStream(dataset, own.inferred(self.world.world_size), collate)
            for dataset, own, collate in zip(datasets, options, collates, strict=True)
        ]
        self._main = main_stream_index(
            [replace(one, ratio=float(weight)) for one, weight in zip(options, planned[0].weights, strict=True)]
        )
        self._pipeline = MixedPipeline(
            names=names,
            pipelines=[dataset._pipeline for dataset in datasets],
            options=samples,
            batch_size=None,
            names_streams=False,
        )
        self._is_persistent = flag_of("persistent_workers", persistent_workers) and self.num_workers > 0
        self._loader: DataLoader[Any] | None = None
        """Torch's loader, while its workers are kept; None: the next iteration makes one."""
        self._start = IterationStart()
        """Held while an iteration begins, and while a batch is waited for: torch's iterators have one thread at a time."""
        self._fetcher = LookingAhead()
        """The caller that has iterated it last."""
        self._world: World | None = None  # of the last iteration
        self._running: _Steps | None = None
        """The iteration that goes on when the loader is iterated again."""

    # -- batches ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Return what comes after the batches that the trainer was given: to several loops, each batch goes once."""
        with self._start.lock:
            fetcher = LookingAhead.of_caller()
            if not fetcher.repeats(self._fetcher) and (state := state_kept_back(self)) is not None:
                self.load_state_dict(state)
            self._fetcher = fetcher
            if self._running is None and self._run.is_at_start and has_ended(self):
                return iter(())
            if self._running is not None and self._run.is_over:  # its loop has counted batches, and not asked for the end
                self._run.note_end()
                self._stop()
            if self._world != self.world:  # a process group has come or gone: workers that run have the place of then
                self._iterator, self._world = None, self.world
            if self._running is None or self._running.handed.has_held:
                self._running = self._begin(fetcher.most_held)
            self._running.handed.fetcher = fetcher
            return _CountedSteps(self, self._running)

    def _begin(self, num_held: int) -> _Steps:
        self._run.begin(
            BatchOptions(
                batch_size=max(stream.micro_batch for stream in self._run.order.batches),
                drop_last=False,
                num_workers=self.num_workers,
                prefetch_factor=self._prefetch_factor,
                is_persistent=self._is_persistent,
                num_held=num_held,
            )
        )
        if self._loader is None or not self._is_persistent:
            self._loader, self._packing, self._loan = self._torch_loader()
        return _Steps(iter(self._loader), self._loan, HandedOut(LookingAhead()))

    def _torch_loader(self) -> tuple[DataLoader[Any], PackedCollate | None, GeneratorLoan]:
        """Return torch's loader, whose workers are about to start."""
        arguments = {key: value for key, value in self._arguments.items() if key not in ("drop_last", "pack_bytes")}
        loan, packing = GeneratorLoan(), None
        if self.num_workers and self._arguments.get("pack_bytes", True):
            packing = PackedCollate(prefetch_factor=self._prefetch_factor)
        collate = CollateStreams([stream.collate for stream in self.streams], self.world.world_size, packing, loan)
        handover = self._pipeline.engines.handover_of(self)
        init_fn = arguments.pop("worker_init_fn", None)
        loader: DataLoader[Any] = DataLoader(
            MicroBatches(self._run, self._pipeline),
            batch_size=None,
            num_workers=self.num_workers,
            collate_fn=collate,  # type: ignore[arg-type]  # what the dataset yields, as batch_size=None has it
            persistent_workers=self._is_persistent,
            worker_init_fn=InitWorker(partial(join_worker, handover=handover), init_fn) if self.num_workers else init_fn,
            **arguments,
        )
        return loader, packing, loan

    @property
    def _prefetch_factor(self) -> int:
        given = self._arguments.get("prefetch_factor")
        return TORCH_PREFETCH_FACTOR if given is None else int(given)

    def _stop(self) -> None:
        """End the iteration under way, with its workers unless they are kept."""
        self._running = None
        if not self._is_persistent:
            self._loader = None

    @property
    def _iterator(self) -> Any:
        """Torch's iterator, which has the workers: Lightning ends those of any loader by it, and then sets it to None."""
        return getattr(self._loader, "_iterator", None)

    @_iterator.setter
    def _iterator(self, value: None) -> None:
        """Forget the workers; the next loop goes on with others."""
        self._loader = self._running = value

    def __len__(self) -> int:
        """Return the batches of this rank that are left up to the end of the next iteration; to Lightning, all of its epoch.

        Raises:
            UnknownLengthError: It has no end.
        """
        if self._run.options.epoch_size is None:
            raise UnknownLengthError("a MultiStreamDataLoader has no end, and no length: give epoch_size=, in steps")
        if not is_asked_by_lightning():
            return self._run.num_micro_batches
        before = num_counted_before(self)
        return self._run.num_whole if before is None else before + self._run.num_micro_batches

    def __repr__(self) -> str:
        """Return the streams; nothing is read."""
        streams = ", ".join(f"{stream.opts.name}: {stream.opts.batch_size}" for stream in self.streams)
        return f"{type(self).__name__}({streams}; {self._run.mixing.rule.schedule.value}, num_workers={self.num_workers})"

    # -- streams ------------------------------------------------------------------------------------------------------

    @property
    def main_stream(self) -> LoadedStream:
        """The stream for visualisations and statistics: the first that `is_main`, else the first with the largest ratio."""
        return self.streams[self._main]

    @property
    def world(self) -> World:
        """The place of this process in its job; ranks that take the same batches count as one."""
        return self._run.world

    def counts(self, step: int) -> dict[str, int]:
        """Return how many samples of each stream the whole job has taken before a step, counted from the start of the run."""
        return self._run.counts(step)

    def plan(self, first: int, stop: int) -> Iterator[PlannedStep]:
        """Yield what the steps `[first, stop)` of the run take of each stream, without loading anything."""
        return self._run.planned_steps(first, stop)

    def reweight(self, weights: NamedWeights, at_step: int | None = None) -> None:
        """Change how often streams come; call it on every rank, after the same step. States carry it, counts of draws go on.

        Args:
            weights: Weights of all streams by name; 0: the stream pauses, and later goes on where it was.
            at_step: From this step of the run on; None: from the first one that nothing has planned, which depends on workers
                and prefetch. Later changes are dropped.

        Raises:
            StateError: That step is handed out or planned already; the message names the first possible one.
            ConfigError: These are no weights of the streams.
        """
        self._run.reweight(weights, at_step)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return the state of the run after the last batch that the trainer was given: JSON-able, and equal on all ranks."""
        return save_stepped(self._run).to_dict()

    def load_state_dict(
        self, state: Mapping[str, Any], strict: bool = True, streams: str | Mapping[str, str] | None = None
    ) -> None:
        """Make the next iteration go on where `state` says, on any ranks that divide the steps and any workers.

        Args:
            state: What `state_dict` returned.
            strict: False: within a step of another layout go on at its start; of another run take the step alone.
            streams: `'continue'`: streams that the state does not have begin, those that this loader does not have pause, and
                the weights are those that this loader was made with. `{"web": "restart"}`: this one begins anew, too.

        Raises:
            StateError: `state` is of other streams, another schedule, seed or batch size, or within a step on another layout.
        """
        load_stepped(self._run, state, strict=strict, streams=streams)
        self._stop()

    def close(self) -> None:
        """End the workers, and close all datasets: give all pins back, end helper processes and threads, close all files."""
        self._is_persistent = False
        self._stop()
        self._pipeline.engines.close()
        for stream in self.streams:
            stream.dataset.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Steps:
    """An iteration, over which several loops may go.

    It does not name its loader, which names it: in that circle the garbage collector would end the workers, and wait for them
    5 s each, since it has closed their queues by then.
    """

    batches: Iterator[Any]
    """Torch's iterator."""
    loan: GeneratorLoan
    """Generators of the trainer that samples take meanwhile."""
    handed: HandedOut
    """The batches, of which the loop that goes on may hold some back."""


class _CountedSteps:
    """What a loop asks for batches; they are counted as they are handed out.

    Args:
        loader: What is iterated.
        steps: Its iteration.
    """

    def __init__(self, loader: MultiStreamDataLoader, steps: _Steps) -> None:
        self._loader = loader
        self._steps = steps

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        with self._loader._start.lock:
            return self._next(self._loader)

    def _next(self, loader: MultiStreamDataLoader) -> Batch:
        steps = self._steps
        if loader._running is not steps:  # a state was loaded, or the loader was closed
            raise StopIteration
        try:
            with steps.loan:
                batch, step, num_rounds_left = next(steps.batches)
        except StopIteration:
            steps.handed.end()
            loader._run.note_end()
            loader._stop()
            raise
        except BaseException as error:  # workers that have failed are not asked again
            loader._loader = loader._running = None
            if loader.num_workers:
                forget_frames(error)
            raise
        steps.handed.add(partial(loader._run.note, step, num_rounds_left))
        assert isinstance(batch, Batch)
        return batch


def _ratios(options: Sequence[StreamOptions]) -> dict[str, float]:
    return {one.name: one.ratio for one in options}


def _num_workers(given: int | Sequence[int]) -> int:
    numbers: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    return sum(check_at_least("num_workers", number, 0) for number in numbers)
