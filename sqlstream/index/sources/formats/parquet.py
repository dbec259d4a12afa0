"""Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream.errors import SourceError
from sqlstream.index.sources.base.base import PLAIN, Reading, arrow_errors, plain_schema
from sqlstream.index.sources.base.byte_source import ByteSource
from sqlstream.index.sources.base.unfold import parquet_batches

_CURE = "If it was cut short while it was written or copied, write it again"
_TAIL_BYTES = 8
"""The length of the footer, and the mark of the format."""
ENCRYPTED_MARK = b"PARE"
"""In place of PAR1 where the footer itself is encrypted."""
_SIGNATURE_BYTES = 28
"""Of a footer that is readable, of a file with encrypted columns: a nonce and a tag."""


def refuse_encrypted(metadata: pq.FileMetaData, footer_bytes: int, name: str) -> None:
    """Raise if a file has encrypted columns: Arrow ends the process when it is asked what one of them has.

    Args:
        metadata: What the footer says.
        footer_bytes: Bytes of the footer, without its length and mark.
        name: The file, for messages.

    Raises:
        SourceError: It has some.
    """
    if footer_bytes - metadata.serialized_size == _SIGNATURE_BYTES:
        raise encrypted(name)


def encrypted(name: str) -> SourceError:
    """Return the error of a file that is encrypted."""
    return SourceError(f"{name} is encrypted, or some of its columns are, which is not read: write it again without encryption")


class ParquetTable:
    """A Parquet file, read row group by row group."""

    def __init__(self, source: ByteSource, name: str, reading: Reading = PLAIN) -> None:  # noqa: ARG002 - all formats take it
        self._source, self._name = source, name
        tail = source.read_at(max(0, source.size_bytes - _TAIL_BYTES), _TAIL_BYTES)
        if tail[4:] == ENCRYPTED_MARK:
            raise encrypted(name)
        with arrow_errors(name, _CURE):
            self._file = self._opened([])
        refuse_encrypted(self._file.metadata, int.from_bytes(tail[:4], "little"), name)

    def schema(self) -> pa.Schema:
        """Return the columns as the footer says."""
        with arrow_errors(self._name, _CURE):
            return plain_schema(self._file.schema_arrow)

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        with arrow_errors(self._name, _CURE):
            yield from parquet_batches(self._opened, range(self._file.num_row_groups), names, self._name)

    def _opened(self, folded: list[str]) -> pq.ParquetFile:
        """Return the file with the columns `folded` read as dictionaries."""
        # Without pre_buffer, which holds all columns of a row group at once.
        return pq.ParquetFile(self._source.open(), pre_buffer=False, read_dictionary=folded, page_checksum_verification=True)
