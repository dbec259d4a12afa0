"""Users' SQL on an index, with limits on time and memory that hold whatever it calls.

A SQLite statement that judges each row by itself, with functions whose time and result are bounded by their arguments, runs
here: it is asked for the time between two rows. All else, and DuckDB, runs in a process of its own (0.3 s), which is killed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from sqlstream.errors import QueryError
from sqlstream.index.file.index import Index
from sqlstream.index.sql import functions
from sqlstream.index.sql.dialect import check_repeatable, has_word
from sqlstream.index.sql.duckdb_engine import duckdb_select
from sqlstream.index.sql.query_process import Job, QueryLimits, QueryProcess
from sqlstream.index.sql.sqlite_engine import SqliteEngine
from sqlstream.index.sql.syntax_trees import check_distinct, judges_rows, renamed_columns
from sqlstream.index.sql.table import QueriedTable
from sqlstream.index.types.result_column import ResultColumn
from sqlstream.index.types.values import columns_of, unsigned_back

DEFAULT_LIMITS = QueryLimits()
BUDGET_SECONDS = DEFAULT_LIMITS.seconds


class SharedProcess:
    """The process that queries of one owner share, one after the other; started when one needs it."""

    def __init__(self) -> None:
        self._process: QueryProcess | None = None

    def open(self, job: Job) -> QueryProcess:
        """Return the process with a new query in it; one that is gone, as after some seconds without use, is replaced."""
        if self._process is not None:
            try:
                self._process.open(job)
            except QueryError:
                if self._process.is_alive():  # the engine refuses the query
                    raise
                self.close()
        if self._process is None:
            self._process = QueryProcess(job)
        return self._process

    def close(self) -> None:
        """End it; the next use starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def forget(self) -> None:
        """Drop what a forked child inherited; the next use starts another one."""
        self._process = None


class Sandbox:
    """One user query.

    Args:
        index: Whose file is queried; all rows of it, selected or not.
        query: The user's SQL, in the dialect of the engine.
        engine: What runs it: "sqlite", or "duckdb" for what SQLite cannot say.
        scratch: A path for DuckDB's file; `close` removes it.
        budget_seconds: The query is stopped after this time; DuckDB's copy of the rows is not counted.
        limits: What else it may use.
        shared: Where it runs when it does not run here, beside others of the same owner; None: in a process of its own.

    Raises:
        MissingDependencyError: DuckDB is not installed.
        QueryError: No single SELECT, or it does not run.
    """

    def __init__(
        self,
        index: Index,
        query: str,
        *,
        engine: str = "sqlite",
        scratch: Path | None = None,
        budget_seconds: float = BUDGET_SECONDS,
        limits: QueryLimits = DEFAULT_LIMITS,
        shared: SharedProcess | None = None,
    ) -> None:
        self._shared, self._is_shared = shared or SharedProcess(), shared is not None
        self._process: QueryProcess | None = None
        self._here: SqliteEngine | None = None
        table = QueriedTable.of(index)
        self.columns = [column.physical for column in table.sql_columns]
        if engine == "duckdb":
            self.statement = duckdb_select(query)
        check_repeatable(query, [column.name for column in table.columns], engine)
        check_distinct(query, engine)
        if engine == "sqlite":
            self._here = SqliteEngine(table, query, budget_seconds=budget_seconds)
            self.statement = self._here.statement
            try:
                self._here.prepare()
            except BaseException:
                self._here.close()
                raise
        limits = replace(limits, seconds=budget_seconds).of(table)
        self._job = Job(table=table, query=query, statement=self.statement, engine=engine, scratch=scratch, limits=limits)

    @property
    def process_id(self) -> int | None:
        """The process that runs it; None: this one, or not yet."""
        return None if self._process is None else self._process.pid

    @property
    def columns_read(self) -> set[str]:
        """Columns that a query of SQLite looks at, as SQL spells them."""
        return set() if self._here is None else self._here.columns_read

    def start(self) -> QueryProcess | SqliteEngine:
        """Return where the query runs."""
        if self._here is not None and self._is_bounded(self._here):
            return self._here
        if self._process is None:
            self._process = self._shared.open(self._job)
        return self._process

    def result_fields(self) -> dict[str, pa.Field[Any]]:
        """Return the Arrow fields of the query's result by name, as far as the engine knows them: SQLite knows none.

        Raises:
            SchemaError: A type that no index can hold.
        """
        if self._here is not None:
            return {}
        process = self.start()
        assert isinstance(process, QueryProcess)
        return process.result_fields()

    def describe(self) -> list[str]:
        """Return the names of the query's result columns (doubles get a number)."""
        return self.start().describe()

    def run(self, statement: str, count: int) -> tuple[list[str], Iterator[list[tuple[Any, ...]]]]:
        """Return the names of the result of `statement` (made from the query's), and its rows, `count` at a time at most."""
        return self.start().run(statement, count)

    def close(self, *, is_over: bool = False) -> None:
        """End the query.

        Args:
            is_over: All rows were read: a shared process may take the next query.
        """
        if self._here is not None:
            self._here.close()
        if not (self._is_shared and is_over):
            self._shared.close()

    def _is_bounded(self, engine: SqliteEngine) -> bool:
        """Return True if no call of the statement takes long, and no value of it is longer than those of the table."""
        if has_word(self.statement, "||"):
            return False
        return all(map(functions.is_bounded, engine.functions)) and judges_rows(self.statement)


def run_query(
    index: Index, sql: str, limit: int | None = None, *, budget_seconds: float = BUDGET_SECONDS
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return column names and rows of a user's query, as SQLite has the values, but for integers above 2^63.

    Args:
        index: All rows of its file are queried.
        sql: One SELECT on `dataframe`, also called `samples`.
        limit: At most this many rows.
        budget_seconds: The query is stopped after this time.

    Raises:
        QueryError: It is no SELECT, does not run, is not allowed, or takes too long.
    """
    with contextlib.closing(Sandbox(index, sql, budget_seconds=budget_seconds)) as sandbox:
        names, batches = sandbox.run(sandbox.statement, 1000)
        rows: list[tuple[Any, ...]] = []
        for batch in batches:
            rows.extend(batch)
            if limit is not None and len(rows) >= limit:
                break
        rows = rows if limit is None else rows[:limit]
        logical = {column.physical.lower(): column.name for column in index.sql_columns}
        read, renamed = sandbox.columns_read, renamed_columns(sql)
        kinds = [ResultColumn(logical.get(name.lower(), name), index, read, renamed) for name in names]
    for kind, values in zip(kinds, columns_of(rows), strict=False):  # of an empty result there are none
        kind.look_at(values)
    if not any(are_unsigned := [pa.types.is_uint64(kind.field(None).type) for kind in kinds]):
        return names, rows
    return names, [tuple(unsigned_back(v) if is_it else v for v, is_it in zip(row, are_unsigned, strict=True)) for row in rows]
