"""The micro-batches of a worker: samples of one stream each, collated as that stream is, on their way to the trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, default_collate

from sqlstream.errors import ConfigError
from sqlstream.order import MicroBatch
from sqlstream.sample_types import DataSampleType
from sqlstream.stream.chain.global_rng import GeneratorLoan
from sqlstream.stream.mixed.pipeline import MixedPipeline
from sqlstream.stream.mixture.stepped_run import Beginning, SteppedRun
from sqlstream.stream.multi.options import Batch
from sqlstream.stream.run.shares import ShareProgress
from sqlstream.stream.transport.handover import Handover
from sqlstream.stream.transport.packed_collate import PackedCollate, Stack, batch_of, collated
from sqlstream.transforms.base import Sample


class StreamSamples(NamedTuple):
    """The samples of a micro-batch."""

    samples: list[Sample]
    micro_batch: MicroBatch
    step: int
    """Step of the run."""


class PlacedBatch(NamedTuple):
    """A batch for the trainer, and what it counts; a named tuple, whose parts torch pins."""

    batch: Any
    step: int
    num_rounds_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCollate:
    """How batches of one stream are made."""

    name: str
    data_type: DataSampleType | None
    collate_fn: Callable[[list[Any]], Any] | None
    """From samples to a batch: the user's, or what goes with `batches=` of the dataset; None: torch's default."""


class MicroBatches(IterableDataset[StreamSamples]):
    """The samples of this worker's micro-batches, in their order.

    Args:
        run: The run; where an iteration begins is read from the memory that it shares with workers.
        pipeline: What makes the samples of all streams.
    """

    def __init__(self, run: SteppedRun, pipeline: MixedPipeline) -> None:
        self.run = run
        self.pipeline = pipeline

    def __iter__(self) -> Iterator[StreamSamples]:
        """Return the micro-batches of the iteration that the trainer has begun."""
        return self._made(self.run.begun_iteration())

    def _made(self, beginning: Beginning) -> Iterator[StreamSamples]:
        order, share, steps, stop = beginning
        progress = ShareProgress(share, 0)
        current: list[MicroBatch] = []

        def refuse() -> None:
            name = order.batches[current[-1].stream].name
            raise ConfigError(
                f"a row of stream {name!r} gives no sample, or several, but micro-batches are counted by rows: make one sample "
                "of each row, or use a StreamingDataLoader"
            )

        ranks_on_node = self.run.options.layout.whole.local_world_size
        engines = self.pipeline.engines
        with engines.iterating(self.pipeline, ranks_on_node, self.run.batch_options, has_loader=True) as engine:
            samples = engine.stream(iter([share]), progress, is_endless=False, note_several=refuse, has_end=False)
            with contextlib.closing(samples):  # type: ignore[type-var]  # a generator
                index = num_taken = 0
                while True:
                    micro = steps.micro_batch(index)
                    step = order.schedule.first_step + micro.step
                    if stop is not None and step >= stop:
                        return
                    current[:] = [micro]
                    made: list[Sample] = []
                    for _ in range(micro.stop_draw - micro.first_draw):
                        made.append(next(samples))
                        num_taken += 1
                        if (progress.taken, progress.offset) != (num_taken, 0):
                            refuse()
                    yield StreamSamples(made, micro, step)
                    index += 1


class CollateStreams:
    """Collates a micro-batch as its stream is, and puts beside it what the trainer counts.

    Args:
        streams: The streams, in their order.
        num_ranks: Ranks that take batches of their own.
        packing: Has batches cross from workers to the trainer; None: as torch sends them.
        loan: Generators of the trainer that samples have taken; they are put back before a `collate_fn` runs.
    """

    def __init__(
        self, streams: Sequence[StreamCollate], num_ranks: int, packing: PackedCollate | None, loan: GeneratorLoan
    ) -> None:
        self._streams = tuple(streams)
        self._num_ranks = num_ranks
        self._packing = packing
        self._loan = loan

    def __call__(self, made: StreamSamples) -> PlacedBatch:
        """Return the batch, in a worker on its way to the trainer."""
        self._loan.put_back()
        make = partial(self._batch, made)
        batch = make(default_collate) if self._packing is None else self._packing.pack(make)
        return PlacedBatch(batch, made.step, made.micro_batch.num_rounds_left)

    def _batch(self, made: StreamSamples, stack: Stack) -> Batch:
        stream, micro = self._streams[made.micro_batch.stream], made.micro_batch
        raw = batch_of(made.samples, stack) if stream.collate_fn is None else collated(stream.collate_fn, made.samples)
        return Batch(
            raw,
            stream_name=stream.name,
            num_accum_rounds_left=micro.num_rounds_left,
            data_type=stream.data_type,
            step=made.step,
            weight=len(made.samples) * self._num_ranks / micro.num_samples_in_round,
            num_samples_in_step=micro.num_samples_in_step,
        )


def join_worker(batches: MicroBatches, handover: Handover | None) -> None:
    """Make a worker's copy of the streams that of a loader: its pins go there as it ends."""
    batches.pipeline.engines.handover = handover
