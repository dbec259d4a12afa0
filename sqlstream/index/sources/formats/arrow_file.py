"""Arrow IPC files (.arrow, .feather, .ipc): the file format, and the stream format as Hugging Face `datasets` writes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from sqlstream.index.sources.base.base import PLAIN, Reading, arrow_errors, plain_schema
from sqlstream.index.sources.base.byte_source import ByteSource
from sqlstream.index.sources.base.unfold import bounded

_CURE = "If it was cut short while it was written or copied, write it again; Feather of version 1 must be written as version 2"
_MAGIC = b"ARROW1"


class ArrowTable:
    """An Arrow file, memory-mapped, read batch by batch."""

    def __init__(self, source: ByteSource, name: str, reading: Reading = PLAIN) -> None:  # noqa: ARG002 - all formats take it
        self._source, self._name = source, name
        self._is_stream = source.read_at(0, len(_MAGIC)) != _MAGIC

    def schema(self) -> pa.Schema:
        """Return the columns."""
        with arrow_errors(self._name, _CURE), self._source.open(is_mapped=True) as file:
            schema: pa.Schema = self._open(file).schema
            return plain_schema(schema)

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        with arrow_errors(self._name, _CURE), self._source.open(is_mapped=True) as file:
            reader = self._open(file)
            stored = reader if self._is_stream else map(reader.get_batch, range(reader.num_record_batches))
            for batch in stored:
                yield from bounded(batch.select(list(names)), self._name)

    def _open(self, file: Any) -> Any:
        return pa.ipc.open_stream(file) if self._is_stream else pa.ipc.open_file(file)
