"""Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream.index.sources.base.base import PLAIN, Reading, arrow_errors, plain_schema
from sqlstream.index.sources.base.byte_source import ByteSource
from sqlstream.index.sources.base.unfold import parquet_batches

_CURE = "If it was cut short while it was written or copied, write it again"


class ParquetTable:
    """A Parquet file, read row group by row group."""

    def __init__(self, source: ByteSource, name: str, reading: Reading = PLAIN) -> None:  # noqa: ARG002 - all formats take it
        self._source, self._name = source, name
        with arrow_errors(name, _CURE):
            self._file = self._opened([])

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
        return pq.ParquetFile(self._source.open(), pre_buffer=False, read_dictionary=folded)
