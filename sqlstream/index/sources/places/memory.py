"""Tables that the user's program has: those of pandas, polars and pyarrow as they are, rows that come one by one in parts.

What comes one by one is dicts or Arrow batches, of an iterable or of a function that makes one. It goes to a temporary file, a
bounded number of rows and bytes at a time: their types are known after the last one, and so is the digest that names the index.
Rejected: a digest of the function, which says nothing of what it gives; and reading it twice, which an iterator cannot.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import pyarrow as pa

from sqlstream.errors import ConfigError, SchemaError, SourceError, SqlStreamError, text_of
from sqlstream.index.sources.base.base import BATCH_ROWS, plain_batch, plain_schema
from sqlstream.index.sources.base.spool import Spool
from sqlstream.index.sources.places.python_rows import (
    owned_table,
    refuse_conflicts,
    table_of_frame,
    table_of_rows,
)
from sqlstream.python_values import owned_row
from sqlstream.storage.base.urls import redact_text

_ROWS_A_PART = 8192
_PART_BYTES = 64 << 20  # of rows with content; arbitrary: as much as may be in memory twice, as dicts and as Arrow
WHOLE_BYTES = 256 << 20
"""Up to here rows are one table for their digest: Arrow's batches of one have some bytes of their neighbours, which no way in
parts gives again, and earlier versions, which held all rows in memory, wrote digests of these into indexes and states."""
_MEASURED = 16  # one row in so many is measured: a nested one takes as long as its conversion


class MemoryTable:
    """A table in memory, in bounded batches."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def schema(self) -> pa.Schema:
        """Return the columns."""
        return plain_schema(self._table.schema)

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        yield from map(plain_batch, self._table.select(list(names)).to_batches(max_chunksize=BATCH_ROWS))

    def digest(self) -> str:
        """Return a digest of names, types and values, the same of a slice as of a table with its rows alone.

        But for columns of views, whose copies have other bytes: their digests are in indexes.
        """
        whole = self._table
        for at, field in enumerate(whole.schema):
            if "view" not in str(field.type):  # two pieces are copied: a slice has bytes of its neighbours
                own = whole.select([at])
                whole = whole.set_column(at, field, pa.concat_tables([own, own.slice(0, 0)]).combine_chunks().column(0))
        whole = whole.combine_chunks()
        return _digest(whole.schema, whole.to_batches(max_chunksize=BATCH_ROWS))


class SpooledTable:
    """Rows that came one by one, in a temporary file.

    Args:
        parts: The rows; a column may have other types in another part, if one type holds all its values.
        spool: The file.
        name: What errors call the source.
        whole_bytes: Up to this size of the file its digest is that of one table.

    Raises:
        SchemaError: A column has values of conflicting types.
    """

    def __init__(self, parts: Generator[pa.Table], spool: Spool, name: str, whole_bytes: int = WHOLE_BYTES) -> None:
        self._spool, self._name, self._whole_bytes = spool, name, whole_bytes
        self._schema: pa.Schema = pa.schema([])
        self.num_rows = 0

        def merged() -> Iterator[pa.Table]:
            for part in parts:
                self._merge(part.schema)
                yield part

        with contextlib.closing(parts):  # the user's generator ends here, not when this error is forgotten
            for batch in _regrouped(merged(), _ROWS_A_PART):
                spool.write(batch)
                self.num_rows += batch.num_rows

    def schema(self) -> pa.Schema:
        """Return the columns, with types that hold for all rows."""
        return plain_schema(self._schema)

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        for table in self._tables():
            yield from (plain_batch(batch) for batch in table.select(list(names)).to_batches() if batch.num_rows)

    def digest(self) -> str:
        """Return a digest of names, types and values: up to a size that of the same rows as one table in memory."""
        if self._spool.num_bytes <= self._whole_bytes:
            return MemoryTable(pa.concat_tables([self._schema.empty_table(), *self._tables()])).digest()
        return _digest(self._schema, _regrouped(self._tables(), BATCH_ROWS))

    def _tables(self) -> Iterator[pa.Table]:
        nothing = self._schema.empty_table()
        with self._conflicts():
            for batch in self._spool.batches():
                yield pa.concat_tables([nothing, pa.Table.from_batches([batch])], promote_options="permissive")

    def _merge(self, schema: pa.Schema) -> None:
        if schema.equals(self._schema):
            return
        if len(set(schema.names)) < len(schema.names):
            twice = next(name for name in schema.names if schema.names.count(name) > 1)
            raise SchemaError(f"{self._name} gives the column {twice!r} more than once: rename one of them")
        with self._conflicts():
            refuse_conflicts(self._schema, schema)
            self._schema = pa.unify_schemas([self._schema, schema], promote_options="permissive")

    @contextlib.contextmanager
    def _conflicts(self) -> Iterator[None]:
        try:
            yield
        except pa.ArrowException as error:
            raise SchemaError(
                f"the rows of {self._name} have values of conflicting types ({error}): give each column one type"
            ) from error


def as_table(
    source: object, new_spool: Callable[[], Spool], name: str, whole_bytes: int = WHOLE_BYTES
) -> MemoryTable | SpooledTable:
    """Return a user's object as a table.

    Args:
        source: A table of pyarrow, pandas or polars, anything with the Arrow PyCapsule interface, an iterable of dicts or of
            tables, or a function that returns one of these.
        new_spool: Makes a file for rows that come one by one.
        name: What errors call the source.
        whole_bytes: See `SpooledTable`.

    Raises:
        ConfigError: It is nothing of these.
        SchemaError: Rows have values of conflicting types.
        SourceError: The user's code raises as it gives rows, or gives none.
    """
    is_asked = is_function(source)
    given = _called(source, name) if is_asked else source
    if (table := _whole(given, name)) is not None:
        return MemoryTable(table)
    if hasattr(given, "__arrow_c_stream__"):
        return SpooledTable(_of_arrow(given, name), new_spool(), name, whole_bytes)
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        if inspect.iscoroutine(given):
            given.close()
        if is_asked:
            raise ConfigError(
                f"{name} returned a {type(given).__name__}: return an iterable of dicts or of Arrow batches, or a table"
            )
        raise ConfigError(
            f"src is of type {type(given).__name__}: give a path or URL, a table of pandas, polars or pyarrow, "
            "an iterable of dicts or of Arrow batches, a function that returns one, or a list of these"
        )
    spooled = SpooledTable(_of_items(given, name), new_spool(), name, whole_bytes)
    if not spooled.num_rows and isinstance(given, Iterator) and not is_asked:
        raise SourceError(
            f"{name} has no rows: an iterator gives them once, and an index needs one at least. Give the function that makes "
            "it: src=rows in place of src=rows()"
        )
    return spooled


def is_function(source: object) -> bool:
    """Return whether rows are asked of an object by calling it."""
    return callable(source) and not isinstance(source, Iterable) and not hasattr(source, "__arrow_c_stream__")


def _called(source: Any, name: str) -> object:
    try:
        return source()
    except SqlStreamError:
        raise
    except Exception as error:
        raise _raised(error, name, "when it was called") from error


def _whole(given: Any, name: str) -> pa.Table | None:
    """Return a table that is in memory as one of Arrow; None: it is none."""
    if isinstance(given, pa.Table):
        return given
    if isinstance(given, pa.RecordBatch):
        return pa.Table.from_batches([given])
    kind = type(given).__module__.partition(".")[0]
    if kind == "pandas" and hasattr(given, "columns"):  # a DataFrame
        return table_of_frame(given, name)
    if kind == "polars" and hasattr(given, "collect_schema"):  # a DataFrame, a LazyFrame
        frame = given.collect() if hasattr(given, "collect") else given
        return pa.RecordBatchReader.from_stream(frame).read_all()
    return None


def _of_arrow(given: Any, name: str) -> Generator[pa.Table]:
    """Yield the batches of a stream of Arrow."""
    try:
        reader = pa.RecordBatchReader.from_stream(given)
    except SqlStreamError:
        raise
    except Exception as error:
        raise _raised(error, name, "when it was asked for a stream of Arrow") from error
    yield reader.schema.empty_table()
    for batch in _asked(reader, name):
        yield pa.Table.from_batches([batch])


def _of_items(items: Iterable[object], name: str) -> Generator[pa.Table]:
    """Yield dicts as tables of all their keys, in the order of first appearance, and tables as they come."""
    rows: list[Mapping[Any, Any]] = []
    measured, most = 0, _ROWS_A_PART
    is_kept = isinstance(items, list | tuple)  # others may fill one object again and again
    for number, item in enumerate(_asked(items, name)):
        if isinstance(item, Mapping):
            if len(rows) % _MEASURED == 0:
                measured += _num_bytes(item)
                most = min(_ROWS_A_PART, _PART_BYTES * (len(rows) // _MEASURED + 1) // max(measured, 1))
            rows.append(item if is_kept else owned_row(item))
        elif (table := _whole(item, name)) is not None or hasattr(item, "__arrow_c_stream__"):
            if rows:
                yield table_of_rows(rows, name)
                rows, measured = [], 0
            yield from _of_arrow(item, name) if table is None else [table if is_kept else owned_table(table)]
        else:
            raise ConfigError(
                f"{name} gives the {type(item).__name__} {redact_text(str(item)[:80])!r} at {number}, where a row is expected: "
                "give one dict a row, or Arrow batches"
            )
        if len(rows) >= max(most, 1):
            yield table_of_rows(rows, name)
            rows, measured = [], 0
    if rows:
        yield table_of_rows(rows, name)


def _asked(items: Iterable[Any], name: str) -> Iterator[Any]:
    """Yield the items of the user's iterable; what it raises names it, and it is closed if it is left in the middle."""
    number = 0
    try:
        for item in items:
            yield item  # what a caller raises is not raised here
            number += 1
    except SqlStreamError:
        raise
    except Exception as error:
        raise _raised(error, name, f"behind its first {number} items") from error
    finally:
        if inspect.isgenerator(items):
            items.close()


def _raised(error: Exception, name: str, when: str) -> SourceError:
    """Return our error for what the user's code raised."""
    said = redact_text(text_of(error))
    return SourceError(f"{name} raised {said}, {when}: no index was built of it")


def _num_bytes(value: object) -> int:
    """Return about how many bytes a value has."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_num_bytes, value))
    size = getattr(value, "nbytes", 8)
    return size if isinstance(size, int) else 8


def _regrouped(tables: Iterable[pa.Table], num_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of tables in batches of `num_rows`, fewer where these would be too large, or columns change."""
    held: list[pa.Table] = []
    num_held = num_bytes = 0
    for given in tables:
        table = given
        if held and not table.schema.equals(held[0].schema):
            yield from _joined(held)
            held, num_held, num_bytes = [], 0, 0
        while table.num_rows:
            taken = table.slice(0, num_rows - num_held)
            table = table.slice(taken.num_rows)
            held.append(taken)
            num_held, num_bytes = num_held + taken.num_rows, num_bytes + taken.nbytes
            if num_held == num_rows or num_bytes >= _PART_BYTES // 2:
                yield from _joined(held)
                held, num_held, num_bytes = [], 0, 0
    yield from _joined(held)


def _joined(tables: list[pa.Table]) -> list[pa.RecordBatch]:
    if not tables:
        return []
    nothing = tables[0].slice(0, 0)  # two pieces are copied: a slice has bits of its neighbours, which a digest would see
    return pa.concat_tables([*tables, nothing]).combine_chunks().to_batches()


def _digest(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> str:
    """Return a digest of names, types and values."""
    digest = blake2b(digest_size=16)
    target: Any = _Hashing(digest)
    sink = pa.PythonFile(target, "w")
    with pa.ipc.new_stream(sink, schema.remove_metadata()) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return digest.hexdigest()


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
