"""What the constructor of a dataset takes, as frozen values; and the cache, the index and the order that they open."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from sqlstream.cache import Cache
from sqlstream.cache.session import VerifyReads
from sqlstream.config import (
    DEFAULT_RETAINED,
    AsItIs,
    IndexOptions,
    MemberForm,
    OnCacheError,
    SampleOptions,
    ShardUnit,
    StorageOptions,
    default_cache_directory,
)
from sqlstream.errors import ConfigError
from sqlstream.index.build.build import open_index
from sqlstream.index.build.chunks import ChunkPlace
from sqlstream.index.build.content import RowGroupIndex
from sqlstream.index.build.content_index import ContentIndex
from sqlstream.index.build.lazy import LazyIndex
from sqlstream.index.build.lazy_build import open_lazy_index
from sqlstream.index.build.lazy_shards.index import LazyShardIndex
from sqlstream.index.build.shards import ShardIndex
from sqlstream.index.file.index import Index
from sqlstream.index.file.store import IndexStore
from sqlstream.index.named.find import find_members
from sqlstream.index.sources.plan.plan import source_items
from sqlstream.index.sources.shards.by_name import shard_urls
from sqlstream.index.types.models import SourceFile
from sqlstream.index.types.origins import RowJudge
from sqlstream.order import BlockLayout, Filtered, Order, Steps, Weighted, shuffled
from sqlstream.storage.base import urls
from sqlstream.storage.base.access import Rules, check_providers
from sqlstream.storage.base.settings import check_options_of_sources
from sqlstream.stream.engine.chunk_objects import ChunkObjects
from sqlstream.stream.engine.content import MEMORY_BYTES
from sqlstream.stream.engine.lazy_rows import WINDOW_CHUNKS, ChunkWalk
from sqlstream.stream.engine.shard_files import CachedShards
from sqlstream.stream.engine.units import ShardUse, choose_unit
from sqlstream.stream.run.order_options import AUTO_BLOCKS, TORCH_PREFETCH_FACTOR, BatchOptions, OrderOptions
from sqlstream.stream.run.schedule import Schedule
from sqlstream.stream.run.state import RunIdentity
from sqlstream.stream.run.weighting import Weighting, weighting_of
from sqlstream.transforms.base import Transform
from sqlstream.transforms.cached import CacheTransform, split_at_points

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Which cache a dataset uses, and how: the parameters of `Cache`, beside those of storage."""

    directory: str | os.PathLike[str] | None
    """None: the user's own cache directory."""
    limit: int | str | AsItIs | None
    eviction_policy: str | None
    on_error: OnCacheError | str
    min_free_bytes: int | str
    namespace: str | None
    verify_reads: VerifyReads | str
    max_age: str | float | None = None

    def open(self, storage: StorageOptions) -> Cache:
        """Return the cache."""
        return Cache(
            self.directory or default_cache_directory(),
            limit=self.limit,
            storage_options=storage,
            eviction_policy=self.eviction_policy,
            on_cache_error=self.on_error,
            min_free_bytes=self.min_free_bytes,
            cache_namespace=self.namespace,
            verify_reads=self.verify_reads,
            max_age=self.max_age,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DatasetOptions:
    """The parameters of a dataset, checked, each beside those that the same part reads."""

    name: str | None
    """None: the last three parts of the source."""
    show_progress: bool
    """Show a bar on a terminal while the index is built."""
    transforms: Sequence[Transform]
    predownload_transforms: Sequence[Transform]
    storage: StorageOptions
    index: IndexOptions
    samples: SampleOptions
    cache: CacheOptions
    order: OrderOptions
    index_store: str | None = None
    """Where nodes share built indexes; None: nowhere."""
    refresh: str | None = None
    """`'epoch'`: the source is looked at again as each epoch begins; None: when the dataset is made."""

    def __post_init__(self) -> None:
        """Check the transforms, and what concerns two parts."""
        for option in ("transforms", "predownload_transforms"):
            object.__setattr__(self, option, _checked_transforms(option, getattr(self, option)))
        split_at_points(self.transforms)  # what is wrong with a cache point shows here, not in a worker
        check_providers(self.storage.providers)
        tables = [self.index.src, *({} if self.index.join is None else self.index.join.tables).values()]
        read = [item for table in tables for item in source_items(table)]
        read += [] if self.index_store is None else [self.index_store]
        schemes = [scheme for item in read for scheme in _schemes(item)]
        check_options_of_sources(schemes, self.storage.storage_options)
        self._check_refresh()
        if self.cache.eviction_policy == "belady" and self.order.is_unaligned:
            raise ConfigError(
                "eviction_policy='belady' needs one order for all workers, which unaligned_worker_index=True gives up: drop one"
            )

    def naming_source(self, name: str) -> DatasetOptions:
        """Return these options with the name of a source in place of rows: a worker opens the index, and is not sent them."""
        src, join = self.index.src, self.index.join
        if _is_text(src) and (join is None or all(map(_is_text, join.tables.values()))):
            return self
        if join is not None:
            tables = {table_name: table if _is_text(table) else table_name for table_name, table in join.tables.items()}
            join = replace(join, tables=tables)
        return replace(self, index=replace(self.index, src=src if _is_text(src) else name, join=join))

    def _check_refresh(self) -> None:
        """Raise ConfigError for options that do not go with rows that change."""
        if self.refresh is None:
            return
        if self.refresh != "epoch":
            raise ConfigError(f"refresh={self.refresh!r} is unknown: give 'epoch', or None")
        join = {} if self.index.join is None else self.index.join.tables
        for is_wrong, problem in (
            (
                not all(map(_is_text, (self.index.src, *join.values()))),
                "looks at a source by its name: give paths or URLs, no rows and no function, or make the dataset again",
            ),
            (self.order.is_endless, "begins no epoch anew with infinite_iteration=True: leave one of them out"),
            (self.index.on_source_change == "raise", "takes what on_source_change='raise' refuses: leave one of them out"),
            (
                not isinstance(self.order.weights, str | None),
                "needs weights that fit any rows: give an expression or a column, no numbers of the rows of now",
            ),
        ):
            if is_wrong:
                raise ConfigError(f"refresh='epoch' {problem}")

    def num_retained(self, batches: BatchOptions | None) -> int | None:
        """Return how many samples of a worker keep their paths valid; None: how many are under way is not known.

        Args:
            batches: How a loader takes samples; None: no loader has said it.
        """
        asked, batch_size = self.samples.retained_samples, self.order.batch_size
        if batches is not None:
            return max(batches.num_under_way, asked or 1)
        if asked is not None or batch_size is None:
            return asked
        return max(DEFAULT_RETAINED, (TORCH_PREFETCH_FACTOR + 1) * batch_size)


def _is_text(src: object) -> bool:
    return all(isinstance(item, str) for item in source_items(src))


def _checked_transforms(option: str, transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    """Return transforms as a tuple.

    Raises:
        ConfigError: One of them cannot be called, or is a cache point where there can be none.
    """
    if callable(transforms):
        raise ConfigError(f"{option}={transforms!r} is a single transform: give a list of them")
    for number, transform in enumerate(transforms):
        if not callable(transform):
            raise ConfigError(f"{option}[{number}]={transform!r} is not callable: give callables from sample to sample")
        if option == "predownload_transforms" and isinstance(transform, CacheTransform):
            raise ConfigError(f"{option}[{number}] is a CacheTransform: rows are not stored, put it into transforms")
    return tuple(transforms)


def _schemes(item: object) -> list[str]:
    """Return the schemes of a source: of shards that a text names, of each."""
    if not isinstance(item, str):
        return ["file"]
    return [*{urls.scheme(url) for url in shard_urls(item) or [item]}]


def default_name(src: str) -> str:
    """Return the last three parts of `src`, joined by '-', without extension, as in `sds`."""
    bare = urls.redact(src).rstrip("/")
    parts = [part for part in bare.partition("://")[2].split("/") or [bare] if part] or [
        part for part in bare.split("/") if part
    ]
    return "-".join(parts[-3:]).removesuffix(urls.extension(bare)) or "dataset"


def open_any(options: DatasetOptions, cache: Cache) -> Index:
    """Return the index of a source: lazy if `options` say so."""
    directory, show_progress = cache.path / "index", options.show_progress
    store = None if options.index_store is None else IndexStore(options.index_store, cache.fetcher)
    if options.index.lazy is None:
        index = open_index(
            options.index,
            directory,
            cache.fetcher,
            show_progress=show_progress,
            identity=cache.identity,
            store=store,
            keep=partial(shards_to_keep, options, cache),
        )
        if options.index.columns_to_download:
            judge = judge_of(index, options.samples, cache)
            try:
                index.named_members = find_members(
                    index, options.index, directory, cache.fetcher, judge, show_progress=show_progress
                )
            except BaseException:
                index.close()
                raise
        return index
    objects = ChunkObjects(cache, None)

    def bring(place: ChunkPlace, num_shards: int) -> AbstractContextManager[list[Path]] | None:
        share = float(options.samples.content_columns != ())
        use = shard_use(options, [place.file.size_bytes or 0] * num_shards, share)
        is_whole = table_unit(options, use, cache) is ShardUnit.WHOLE
        return objects.fetched(place, objects.refs(place)) if is_whole else None

    return open_lazy_index(
        options.index,
        directory,
        cache.fetcher,
        show_progress=show_progress,
        identity=cache.identity,
        store=store,
        bring=bring,
    )


def judge_of(index: Index, options: SampleOptions, cache: Cache) -> RowJudge:
    """Return what the rows of an index may name."""
    origins, storage = index.origins(), cache.storage_options
    rules = Rules(
        allowed_roots=options.allowed_roots,
        credential_hosts=storage.credential_hosts,
        places=origins.places,
        providers=frozenset(storage.providers),
    )
    return RowJudge(origins=origins, rules=rules, base_url=index.base_url)


def open_schedule(options: OrderOptions, seed: int | None, index: Index, directory: Path) -> Schedule:
    """Return the order of an index's rows, at its start.

    Args:
        options: What the user asked for.
        seed: What the ranks have agreed on.
        index: Whose rows.
        directory: Where tables of weights are kept.

    Raises:
        ConfigError: The index has no rows for such an order.
    """
    weighting = weighting_of(index, directory, options.epoch_size, options.weights)
    layout = blocks_of(index, options, weighting.num_positions)
    seeded = partial(compose, index, weighting, options, layout)
    steps = Steps(
        order=seeded(seed), batch_size=options.batch_size, tail=options.tail, num_canonical_nodes=options.num_canonical_nodes
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
    if order.shuffle_block_size is None:
        if index.is_remote or index.num_bytes > memory_bytes:
            logger.warning(
                "%s is shuffled as a whole, and the content of its samples is read by row groups of %d rows: mostly one for "
                "each sample, remote ones again when the cache has no room for all; leave shuffle_block_size out to keep row "
                "groups together",
                *(index.src, index.group_rows),
            )
    elif order.shuffle_block_size == AUTO_BLOCKS:
        num_mixed, num_kept = min(order.shuffle_window, len(index.bounds)), max(1, memory_bytes // group_bytes)
        if num_mixed > num_kept:
            logger.warning(
                "the rows of %d row groups of %s are mixed, and a process keeps %d of them decoded (%d MiB each): most samples "
                "decode one again. Give shuffle_window=%d, or write smaller row groups",
                *(num_mixed, index.src, num_kept, max(1, group_bytes >> 20), num_kept),
            )


def shards_to_keep(options: DatasetOptions, cache: Cache, src: str, shards: Sequence[SourceFile]) -> CachedShards | None:
    """Return what brings the shards of a source whole while they are indexed; None: the dataset does not take them so.

    It does where it is known to take whole shards before its rows are, and all of them fit the limit of the cache.

    Args:
        options: All of them.
        cache: Where shards are kept.
        src: The source, without credentials.
        shards: Its remote shards.
    """
    index, samples = options.index, options.samples
    takes_all = samples.content_columns is None and index.where is None and index.sql_query is None and index.max_size is None
    num_bytes = sum(shard.size_bytes or 0 for shard in shards)
    use = ShardUse(
        num_bytes=num_bytes,
        window_bytes=num_bytes,
        wanted_share=1.0 if takes_all else 0.0,  # not known
        num_nodes=options.order.layout.whole.num_nodes,
    )
    limit_bytes = cache.session.limit_in_force()
    is_whole = choose_unit(ShardUnit(samples.shards), use, limit_bytes).unit is ShardUnit.WHOLE
    if not is_whole or (limit_bytes is not None and num_bytes > limit_bytes):
        return None
    return CachedShards(cache, cache.session.register(options.name or default_name(src), src, ""))


def shard_use_of(options: DatasetOptions, index: ShardIndex | LazyShardIndex) -> ShardUse:
    """Return what an epoch takes of the shards of an index."""
    wanted = options.samples.content_columns
    share = index.wanted_share([column.name for column in index.content_columns] if wanted is None else wanted)
    return shard_use(options, index.shard_sizes(), share)


def table_unit(options: DatasetOptions, use: ShardUse, cache: Cache) -> ShardUnit:
    """Return in what unit shards are brought whose tables are not known: whole ones are kept for their samples."""
    if options.samples.members is MemberForm.PATH:  # each part is an entry of its own
        return ShardUnit.MEMBERS
    return choose_unit(ShardUnit(options.samples.shards), use, cache.session.limit_in_force()).unit


def shard_use(options: DatasetOptions, shard_bytes: Sequence[int], wanted_share: float) -> ShardUse:
    """Return what an epoch takes of shards.

    Args:
        options: The order.
        shard_bytes: Size of each shard.
        wanted_share: Share of the bytes of all that is wanted, in [0, 1].
    """
    order, sizes = options.order, sorted(shard_bytes, reverse=True)
    if order.shuffle_seed is None:
        num_mixed = 1
    elif order.shuffle_block_size == AUTO_BLOCKS:
        num_mixed = order.shuffle_window
    else:  # samples of all shards, or blocks that know no shards
        num_mixed = len(sizes)
    num_nodes = order.layout.whole.num_nodes
    return ShardUse(
        num_bytes=sum(sizes),
        window_bytes=sum(sizes[:num_mixed]),
        wanted_share=wanted_share,
        num_nodes=1 if num_nodes == order.num_canonical_nodes else num_nodes,
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
    """Return what a state says of blocks; None: there are none, or they are always the same."""
    if layout is not None:
        return layout.fingerprint
    return f"shards, window {lazy_window(index, options)}" if isinstance(index, LazyShardIndex) else None


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
