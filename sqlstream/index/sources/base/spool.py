"""Rows that are read before their types are known, and wait for it in a temporary file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa


class Spool:
    """Arrow batches in a file, each with types of its own.

    Args:
        path: A new file; the caller removes it.
        make_room: Is called as the file grows; None: nothing is asked.
    """

    def __init__(self, path: Path, make_room: Callable[[], None] | None = None) -> None:
        self._path = path
        self._make_room = make_room
        path.touch()

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._path.stat().st_size

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch."""
        with open(self._path, "r+b") as file:  # not "ab": of a file that was removed it makes one without the earlier batches
            file.seek(0, os.SEEK_END)
            with pa.ipc.new_stream(file, batch.schema) as writer:
                writer.write_batch(batch)
        if self._make_room is not None:
            self._make_room()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield them from the first one on."""
        size = self.num_bytes
        with open(self._path, "rb") as file:
            while file.tell() < size:
                with pa.ipc.open_stream(file) as reader:
                    yield from reader
