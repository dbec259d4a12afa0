"""What every table format does: say its columns, then give its rows in batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from sqlstream.errors import SourceError

BATCH_ROWS = 16_384
"""Rows converted to Python values at a time: some MiB, and larger is not faster."""


class TableFile(Protocol):
    """One local table file. Made from (path, name); `name` is the redacted URL, for errors."""

    @property
    def num_rows(self) -> int | None:
        """Rows of the file where that costs nothing to know."""
        ...

    def schema(self) -> pa.Schema:
        """Return the columns with types that hold for the whole file (formats without types are read once for it)."""
        ...

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows in order, with the columns `names` (each in the schema), a bounded number of bytes at a time."""
        ...


class OpenTable(Protocol):
    """The constructor of a format."""

    def __call__(self, path: Path, name: str) -> TableFile:
        """Open `path`, which errors call `name`."""
        ...


@contextlib.contextmanager
def arrow_errors(name: str, cure: str) -> Iterator[None]:
    """Turn what Arrow and the disk say about a broken file into a SourceError that names it."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise SourceError(f"{name} cannot be read: {first_line[:300]}. {cure}") from error
