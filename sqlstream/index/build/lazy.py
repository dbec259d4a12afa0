"""A lazy index: its rows stay in Parquet files, whose row groups are read when they are needed.

Its file holds columns, sources and footers, so it is small and built at once; `rows` is empty. A reader of rows asks which
bytes they are in (`place_of`), brings these, and gives them back to `read`: the index knows no cache and no network.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sqlstream.errors import SourceChangedError, SourceError, UnknownLengthError
from sqlstream.index.build.row_groups import RowGroupTable, group_spans, has_footer, parse_footer
from sqlstream.index.file.index import Index, damage_named, damaged
from sqlstream.index.file.kept import KeptRows
from sqlstream.index.file.workplace import workplace
from sqlstream.index.file.writer import IndexWriter
from sqlstream.index.sources.base.access import local_file, named_errors
from sqlstream.index.sources.base.byte_source import ByteSource, LocalBytes, Pieces, Span
from sqlstream.index.sources.base.unfold import together
from sqlstream.index.sources.plan.parts import DerivedPart, FilePart
from sqlstream.index.sql.sandbox import Sandbox, SharedProcess
from sqlstream.index.types.models import ROW, Column, SourceFile, fingerprint
from sqlstream.index.types.values import decoder, encode_named
from sqlstream.order.permute import Int64Array
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader, has_own_version

_ROWS_AT_A_TIME = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Row groups of one file that are read together."""

    number: int
    source: int
    """Position of its file among the sources."""
    groups: range
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlace:
    """Where the bytes of a chunk are."""

    file: SourceFile
    spans: tuple[Span, ...]
    """What to bring of it; none of a local file, which is read in place."""
    version: str = ""
    """What tells its bytes from those of another version: that of the server, else a hash of the footer."""
    footer: bytes = field(default=b"", repr=False)
    """How the file ends, where its server names no versions; else empty."""

    def check_unchanged(self, remote: RemoteReader) -> None:
        """Compare the file, of which bytes have come, with what was indexed, where its server names no versions.

        Its footer is read again: it holds the places, sizes and (of most writers) the extremes of all columns.

        Raises:
            SourceChangedError: It is another version.
            StorageError: It cannot be read.
        """
        if self.footer:
            with named_errors(self.file.url):
                if not has_footer(self.file, self.footer, remote):
                    raise SourceChangedError(
                        f"{urls.redact(self.file.url)} changed since its footer was read: open the dataset again"
                    )


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
        self._name = name
        own = set(batch.schema.names)
        self._arrays = [(c, batch.column(c.name) if c.name in own else None, decoder(c)) for c in columns]

    def rows(self, row_ids: Int64Array) -> list[dict[str, object]]:
        """Return the rows with these ids, as a built index gives them."""
        at = np.searchsorted(self.row_ids, row_ids).astype(np.int64)  # [n]
        columns: dict[str, list[Any]] = {}
        for column, array, decode in self._arrays:
            if array is None:
                columns[column.name] = [None] * len(row_ids)
                continue
            values = encode_named(array.take(at), column.field, self._name).values
            columns[column.name] = values if decode is None else [None if value is None else decode(value) for value in values]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class LazyIndex(Index):
    """Rows that stay in their files until they are needed; made by `lazy_build.open_lazy_index`.

    Args:
        path: The file with columns, sources and footers.
        parts: The sources, in its order: their URLs may hold credentials, which the file does not.
        condition: What rows must fulfil, in SQL; None: nothing.
        max_rows: Only the first so many rows that fulfil it; None: all.
        base_url: Where relative paths start, when it holds credentials.
    """

    def __init__(
        self,
        path: Path,
        *,
        parts: Sequence[FilePart | DerivedPart],
        condition: str | None = None,
        max_rows: int | None = None,
        base_url: str | None = None,
    ) -> None:
        self._apart, self._one_filter = SharedProcess(), threading.Lock()
        """Where the filter runs when its cost has no bound, one chunk at a time."""
        super().__init__(path, base_url=base_url)
        self._parts = tuple(parts)
        self.condition = condition
        self._max_rows = max_rows
        self._last_footer: tuple[int, Any] | None = None
        weakref.finalize(self, self._apart.close)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["selection"]
        return {**state, "parts": self._parts, "condition": self.condition, "max_rows": self._max_rows}

    def __len__(self) -> int:
        length = self.known_length
        if length is None:
            num_known = int((self.sizes() >= 0).sum())
            raise UnknownLengthError(
                f"the length of {self.src} is not known yet: the filter {self.condition} has been run on {num_known} of "
                f"{len(self.bounds) - 1} chunks. One whole pass finds it out, for later runs, too; or leave "
                "lazy_index_chunk_size out"
            )
        return length

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
    def _table(self) -> Int64Array:
        """The chunks: source, first group, number of groups, first row, number of rows: [num_chunks, 5]."""
        with self._lock, damage_named(self.path):
            found = self._opened().connection.execute(
                "SELECT source, first_group, num_groups, first_row, num_rows FROM chunks ORDER BY chunk"
            )
            table = np.array(found.fetchall(), np.int64).reshape(-1, 5)  # [num_chunks, 5]
        if self._max_rows is not None and self.condition is None:
            table = table[table[:, 3] < self._max_rows]
            table[-1, 4] = min(table[-1, 4], self._max_rows - table[-1, 3])
        return table

    @cached_property
    def bounds(self) -> Int64Array:
        """First row of each chunk, and the end: [num_chunks + 1]."""
        return np.append(self._table[:, 3], self._table[-1, 3] + self._table[-1, 4])

    def sizes(self) -> Int64Array:
        """Return how many rows of each chunk the filter keeps, -1 where it is not known yet: [num_chunks].

        With `max_rows`, that is known of a chunk when all chunks before it have been counted, or enough rows found.
        """
        if self.condition is None:
            return self._table[:, 4]
        counts = self.kept.counts()
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

    def chunk(self, number: int) -> Chunk:
        """Return a chunk."""
        source, first_group, num_groups, first_row, num_rows = self._table[number].tolist()
        groups = range(first_group, first_group + num_groups)
        return Chunk(number=number, source=source, groups=groups, first_row=first_row, num_rows=num_rows)

    def place_of(self, number: int) -> ChunkPlace:
        """Return where the bytes of a chunk are."""
        chunk = self.chunk(number)
        file = self._parts[chunk.source].source
        if not urls.is_remote(file.url):
            return ChunkPlace(file=file, spans=())
        assert file.size_bytes is not None  # see read_footer
        names = [column.name for column in self.columns]
        spans = tuple(group_spans(self._footer(chunk.source), chunk.groups, names, file.size_bytes))
        version = file.etag or ""
        footer = b"" if has_own_version(file.etag) else self._footer_bytes(chunk.source)
        if footer:
            version += f" {blake2b(footer, digest_size=16).hexdigest()}"
        return ChunkPlace(file=file, spans=spans, version=version, footer=footer)

    def _footer_bytes(self, source: int) -> bytes:
        with self._lock, damage_named(self.path):
            (footer,) = self._opened().connection.execute("SELECT footer FROM footers WHERE source = ?", (source,)).fetchone()
        return bytes(footer)

    def _footer(self, source: int) -> Any:
        """Return what the footer of a file says; the last one is kept, as neighbours ask for the same."""
        known = self._last_footer
        if known is not None and known[0] == source:
            return known[1]
        try:
            metadata = parse_footer(self._footer_bytes(source), f"the footer of {urls.redact(self._parts[source].source.url)}")
        except SourceError as error:  # it was whole when it was written here
            raise damaged(self.path, error) from error
        self._last_footer = (source, metadata)
        return metadata

    # -- rows ---------------------------------------------------------------------------------------------------------

    def read(self, number: int, files: Sequence[Path]) -> ChunkRows:
        """Return the rows of a chunk that the filter keeps; which these are is noted for all processes.

        Args:
            number: Of the chunk.
            files: The bytes of each span of its place.

        Raises:
            SourceError: They are no Parquet; a local file changed.
            QueryError: The filter does not run on them.
        """
        chunk = self.chunk(number)
        batch = self._batch(chunk, files)
        row_ids = np.arange(chunk.first_row, chunk.first_row + batch.num_rows, dtype=np.int64)
        if self.condition is not None:
            offsets = self.kept.offsets(number)
            if offsets is None:
                offsets = self._filter(chunk, batch)
            batch, row_ids = batch.take(offsets), row_ids[offsets]
        return ChunkRows(self.columns, batch, row_ids, urls.redact(self._parts[chunk.source].source.url))

    def _batch(self, chunk: Chunk, files: Sequence[Path]) -> pa.RecordBatch:
        place, part = self.place_of(chunk.number), self._parts[chunk.source]
        name = urls.redact(place.file.url)
        with contextlib.ExitStack() as stack:
            source: ByteSource = LocalBytes(Path(place.file.url))
            if place.spans:
                assert place.file.size_bytes is not None
                source = stack.enter_context(contextlib.closing(Pieces(place.spans, files, place.file.size_bytes)))
            elif local_file(Path(place.file.url)) != place.file:
                raise SourceChangedError(f"{name} changed since its footer was read: open the dataset again")
            table = part.over(RowGroupTable(self._footer(chunk.source), name, source, chunk.groups))
            own = set(table.schema().names)
            return together(table.batches([column.name for column in self.columns if column.name in own]), name)

    @cached_property
    def kept(self) -> KeptRows:
        """What the filter keeps, as far as it has been run."""
        return KeptRows(self.kept_path, self._table[:, 4])

    @property
    def kept_path(self) -> Path:
        """Where that is."""
        return self.path.parent / f"{fingerprint({'lazy': self.path.stem, 'condition': self.condition})}.kept"

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

    def _filter(self, chunk: Chunk, batch: pa.RecordBatch) -> Int64Array:
        """Run the condition on the rows of a chunk, in a small index of their own; one process at a time."""
        key = fingerprint({"chunk": chunk.number, "of": self.kept_path.stem})
        with workplace(self.path.parent, key, is_brief=True) as place:
            offsets = self.kept.offsets(chunk.number)
            if offsets is not None:  # another process has done it while we waited
                return offsets
            path = place.temporary("chunk")
            self._write(path, chunk, batch)
            rows = self._kept_rows(Index(path))
            offsets = np.sort(np.array(rows, np.int64)) - chunk.first_row
            self.kept.write(chunk.number, offsets)
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

    def _write(self, path: Path, chunk: Chunk, batch: pa.RecordBatch) -> None:
        """Write a table of all columns, in which those have values that the condition reads."""
        wanted = self.check_condition() or {self.columns[0].name}
        with contextlib.closing(IndexWriter(path, self.key_column, first_row=chunk.first_row)) as writer:
            writer.begin_source(self._parts[chunk.source].source, pa.schema([]))
            for column in self.columns:  # in this order, so that each has the same name in SQL
                writer.add_column(column.field, column.declared)
            for start in range(0, batch.num_rows, _ROWS_AT_A_TIME):
                names = [name for name in batch.schema.names if name in wanted] or batch.schema.names[:1]
                writer.write_batch(batch.select(names).slice(start, _ROWS_AT_A_TIME))
            writer.finish({}, is_durable=False)
