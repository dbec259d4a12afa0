"""Row groups of Parquet files whose bytes are not here: their footer, where they lie, and how they are read from pieces."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream.errors import ObjectChangedError, SourceError
from sqlstream.index.sources.base.access import reader_for
from sqlstream.index.sources.base.base import arrow_errors, plain_schema
from sqlstream.index.sources.base.unfold import parquet_batches
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.coalesce import plan_reads
from sqlstream.storage.base.protocols import RemoteReader

_FIRST_GUESS_BYTES = 256 << 10  # footer of some 100 row groups of 20 columns; costs less than a second request
_TAIL_BYTES = 8  # length of the footer, PAR1
_PADDING_BYTES = 100  # Arrow reads so much behind a column that old writers made: they gave its length too short (PARQUET-816)
_WHOLE_SHARE = 0.5  # a group of which more is wanted is fetched as it is: one request
_MAX_GAP_BYTES = 1 << 20  # between two columns: cheaper than one more request (100 ms at 10 MB/s)
_CURE = "If it was cut short while it was written or copied, write it again"

Span = tuple[int, int]
"""Bytes of a file, half open."""


def read_footer(file: SourceFile, remote: RemoteReader) -> bytes:
    """Return the footer of a Parquet file, with its length and mark at the end: one request, two when it is large.

    Raises:
        SourceError: It is no Parquet file, or the server does not say its length.
    """
    name = urls.redact(file.url)
    if file.size_bytes is None:
        raise SourceError(
            f"{name}: the server does not say its length, which a lazy index needs: leave lazy_index_chunk_size out"
        )
    size, guess = file.size_bytes, min(file.size_bytes, _FIRST_GUESS_BYTES)
    tail = _read(file, (size - guess, size), remote)
    if len(tail) < _TAIL_BYTES or tail[-4:] != b"PAR1":
        raise SourceError(f"{name} is no Parquet file (its end is {tail[-4:]!r}). {_CURE}")
    wanted = int.from_bytes(tail[-8:-4], "little") + _TAIL_BYTES
    if wanted > size:
        raise SourceError(f"{name} is no whole Parquet file: its footer has {wanted} bytes, the file {size}. {_CURE}")
    return tail[-wanted:] if wanted <= len(tail) else _read(file, (size - wanted, size), remote)


def has_footer(file: SourceFile, footer: bytes, remote: RemoteReader) -> bool:
    """Return whether a file still ends in these bytes."""
    if file.size_bytes is None or file.size_bytes < len(footer):
        return False
    try:
        return _read(file, (file.size_bytes - len(footer), file.size_bytes), remote) == footer
    except ObjectChangedError:
        return False


def parse_footer(footer: bytes, name: str) -> pq.FileMetaData:
    """Return what a footer says."""
    with arrow_errors(name, _CURE):
        return pq.read_metadata(pa.BufferReader(footer))


def group_spans(metadata: pq.FileMetaData, groups: range, columns: Sequence[str], file_bytes: int) -> list[Span]:
    """Return the bytes that are needed of row groups: of all columns as one span, unless few of them are wanted.

    Args:
        metadata: Of the file.
        groups: Neighbouring row groups.
        columns: Names of top-level columns.
        file_bytes: Size of the file.
    """
    wanted, owners = set(columns), _owners(metadata)
    everything: list[Span] = []
    needed: list[Span] = []
    for group in groups:
        row_group = metadata.row_group(group)
        for number in range(row_group.num_columns):
            chunk = row_group.column(number)
            offsets = (chunk.dictionary_page_offset, chunk.data_page_offset)
            start = min(offset for offset in offsets if offset)
            span = (start, min(file_bytes, start + chunk.total_compressed_size + _PADDING_BYTES))
            everything.append(span)
            if owners[number] in wanted:
                needed.append(span)
    whole = (min(start for start, _ in everything), max(stop for _, stop in everything))
    spans = list(plan_reads(needed, max_gap_bytes=_MAX_GAP_BYTES, max_request_bytes=1 << 62).requests)
    return [whole] if sum(stop - start for start, stop in spans) > _WHOLE_SHARE * (whole[1] - whole[0]) else spans


class RowGroupTable:
    """Some row groups of a file as a table; none of them: its schema only.

    Args:
        metadata: Of the file.
        name: The file, for errors.
        source: Its pieces, or its path.
        groups: Which row groups.
    """

    def __init__(self, metadata: pq.FileMetaData, name: str, source: Any = None, groups: range = range(0)) -> None:
        self._metadata, self._name, self._source, self._groups = metadata, name, source, groups

    def schema(self) -> pa.Schema:
        """Return the columns as the footer says."""
        with arrow_errors(self._name, _CURE):
            return plain_schema(self._metadata.schema.to_arrow_schema())

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        with arrow_errors(self._name, _CURE):  # without threads: it runs in workers that were forked
            yield from parquet_batches(self._opened, self._groups, names, self._name, use_threads=False)

    def _opened(self, folded: list[str]) -> pq.ParquetFile:
        return pq.ParquetFile(self._source, metadata=self._metadata, pre_buffer=False, read_dictionary=folded)


class Pieces(io.RawIOBase):
    """A file of which only some pieces are here, each in a file of its own; what lies between them cannot be read."""

    def __init__(self, pieces: Sequence[tuple[Span, Path]], size_bytes: int) -> None:
        self._spans = [span for span, _ in pieces]
        self._maps = [pa.memory_map(str(path)) for _, path in pieces]
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        """It can."""
        return True

    def seekable(self) -> bool:
        """It can."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place of the whole file."""
        self._position = offset + (0, self._position, self._size_bytes)[whence]
        return self._position

    def tell(self) -> int:
        """Return the place."""
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        """Return bytes of one piece."""
        start = self._position
        for span, file in zip(self._spans, self._maps, strict=True):
            if span[0] <= start < span[1]:
                file.seek(start - span[0])
                data = file.read(min(size if size >= 0 else span[1] - start, span[1] - start))
                self._position += len(data)
                return data
        raise OSError(f"bytes from {start} on are not among the fetched {self._spans}")

    def close(self) -> None:
        """Close the pieces."""
        if not self.closed:
            for file in self._maps:
                file.close()
        super().close()


def _owners(metadata: pq.FileMetaData) -> list[str]:
    """Return for each Parquet column, which are the leaves of nested types, the name of the column that it is of."""
    schema = metadata.schema.to_arrow_schema()
    return [field.name for field in schema for _ in range(_num_leaves(field.type))]


def _num_leaves(kind: Any) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        return _num_leaves(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _num_leaves(kind.value_type)
    return sum(_num_leaves(kind.field(i).type) for i in range(kind.num_fields)) if kind.num_fields else 1


def _read(file: SourceFile, span: Span, remote: RemoteReader) -> bytes:
    if urls.is_remote(file.url):
        return reader_for(remote, file.access).get_ranges(file.url, [span], file.size_bytes)[0]
    with open(file.url, "rb") as local:
        local.seek(span[0])
        return local.read(span[1] - span[0])
