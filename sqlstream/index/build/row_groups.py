"""Row groups of Parquet files whose bytes are not here: their footer, where they lie, and how they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream.errors import SourceError
from sqlstream.index.sources.base.base import arrow_errors, plain_schema
from sqlstream.index.sources.base.byte_source import ByteSource, Span, bytes_of
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
    source = bytes_of(file, remote)
    tail = source.read_at(size - guess, guess)
    if len(tail) < _TAIL_BYTES or tail[-4:] != b"PAR1":
        raise SourceError(f"{name} is no Parquet file (its end is {tail[-4:]!r}). {_CURE}")
    wanted = int.from_bytes(tail[-8:-4], "little") + _TAIL_BYTES
    if wanted > size:
        raise SourceError(f"{name} is no whole Parquet file: its footer has {wanted} bytes, the file {size}. {_CURE}")
    return tail[-wanted:] if wanted <= len(tail) else source.read_at(size - wanted, wanted)


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
        source: Its bytes.
        groups: Which row groups.
    """

    def __init__(
        self, metadata: pq.FileMetaData, name: str, source: ByteSource | None = None, groups: range = range(0)
    ) -> None:
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
        assert self._source is not None, "rows are read of bytes"
        return pq.ParquetFile(self._source.open(), metadata=self._metadata, pre_buffer=False, read_dictionary=folded)


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
