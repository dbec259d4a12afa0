"""Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream.index.sources.base import BATCH_ROWS, PLAIN, Reading, arrow_errors

_BATCH_BYTES = 16 << 20  # long captions: fewer rows a batch
_CURE = "If it was cut short while it was written or copied, write it again"


class ParquetTable:
    """A Parquet file, read row group by row group."""

    def __init__(self, path: Path, name: str, reading: Reading = PLAIN) -> None:  # noqa: ARG002 - all formats take it
        self._name = name
        with arrow_errors(name, _CURE):
            # Without pre_buffer, which holds all columns of a row group at once.
            self._file = pq.ParquetFile(path, pre_buffer=False)

    @property
    def num_rows(self) -> int | None:
        """Rows as the footer says."""
        return int(self._file.metadata.num_rows)

    def schema(self) -> pa.Schema:
        """Return the columns as the footer says."""
        with arrow_errors(self._name, _CURE):
            return self._file.schema_arrow.remove_metadata()

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        with arrow_errors(self._name, _CURE):
            for batch in self._file.iter_batches(self._batch_rows(), columns=list(names)):
                # By name: Arrow also reads a column 'a.b' when it is asked for 'a'.
                yield batch.select(list(names))

    def _batch_rows(self) -> int:
        metadata = self._file.metadata
        num_bytes = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
        return int(max(64, min(BATCH_ROWS, _BATCH_BYTES * metadata.num_rows // max(num_bytes, 1))))
