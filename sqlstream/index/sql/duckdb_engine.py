"""DuckDB as the engine of users' SQL (`sql_engine="duckdb"`), for what SQLite cannot say; it runs in `query_child` only.

The rows go into a temporary DuckDB file with their Arrow types (lists are lists, times are times). Then files, network,
extensions and settings are locked, memory, threads and temporary files are bounded, and one SELECT runs.
"""

from __future__ import annotations

import contextlib
import importlib
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import types

from sqlstream.errors import MissingDependencyError, QueryError, SchemaError
from sqlstream.index.file.connection import connect
from sqlstream.index.sql.dialect import does_not_run, shortened
from sqlstream.index.sql.duckdb_compat import MACROS
from sqlstream.index.sql.expressions import without_end
from sqlstream.index.sql.table import QueriedTable
from sqlstream.index.types import values
from sqlstream.index.types.arrow import arrays_of, schema_of
from sqlstream.index.types.models import ROW, VIEWS, quote
from sqlstream.index.types.schema import normalise

_ROWS_AT_A_TIME = 16_384
_THREADS = 1
"""More give rows in another order each time, and with it other rows where a LIMIT cuts equal ones: nodes would disagree."""
_NOT_IN_ARROW = frozenset({"time with time zone", "bit", "uhugeint", "bignum", "varint"})
"""Types of which DuckDB gives Arrow less than the value: no zone, bytes of its own, a number of fewer digits."""
_INTERVAL = frozenset({"interval"})
"""Types of months, days and microseconds, which no column of an index has; durations of a source are such in DuckDB."""
_HUGE = frozenset({"hugeint"})
"""Types of which Arrow gets values of 39 digits as decimals of 38."""
_LOCKS = (
    "TimeZone='UTC'",  # else the machine's: hours and days of moments would differ from node to node
    "enable_progress_bar=false",
    "enable_external_access=false",
    "autoinstall_known_extensions=false",
    "autoload_known_extensions=false",
    "python_enable_replacements=false",
    "lock_configuration=true",
)


def duckdb_select(query: str) -> str:
    """Return a query without comments and semicolons at its end.

    Raises:
        MissingDependencyError: DuckDB is not installed.
        QueryError: It is no single SELECT to DuckDB.
    """
    try:
        duckdb: Any = importlib.import_module("duckdb")
    except ImportError as error:
        raise MissingDependencyError("sql_engine='duckdb' needs DuckDB: pip install 'sqlstream-data[duckdb]'") from error
    why = "give 'SELECT … FROM dataframe WHERE …'"
    try:
        statement = without_end(query, "duckdb")
        for text in (query, statement):
            statements = duckdb.extract_statements(text)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                break
        else:
            return statement
    except (duckdb.Error, ValueError) as error:
        why = " ".join(str(error).split())[:500]
    raise QueryError(f"the query {shortened(query)!r} is no single SELECT: {why}", query=query)


class DuckdbEngine:
    """A DuckDB with the rows of an index, for one user query.

    Args:
        table: What is queried.
        query: The user's SQL, in DuckDB's dialect.
        statement: What `duckdb_select` made of it.
        scratch: A path for DuckDB's file; its temporary files are in a directory of this name with `.d`.
        memory_bytes: What DuckDB may hold in memory.
        spill_bytes: What its temporary files may take.
    """

    def __init__(
        self, table: QueriedTable, query: str, statement: str, scratch: Path, *, memory_bytes: int, spill_bytes: int
    ) -> None:
        self._query, self.statement = query, statement
        self._columns = table.columns
        self._duckdb: Any = importlib.import_module("duckdb")
        settings = {
            "memory_limit": f"{memory_bytes}B",
            "threads": _THREADS,
            "temp_directory": f"{scratch}.d",
            "max_temp_directory_size": f"{spill_bytes}B",
        }
        self._connection = self._duckdb.connect(str(scratch), config=settings)
        try:
            with self._errors():
                self._load(table)
        except BaseException:
            self._connection.close()
            raise

    def describe(self) -> list[str]:
        """Return the names of the query's result columns."""
        with self._errors():
            return [column[0] for column in self._connection.execute(f"DESCRIBE {self.statement}").fetchall()]

    def run(self, statement: str, count: int) -> tuple[list[str], Iterator[list[tuple[Any, ...]]]]:
        """Return the names of the result of `statement`, and its rows as an index stores them, `count` at a time.

        Raises:
            SchemaError: A type whose values DuckDB does not give whole.
        """
        with self._errors():
            result = self._connection.sql(statement)
            self._check_types(result)
            reader = result.to_arrow_reader(count)
            return list(reader.schema.names), self._batches(reader, result.types)

    def result_fields(self) -> dict[str, pa.Field[Any]]:
        """Return the Arrow fields of the query's result by name; runs nothing.

        Raises:
            SchemaError: A type that no index can hold.
        """
        with self._errors():
            result = self._connection.sql(f"SELECT * FROM ({self.statement}\n) LIMIT 0")
            self._check_types(result)
            schema = pa.schema(
                field.with_type(pa.uuid()) if kind.id == "uuid" else field
                for field, kind in zip(result.to_arrow_table().schema, result.types, strict=True)
            )
        return {field.name: normalise(field, f"the query {shortened(self._query)!r}") for field in schema}

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _load(self, table: QueriedTable) -> None:
        db = self._connection
        db.register("incoming", _read(table))
        db.execute(f"CREATE TABLE {VIEWS[0]} AS SELECT * FROM incoming")
        db.unregister("incoming")
        db.execute(f"CREATE VIEW {VIEWS[1]} AS SELECT * FROM {VIEWS[0]}")
        for macro in MACROS:
            db.execute(f"CREATE MACRO {macro}")
        for lock in _LOCKS:
            db.execute(f"SET {lock}")

    def _batches(self, reader: Any, kinds: Sequence[Any]) -> Iterator[list[tuple[Any, ...]]]:
        are_uuids = [kind.id == "uuid" for kind in kinds]
        are_huge = [_has_type(kind, _HUGE) for kind in kinds]
        while True:
            with self._errors():
                batch = next(reader, None)
            if batch is None:
                return
            for column, field, is_huge in zip(batch.columns, batch.schema, are_huge, strict=True):
                if is_huge:
                    self._check_digits(column, field.name)
            fields = [normalise(field, "the query") for field in batch.schema]
            source = f"the query {shortened(self._query)!r}"
            encoded = [values.encode_named(column, field, source) for column, field in zip(batch.columns, fields, strict=True)]
            stored = [[None if v == values.NAN else v for v in e.values] if e.has_nan else e.values for e in encoded]
            stored = [_uuids(v) if is_uuid else v for v, is_uuid in zip(stored, are_uuids, strict=True)]
            yield list(zip(*stored, strict=True))

    def _check_types(self, result: Any) -> None:
        """Raise SchemaError if a column of a result has a type whose values do not come whole into an index."""
        for name, kind in zip(result.columns, result.types, strict=True):
            if _has_type(kind, _NOT_IN_ARROW | _INTERVAL):
                number = f"make it a number, epoch_us({quote(name)}), or " if kind.id in _INTERVAL else ""
                raise SchemaError(
                    f"the query {shortened(self._query)!r}: column {name!r} has DuckDB's type {kind}, whose values do not come "
                    f"whole into an index: {number}cast it in the query, as CAST({quote(name)} AS VARCHAR)"
                )

    def _check_digits(self, column: pa.Array[Any], name: str) -> None:
        """Raise SchemaError if integers have more digits than the type says that DuckDB gives Arrow for them."""
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            raise SchemaError(
                f"the query {shortened(self._query)!r}: column {name!r} has an integer of more than 38 digits, which no "
                f"index can hold as a number: cast it in the query, as CAST({quote(name)} AS VARCHAR)"
            ) from error

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (self._duckdb.Error, pa.ArrowException, OSError) as error:  # batches come through Arrow: its errors, or OSError
            raise does_not_run(self._query, " ".join(str(error).split())[:500], self._columns, " in DuckDB") from error


def _has_type(kind: Any, wanted: frozenset[str]) -> bool:
    """Return whether a type of DuckDB, or one within it, is among those `wanted`."""
    if kind.id not in ("list", "array", "struct", "map", "union"):
        return kind.id in wanted
    return any(_has_type(child, wanted) for _, child in kind.children if not isinstance(child, int))  # an array's size is one


def _uuids(texts: Sequence[str | None]) -> list[bytes | None]:
    """Return UUIDs as an index stores them: DuckDB gives Arrow their texts."""
    return [None if text is None else uuid.UUID(text).bytes for text in texts]


def _for_duckdb(field: pa.Field[Any]) -> pa.Field[Any]:
    """Return a column with a type that DuckDB reads from Arrow, and that holds the values of its own.

    Raises:
        SchemaError: There is none.
    """
    try:
        return field.with_type(_readable(field.type))
    except ValueError as error:
        raise SchemaError(
            f"column {field.name!r} has the type {field.type}, and DuckDB has decimals of 38 digits at most: leave it out with "
            "index_cols_to_keep, or leave out sql_engine='duckdb'"
        ) from error


def _readable(kind: Any) -> Any:
    """Return the type of `_for_duckdb` for a normal one."""
    if types.is_float16(kind):
        return pa.float32()
    if types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")  # DuckDB would cut digits off; this cast refuses to
    if types.is_decimal256(kind):
        return pa.decimal128(kind.precision, kind.scale)  # ValueError: more than 38 digits
    if types.is_struct(kind):
        return pa.struct([child.with_type(_readable(child.type)) for child in kind])
    if types.is_map(kind):
        return pa.map_(_readable(kind.key_type), _readable(kind.item_type))
    return pa.list_(_readable(kind.value_type)) if types.is_list(kind) else kind


def _read(table: QueriedTable) -> pa.RecordBatchReader:
    """Return all rows of the index file."""
    columns = table.sql_columns
    schema = pa.schema(map(_for_duckdb, schema_of(columns, physical=True)))
    names = ", ".join([ROW, *(column.expression for column in columns)])

    def batches() -> Iterator[pa.RecordBatch]:
        with contextlib.closing(connect(table.path)) as connection:
            cursor = connection.execute(f"SELECT {names} FROM rows ORDER BY {ROW}")
            while rows := cursor.fetchmany(_ROWS_AT_A_TIME):
                ids = pa.array([row[0] for row in rows], pa.int64())
                arrays = [ids, *arrays_of(columns, [row[1:] for row in rows])]
                cast = [_cast(array, field) for array, field in zip(arrays, schema, strict=True)]
                yield pa.RecordBatch.from_arrays(cast, schema=schema)

    return pa.RecordBatchReader.from_batches(schema, batches())


def _cast(array: Any, field: pa.Field[Any]) -> Any:
    try:
        return array.cast(field.type)
    except pa.ArrowInvalid as error:
        raise pa.ArrowInvalid(
            f"column {field.name!r} has values that DuckDB's type does not hold ({error}): round them, leave the column out "
            "with index_cols_to_keep, or leave out sql_engine='duckdb'"
        ) from error
