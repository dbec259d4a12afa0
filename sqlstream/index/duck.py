"""Runs users' SQL in DuckDB (`sql_engine="duckdb"`), for what SQLite cannot say; the same face as `sandbox.Sandbox`.

The rows go into a temporary DuckDB file with their Arrow types (lists are lists, times are times). Then files, network,
extensions and settings are locked, and one SELECT runs, with a time budget.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from sqlstream.errors import MissingDependencyError, QueryError
from sqlstream.index import values
from sqlstream.index.arrow import arrays_of, schema_of
from sqlstream.index.dialect import bare, shortened
from sqlstream.index.models import ROW, VIEWS, quote
from sqlstream.index.sandbox import BUDGET_SECONDS
from sqlstream.index.schema import normalise
from sqlstream.index.store import Index, connect

_ROWS_AT_A_TIME = 16_384
_LOCKS = (
    "enable_external_access=false",
    "autoinstall_known_extensions=false",
    "autoload_known_extensions=false",
    "python_enable_replacements=false",
    "lock_configuration=true",
)


class DuckSandbox:
    """A DuckDB with the rows of an index, for one user query.

    Args:
        index: Whose file is queried; all rows of it, selected or not.
        query: The user's SQL, in DuckDB's dialect.
        scratch: A path for DuckDB's file; the caller removes it.
        budget_seconds: The query is stopped after this time.

    Raises:
        MissingDependencyError: DuckDB is not installed.
        QueryError: No single SELECT.
    """

    def __init__(self, index: Index, query: str, scratch: Path, *, budget_seconds: float = BUDGET_SECONDS) -> None:
        self._query, self._budget, self._is_late = query, budget_seconds, False
        self.columns = [column.physical for column in index.columns]
        try:
            self._duckdb: Any = importlib.import_module("duckdb")
        except ImportError as error:
            raise MissingDependencyError("sql_engine='duckdb' needs DuckDB: pip install 'sqlstream[duckdb]'") from error
        with self._errors():
            statements = self._duckdb.extract_statements(query)
        if len(statements) != 1 or statements[0].type != self._duckdb.StatementType.SELECT:
            raise QueryError(f"the query {shortened(query)!r} is no single SELECT: give 'SELECT … FROM dataframe WHERE …'")
        self.statement = bare(query)
        self._connection = self._duckdb.connect(str(scratch))
        try:
            with self._errors():
                self._load(index)
        except BaseException:
            self._connection.close()
            raise

    def describe(self) -> list[str]:
        """Return the names of the query's result columns."""
        with self._errors():
            return [column[0] for column in self._connection.execute(f"DESCRIBE {self.statement}").fetchall()]

    def run(self, statement: str, count: int) -> tuple[list[str], Iterator[list[tuple[Any, ...]]]]:
        """Return the names of the result of `statement`, and its rows as an index stores them, `count` at a time."""
        with self._errors():
            reader = self._connection.sql(statement).to_arrow_reader(count)
            return list(reader.schema.names), self._batches(reader)

    def result_fields(self) -> dict[str, pa.Field[Any]]:
        """Return the Arrow fields of the query's result by name; runs nothing.

        Raises:
            SchemaError: A type that no index can hold.
        """
        with self._errors():
            schema = self._connection.sql(f"SELECT * FROM ({self.statement}\n) LIMIT 0").to_arrow_table().schema
        return {field.name: normalise(field, f"the query {shortened(self._query)!r}") for field in schema}

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _load(self, index: Index) -> None:
        db = self._connection
        db.register("incoming", _read(index))
        db.execute(f"CREATE TABLE {VIEWS[0]} AS SELECT * FROM incoming")
        db.unregister("incoming")
        db.execute(f"CREATE VIEW {VIEWS[1]} AS SELECT * FROM {VIEWS[0]}")
        for lock in _LOCKS:
            db.execute(f"SET {lock}")

    def _batches(self, reader: Any) -> Iterator[list[tuple[Any, ...]]]:
        while True:
            with self._errors():
                batch = next(reader, None)
            if batch is None:
                return
            fields = [normalise(field, "the query") for field in batch.schema]
            encoded = [values.encode(column, field) for column, field in zip(batch.columns, fields, strict=True)]
            stored = [[None if v == values.NAN else v for v in e.values] if e.has_nan else e.values for e in encoded]
            yield list(zip(*stored, strict=True))

    def _interrupt(self) -> None:
        self._is_late = True
        self._connection.interrupt()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        timer = threading.Timer(self._budget, self._interrupt)
        timer.daemon = True
        timer.start()
        try:
            yield
        except self._duckdb.Error as error:
            why = f"it did not end within {self._budget:g} seconds" if self._is_late else " ".join(str(error).split())[:500]
            columns = ", ".join([ROW, *self.columns[:50]]) + (", …" if len(self.columns) > 50 else "")
            raise QueryError(
                f"the query {shortened(self._query)!r} does not run in DuckDB: {why}. "
                f"The table is {VIEWS[0]!r}, its columns: {columns}",
                query=self._query,
            ) from error
        finally:
            timer.cancel()


def _read(index: Index) -> pa.RecordBatchReader:
    """Return all rows of the index file."""
    columns = index.columns
    schema = schema_of(columns, physical=True)
    names = ", ".join([ROW, *(quote(column.physical) for column in columns)])

    def batches() -> Iterator[pa.RecordBatch]:
        with contextlib.closing(connect(index.path)) as connection:
            cursor = connection.execute(f"SELECT {names} FROM rows ORDER BY {ROW}")
            while rows := cursor.fetchmany(_ROWS_AT_A_TIME):
                ids = pa.array([row[0] for row in rows], pa.int64())
                yield pa.RecordBatch.from_arrays([ids, *arrays_of(columns, [row[1:] for row in rows])], schema=schema)

    return pa.RecordBatchReader.from_batches(schema, batches())
