"""The index of a dataset, opened or built; and in what unit the shards of its source are fetched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sqlstream.cache import Cache
from sqlstream.config import (
    MemberForm,
    SampleOptions,
    ShardUnit,
)
from sqlstream.errors import ConfigError
from sqlstream.index.build.build import open_index
from sqlstream.index.build.lazy_build import open_lazy_index
from sqlstream.index.build.lazy_shards.index import LazyShardIndex
from sqlstream.index.build.shards import ShardIndex
from sqlstream.index.file.index import Index
from sqlstream.index.file.store import IndexStore
from sqlstream.index.named.find import find_members
from sqlstream.index.types.models import SourceFile
from sqlstream.index.types.origins import RowJudge
from sqlstream.storage.base import urls
from sqlstream.storage.base.access import Rules
from sqlstream.stream.engine.content.shard_files import CachedShards
from sqlstream.stream.engine.units import ShardUse, choose_unit
from sqlstream.stream.lenient_rows import note_left_out
from sqlstream.stream.options import DatasetOptions, default_name


def open_any(options: DatasetOptions, cache: Cache) -> Index:
    """Return the index of a source: lazy if `options` say so.

    Raises:
        ConfigError: The source has not what the options ask for.
    """
    index = _open(options, cache)
    try:
        gives_paths = options.samples.members is MemberForm.PATH and options.samples.content_columns != ()
        if gives_paths and isinstance(index, ShardIndex | LazyShardIndex) and index.holds_values:
            where = urls.redact(index.src)
            raise ConfigError(f"members='path': {where} has shards of values, in which there are no files: leave it out")
    except BaseException:
        index.close()
        raise
    return index


def _open(options: DatasetOptions, cache: Cache) -> Index:
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
    lazy = open_lazy_index(
        options.index,
        directory,
        cache.fetcher,
        show_progress=show_progress,
        identity=cache.identity,
        store=store,
        keep=partial(tables_to_keep, options, cache),
    )
    if isinstance(lazy, LazyShardIndex):
        note_left_out(lazy, cache.session)
    return lazy


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
    are_commands = all(urls.is_command(shard.url) for shard in shards)  # which are run for whole shards in any case
    use = ShardUse(
        num_bytes=num_bytes,
        window_bytes=num_bytes,
        wanted_share=1.0 if takes_all or are_commands else 0.0,  # not known
        num_nodes=options.order.layout.whole.num_nodes,
    )
    limit_bytes = cache.session.limit_in_force()
    is_whole = are_commands or choose_unit(ShardUnit(samples.shards), use, limit_bytes).unit is ShardUnit.WHOLE
    if not is_whole or (limit_bytes is not None and num_bytes > limit_bytes):
        return None
    return CachedShards(cache, cache.session.register(options.name or default_name(src), src, ""))


def tables_to_keep(options: DatasetOptions, cache: Cache, _src: str, shards: Sequence[SourceFile]) -> CachedShards | None:
    """Return what brings shards whole whose tables are not known, and are found as they come; None: they are read in ranges."""
    share = float(options.samples.content_columns != ())
    use = shard_use(options, [shard.size_bytes or 0 for shard in shards], share)
    are_commands = all(urls.is_command(shard.url) for shard in shards)
    unit = table_unit(options, use, cache, are_commands=are_commands)
    return CachedShards(cache, None) if unit is ShardUnit.WHOLE else None


def shard_use_of(options: DatasetOptions, index: ShardIndex | LazyShardIndex) -> ShardUse:
    """Return what an epoch takes of the shards of an index."""
    wanted = options.samples.content_columns
    share = index.wanted_share([column.name for column in index.content_columns] if wanted is None else wanted)
    return shard_use(options, index.shard_sizes(), share)


def table_unit(options: DatasetOptions, use: ShardUse, cache: Cache, *, are_commands: bool) -> ShardUnit:
    """Return in what unit shards are fetched whose tables are not known: whole ones are kept for their samples."""
    if are_commands:  # which are run for whole shards in any case
        return ShardUnit.WHOLE
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
    elif order.has_auto_blocks:
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
