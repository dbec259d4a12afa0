"""The order of a dataset, of its index and its options: blocks, windows of a lazy index, weights."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sqlstream.config import (
    Buckets,
    OnLong,
    Packs,
    ShardUnit,
)
from sqlstream.errors import ConfigError
from sqlstream.index.buckets import BucketTable, open_buckets
from sqlstream.index.build.content import RowGroupIndex
from sqlstream.index.build.content_index import ContentIndex
from sqlstream.index.build.lazy import LazyIndex
from sqlstream.index.build.lazy_shards.index import LazyShardIndex
from sqlstream.index.file.index import Index
from sqlstream.index.lengths import LengthTable, open_lengths
from sqlstream.index.weights import open_weights
from sqlstream.order import (
    BlockLayout,
    Bucketed,
    BucketLanes,
    Continued,
    Filtered,
    Order,
    Packed,
    Steps,
    Weighted,
    Windows,
    shuffled,
    text_of_packs,
)
from sqlstream.stream.engine.content.parquet import MEMORY_BYTES
from sqlstream.stream.engine.lazy_rows import WINDOW_CHUNKS, ChunkWalk
from sqlstream.stream.options import DatasetOptions
from sqlstream.stream.run.order_options import AUTO_BLOCKS, OrderOptions
from sqlstream.stream.run.schedule import Schedule
from sqlstream.stream.run.state import RunIdentity
from sqlstream.stream.run.weighting import BucketWeighting, PackWeighting, Weighting, pack_weighting_of, weighting_of

logger = logging.getLogger(__name__)


class OpenedOrder(NamedTuple):
    """The order of an index's rows, with the tables that it is made from."""

    schedule: Schedule
    buckets: BucketTable | None
    """The rows of each bucket; None: rows share a batch with any others."""
    lengths: LengthTable | None
    """The rows by length; None: no table has the lengths, or each row is a sample of its own."""


def open_order(options: DatasetOptions, seed: int | None, index: Index, directory: Path) -> OpenedOrder:
    """Return the order of an index's rows, at its start, with the tables that it needs, made when no earlier run has done it.

    Args:
        options: What the user asked for.
        seed: What the ranks have agreed on.
        index: Whose rows.
        directory: Where tables are kept.

    Raises:
        ConfigError: The index has no rows for such an order.
        QueryError: The SQL of buckets or lengths does not run.
    """
    batches, show_progress = options.order.batches, options.show_progress
    buckets, lengths = None, None
    if isinstance(batches, Buckets):
        buckets = open_buckets(index, batches, directory, show_progress=show_progress)
    elif isinstance(batches, Packs) and isinstance(batches.length, str):
        lengths = open_lengths(index, batches.length, directory, show_progress=show_progress)
    return OpenedOrder(open_schedule(options.order, seed, index, directory, buckets, lengths), buckets, lengths)


def open_schedule(
    options: OrderOptions,
    seed: int | None,
    index: Index,
    directory: Path,
    buckets: BucketTable | None = None,
    lengths: LengthTable | None = None,
) -> Schedule:
    """Return the order of an index's rows, at its start.

    Args:
        options: What the user asked for.
        seed: What the ranks have agreed on.
        index: Whose rows.
        directory: Where tables of weights are kept.
        buckets: The rows of each bucket; None: rows share a batch with any others.
        lengths: The rows by length; None: each row is a sample of its own.

    Raises:
        ConfigError: The index has no rows for such an order.
    """
    if isinstance(options.batches, Buckets) and buckets is not None:
        return _in_buckets(options, options.batches, seed, index, buckets, directory)
    if isinstance(options.batches, Packs) and lengths is not None:
        weighting = pack_weighting_of(index, directory, lengths, options.weights)
        return _in_packs(options, options.batches, seed, index, lengths, weighting)
    weighting = weighting_of(index, directory, options.epoch_size, options.weights)
    layout = blocks_of(index, options, weighting.num_positions)
    seeded = partial(compose, index, weighting, options, layout)
    steps = Steps(
        order=seeded(seed),
        batch_size=options.batch_size,
        tail=options.tail,
        num_canonical_nodes=options.num_canonical_nodes,
        gives_several=options.window_packs is not None,
    )
    identity = RunIdentity(
        fingerprint=index.fingerprint,
        shuffle_seed=seed,
        num_canonical_nodes=options.num_canonical_nodes,
        blocks=_named_blocks(index, options, layout),
        epoch_size=weighting.num_positions,
        content=index.content,
    )
    return Schedule(steps, weighting, options, identity=identity, reseeded=seeded)


def _in_buckets(
    options: OrderOptions,
    batches: Buckets,
    seed: int | None,
    index: Index,
    buckets: BucketTable,
    directory: Path,
) -> Schedule:
    """Return the order of batches of one bucket each; the rows in buckets are the size of its epochs that a state knows.

    Args:
        options: What the user asked for.
        batches: Which batches.
        seed: What the ranks have agreed on.
        index: Whose rows.
        buckets: The rows of each bucket.
        directory: Where tables of weights are kept.
    """
    weighting = Weighting(
        len(index),
        options.epoch_size or buckets.num_rows,
        partial(open_weights, index, directory=directory, sequence=buckets),
        options.weights,
    )
    return _with_sizes(options, batches, seed, index, buckets, weighting)


def _with_sizes(
    options: OrderOptions,
    batches: Buckets,
    seed: int | None,
    index: Index,
    buckets: BucketTable,
    weighting: Weighting,
    rank_multiple: int | None = None,
) -> Schedule:
    """Return the order of batches of sizes that may depend on the ranks.

    Args:
        options: What the user asked for.
        batches: Which batches.
        seed: What the ranks have agreed on.
        index: Whose rows.
        buckets: The rows of each bucket.
        weighting: The weights of the run.
        rank_multiple: What the sizes of batches are multiples of, where the user leaves it out; None: the ranks of now.
    """
    multiple = None
    if batches.follows_ranks:
        multiple = rank_multiple or options.layout.effective.world_size
    order = _bucketed(options, batches, seed, buckets, weighting, multiple or batches.rank_multiple or 1)
    if rank_multiple is None and options.layout.effective.rank == 0:
        _tell_of_small(batches, buckets, order)
    steps = Steps(
        order=order,
        batch_size=options.batch_size,
        tail=options.tail,
        num_canonical_nodes=options.num_canonical_nodes,
        batches=order,
    )
    identity = RunIdentity(
        fingerprint=index.fingerprint,
        shuffle_seed=seed,
        num_canonical_nodes=options.num_canonical_nodes,
        blocks=f"buckets {buckets.digest}, {order.text_of_sizes}",
        epoch_size=weighting.num_positions,
        content=index.content,
    )
    schedule = Schedule(steps, weighting, options, identity=identity)
    if multiple is not None:
        schedule.rank_multiple = multiple
        schedule.refit = partial(_with_sizes, options, batches, seed, index, buckets, weighting)
    return schedule


def _bucketed(
    options: OrderOptions, batches: Buckets, seed: int | None, buckets: BucketTable, weighting: Weighting, multiple: int
) -> Bucketed | BucketLanes:
    """Return batches of one bucket each, one a step or one for each lane of it.

    Args:
        options: What the user asked for.
        batches: Which batches.
        seed: What the ranks have agreed on.
        buckets: The rows of each bucket.
        weighting: The weights of the run.
        multiple: What the sizes of batches by a budget are multiples of, and the lanes of a step.
    """
    has_lanes, sizes = batches.sync == "lane", batches.sizes_of(buckets.values, multiple)
    if has_lanes and options.num_canonical_nodes > 1:
        raise ConfigError(
            f"num_canonical_nodes={options.num_canonical_nodes} cannot be had with sync='lane': one rank takes a lane, which "
            "has rows of all parts of its bucket; leave one of them out"
        )
    order = Bucketed(
        rows=buckets,
        batch_size=tuple(size // multiple for size in sizes) if has_lanes else sizes,
        seed=seed,
        num_parts=options.num_canonical_nodes,
        leftovers=batches.leftovers,
        epoch_size=options.epoch_size,
        weights=BucketWeighting(weighting, buckets.sizes),
    )
    return BucketLanes(batches=order, num_lanes=multiple) if has_lanes else order


def _tell_of_small(batches: Buckets, buckets: BucketTable, order: Bucketed | BucketLanes) -> None:
    """Log buckets that do not fill a batch in each epoch."""
    sizes = zip(buckets.values, buckets.sizes, order.batch_sizes, strict=True)
    small = [value for value, size, batch in sizes if size < batch]
    if small:
        logger.warning(
            "batches by %r: %d of %d buckets have fewer rows than a batch (%s), so epochs pass without a batch of them, and a "
            "batch may hold a row twice: %s",
            *(batches.by, len(small), len(buckets.values), order.text_of_sizes),
            ", ".join(map(str, small[:8])) + (", …" if len(small) > 8 else ""),
        )


def _in_packs(
    options: OrderOptions, packs: Packs, seed: int | None, index: Index, lengths: LengthTable, weighting: Weighting
) -> Schedule:
    """Return the order of packs of rows; a state counts packs, and knows the rows as the size of its epochs.

    With `epoch_size` an epoch has so many packs, and begins where the one before has ended.
    """
    parts = options.num_canonical_nodes
    packed = Packed(
        rows=lengths,
        capacity=packs.capacity,
        max_rows=packs.max_rows,
        on_long=OnLong(packs.on_long),
        seed=seed,
        num_parts=parts,
        weights=PackWeighting(weighting, lengths),
    )
    num_packed, most_rows = packed.num_rows, max(plan.most_rows for plan in packed.plans)
    logger.info(
        "packs by %r: %d rows in %d packs of %d, %.2f %% full, at most %d rows in one",
        *(packs.length, num_packed, sum(plan.num_packs for plan in packed.plans), packs.capacity),
        *(100 * packed.fill, most_rows),
    )
    if num_packed < lengths.num_rows:
        logger.info(
            "packs by %r leave out %d of %d rows, which are longer",
            packs.length,
            lengths.num_rows - num_packed,
            lengths.num_rows,
        )
    order: Order = packed
    if options.epoch_size is not None:
        order = Continued(order=packed, epoch_size=options.epoch_size, num_parts=parts)
    identity = RunIdentity(
        fingerprint=index.fingerprint,
        shuffle_seed=seed,
        num_canonical_nodes=parts,
        blocks=packed.packing + ("" if options.epoch_size is None else f", epochs of {options.epoch_size} packs"),
        epoch_size=options.epoch_size or lengths.num_rows,
        content=index.content,
    )
    steps = Steps(order=order, batch_size=options.batch_size, tail=options.tail, num_canonical_nodes=parts)
    return Schedule(steps, weighting, options, identity=identity)


def warn_of_reading_again(options: DatasetOptions, index: Index, memory_bytes: int = MEMORY_BYTES) -> None:
    """Say that an order has row groups of content decoded again for most samples, if it has.

    Args:
        options: Order, and which content is wanted.
        index: The rows.
        memory_bytes: What a process keeps of row groups.
    """
    order, wanted = options.order, options.samples.content_columns
    if not isinstance(index, RowGroupIndex) or order.shuffle_seed is None:
        return
    if wanted is not None and not any(column.name in wanted for column in index.content_columns):
        return
    group_bytes = max(1, index.num_bytes // len(index.bounds))
    if order.shuffle_block_size is None or order.planned_batches is not None:
        if index.is_remote or index.num_bytes > memory_bytes:
            logger.warning(
                "%s is shuffled as a whole, and the content of its samples is read by row groups of %d rows: mostly one for "
                "each sample, remote ones again when the cache has no room for all; leave %s out to keep row groups "
                "together",
                *(index.src, index.group_rows, "shuffle_block_size" if order.planned_batches is None else "batches"),
            )
    elif order.shuffle_block_size == AUTO_BLOCKS:
        num_mixed, num_kept = min(order.shuffle_window, len(index.bounds)), max(1, memory_bytes // group_bytes)
        if num_mixed > num_kept:
            logger.warning(
                "the rows of %d row groups of %s are mixed, and a process keeps %d of them decoded (%d MiB each): most samples "
                "decode one again. Give shuffle_window=%d, or write smaller row groups",
                *(num_mixed, index.src, num_kept, max(1, group_bytes >> 20), num_kept),
            )


def chunk_walk(index: LazyShardIndex, order: OrderOptions, unit: ShardUnit) -> ChunkWalk:
    """Return how an order comes by shards that are chunks."""
    return ChunkWalk(
        window=lazy_window(index, order), is_in_order=order.shuffle_seed is None, in_ranges=unit is ShardUnit.MEMBERS
    )


def lazy_window(index: LazyIndex, order: OrderOptions) -> int:
    """Return how many chunks of a lazy index are mixed: without a seed a shard is known to its end before the next is read."""
    if not isinstance(index, LazyShardIndex):
        return WINDOW_CHUNKS
    return order.shuffle_window if order.shuffle_seed is not None else 1


def compose(index: Index, weighting: Weighting, options: OrderOptions, layout: BlockLayout | None, seed: int | None) -> Order:
    """Return the order of an index's rows, one at each position, or a window of them where they are packed on the way."""
    order = _order_of_rows(index, weighting, options, layout, seed)
    if (packs := options.window_packs) is None:
        return order
    return Windows(order=order, size=packs.window_rows, num_parts=options.num_canonical_nodes)


def _order_of_rows(
    index: Index, weighting: Weighting, options: OrderOptions, layout: BlockLayout | None, seed: int | None
) -> Order:
    """Return the order of an index's rows, with their weights, or their chunks as a filter leaves them."""
    if isinstance(index, LazyIndex) and index.learns_sizes:
        return Filtered(chunks=index, window=lazy_window(index, options), seed=seed)
    order = shuffled(weighting.num_positions, seed, options.num_canonical_nodes, layout)
    return order if isinstance(index, LazyIndex) else Weighted(order=order, weights=weighting, seed=seed)


def blocks_of(index: Index, options: OrderOptions, num_positions: int) -> BlockLayout | None:
    """Return the blocks of an order: the chunks of a lazy index, or such as the user asks for; None: it has none.

    A filter of a lazy index keeps no block whole: its order has windows of chunks instead.

    Raises:
        ConfigError: These blocks cannot be, or there are parts of fixed size, which a lazy filter cannot give.
    """
    if not isinstance(index, LazyIndex):
        if isinstance(options.shuffle_block_size, str):
            return _blocks_of_content(index, options, num_positions)
        if options.shuffle_block_size is None:
            return None
        return BlockLayout.of_size(options.shuffle_block_size, num_rows=num_positions, window=options.shuffle_window)
    if options.shuffle_block_size not in (None, AUTO_BLOCKS):
        raise ConfigError("chunks of a lazy index are its blocks: leave shuffle_block_size or lazy_index_chunk_size out")
    if not index.learns_sizes:
        bounds = np.unique(index.bounds) if isinstance(index, LazyShardIndex) else index.bounds  # as a built index has them
        return BlockLayout(bounds=bounds, window=lazy_window(index, options))
    if options.num_canonical_nodes > 1:
        what = "samples shards have" if index.condition is None else "rows a filter keeps"
        raise ConfigError(
            f"num_canonical_nodes={options.num_canonical_nodes} needs to know how many {what}, which a lazy index "
            "finds out on the way: use 1, or leave the filter or lazy_index_chunk_size out"
        )
    return None


def _named_blocks(index: Index, options: OrderOptions, layout: BlockLayout | None) -> str | None:
    """Return what a state says of blocks and of packs; None: there are none, or they are always the same."""
    blocks = None
    if layout is not None:
        blocks = layout.fingerprint
    elif isinstance(index, LazyShardIndex):
        blocks = f"shards, window {lazy_window(index, options)}"
    if (packs := options.window_packs) is None:
        return blocks
    text = text_of_packs(packs.capacity, packs.max_rows, OnLong(packs.on_long))
    return f"windows of {packs.window_rows} rows in {text}{'' if blocks is None else f', {blocks}'}"


def _blocks_of_content(index: Index, options: OrderOptions, num_positions: int) -> BlockLayout | None:
    """Return the row groups or shards of content as blocks; None: the rows have none, or are not shuffled.

    With weights, or an epoch of another size, a block has its rows' share of the positions.
    """
    if not isinstance(index, ContentIndex) or options.shuffle_seed is None:
        return None
    bounds = index.block_bounds()  # [num_blocks + 1]
    if num_positions != len(index):
        bounds = (bounds * (num_positions / len(index))).round().astype(np.int64)
        bounds[-1] = num_positions
    return BlockLayout(bounds=bounds, window=options.shuffle_window)
