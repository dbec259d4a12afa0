"""Tables that are in memory already: pandas, polars, pyarrow, whatever speaks Arrow, and iterables of dicts."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any

import pyarrow as pa

from sqlstream.errors import ConfigError, SchemaError
from sqlstream.index.sources.base.base import BATCH_ROWS, plain_schema

_ROWS_A_CHUNK = 8192


class MemoryTable:
    """A table in memory, in bounded batches."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def schema(self) -> pa.Schema:
        """Return the columns."""
        return plain_schema(self._table.schema)

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        yield from self._table.select(list(names)).to_batches(max_chunksize=BATCH_ROWS)

    def digest(self) -> str:
        """Return a digest of names, types and values."""
        digest = blake2b(digest_size=16)
        target: Any = _Hashing(digest)
        sink = pa.PythonFile(target, "w")
        with pa.ipc.new_stream(sink, self._table.schema.remove_metadata()) as writer:
            writer.write_table(self._table.combine_chunks(), max_chunksize=BATCH_ROWS)
        return digest.hexdigest()


def as_table(source: object) -> MemoryTable:
    """Return a user's object as a table.

    Args:
        source: A table of pyarrow, pandas or polars, anything with the Arrow PyCapsule interface, or an iterable of dicts,
            which is read once and kept in memory as Arrow has it.

    Raises:
        ConfigError: It is nothing of these.
        SchemaError: Rows have values of conflicting types.
    """
    kind = type(source).__module__.partition(".")[0]
    given: Any = source
    if isinstance(source, pa.Table):
        return MemoryTable(source)
    if kind == "pandas":
        has_index = any(name is not None for name in given.index.names)  # a nameless one only counts rows
        return MemoryTable(pa.Table.from_pandas(given.reset_index() if has_index else given, preserve_index=False))
    if kind == "polars" and hasattr(given, "collect"):
        given = given.collect()
    if hasattr(given, "__arrow_c_stream__"):
        return MemoryTable(pa.RecordBatchReader.from_stream(given).read_all())
    if isinstance(source, Iterable) and not isinstance(source, str | bytes | Mapping):
        return MemoryTable(_of_rows(source))
    raise ConfigError(
        f"src is of type {type(source).__name__}: give a path or URL, a table of pandas, polars or pyarrow, "
        "an iterable of dicts, or a list of these"
    )


def _of_rows(rows: Iterable[object]) -> pa.Table:
    """Return dicts as a table of all their keys, in the order of first appearance."""
    iterator, chunks = iter(rows), []
    while some := list(islice(iterator, _ROWS_A_CHUNK)):
        wrong = next((row for row in some if not isinstance(row, Mapping)), None)
        if wrong is not None:
            raise ConfigError(
                f"src gives {type(wrong).__name__} {str(wrong)[:80]!r} where a row is expected: give one dict a row"
            )
        names = dict.fromkeys(name for row in some for name in row)  # type: ignore[attr-defined]  # all are Mappings
        chunks.append(pa.table({str(name): _column(some, name) for name in names}))
    try:
        return pa.concat_tables(chunks, promote_options="permissive") if chunks else pa.table({})
    except pa.ArrowException as error:
        raise SchemaError(f"the rows of src have values of conflicting types ({error}): give each column one type") from error


def _column(rows: Sequence[Any], name: object) -> Any:
    values = [row.get(name) for row in rows]
    if any(isinstance(value, dt.time) and value.tzinfo is not None for value in values):
        raise SchemaError(
            f"the rows of src: column {name!r} has times of a day with a zone, which Arrow drops: give them as text"
        )
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise SchemaError(
            f"the rows of src: column {name!r} has values of several types ({error}): give it one type"
        ) from error


class _Hashing:
    """A file that only hashes what is written."""

    closed = False

    def __init__(self, digest: Any) -> None:
        self._digest, self._size = digest, 0

    def write(self, data: Any) -> int:
        """Hash `data`."""
        view = memoryview(data)
        self._digest.update(view)
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Return the bytes so far."""
        return self._size

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
