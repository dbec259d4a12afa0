"""Opens a lazy index: plans the source, reads the footers of its Parquet files, writes down what they say."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from sqlstream.config import IndexOptions
from sqlstream.errors import ConfigError
from sqlstream.index.build.build import begin_source, finish, planned
from sqlstream.index.build.checks import check_downloads, check_key, warn_of_names
from sqlstream.index.build.chunks import ChunkSource
from sqlstream.index.build.lazy import LazyIndex
from sqlstream.index.build.lazy_shards.chunks import ShardChunks, members_path
from sqlstream.index.build.lazy_shards.index import LazyShardIndex, drop_kept
from sqlstream.index.build.lazy_shards.opening import first_shards, write_shards
from sqlstream.index.build.lazy_shards.table import encoded
from sqlstream.index.build.parquet.chunks import ParquetChunks, ParquetPart, with_footers, write_parquet_chunks
from sqlstream.index.build.shared import build_shared, check_shareable
from sqlstream.index.build.target import Target, find_grown, target_of
from sqlstream.index.file.found import Found, FoundChunks
from sqlstream.index.file.intact import check_plain
from sqlstream.index.file.room import IndexRoom
from sqlstream.index.file.store import IndexStore
from sqlstream.index.file.workplace import Workplace, build_once
from sqlstream.index.file.writer import IndexWriter
from sqlstream.index.sources.base.base import TableFile
from sqlstream.index.sources.plan.item import label
from sqlstream.index.sources.plan.parts import ShardPart, innermost, parquet_part
from sqlstream.index.sources.plan.plan import source_items
from sqlstream.index.sources.plan.source_plan import SourcePlan
from sqlstream.index.sources.shards.layout import KeepsShards, Scratch
from sqlstream.index.sql.expressions import condition_of
from sqlstream.progress import progress
from sqlstream.storage.base.identity import Identity
from sqlstream.storage.base.protocols import RemoteReader

logger = logging.getLogger(__name__)


class _Write(Protocol):
    """Writes the file of an index."""

    def __call__(
        self,
        plan: SourcePlan,
        options: IndexOptions,
        target: Target,
        place: Workplace,
        remote: RemoteReader,
        *,
        show_progress: bool,
    ) -> None:
        """Write it at its place."""
        ...


def open_lazy_index(
    options: IndexOptions,
    directory: Path,
    remote: RemoteReader,
    *,
    show_progress: bool = True,
    identity: Identity | None = None,
    store: IndexStore | None = None,
    keep: KeepsShards | None = None,
) -> LazyIndex:
    """Return the lazy index of a source of Parquet files, of which the footers are read, or of shards: the first one is read.

    Args:
        options: The source, what is kept of it, the filter, and `lazy`.
        directory: Where index files are (`<dst>/index`); exists.
        remote: Reads what is not local.
        show_progress: Show a bar while footers are read, if stderr is a terminal.
        identity: What else than its URL identifies a source; None: nothing.
        store: Where built indexes are shared; None: nowhere.
        keep: Brings whole shards, which are kept for their samples; None: their tables are read in ranges.

    Raises:
        ConfigError: The source is not made of Parquet files or shards, or is of this machine and there is a `store`; an option
            needs all rows.
        QueryError: The filter needs more than one row at a time, or does not run.
        SourceError: A file is broken, or lacks what is asked for.
    """
    condition = condition_of(options.sql_query, options.where)
    if options.sql_engine != "sqlite":
        raise ConfigError("sql_engine='duckdb' filters whole tables: leave it or lazy_index_chunk_size out")
    for item in source_items(options.src):
        if not isinstance(item, str):  # said before a function is asked for all its rows
            raise _not_parquet(label(item))
    with planned(options, directory, remote) as (found, roomy):
        plan = found
        check_shareable(plan, store)
        kind: type[LazyIndex] = LazyIndex
        chunks: ChunkSource
        write: _Write
        if all(isinstance(innermost(part), ShardPart) for part in plan.parts):
            options = replace(options, lazy=replace(options.lazy, chunk_rows=1) if options.lazy else None)  # a shard is a chunk
            kind, chunks = LazyShardIndex, ShardChunks(plan.parts, IndexRoom(directory, options))
            write = partial(_build_shards, chunks=chunks, keep=keep or (lambda _, __: None))
        else:
            parts = with_footers([_parquet(part, plan) for part in map(parquet_part, plan.parts)], roomy)
            plan, chunks = replace(plan, parts=tuple(parts)), ParquetChunks(parts)
            write = partial(_build, parts=parts)
    target = target_of(plan, options, identity)
    path = directory / f"{target.key}.sqlite"
    max_rows = options.max_size
    index = kind(path, chunks=chunks, condition=condition, max_rows=max_rows, base_url=plan.paths_base_url)
    index.provenance = plan.provenance

    def build(place: Workplace) -> LazyIndex:
        find_grown(plan, options, target, directory)
        write(plan, options, target, place, roomy, show_progress=show_progress)
        return index

    def find() -> LazyIndex | None:
        return index if index.is_usable() else None

    def check() -> None:
        find_grown(plan, options, target, directory)

    build_shared(store, options, (directory, target.key), find, build, check=check, show_progress=show_progress)
    if isinstance(index, LazyShardIndex):
        index.look_for_missing(remote)
    check_key(index, options)
    check_downloads(index, options)
    if condition is not None:
        warn_of_names(index, condition, options.sql_engine)
    return with_filter(index, directory)


def with_filter(index: LazyIndex, directory: Path) -> LazyIndex:
    """Return an index that is held, with the file of what its filter keeps, if it has a filter.

    Args:
        index: The index; its own file is there.
        directory: Where index files are.

    Raises:
        QueryError: The filter does not run.
    """
    if index.condition is not None:
        index.check_condition()
    files = index.own_files()
    for path, num_bytes in files.items():
        check_plain(path)
        find, make = partial(_found, path, num_bytes), partial(_made, index, path, num_bytes)
        build_once(directory, path.name.replace(".", "-"), find, make, is_brief=True)
    index.hold(*files)
    return index


def _found(path: Path, num_bytes: int) -> Path | None:
    """Return a file that is there, with what it has of its chunks at its start."""
    if not path.exists():
        return None
    if path.stat().st_size < num_bytes:
        logger.warning("%s was cut short: what it says is found out again", path)
        return None
    return path


def _made(index: LazyIndex, path: Path, num_bytes: int, place: Workplace) -> Path:
    """Make a file in which nothing is noted yet."""
    index.made_anew(path)
    return place.publish(_emptied(place.temporary(path.suffix.lstrip(".")), num_bytes), path.name)


def _emptied(path: Path, num_bytes: int) -> Path:
    with open(path, "wb") as file:
        file.truncate(num_bytes)
    return path


def _parquet(part: ParquetPart | None, plan: SourcePlan) -> ParquetPart:
    if part is None:
        raise _not_parquet(plan.src)
    return part


def _not_parquet(src: str) -> ConfigError:
    return ConfigError(
        f"lazy_index_chunk_size needs Parquet files, whose rows can be read in groups, or shards, but {src} is not made of "
        "them: leave it out, then the index is built whole"
    )


def _build(
    plan: SourcePlan,
    options: IndexOptions,
    target: Target,
    place: Workplace,
    remote: RemoteReader,
    *,
    parts: Sequence[ParquetPart],
    show_progress: bool,
) -> None:
    assert options.lazy is not None
    temporary = place.temporary()
    with (
        contextlib.closing(IndexWriter(temporary, plan.key_column, room=IndexRoom(temporary.parent, options))) as writer,
        progress(len(parts), " files", f"reading footers of {plan.src}", show_progress) as bar,
    ):

        def begin(number: int, table: TableFile) -> None:
            begin_source(parts[number].source, table, writer, options, (plan.key_column, target.digests[number]))
            bar.update(1)

        write_parquet_chunks(parts, writer, remote, options.lazy.chunk_rows, begin)
        finish(writer, plan, options, target, is_lazy=1, chunk_rows=options.lazy.chunk_rows)
    place.publish(temporary, f"{target.key}.sqlite")


def _build_shards(
    plan: SourcePlan,
    options: IndexOptions,
    target: Target,
    place: Workplace,
    remote: RemoteReader,
    *,
    chunks: ShardChunks,
    keep: KeepsShards,
    show_progress: bool,
) -> None:
    del show_progress  # one shard is read
    temporary, room = place.temporary(), IndexRoom(place.directory, options)
    first = first_shards(chunks, keep, remote, Scratch(place.temporary, room.on_growth))
    if (error := first[0].error) is not None and all(shard.error is not None for shard in first):
        raise error
    with contextlib.closing(IndexWriter(temporary, plan.key_column, room=room)) as writer:
        write_shards(writer, plan, options, target, chunks, first)
    members = members_path(place.directory / f"{target.key}.sqlite")
    tables = FoundChunks(_emptied(place.temporary("members"), FoundChunks.size_bytes(len(chunks))), len(chunks))
    for number in (number for number, shard in enumerate(first) if shard.error is None or shard.table.is_missing):
        tables.write(number, Found(first[number].table.rows.num_rows, encoded(first[number].table)))
    drop_kept(place.directory / f"{target.key}.sqlite")
    place.publish(tables.path, members.name)
    place.publish(temporary, f"{target.key}.sqlite")
