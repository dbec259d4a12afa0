"""SQLite as the engine of users' SQL: it runs on an index file so that it can read the rows and nothing else.

Each of these alone has a hole (mode=ro still lets ATTACH create files, query_only still lets it open them): the file is opened
read-only and immutable, query_only, trusted_schema off, with an authorizer that knows the one table and a list of functions,
with limits on length, depth and size, and a time budget. One statement, which begins with SELECT or WITH.
"""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from sqlstream.index.file.connection import connect, damage_named, size_of
from sqlstream.index.sql import functions
from sqlstream.index.sql.dialect import MAX_SQL_LENGTH, does_not_run, to_sqlite
from sqlstream.index.sql.moments import is_moment, with_whole_moments
from sqlstream.index.sql.numbers import computed_moment, computed_with, ordered_by_number, stored_as
from sqlstream.index.sql.table import QueriedTable
from sqlstream.index.types.models import ROW, VIEWS, quote

_OPERATIONS = 20_000  # of SQLite's machine between two looks at the clock: about a millisecond
_LIMITS = {
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_SQL_LENGTH,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 32,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_LEAST_LENGTH, _MOST_LENGTH = 1 << 20, 64 << 20
"""Bounds of a value's or a sorted row's bytes: no value is longer than the file of its table, but a computed one may be."""
_SLICE_ROWS, _SLICE_BYTES = 256, 16 << 20  # fetched before their bytes are counted; a batch
_WITHIN_VIEWS = ("rows", "sources")
_TABLE_FUNCTIONS = ("json_each", "json_tree")
SELECTED = "selected_rows"
"""Name, in statements of ours, of the rows that a filter keeps; no table has it."""


class SqliteEngine:
    """A connection for one user query.

    Args:
        table: What is queried.
        query: The user's SQL.
        budget_seconds: The query is stopped after this time; within one function of it, nothing stops it.
        statement: The query as SQLite must read it, where that is known: its translation imports sqlglot.

    Raises:
        QueryError: No single SELECT.
    """

    def __init__(self, table: QueriedTable, query: str, *, budget_seconds: float, statement: str | None = None) -> None:
        self._table, self._query, self._budget = table, query, budget_seconds
        self.columns = [column.physical for column in table.sql_columns]
        self.statement = statement or with_whole_moments(to_sqlite(query, self.columns), table.columns)
        self.functions: set[str] = set()
        """Functions that the statements so far call, in lower case."""
        self.columns_read: set[str] = set()
        """Columns that the statements so far look at, as SQL spells them."""
        self._length = min(max(_LEAST_LENGTH, size_of(table.path)), _MOST_LENGTH)
        self._denied: str | None = None
        self._failed: list[Exception] = []
        self._raised: BaseException | None = None
        self._is_late = False
        self._connection = self._locked_down()

    def prepare(self) -> None:
        """Find out what the query looks at and calls; runs nothing of it."""
        with self._errors():
            self._connection.execute(f"EXPLAIN {self.statement}").close()
        self._check_numbers()

    def _check_numbers(self) -> None:
        """Raise QueryError for a query that computes with values for which SQLite has no number, if there are some."""
        read = [column for column in self._table.columns if column.physical in self.columns_read]
        if (texts := ordered_by_number(self.statement, read)) is not None:
            way = f"'10' comes before '9' among texts: write CAST({quote(texts.physical)} AS REAL)"
            if is_moment(texts):
                way = "'2024-01-31' is more than every number: write a text, such as '2024-01-31', or epoch(x) for seconds"
            why = f"it asks whether values of {texts.name!r}, which are texts, are more or less than a number, and {way}"
            raise does_not_run(self._query, why, self._table.columns)
        if (moments := computed_moment(self.statement, read)) is not None:
            why = (
                f"it computes with {moments.name!r} ({moments.type}), whose values are texts such as '2024-01-31', of which "
                "SQLite takes the year: write date(x, '+1 day'), julianday(x) for days, epoch(x) for seconds, or use "
                "sql_engine='duckdb'"
            )
            raise does_not_run(self._query, why, self._table.columns)
        for column in computed_with(self.statement, read):
            name = quote(column.physical)
            first = f"SELECT {ROW} FROM {VIEWS[0]} WHERE typeof({name}) = '{stored_as(column)}' LIMIT 1"
            with self._errors():
                found = self._connection.execute(first).fetchone()
            if found is not None:
                is_text = stored_as(column) == "text"
                way = f"CAST({name} AS REAL), which rounds" if is_text else f"hash({name}, seed) for a random part"
                why = (
                    f"it compares or computes with {column.name!r}, of which row {found[0]} is no number to SQLite "
                    f"({column.type}), so that rows would be wrong: use sql_engine='duckdb', or {way}"
                )
                raise does_not_run(self._query, why, self._table.columns)

    def describe(self) -> list[str]:
        """Return the names of the query's result columns (doubles get a number); runs nothing."""
        with self._errors():
            return _names(self._connection.execute(f"SELECT * FROM ({self.statement}) LIMIT 0"))

    def run(self, statement: str, count: int) -> tuple[list[str], Iterator[list[tuple[Any, ...]]]]:
        """Return the names of the result of `statement` (made from the query's), and its rows, `count` at a time."""
        with self._errors():
            cursor = self._connection.execute(statement)
        return _names(cursor), self._batches(cursor, count)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _batches(self, cursor: sqlite3.Cursor, count: int) -> Iterator[list[tuple[Any, ...]]]:
        """Yield rows, as many as are asked for or as many as are some MiB."""
        if _names(cursor) == [ROW]:  # numbers, or an error a moment later
            while rows := self._fetched(cursor, count):
                yield rows
            return
        batch: list[tuple[Any, ...]] = []
        num_bytes, at_a_time = 0, 1
        while rows := self._fetched(cursor, min(at_a_time, count)):
            batch += rows
            size = _num_bytes(rows)
            num_bytes += size
            at_a_time = max(1, min(2 * at_a_time, _SLICE_ROWS, _SLICE_BYTES * len(rows) // (size + 1)))
            if len(batch) >= count or num_bytes >= _SLICE_BYTES:
                yield batch
                batch, num_bytes = [], 0
        if batch:
            yield batch

    def _fetched(self, cursor: sqlite3.Cursor, count: int) -> list[tuple[Any, ...]]:
        with self._errors():
            return cursor.fetchmany(count)

    def _locked_down(self) -> sqlite3.Connection:
        connection = connect(self._table.path)
        connection.execute("PRAGMA case_sensitive_like=ON")  # as in DuckDB
        functions.register(connection, self._failed.append)
        with damage_named(self._table.path):  # the schema is read before the guard stands
            connection.execute("SELECT 1 FROM dataframe, json_each('[]'), json_tree('[]') LIMIT 0")
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, self._length)
        if sys.version_info >= (3, 12):
            connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
        connection.set_authorizer(self._authorize)
        deadline = time.monotonic() + self._budget
        connection.set_progress_handler(lambda: self._is_over(deadline), _OPERATIONS)
        return connection

    def _authorize(self, action: int, one: str | None, two: str | None, _database: str | None, within: str | None) -> int:
        if action == sqlite3.SQLITE_SELECT:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_READ:
            # `rows`, and URLs of shards, only through the views; a read of no column at all (count(*)) names no view.
            names_no_column = two == "" and one in ("rows", SELECTED)
            if one in VIEWS or one in _TABLE_FUNCTIONS or names_no_column or (one in _WITHIN_VIEWS and within in VIEWS):
                if one in VIEWS and two:
                    self.columns_read.add(two)
                return sqlite3.SQLITE_OK
            self._denied = f"it reads {one!r}, and there is only the table {VIEWS[0]!r} (also called {VIEWS[1]!r})"
        elif action == sqlite3.SQLITE_FUNCTION:
            self.functions.add(str(two).lower())
            if functions.is_allowed(str(two)):
                return sqlite3.SQLITE_OK
            instead = functions.instead_of(str(two))
            self._denied = f"the function {two}() is not allowed" + ("" if instead is None else f": use {instead}")
        else:
            self._denied = (
                "it does more than select from the index" if action != sqlite3.SQLITE_RECURSIVE else "it is recursive"
            )
        return sqlite3.SQLITE_DENY

    def _is_over(self, deadline: float) -> int:
        try:
            self._is_late = time.monotonic() > deadline
        except BaseException as error:  # Ctrl-C; SQLite would swallow it
            self._raised = error
            return 1
        return int(self._is_late)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, sqlite3.Warning, UnicodeEncodeError, OverflowError) as error:
            if self._raised is not None:
                raise self._raised from error
            why = self._denied or str(error)
            if self._is_late:
                why = f"it did not end within {self._budget:g} seconds"
            elif self._failed:
                why = str(self._failed[-1])
            elif "too big" in why:
                why = f"a value or a row of it has more than {self._length >> 20} MiB"
            elif "disk I/O error" in why:
                why += ": its temporary files, for what it sorts or groups, have no room"
            elif "syntax error" in why or "no such function" in why or "unrecognized token" in why:
                why += " (what only DuckDB knows needs sql_engine='duckdb')"
            raise does_not_run(self._query, why, self._table.columns) from error


def _num_bytes(rows: list[tuple[Any, ...]]) -> int:
    """Return the length of texts and bytes of some rows."""
    if set(map(type, chain.from_iterable(rows))).isdisjoint((str, bytes)):  # numbers, mostly: a quarter of the time
        return 0
    return sum([len(value) for row in rows for value in row if type(value) is str or type(value) is bytes])


def _names(cursor: sqlite3.Cursor) -> list[str]:
    return [column[0] for column in cursor.description]
