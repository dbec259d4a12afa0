"""A lazy index: its rows stay in their files, in chunks that are read when they are needed.

Its file holds columns, sources and what its `ChunkSource` wrote down, so it is small and built at once; `rows` is empty. A
reader of rows asks which bytes they are in (`place_of`), brings these, and gives them back to `read`: the index knows no cache
and no network. What chunks are made of is the chunk source's; the filter, and the count of what it keeps, are here.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from sqlstream.errors import ConfigError, SourceError, UnknownLengthError
from sqlstream.index.build.chunks import ChunkPlace, ChunkSource
from sqlstream.index.file.found import FoundRows
from sqlstream.index.file.index import Index
from sqlstream.index.file.kept import KeptRows
from sqlstream.index.file.workplace import workplace
from sqlstream.index.file.writer import IndexWriter
from sqlstream.index.sql.functions import changes
from sqlstream.index.sql.sandbox import Sandbox, SharedProcess
from sqlstream.index.types.content import Content, named_query
from sqlstream.index.types.models import ROW, Column, Decode, fingerprint
from sqlstream.index.types.values import Encoded, decoder, encoder
from sqlstream.order.permute import Int64Array
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader

_ROWS_AT_A_TIME = 65_536
_MOST_KEPT_ROWS = 1 << 12
"""Rows of a chunk whose values are kept as an index file has them; arbitrary: more than most shards of samples have."""
_OBJECT_BYTES = 50  # of one of Python's, without its content


class ChunkRows:
    """The rows of a chunk that the filter keeps, in memory.

    Args:
        columns: Of the index.
        batch: The rows, with those of the columns that their file has.
        row_ids: Their ids, rising: [n].
        name: The file, for errors.
    """

    def __init__(self, columns: Sequence[Column], batch: pa.RecordBatch, row_ids: Int64Array, name: str) -> None:
        self.row_ids = row_ids
        own = set(batch.schema.names)
        arrays = [batch.column(column.name) if column.name in own else None for column in columns]
        self._columns = [_ChunkColumn.of(column, array, name) for column, array in zip(columns, arrays, strict=True)]
        self._names = [column.name for column in columns]
        self._values = self._all_values() if len(row_ids) <= _MOST_KEPT_ROWS else None
        self.nbytes: int = batch.nbytes
        """Bytes of it in memory."""
        if self._values is not None:  # their contents, and a header each
            self.nbytes += batch.nbytes + _OBJECT_BYTES * len(row_ids) * len(own)

    def _all_values(self) -> list[Sequence[Any] | None] | None:
        """Return all values, by columns; None: one has no exact form, which is the fault of its row alone.

        Where the rows of many chunks are mixed, they are asked for one by one, and Arrow takes as long for one as for many.
        """
        try:
            return [None if column.array is None else column.encode(column.array).values for column in self._columns]
        except SourceError:
            return None

    def rows(self, row_ids: Sequence[int] | Int64Array) -> list[dict[str, object]]:
        """Return the rows with these ids, as a built index gives them."""
        columns: list[list[Any]] = []
        for column, values in zip(self._columns, self._stored(row_ids), strict=True):
            decode = column.decode
            columns.append(values if decode is None else [None if value is None else decode(value) for value in values])
        return [dict(zip(self._names, row, strict=True)) for row in zip(*columns, strict=True)]

    def stored_rows(self, row_ids: Sequence[int] | Int64Array) -> list[tuple[Any, ...]]:
        """Return the same as a built index has them in its file: without what stays in shards."""
        columns = zip(self._columns, self._stored(row_ids), strict=True)
        return list(zip(*(values for column, values in columns if not column.is_in_place), strict=True))

    def _stored(self, row_ids: Sequence[int] | Int64Array) -> list[list[Any]]:
        at = self.row_ids.searchsorted(row_ids)  # [n]
        if (kept := self._values) is not None:
            places: list[int] = at.tolist()
            return [[None] * len(places) if values is None else [values[place] for place in places] for values in kept]
        return [[None] * len(at) if c.array is None else c.encode(_taken(c.array, at)).values for c in self._columns]


class _ChunkColumn(NamedTuple):
    """A column of a chunk."""

    array: pa.Array[Any] | None
    """Its values; None: the file has none."""
    encode: Callable[[pa.Array[Any]], Encoded]
    """Returns what a built index has in its file for some of them."""
    decode: Decode | None
    """Turns that back; None: it is the value itself."""
    is_in_place: bool
    """Its values stay in their shard."""

    @classmethod
    def of(cls, column: Column, array: pa.Array[Any] | None, name: str) -> Self:
        """Return a column of an index in a chunk."""
        encode = encoder(pa.nulls(0) if array is None else array, column.field, name)
        return cls(array, encode, decoder(column), column.is_in_place)


def _taken(array: pa.Array[Any], at: Any) -> pa.Array[Any]:
    """Return values by their places; `take` takes ten times as long as to cut one out (m)."""
    if len(at) == 1 and not pa.types.is_nested(array.type):  # a part of a nested array is cast with all that lies below it
        return array.slice(int(at[0]), 1)
    return array.take(_as_arrow(at.astype(np.int64)))


def _as_arrow(numbers: Int64Array) -> Any:
    """Return numbers as Arrow has them: given to its `take` as they are, it would import pandas, where that is installed."""
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers).data)])


class LazyIndex(Index):
    """Rows that stay in their files until they are needed; made by `lazy_build.open_lazy_index`.

    Args:
        path: The file with columns, sources and footers.
        chunks: Where its rows are.
        condition: What rows must fulfil, in SQL; None: nothing.
        max_rows: Only the first so many rows that fulfil it; None: all.
        base_url: Where relative paths start, when it holds credentials.
    """

    def __init__(
        self,
        path: Path,
        *,
        chunks: ChunkSource,
        condition: str | None = None,
        max_rows: int | None = None,
        base_url: str | None = None,
    ) -> None:
        self._apart, self._one_filter = SharedProcess(), threading.Lock()
        """Where the filter runs when its cost has no bound, one chunk at a time."""
        super().__init__(path, base_url=base_url)
        self._chunks = chunks
        self.condition = condition
        self._max_rows = max_rows
        weakref.finalize(self, self._apart.close)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["selection"]
        return {**state, "chunks": self._chunks, "condition": self.condition, "max_rows": self._max_rows}

    def _summary_of_rows(self, _num_rows: int) -> str:
        first = "" if self._max_rows is None else f"first {self._max_rows} "
        return f"{first}rows{'' if self.condition is None else f' where {self.condition}'} (lazy)"

    def __len__(self) -> int:
        length = self.known_length
        if length is None:
            num_known = int((self.sizes() >= 0).sum())
            what = "samples have been counted" if self.condition is None else f"the filter {self.condition} has been run"
            raise UnknownLengthError(
                f"the length of {self.src} is not known yet: {what} on {num_known} of {len(self.bounds) - 1} chunks. "
                "One whole pass finds it out, for later runs, too; or leave lazy_index_chunk_size out"
            )
        return length

    def narrowed(self, condition: str | None, max_rows: int | None) -> LazyIndex:
        """Return the index of those rows that also fulfil `condition`, of these at most `max_rows`.

        Raises:
            ConfigError: There is a condition, and the rows are counted already: chunks are filtered before that.
        """
        if condition is not None and self._max_rows is not None:
            raise ConfigError(
                f"the first {self._max_rows} rows of a lazy index are those that its whole filter keeps: filter before "
                "take() or max_size, or leave lazy_index_chunk_size out"
            )
        conditions = [some for some in (self.condition, condition) if some is not None]
        limits = [some for some in (self._max_rows, max_rows) if some is not None]
        index = type(self)(
            self.path,
            chunks=self._chunks,
            condition=" AND ".join(conditions) if conditions else None,
            max_rows=min(limits, default=None),
            base_url=self._base_url,
        )
        index.provenance = self.provenance
        return index

    @property
    def known_length(self) -> int | None:
        """Rows that the filter keeps; None until it has been run on all chunks."""
        sizes = self.sizes()
        return None if (sizes < 0).any() else int(sizes.sum())

    @property
    def num_rows(self) -> int:
        """Rows of all chunks, kept or not."""
        return int(self.bounds[-1])

    @cached_property
    def fingerprint(self) -> str:
        """Names source, version, columns, chunks and filter."""
        return fingerprint({"lazy": self.path.stem, "condition": self.condition, "max_rows": self._max_rows})

    @property
    def content(self) -> Content | None:
        """What its footers say, and which rows are selected, wherever the files lie; None: an earlier version wrote it."""
        if (whole := super().content) is None or (chunk_rows := self.meta.get("chunk_rows")) is None:
            return None
        return replace(whole, chunk_rows=int(chunk_rows), query=named_query(self.condition), max_size=self._max_rows)

    def close(self) -> None:
        """Close the file, and end the process of the filter; the next use opens and starts them again."""
        super().close()
        self._apart.close()

    def after_fork_in_child(self) -> None:
        """Leave what is the parent's to it."""
        super().after_fork_in_child()
        self._apart.forget()
        self._one_filter = threading.Lock()  # another thread of the parent may have held it

    # -- chunks -------------------------------------------------------------------------------------------------------

    @cached_property
    def bounds(self) -> Int64Array:
        """First row of each chunk, and the end: [num_chunks + 1]."""
        bounds = self._chunks.bounds(self)
        if self._max_rows is None or self.learns_sizes:
            return bounds
        return np.append(bounds[:-1][bounds[:-1] < self._max_rows], min(int(bounds[-1]), self._max_rows))

    @cached_property
    def learns_sizes(self) -> bool:
        """How many rows of a chunk are selected is known once it was read: there is a filter, or nothing else counts them."""
        return self.condition is not None or self._chunks.counts(self) is not None

    def at_epoch(self, epoch: int) -> None:
        """Take the epoch that is asked for next: all are the same."""

    def _known_counts(self) -> Int64Array:
        """Return how many rows of each chunk are selected, without `max_rows`: [num_chunks]."""
        return self._counts_of_chunks() if self.condition is None else self.kept.counts()

    def _counts_of_chunks(self) -> Int64Array:
        counts = self._chunks.counts(self)
        return np.diff(self.bounds) if counts is None else counts

    def sizes(self) -> Int64Array:
        """Return how many rows of each chunk the filter keeps, -1 where it is not known yet: [num_chunks].

        With `max_rows`, that is known of a chunk when all chunks before it have been counted, or enough rows found.
        """
        if not self.learns_sizes:
            return np.diff(self.bounds)
        counts = self._known_counts()
        if self._max_rows is None:
            return counts
        num_known = int(np.argmax(counts < 0)) if (counts < 0).any() else len(counts)
        ends = np.minimum(np.cumsum(counts[:num_known]), self._max_rows)
        is_enough = num_known == len(counts) or (num_known > 0 and ends[-1] == self._max_rows)
        rest = np.full(len(counts) - num_known, 0 if is_enough else -1)
        return np.concatenate((np.diff(ends, prepend=0), rest)).astype(np.int64)

    def to_count(self, chunks: Sequence[int]) -> list[int]:
        """Return which chunks must be read next, so that it becomes known how many rows of `chunks` are kept."""
        sizes = self.sizes()
        unknown = [chunk for chunk in chunks if sizes[chunk] < 0]
        return unknown if self._max_rows is None else [int(np.argmax(sizes < 0))] if unknown else []

    def look_up(self, numbers: Sequence[int], remote: RemoteReader, *, in_ranges: bool = False) -> None:
        """Learn what must be known of chunks before their places are asked for; see `ChunkSource.look_up`."""
        self._chunks.look_up(numbers, self, remote, in_ranges=in_ranges)

    def place_of(self, number: int) -> ChunkPlace:
        """Return where the bytes of a chunk are."""
        return self._chunks.place_of(number, self)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def read(self, number: int, files: Sequence[Path]) -> ChunkRows:
        """Return the rows of a chunk that the filter keeps; which these are is noted for all processes.

        Args:
            number: Of the chunk.
            files: The bytes of each span of its place.

        Raises:
            SourceError: They are not what was indexed; a local file changed.
            QueryError: The filter does not run on them.
        """
        batch = self._chunks.read(number, files, self)
        first_row = int(self.bounds[number])
        row_ids = np.arange(first_row, first_row + batch.num_rows, dtype=np.int64)
        if self.condition is not None:
            offsets = self.kept.offsets(number)
            if offsets is None:
                offsets = self._filter(number, batch)
            batch, row_ids = batch.take(_as_arrow(offsets)), row_ids[offsets]
        return ChunkRows(self.columns, batch, row_ids, urls.redact(self.place_of(number).file.url))

    @cached_property
    def kept(self) -> KeptRows | FoundRows:
        """What the filter keeps, as far as it has been run."""
        return KeptRows(self.kept_path, np.diff(self.bounds))

    def own_files(self) -> dict[Path, int]:
        """Return the files beside the index in which is noted what is learned, with their sizes while nothing is."""
        return {} if self.condition is None else {self.kept_path: KeptRows.size_bytes(np.diff(self.bounds))}

    def made_anew(self, path: Path) -> None:
        """Take note that one of these files is to be made anew, without what was noted in it."""

    @property
    def kept_path(self) -> Path:
        """Where that is."""
        parts: dict[str, object] = {
            "lazy": self.path.stem,
            "condition": self.condition,
            **changes(self.condition or "", "sqlite", self.columns),
        }
        return self.path.parent / f"{fingerprint(parts)}.kept"

    def check_condition(self) -> set[str]:
        """Return the columns that the condition reads.

        Raises:
            QueryError: It does not run.
        """
        with contextlib.closing(Sandbox(self, self._statement)) as sandbox:
            return {column.name for column in self.columns if column.physical in sandbox.columns_read}

    @property
    def _statement(self) -> str:
        return f"SELECT {ROW} FROM dataframe WHERE {self.condition}"

    def _filter(self, number: int, batch: pa.RecordBatch) -> Int64Array:
        """Run the condition on the rows of a chunk, in a small index of their own; one process at a time."""
        key = fingerprint({"chunk": number, "of": self.kept_path.stem})
        with workplace(self.path.parent, key, is_brief=True) as place:
            offsets = self.kept.offsets(number)
            if offsets is not None:  # another process has done it while we waited
                return offsets
            path = place.temporary("chunk")
            self._write(path, number, batch)
            with contextlib.closing(Index(path)) as table:
                rows = self._kept_rows(table)
            offsets = np.sort(np.array(rows, np.int64)) - int(self.bounds[number])
            self.kept.write(number, offsets)
            return offsets

    def _kept_rows(self, table: Index) -> list[int]:
        with self._one_filter:
            sandbox, is_over = Sandbox(table, self._statement, shared=self._apart), False
            try:
                _, found = sandbox.run(sandbox.statement, _ROWS_AT_A_TIME)
                rows = [row for some in found for (row,) in some]
                is_over = True
            finally:
                sandbox.close(is_over=is_over)
        return rows

    def _write(self, path: Path, number: int, batch: pa.RecordBatch) -> None:
        """Write a table of all columns, in which those have values that the condition reads."""
        wanted = self.check_condition() or {self.columns[0].name}
        with contextlib.closing(IndexWriter(path, self.wanted_key, first_row=int(self.bounds[number]))) as writer:
            writer.begin_source(self.place_of(number).file, pa.schema([]))
            # In this order, so that each has the same name in SQL.
            writer.add_columns((column.field, column.declared) for column in self.columns)
            for start in range(0, batch.num_rows, _ROWS_AT_A_TIME):
                names = [name for name in batch.schema.names if name in wanted] or batch.schema.names[:1]
                writer.write_batch(batch.select(names).slice(start, _ROWS_AT_A_TIME))
            writer.finish({}, is_durable=False)
