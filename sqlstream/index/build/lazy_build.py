"""Opens a lazy index: plans the source, reads the footers of its Parquet files, writes down what they say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from sqlstream.config import IndexOptions
from sqlstream.errors import ConfigError
from sqlstream.index.build.build import Target, begin_source, find_grown, finish, plan_of, target_of
from sqlstream.index.build.lazy import LazyIndex
from sqlstream.index.build.row_groups import RowGroupTable, parse_footer, read_footer
from sqlstream.index.file.intact import check_plain
from sqlstream.index.file.kept import KeptRows
from sqlstream.index.file.room import IndexRoom
from sqlstream.index.file.workplace import Workplace, build_once
from sqlstream.index.file.writer import IndexWriter
from sqlstream.index.sources.base.access import named_errors
from sqlstream.index.sources.plan.parts import DerivedPart, FilePart, parquet_part
from sqlstream.index.sources.plan.plan import SourcePlan
from sqlstream.index.sql.expressions import condition_of
from sqlstream.progress import progress
from sqlstream.storage.base import urls
from sqlstream.storage.base.identity import Identity
from sqlstream.storage.base.protocols import RemoteReader, has_own_version

_FOOTERS_AT_A_TIME = 16
_SCHEMA = """
CREATE TABLE footers (source INTEGER PRIMARY KEY, footer BLOB NOT NULL) STRICT;
CREATE TABLE chunks (chunk INTEGER PRIMARY KEY, source INTEGER NOT NULL, first_group INTEGER NOT NULL,
    num_groups INTEGER NOT NULL, first_row INTEGER NOT NULL, num_rows INTEGER NOT NULL) STRICT;
"""


def open_lazy_index(
    options: IndexOptions,
    directory: Path,
    remote: RemoteReader,
    *,
    show_progress: bool = True,
    identity: Identity | None = None,
) -> LazyIndex:
    """Return the lazy index of a source of Parquet files; only their footers are read.

    Args:
        options: The source, what is kept of it, the filter, and `lazy`.
        directory: Where index files are (`<dst>/index`); exists.
        remote: Reads what is not local.
        show_progress: Show a bar while footers are read, if stderr is a terminal.
        identity: What else than its URL identifies a source; None: nothing.

    Raises:
        ConfigError: The source is not made of Parquet files, or an option needs all rows.
        QueryError: The filter needs more than one row at a time, or does not run.
        SourceError: A file is broken, or lacks what is asked for.
    """
    condition = condition_of(options.sql_query, options.where)
    if options.sql_engine != "sqlite":
        raise ConfigError("sql_engine='duckdb' filters whole tables: leave it or lazy_index_chunk_size out")
    plan, remote = plan_of(options, directory, remote)
    parts = [_parquet(part, plan) for part in map(parquet_part, plan.parts)]
    parts = _with_footers(parts, remote)
    plan = replace(plan, parts=tuple(parts))
    target = target_of(plan, options, identity)
    path = directory / f"{target.key}.sqlite"
    max_rows = options.max_size
    index = LazyIndex(path, parts=parts, condition=condition, max_rows=max_rows, base_url=plan.paths_base_url)
    index.provenance = plan.provenance

    def build(place: Workplace) -> LazyIndex:
        find_grown(plan, options, target, directory)
        _build(plan, parts, options, target, place, remote, show_progress=show_progress)
        return index

    build_once(directory, target.key, lambda: index if index.is_usable() else None, build, show_progress=show_progress)
    if condition is None:
        index.hold()
        return index
    index.check_condition()
    kept = index.kept_path
    check_plain(kept)
    build_once(
        directory, kept.stem, lambda: kept if kept.exists() else None, lambda place: _make_kept(index, place), is_brief=True
    )
    index.hold(kept)
    return index


def _parquet(part: FilePart | DerivedPart | None, plan: SourcePlan) -> FilePart | DerivedPart:
    if part is None:
        raise ConfigError(
            f"lazy_index_chunk_size needs Parquet files, whose rows can be read in groups, but {plan.src} is not made of them: "
            "leave it out, then the index is built whole"
        )
    return part


def _make_kept(index: LazyIndex, place: Workplace) -> Path:
    temporary = place.temporary("kept")
    with open(temporary, "wb") as file:
        file.truncate(KeptRows.size_bytes(index.bounds[1:] - index.bounds[:-1]))
    return place.publish(temporary, index.kept_path.name)


def _build(
    plan: SourcePlan,
    parts: Sequence[FilePart | DerivedPart],
    options: IndexOptions,
    target: Target,
    place: Workplace,
    remote: RemoteReader,
    *,
    show_progress: bool,
) -> None:
    assert options.lazy is not None
    temporary, num_chunks = place.temporary(), 0
    with (
        contextlib.closing(IndexWriter(temporary, plan.key_column, room=IndexRoom(temporary.parent, options))) as writer,
        progress(len(parts), " files", f"reading footers of {plan.src}", show_progress) as bar,
    ):
        for statement in filter(str.strip, _SCHEMA.split(";")):
            writer.connection.execute(statement)
        for number, (part, footer) in enumerate(zip(parts, _footers(parts, remote), strict=True)):
            name = urls.redact(part.source.url)
            metadata = parse_footer(footer, name)
            table = part.over(RowGroupTable(metadata, name))
            begin_source(part.source, table, writer, options, (plan.key_column, target.digests[number]))
            writer.connection.execute("INSERT INTO footers VALUES (?, ?)", (number, footer))
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            for groups in together(sizes, options.lazy.chunk_rows):
                num_rows = sum(sizes[groups.start : groups.stop])
                chunk = (num_chunks, number, groups.start, len(groups), writer.num_rows, num_rows)
                writer.connection.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?)", chunk)
                writer.count_elsewhere(num_rows)
                num_chunks += 1
            bar.update(1)
        finish(writer, plan, options, target, is_lazy=1)
    place.publish(temporary, f"{target.key}.sqlite")


def _with_footers(parts: list[FilePart | DerivedPart], remote: RemoteReader) -> list[FilePart | DerivedPart]:
    """Return the parts, with digests of their footers where a server names no versions: another footer is another version."""
    unversioned = [
        at for at, part in enumerate(parts) if urls.is_remote(part.source.url) and not has_own_version(part.source.etag)
    ]
    found = list(parts)
    for at, footer in zip(unversioned, _footers([parts[at] for at in unversioned], remote), strict=True):
        found[at] = _with_content(parts[at], blake2b(footer, digest_size=16).hexdigest())
    return found


def _with_content(part: FilePart | DerivedPart, content: str) -> FilePart | DerivedPart:
    if isinstance(part, FilePart):
        return replace(part, source=replace(part.source, content=content))
    inner = parquet_part(part.part)
    assert inner is not None
    return replace(part, part=_with_content(inner, content))


def _footers(parts: Sequence[FilePart | DerivedPart], remote: RemoteReader) -> Iterator[bytes]:
    """Yield the footer of each part, several of them under way."""

    def read(part: FilePart | DerivedPart) -> bytes:
        with named_errors(part.source.url):
            return read_footer(part.source, remote)

    if len(parts) == 1:
        yield read(parts[0])
        return
    with ThreadPoolExecutor(_FOOTERS_AT_A_TIME, thread_name_prefix="footer") as pool:
        for start in range(0, len(parts), 64 * _FOOTERS_AT_A_TIME):  # so that not all of them are in memory
            yield from pool.map(read, parts[start : start + 64 * _FOOTERS_AT_A_TIME])


def together(sizes: Sequence[int], least_rows: int) -> Iterator[range]:
    """Yield neighbouring row groups that are read together; empty ones go with others.

    Example:
        >>> list(together([10, 10, 10, 50, 5], 20))
        [range(0, 2), range(2, 4), range(4, 5)]
    """
    start, num_rows = 0, 0
    for group, size in enumerate(sizes):
        num_rows += size
        if num_rows >= least_rows or (num_rows and group == len(sizes) - 1):
            yield range(start, group + 1)
            start, num_rows = group + 1, 0
