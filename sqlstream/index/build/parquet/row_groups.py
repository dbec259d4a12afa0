"""Row groups of Parquet files whose bytes are not here: their footer, where they lie, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream.errors import SourceError
from sqlstream.index.sources.base.access import named_errors, reader_for
from sqlstream.index.sources.base.base import arrow_errors, plain_schema
from sqlstream.index.sources.base.byte_source import ByteSource, Pieces, Span, bytes_of
from sqlstream.index.sources.base.unfold import parquet_batches
from sqlstream.index.sources.formats.parquet import ENCRYPTED_MARK, encrypted, refuse_encrypted
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.coalesce import plan_reads
from sqlstream.storage.base.protocols import CALLS_AT_A_TIME, RemoteReader

_FIRST_GUESS_BYTES = 256 << 10  # footer of some 100 row groups of 20 columns; costs less than a second request
_TAIL_BYTES = 8  # length of the footer, PAR1
_PADDING_BYTES = 100  # Arrow reads so much behind a column that old writers made: they gave its length too short (PARQUET-816)
_WHOLE_SHARE = 0.5  # a group of which more is wanted is fetched as it is: one request
_MAX_GAP_BYTES = 1 << 20  # between two columns: cheaper than one more request (100 ms at 10 MB/s)
_GROUPS_AT_A_TIME = 64
_BYTES_AT_A_TIME = 64 << 20  # of some columns of row groups, in memory; arbitrary: some row groups of captions
_MEDIA = frozenset(("Image", "Audio", "Video"))
"""Features of Hugging Face's `datasets` that are files."""
_CURE = "If it was cut short while it was written or copied, write it again"
_CURE_OF_COPY = f"{_CURE}; where the file itself is whole, its copy is not: `sqlstream cache clear` has it fetched again"


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
    if tail[-4:] == ENCRYPTED_MARK:
        raise encrypted(name)
    if len(tail) < _TAIL_BYTES or tail[-4:] != b"PAR1":
        raise SourceError(f"{name} is no Parquet file (its end is {tail[-4:]!r}). {_CURE}")
    wanted = int.from_bytes(tail[-8:-4], "little") + _TAIL_BYTES
    if wanted > size:
        raise SourceError(f"{name} is no whole Parquet file: its footer has {wanted} bytes, the file {size}. {_CURE}")
    return tail[-wanted:] if wanted <= len(tail) else source.read_at(size - wanted, wanted)


def parse_footer(footer: bytes, name: str) -> pq.FileMetaData:
    """Return what a footer says.

    Raises:
        SourceError: It is damaged, or of a file that is encrypted.
    """
    with arrow_errors(name, _CURE):
        metadata = pq.read_metadata(pa.BufferReader(footer))
    refuse_encrypted(metadata, len(footer) - _TAIL_BYTES, name)
    return metadata


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
        is_copied: Its bytes are a copy in the cache.
    """

    counts_rows = True
    """Rows of which no column is asked for take no bytes: the footer counts them."""

    def __init__(
        self,
        metadata: pq.FileMetaData,
        name: str,
        source: ByteSource | None = None,
        groups: range = range(0),
        *,
        is_copied: bool = False,
    ) -> None:
        self._metadata, self._name, self._source, self._groups = metadata, name, source, groups
        self._cure = _CURE_OF_COPY if is_copied else _CURE

    def schema(self) -> pa.Schema:
        """Return the columns as the footer says."""
        with arrow_errors(self._name, _CURE):
            return plain_schema(self._metadata.schema.to_arrow_schema())

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        if not names:
            yield pa.RecordBatch.from_arrays([pa.nulls(self._num_rows)], names=[""]).select([])
            return
        with arrow_errors(self._name, self._cure):  # without threads: it runs in workers that were forked
            yield from parquet_batches(self._opened, self._groups, names, self._name, use_threads=False)

    @property
    def _num_rows(self) -> int:
        return sum(self._metadata.row_group(group).num_rows for group in self._groups)

    def _opened(self, folded: list[str]) -> pq.ParquetFile:
        assert self._source is not None, "rows are read of bytes"
        return pq.ParquetFile(
            self._source.open(),
            metadata=self._metadata,
            pre_buffer=False,
            read_dictionary=folded,
            page_checksum_verification=True,
        )


class RangedTable:
    """A remote Parquet file of which the column chunks that are asked for are read, and nothing else.

    Args:
        metadata: What its footer says.
        file: The file.
        remote: Reads it.
    """

    def __init__(self, metadata: pq.FileMetaData, file: SourceFile, remote: RemoteReader) -> None:
        self._metadata, self._file = metadata, file
        self._name = urls.redact(file.url)
        self._reader = reader_for(remote, file.access)

    def schema(self) -> pa.Schema:
        """Return the columns as the footer says."""
        return RowGroupTable(self._metadata, self._name).schema()

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows; the column chunks of some row groups are in memory at a time."""
        with ThreadPoolExecutor(CALLS_AT_A_TIME, thread_name_prefix="columns") as pool:
            for groups in self._rounds(names):
                for group, pieces in zip(groups, pool.map(partial(self._pieces, names), groups), strict=True):
                    yield from RowGroupTable(self._metadata, self._name, pieces, range(group, group + 1)).batches(names)

    def _rounds(self, names: Sequence[str]) -> Iterator[list[int]]:
        """Yield row groups that are read together."""
        groups, num_bytes = list[int](), 0
        for group in range(self._metadata.num_row_groups):
            if not self._metadata.row_group(group).num_rows:
                continue
            size = sum(stop - start for start, stop in self._spans(names, group))
            if groups and (len(groups) == _GROUPS_AT_A_TIME or num_bytes + size > _BYTES_AT_A_TIME):
                yield groups
                groups, num_bytes = [], 0
            groups.append(group)
            num_bytes += size
        if groups:
            yield groups

    def _spans(self, names: Sequence[str], group: int) -> list[tuple[int, int]]:
        assert self._file.size_bytes is not None
        return group_spans(self._metadata, range(group, group + 1), names, self._file.size_bytes)

    def _pieces(self, names: Sequence[str], group: int) -> Pieces:
        assert self._file.size_bytes is not None
        spans = self._spans(names, group)
        with named_errors(self._file.url):
            data = self._reader.get_ranges(self._file.url, spans, self._file.size_bytes)
        return Pieces(spans, data, self._file.size_bytes)


def content_columns(metadata: pq.FileMetaData, named: Collection[str]) -> tuple[str, ...]:
    """Return the columns of a file that hold content: pictures, sound and videos, and what else is read as a file.

    These are structs of bytes and path; columns of bytes that are images, audio or videos to Hugging Face's `datasets`, which
    says so in the metadata; and columns of bytes that are named. A column in which all bytes are NULL holds none.

    Args:
        metadata: Of the file.
        named: Columns that the user calls content.
    """
    schema = metadata.schema.to_arrow_schema()
    media = _media_columns(schema)
    found = [
        field.name
        for field in schema
        if _is_struct(field.type) or (_is_bytes(field.type) and (field.name in media or field.name in named))
    ]
    once = [name for name in found if schema.names.count(name) == 1]
    groups = range(metadata.num_row_groups)
    return tuple(name for name in once if any(without_bytes(metadata, group, name) is not WithoutBytes.ALL for group in groups))


def largest_group_bytes(metadata: pq.FileMetaData, name: str) -> int:
    """Return what a column takes in the row group where it takes most, decompressed."""
    leaves = [number for number, owner in enumerate(_owners(metadata)) if owner == name]
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return max((sum(group.column(leaf).total_uncompressed_size for leaf in leaves) for group in groups), default=0)


def _media_columns(schema: pa.Schema) -> set[str]:
    """Return the columns that `datasets` decodes; none where its metadata makes no sense."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name for name, feature in features.items() if isinstance(feature, dict) and feature.get("_type") in _MEDIA}
    except (KeyError, TypeError, ValueError, AttributeError):
        return set()


def _is_struct(kind: Any) -> bool:
    if not pa.types.is_struct(kind) or {kind.field(at).name for at in range(kind.num_fields)} != {"bytes", "path"}:
        return False
    return kind.num_fields == 2 and _is_bytes(kind.field("bytes").type) and _is_text(kind.field("path").type)


def _is_bytes(kind: Any) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def _is_text(kind: Any) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


class WithoutBytes(StrEnum):
    """How many rows of a row group have no bytes in a column of content, as the footer says."""

    NONE = "none"
    SOME = "some"
    """Or it is not said."""
    ALL = "all"


def without_bytes(metadata: pq.FileMetaData, group: int, name: str) -> WithoutBytes:
    """Return how many rows of a row group have no bytes in a column of content."""
    paths = [metadata.schema.column(leaf).path for leaf in range(metadata.num_columns)]
    leaf = next(number for number, owner in enumerate(_owners(metadata)) if owner == name and paths[number] != f"{name}.path")
    chunk = metadata.row_group(group).column(leaf)
    num_nulls = None if chunk.statistics is None else chunk.statistics.null_count
    if num_nulls == chunk.num_values:
        return WithoutBytes.ALL
    return WithoutBytes.NONE if num_nulls == 0 else WithoutBytes.SOME


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
