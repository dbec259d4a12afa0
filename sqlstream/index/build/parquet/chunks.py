"""Row groups of Parquet files as chunks: what their footers say is in the file of the index."""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream.errors import SourceError
from sqlstream.index.build.chunks import ChunkPlace, ChunkStore
from sqlstream.index.build.parquet.row_groups import (
    RowGroupTable,
    WithoutBytes,
    group_spans,
    parse_footer,
    read_footer,
    without_bytes,
)
from sqlstream.index.file.connection import damaged
from sqlstream.index.file.writer import IndexWriter
from sqlstream.index.sources.base.access import named_errors
from sqlstream.index.sources.base.ahead import ReadsAhead
from sqlstream.index.sources.base.base import TableFile
from sqlstream.index.sources.base.derived import derived_rows
from sqlstream.index.sources.base.unfold import together as as_one
from sqlstream.index.sources.plan.parts import DerivedPart, FilePart, over, parquet_part
from sqlstream.order.permute import Int64Array
from sqlstream.storage.base import urls
from sqlstream.storage.base.etags import has_own_version
from sqlstream.storage.base.protocols import RemoteReader

ParquetPart: TypeAlias = FilePart | DerivedPart
_KEPT_FOOTERS = 8  # those of the chunks that are shuffled together; a footer may take some MiB
_SCHEMA = """
CREATE TABLE IF NOT EXISTS footers (source INTEGER PRIMARY KEY, footer BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS chunks (chunk INTEGER PRIMARY KEY, source INTEGER NOT NULL, first_group INTEGER NOT NULL,
    num_groups INTEGER NOT NULL, first_row INTEGER NOT NULL, num_rows INTEGER NOT NULL) STRICT;
"""
PLACES = "places"
"""Table of the place of a row among those of all chunks, where its number does not say it: rows between were left out."""


class ParquetChunks:
    """Neighbouring row groups of one file are a chunk.

    Args:
        parts: The files, in the order of the index: their URLs may hold credentials, which its file does not. None: another
            part of the source, which has no chunks.
    """

    def __init__(self, parts: Sequence[ParquetPart | None]) -> None:
        self._parts = tuple(parts)
        self._footers: OrderedDict[int, pq.FileMetaData] = OrderedDict()

    def __reduce__(self) -> tuple[type[ParquetChunks], tuple[Sequence[ParquetPart | None]]]:
        return (ParquetChunks, (self._parts,))

    @property
    def are_remote(self) -> bool:
        """Some files are not on this machine."""
        return any(part is not None and urls.is_remote(part.source.url) for part in self._parts)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(part.source.size_bytes or 0 for part in self._parts if part is not None)

    def bounds(self, store: ChunkStore) -> Int64Array:
        """Return the first row of each chunk, and the end: [num_chunks + 1]."""
        table = np.array(store.stored("SELECT first_row, num_rows FROM chunks ORDER BY chunk"), np.int64)  # [num_chunks, 2]
        return np.append(table[:, 0], table[-1].sum())

    def counts(self, store: ChunkStore) -> None:
        """Return None: footers say it."""

    def look_up(self, numbers: Sequence[int], store: ChunkStore, remote: RemoteReader, *, in_ranges: bool) -> None:
        """Nothing is left to learn: footers are read as the index is opened."""

    def place_of(self, number: int, store: ChunkStore) -> ChunkPlace:
        """Return where the bytes of a chunk are."""
        source, groups = self._groups(number, store)
        file = self._part(source).source
        if not urls.is_remote(file.url):
            return ChunkPlace(file=file, spans=())
        assert file.size_bytes is not None  # see read_footer
        names = [column.name for column in store.columns]
        spans = tuple(group_spans(self._footer(source, store), groups, names, file.size_bytes))
        version = file.etag or ""
        footer = b"" if has_own_version(file.etag) else self._footer_bytes(source, store)
        if footer:
            version += f" {blake2b(footer, digest_size=16).hexdigest()}"
        return ChunkPlace(file=file, spans=spans, version=version, ending=footer)

    def may_lack_bytes(self, number: int, name: str, store: ChunkStore) -> bool:
        """Return whether rows of a chunk may have no bytes in a column of content: a struct then may have a path."""
        source, groups = self._groups(number, store)
        footer = self._footer(source, store)
        is_there = name in footer.schema.to_arrow_schema().names
        return is_there and any(without_bytes(footer, group, name) is not WithoutBytes.NONE for group in groups)

    def read(self, number: int, files: Sequence[Path], store: ChunkStore) -> pa.RecordBatch:
        """Return the rows of a chunk, with those columns of the index that its file has."""
        source, groups = self._groups(number, store)
        place, part = self.place_of(number, store), self._part(source)
        name = urls.redact(place.file.url)
        with place.opened(files) as opened:
            table = over(part, RowGroupTable(self._footer(source, store), name, opened, groups, is_copied=bool(place.spans)))
            own = set(table.schema().names)
            rows = derived_rows(table, [column.name for column in store.columns if column.name in own])
            return as_one((batch for batch, _ in rows), name)

    def _part(self, source: int) -> ParquetPart:
        part = self._parts[source]
        assert part is not None, "a part without chunks has none"
        return part

    def _groups(self, number: int, store: ChunkStore) -> tuple[int, range]:
        ((source, first, num_groups),) = store.stored(
            "SELECT source, first_group, num_groups FROM chunks WHERE chunk = ?", (number,)
        )
        return source, range(first, first + num_groups)

    def _footer_bytes(self, source: int, store: ChunkStore) -> bytes:
        ((footer,),) = store.stored("SELECT footer FROM footers WHERE source = ?", (source,))
        return bytes(footer)

    def _footer(self, source: int, store: ChunkStore) -> pq.FileMetaData:
        """Return what the footer of a file says; the last ones are kept, as chunks of a window ask for the same."""
        if (known := self._footers.get(source)) is not None:
            return known
        name = f"the footer of {urls.redact(self._part(source).source.url)}"
        try:
            metadata = parse_footer(self._footer_bytes(source, store), name)
        except SourceError as error:  # it was whole when it was written here
            raise damaged(store.path, error) from error
        self._footers[source] = metadata
        while len(self._footers) > _KEPT_FOOTERS:
            self._footers.popitem(last=False)
        return metadata


class ChunkTables:
    """The tables of an index file that `ParquetChunks` reads, while the file is written.

    Args:
        connection: Of the file, which may have the tables already: then they go on.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        for statement in filter(str.strip, _SCHEMA.split(";")):
            connection.execute(statement)
        self._num_chunks, self.end = connection.execute(
            "SELECT count(*), ifnull(max(first_row + num_rows), 0) FROM chunks"
        ).fetchone()
        """The end of the rows of all chunks so far."""

    def add_footer(self, number: int, footer: bytes) -> None:
        """Keep the footer of a file, by the position of the file in the source."""
        self._connection.execute("INSERT INTO footers VALUES (?, ?)", (number, footer))

    def add_chunk(self, number: int, groups: range, first_row: int, num_rows: int) -> None:
        """Note neighbouring row groups of a file as a chunk.

        Args:
            number: Position of the file in the source.
            groups: The row groups.
            first_row: Row of the index that their rows begin with, or a place (`add_places`).
            num_rows: How many they are.
        """
        chunk = (self._num_chunks, number, groups.start, len(groups), first_row, num_rows)
        self._connection.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?)", chunk)
        self._num_chunks += 1

    def add_places(self, first_row: int, places: Iterable[int]) -> None:
        """Note for rows of the index, from the first on, which of the rows of all chunks they are."""
        self._connection.execute(
            f"CREATE TABLE IF NOT EXISTS {PLACES} (row INTEGER PRIMARY KEY, place INTEGER NOT NULL) STRICT"
        )
        self._connection.executemany(f"INSERT INTO {PLACES} VALUES (?, ?)", enumerate(places, first_row))


def write_parquet_chunks(
    parts: Sequence[ParquetPart],
    writer: IndexWriter,
    remote: RemoteReader,
    least_rows: int,
    begin: Callable[[int, TableFile], object],
) -> None:
    """Write down what the footers of all files say, for `ParquetChunks`.

    Args:
        parts: The files.
        writer: Of the index, which gets the number of their rows.
        remote: Reads what is not local.
        least_rows: Row groups of fewer rows are a chunk together.
        begin: (position of the file, its columns), before its rows are counted.
    """
    tables = ChunkTables(writer.connection)
    for number, (part, footer) in enumerate(zip(parts, _footers(parts, remote), strict=True)):
        name = urls.redact(part.source.url)
        metadata = parse_footer(footer, name)
        begin(number, over(part, RowGroupTable(metadata, name)))
        writer.add_content(footer)
        tables.add_footer(number, footer)
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        for groups in together(sizes, least_rows):
            num_rows = sum(sizes[groups.start : groups.stop])
            tables.add_chunk(number, groups, writer.num_rows, num_rows)
            writer.count_elsewhere(num_rows)


def with_footers(parts: list[ParquetPart], remote: RemoteReader) -> list[ParquetPart]:
    """Return the parts, with digests of their footers where a server names no versions: another footer is another version."""
    unversioned = [
        at for at, part in enumerate(parts) if urls.is_remote(part.source.url) and not has_own_version(part.source.etag)
    ]
    found = list(parts)
    for at, footer in zip(unversioned, _footers([parts[at] for at in unversioned], remote), strict=True):
        found[at] = _with_content(parts[at], blake2b(footer, digest_size=16).hexdigest())
    return found


def _with_content(part: ParquetPart, content: str) -> ParquetPart:
    if isinstance(part, FilePart):
        return replace(part, source=replace(part.source, content=content))
    inner = parquet_part(part.part)
    assert inner is not None
    return replace(part, part=_with_content(inner, content))


def _footers(parts: Sequence[ParquetPart], remote: RemoteReader) -> Iterator[bytes]:
    """Yield the footer of each part, several of them under way."""

    def read(part: ParquetPart, remote: RemoteReader) -> bytes:
        with named_errors(part.source.url):
            return read_footer(part.source, remote)

    with ReadsAhead(read, parts, remote) as footers:
        yield from footers


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
