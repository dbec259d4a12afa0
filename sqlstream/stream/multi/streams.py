"""The streams of a MultiStreamDataLoader: what is checked of them together, and what each of them is for its user."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

from sqlstream.config import OnError
from sqlstream.errors import ConfigError
from sqlstream.order import ScheduleType, is_counted
from sqlstream.order.order import check_seed
from sqlstream.order.streams.whole_weights import Number, whole_weights
from sqlstream.sample_types import DataSampleType
from sqlstream.stream.dataset import StreamingDataset
from sqlstream.stream.iterated import default_collate_of
from sqlstream.stream.loader import StreamingDataLoader
from sqlstream.stream.mixture.mixing import NamedWeights, check_named
from sqlstream.stream.mixture.step_sizes import AskedBatches
from sqlstream.stream.multi.batches import StreamCollate
from sqlstream.stream.multi.options import StreamOptions
from sqlstream.stream.run.order_options import Layout, OrderOptions

logger = logging.getLogger(__name__)

_RANDOM = frozenset((ScheduleType.RANDOM, ScheduleType.RANDOM_ORDER, ScheduleType.FIXED_RANDOM_ORDER))
OWN_KEYS = frozenset(("collate_fn", "batch_size"))
"""Arguments of a DataLoader that each stream may have for itself: workers are those of all streams."""


class LoaderArguments(TypedDict, total=False):
    """Arguments of torch's DataLoader that concern all streams, and `pack_bytes` of StreamingDataLoader."""

    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: Any
    prefetch_factor: int | None
    pin_memory_device: str
    drop_last: bool
    pack_bytes: bool


class LoadedStream:
    """A stream of a MultiStreamDataLoader, with the names of sds.

    Args:
        dataset: Its dataset.
        opts: Its options, with all batch sizes.
        collate: How its batches are made.
    """

    def __init__(self, dataset: StreamingDataset, opts: StreamOptions, collate: StreamCollate) -> None:
        self.dataset = dataset
        self.opts = opts
        self.collate = collate

    @cached_property
    def dataloader(self) -> StreamingDataLoader:
        """A loader of this stream alone, in this process, for a look at its samples: it goes on by itself."""
        return StreamingDataLoader(self.dataset, batch_size=self.opts.batch_gpu, collate_fn=self.collate.collate_fn)

    def __repr__(self) -> str:
        """Return name and dataset."""
        return f"{type(self).__name__}({self.opts.name!r}, {self.dataset!r})"


@dataclass(frozen=True, slots=True)
class BatchesOfRanks:
    """The batches that streams ask for, by the number of ranks; picklable."""

    options: tuple[StreamOptions, ...]
    group_of: tuple[int, ...]

    def __call__(self, num_ranks: int) -> list[AskedBatches]:
        """Return the batches on so many ranks."""
        return [
            AskedBatches(
                name=own.name,
                global_batch=own.batch_size or 0,
                micro_batch=own.batch_gpu or 0,
                is_inferred=own.is_batch_size_inferred,
                group=group,
            )
            for own, group in zip([one.inferred(num_ranks) for one in self.options], self.group_of, strict=True)
        ]


def whole_of_named(names: Sequence[str], precision: int, weights: NamedWeights) -> tuple[int, ...]:
    """Return whole weights of named ones, in the order of the streams.

    Raises:
        ConfigError: They are not weights of all streams.
    """
    check_named(weights)
    if set(weights) != set(names):
        raise ConfigError(
            f"weights for {sorted(map(str, weights))}, but the streams are {sorted(names)}: name each of them, with 0 for one "
            "that pauses"
        )
    given: list[Number] = [weights[name] for name in names]
    try:
        return whole_weights(given, precision)
    except ConfigError as error:
        raise ConfigError(f"weights of the streams {', '.join(map(repr, names))}: {error}") from None


def check_datasets(datasets: Sequence[StreamingDataset], options: Sequence[StreamOptions], weights: Sequence[int]) -> None:
    """Check what a stream says that concerns the run, or contradicts that micro-batches are counted.

    Raises:
        ConfigError: It says it.
    """
    given: object = datasets
    if not isinstance(given, Sequence):
        raise ConfigError(f"datasets={given!r} is no list: give a StreamingDataset for each stream")
    if len(datasets) != len(options):
        raise ConfigError(f"{len(datasets)} datasets and {len(options)} stream_opts: give one each")
    for dataset, own, weight in zip(datasets, options, weights, strict=True):
        if not isinstance(dataset, StreamingDataset):
            raise ConfigError(
                f"stream {own.name!r} is {dataset!r}: give a StreamingDataset of sqlstream itself, of a mixture its streams "
                "one by one"
            )
        given = dataset._pipeline.options
        order = given.order
        for name, is_given, cure in (
            ("world", order.layout.world is not None, "give it to the loader"),
            ("replication", order.layout.replication != 1, "give it to the loader"),
            ("batch_size", order.batch_size is not None, "give it to its StreamOptions"),
            ("num_canonical_nodes", order.num_canonical_nodes != 1, "leave it out"),
            ("refresh", given.refresh is not None, "leave it out"),
            ("packs of rows without a length in SQL", order.window_packs is not None, "give Packs a column of lengths"),
            (
                "on_error='skip'",
                given.samples.on_error is OnError.SKIP,
                "rows are counted, so give 'replace' or 'raise'",
            ),
        ):
            if is_given:
                raise ConfigError(
                    f"stream {own.name!r} has {name}, which a stream of a MultiStreamDataLoader cannot have: {cure}"
                )
        if order.is_unaligned:  # scripts of sds have it
            logger.warning(
                "stream %r has unaligned_worker_index, which has no effect here: its workers share one order",
                own.name,
            )
        rows = dataset.schedule.steps.order
        if weight and is_counted(rows, 0) and not rows.num_positions(0):
            query = given.index.sql_query
            raise ConfigError(
                f"stream {own.name!r} has no row, but a weight above 0: its query ({query or 'none'}) or its where keeps none"
            )


def merged_arguments(
    options: Sequence[StreamOptions], datasets: Sequence[StreamingDataset], common: Mapping[str, Any]
) -> tuple[dict[str, Any], list[StreamCollate]]:
    """Return the arguments of the DataLoader of all streams, and how each stream is collated.

    Raises:
        ConfigError: An argument is unknown, or the streams differ in one that concerns their workers.
    """
    allowed = set(LoaderArguments.__annotations__)
    unknown = sorted({key for own in (common, *(one.dataloader_kwargs for one in options)) for key in own} - allowed - OWN_KEYS)
    if unknown or "batch_size" in common:
        names = unknown or ["batch_size"]
        raise ConfigError(
            f"a MultiStreamDataLoader does not take {', '.join(names)}: batches are those of stream_opts, workers "
            f"those of all of them; it takes {', '.join(sorted(allowed))}"
        )
    shared = dict(common)
    for key in sorted({key for one in options for key in one.dataloader_kwargs} - OWN_KEYS):
        values = [one.dataloader_kwargs.get(key, common.get(key)) for one in options]
        named = dict(zip([one.name for one in options], values, strict=True))
        if any(value is not values[0] and value != values[0] for value in values):
            raise ConfigError(
                f"dataloader_kwargs of the streams differ in {key}: {named}; workers are those of all streams, so give it to "
                "the loader; collate_fn may differ"
            )
        shared[key] = values[0]
    shared.pop("collate_fn", None)
    collates = [
        StreamCollate(
            name=one.name,
            data_type=None if dataset.data_type is None else DataSampleType.from_str(dataset.data_type),
            collate_fn=one.dataloader_kwargs.get("collate_fn", common.get("collate_fn")) or default_collate_of(dataset),
        )
        for one, dataset in zip(options, datasets, strict=True)
    ]
    return shared, collates


def agreed_seed(seed: int | None, schedule: ScheduleType, layout: Layout, *, is_grouped: bool) -> int:
    """Return the seed of the order of steps and lanes.

    Raises:
        ConfigError: It is needed, and there is none.
    """
    if seed is None and (is_grouped or schedule in _RANDOM):
        what = "streams that are mixed in a step" if is_grouped else f"schedule={schedule.value!r}"
        raise ConfigError(f"shuffle_seed=None with {what}, which need a seed: give a number, or -1 for a random one")
    agreed = OrderOptions(shuffle_seed=seed, shuffle_block_size=None, layout=layout).agreed_seed()
    check_seed(agreed)
    return agreed or 0
