"""Content that stays in its Parquet files: columns of pictures, sound and videos, of which an index file has no copy.

As rows are indexed the column chunks of content are not read. The index file has the footers of the files, and says which rows
are in which row group (`ChunkTables`); a reader of the content of a row asks which bytes of its row group it is in
(`place_of`), brings these, and gives them back to `read`, as with a lazy index. Smaller pieces were rejected: most writers
say nowhere in which page a row is.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream.config import IndexOptions
from sqlstream.errors import DamagedShardError, SourceChangedError
from sqlstream.index.build.chunks import ChunkPlace
from sqlstream.index.build.content_index import ContentIndex
from sqlstream.index.build.join import JoinedTables
from sqlstream.index.build.parquet.chunks import PLACES, ChunkTables, ParquetChunks
from sqlstream.index.build.parquet.row_groups import (
    RangedTable,
    content_columns,
    largest_group_bytes,
    parse_footer,
    read_footer,
)
from sqlstream.index.build.shards import PlacesOfResult, PlacesOfShard, ShardIndex, Shards, has_members
from sqlstream.index.file.index import Index
from sqlstream.index.file.writer import IndexWriter
from sqlstream.index.sources.base.access import check_same, local_copy, local_file, named_errors, stat_file
from sqlstream.index.sources.base.base import BATCH_ROWS, PLAIN, TableFile
from sqlstream.index.sources.base.byte_source import LocalBytes
from sqlstream.index.sources.formats.by_extension import open_table
from sqlstream.index.sources.plan.parts import ShardPart, SourcePart, innermost, over, parquet_part
from sqlstream.index.sources.plan.source_plan import SourcePlan
from sqlstream.index.sources.shards.layout import Scratch
from sqlstream.index.sources.shards.samples import ShardSamples
from sqlstream.index.types.models import Column
from sqlstream.index.types.schema import normal_type
from sqlstream.order.permute import Int64Array
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader

logger = logging.getLogger(__name__)

_WHOLE_BYTES = 1 << 20  # a remote file of so many is downloaded as it is: that costs less than a second request


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentInPlace:
    """The content columns of a Parquet file, which stay there."""

    names: tuple[str, ...]
    digest: bytes
    """The footer of the file."""
    metadata: pq.FileMetaData

    def write(self, writer: IndexWriter, number: int, first_row: int, joins: JoinedTables | None) -> None:
        """Note in an index file where the content of rows is that have been written; see `LeftContent`."""
        tables = ChunkTables(writer.connection)
        tables.add_footer(number, self.digest)
        row = start = max(first_row, tables.end)
        for group in range(self.metadata.num_row_groups):
            if num_rows := self.metadata.row_group(group).num_rows:
                tables.add_chunk(number, range(group, group + 1), row, num_rows)
                row += num_rows
        if joins is not None and joins.leaves_out:
            tables.add_places(first_row, islice(joins.kept(iter(range(start, row))), writer.num_rows - first_row))


class LeftContent(Protocol):
    """Content of a part of a source that stays in its files."""

    @property
    def names(self) -> Sequence[str]:
        """Columns that no query sees: rows have NULL there."""
        ...

    @property
    def digest(self) -> bytes:
        """What stands for their values, see `Content.values`."""
        ...

    def write(self, writer: IndexWriter, number: int, first_row: int, joins: JoinedTables | None) -> None:
        """Note in an index file where the content of rows is that have been written.

        Args:
            writer: Of the index file.
            number: Position of the part in the source.
            first_row: The first of its rows, of which as many as were asked for (`max_size`) were written.
            joins: What was joined to them; rows may have been left out for it.
        """
        ...


class OpenPart(NamedTuple):
    """A part of a source, to be copied into an index."""

    table: TableFile
    """Its rows; content that stays in place is NULL in them."""
    content: LeftContent | None
    """What stays in place; None: nothing."""
    damage: DamagedShardError | None = None
    """Why no row of it is used: not even its columns are known; None: they are, and its rows."""


@contextlib.contextmanager
def open_part(
    part: SourcePart,
    number: int,
    plan: SourcePlan,
    options: IndexOptions,
    scratch: Scratch,
    remote: RemoteReader,
    shards: Iterator[ShardSamples],
) -> Iterator[OpenPart]:
    """Give a part of a source; of a remote Parquet file with content, only the footer and what is copied is read.

    Args:
        part: The part.
        number: Its position in the source.
        plan: The source.
        options: What is kept of it, and which columns are called content.
        scratch: Where what is downloaded or unpacked is written.
        remote: Reads what is not local.
        shards: The samples of shards, from this part on.

    Raises:
        SourceChangedError: The file changed meanwhile.
    """
    if isinstance(innermost(part), ShardPart):
        samples = next(shards).at(number, len(plan.joined_parts) + number)
        yield OpenPart(over(part, samples), PlacesOfShard(samples), None if samples.parts else samples.damage)
        return
    parquet = parquet_part(part)
    if parquet is None:
        with part.open(scratch.path, remote) as table:
            yield OpenPart(table, None)
        return
    file, name = parquet.source, urls.redact(parquet.source.url)
    is_large = urls.is_remote(file.url) and file.size_bytes is not None and file.size_bytes > _WHOLE_BYTES
    if is_large:
        with named_errors(file.url):
            footer = read_footer(file, remote)
        if (content := _content_of(footer, name, plan, options)) is not None:
            ranged = RangedTable(content.metadata, file, remote)
            yield OpenPart(over(part, _WithoutContent(ranged, content)), content)
            now = stat_file(file.url, remote, file.access)
            check_same(file, now)
            if now.content != file.content:
                raise SourceChangedError(f"{name} changed while it was indexed: wait until its writer is done, and start again")
            return
    with local_copy(file, scratch.path("download"), remote) as path:
        whole = open_table(LocalBytes(path), file.url, PLAIN)
        known = file.size_bytes is not None or not urls.is_remote(file.url)  # else nothing can be asked for by range later
        content = _content_of(read_footer(local_file(path), remote), name, plan, options) if known else None
        yield OpenPart(over(part, whole if content is None else _WithoutContent(whole, content)), content)


def _content_of(footer: bytes, name: str, plan: SourcePlan, options: IndexOptions) -> ContentInPlace | None:
    """Return what of a file stays in place; None: nothing.

    Args:
        footer: Its footer.
        name: The file, for messages.
        plan: The source.
        options: What is kept of it.
    """
    metadata = parse_footer(footer, name)
    keys = {plan.key_column, None if options.join is None else options.join.on}
    kept = options.columns_to_keep
    names = []
    for column in content_columns(metadata, options.columns_to_download):
        if column in keys or (kept is not None and column not in (*kept, *options.columns_to_download)):
            continue
        if (size := largest_group_bytes(metadata, column)) > options.largest_content_bytes:
            logger.warning(
                "%s: a row group has %d MiB of content in %r, more than the %d MiB that a process takes into memory: its bytes "
                "are copied into the index; write it with smaller row groups, then they stay where they are",
                *(name, size >> 20, column, options.largest_content_bytes >> 20),
            )
            continue
        names.append(column)
    return ContentInPlace(names=tuple(names), digest=footer, metadata=metadata) if names else None


class _WithoutContent:
    """A Parquet file in which content is not read: it is NULL.

    Args:
        table: The file.
        content: What of it is content.
    """

    def __init__(self, table: TableFile, content: ContentInPlace) -> None:
        self._table, self._content = table, content

    def schema(self) -> pa.Schema:
        """Return all columns."""
        return self._table.schema()

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows, content as NULL."""
        schema, left = self.schema(), self._content.names
        read = [name for name in names if name not in left]
        for batch in self._table.batches(read) if read else self._empty():
            columns = [
                batch.column(name) if name in read else pa.nulls(batch.num_rows, normal_type(schema.field(name).type))
                for name in names
            ]
            yield pa.RecordBatch.from_arrays(columns, names=list(names))

    def _empty(self) -> Iterator[pa.RecordBatch]:
        """Yield rows of which nothing is read."""
        for start in range(0, self._content.metadata.num_rows, BATCH_ROWS):
            num_rows = min(BATCH_ROWS, self._content.metadata.num_rows - start)
            yield pa.RecordBatch.from_arrays([pa.nulls(num_rows)], names=[""])


class RowGroupIndex(ContentIndex):
    """An index of which some columns stay in the Parquet files of its source: rows are read by row groups."""

    _files: ParquetChunks

    @cached_property
    def bounds(self) -> Int64Array:
        """For each chunk, a row group: its number, its first row, and the end of its rows: [num_chunks, 3]."""
        found = self.stored("SELECT chunk, first_row, first_row + num_rows FROM chunks ORDER BY first_row")
        return np.array(found, np.int64).reshape(-1, 3)

    @property
    def group_rows(self) -> int:
        """Rows of a usual row group."""
        return int(np.median(self.bounds[:, 2] - self.bounds[:, 1]))

    def chunks_of(self, row_ids: Sequence[int]) -> Int64Array:
        """Return for each row its chunk, and which of the chunk's rows it is; a chunk of -1: nothing of the row is in place.

        Args:
            row_ids: The rows.

        Returns:
            Chunk, and row of the chunk: [n, 2].
        """
        wanted = _places(self, row_ids) if self._has_places else np.asarray(row_ids, np.int64)  # [n]
        bounds = self.bounds  # [num_chunks, 3]
        at = np.searchsorted(bounds[:, 1], wanted, side="right") - 1  # [n]
        starts, stops = bounds[np.maximum(at, 0), 1], bounds[np.maximum(at, 0), 2]  # [n]
        is_in = (at >= 0) & (wanted < stops)
        return np.stack([np.where(is_in, bounds[np.maximum(at, 0), 0], -1), wanted - starts], axis=1)

    def place_of(self, number: int, names: Sequence[str]) -> ChunkPlace:
        """Return where the content of a chunk is, of some columns."""
        return self._files.place_of(number, self._left(names))

    def read(self, number: int, files: Sequence[Path], names: Sequence[str]) -> pa.RecordBatch:
        """Return the content of the rows of a chunk, with those of the columns that its file has.

        Args:
            number: Of the chunk.
            files: The bytes of each span of its place.
            names: Some of the columns in place.

        Raises:
            SourceError: They are not what was indexed; a local file changed.
        """
        return self._files.read(number, files, self._left(names))

    @cached_property
    def _has_places(self) -> bool:
        return _has_places(self)

    def may_lack_bytes(self, number: int, name: str) -> bool:
        """Return whether some rows of a chunk may have a path in place of bytes."""
        return self._files.may_lack_bytes(number, name, self._left([name]))

    def _left(self, names: Sequence[str]) -> _LeftColumns:
        columns = tuple(column for column in self.content_columns if column.name in names)
        return _LeftColumns(path=self.path, columns=columns, stored=self.stored)


@dataclass(slots=True, kw_only=True)
class _LeftColumns:
    """The file of an index, of which only columns in place are looked at: a `ChunkStore`."""

    path: Path
    columns: Sequence[Column]
    stored: Callable[..., list[tuple[Any, ...]]]


def _has_places(index: Index) -> bool:
    return bool(index.stored("SELECT 1 FROM sqlite_master WHERE name = ?", (PLACES,)))


def _places(index: Index, row_ids: Sequence[int]) -> Int64Array:
    """Return the place of each row among those of all chunks, -1 for none: [n]."""
    statement = f"SELECT row, place FROM {PLACES} WHERE row IN (SELECT value FROM json_each(?))"
    found = dict(index.stored(statement, (json.dumps(list(map(int, row_ids))),)))
    return np.array([found.get(int(row_id), -1) for row_id in row_ids], np.int64)


class ContentOfResult:
    """Where the content is of the rows that a query gives, while the index file of its result is written.

    Args:
        base: The index that is queried.
        writer: Of the result, whose own columns are there already: content that they replace is left out.
    """

    def __init__(self, base: Index, writer: IndexWriter) -> None:
        self._base, self._writer = base, writer
        columns = [column for column in base.columns if column.is_in_place and column.name not in writer.columns]
        self.names = tuple(column.name for column in columns)
        """Columns that stay in their files."""
        for column in columns:
            writer.add_column(column.field, column.declared)
        self._tables, self._base_has_places = ChunkTables(writer.connection), _has_places(base)
        for footer in base.stored("SELECT source, footer FROM footers"):
            self._tables.add_footer(*footer)
        statement = "SELECT source, first_group, num_groups, first_row, num_rows FROM chunks ORDER BY chunk"
        for source, group, num_groups, *rows in base.stored(statement):
            self._tables.add_chunk(source, range(group, group + num_groups), *rows)

    def add(self, row_ids: Sequence[int]) -> None:
        """Note which rows of the base are written next."""
        places = _places(self._base, row_ids).tolist() if self._base_has_places else row_ids
        self._tables.add_places(self._writer.num_rows, places)

    def finish(self) -> None:
        """Note what stays in its files, once there are rows."""
        if self.names:
            content = self._base.content
            self._writer.leave_in_place(self.names, b"" if content is None else content.values.encode())


def content_of_result(base: Index, writer: IndexWriter) -> ContentOfResult | PlacesOfResult | None:
    """Return what notes where the content of a query's rows is, see `ContentOfResult`; None: they have none."""
    if has_members(base):
        return PlacesOfResult(base, writer)
    return ContentOfResult(base, writer) if any(column.is_in_place for column in base.columns) else None


def with_content(index: Index, plan: SourcePlan) -> Index:
    """Return an index with its content, as far as that is in place.

    Args:
        index: All rows of the source, or some of them.
        plan: The source.
    """
    if has_members(index):
        index.close()
        return ShardIndex.of(index, Shards.of(plan.parts, len(plan.joined_parts)))
    if not any(column.is_in_place for column in index.columns):
        return index
    index.close()  # the other one opens the file itself
    return RowGroupIndex.of(index, ParquetChunks([parquet_part(part) for part in plan.parts]))
