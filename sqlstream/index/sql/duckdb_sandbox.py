"""Users' SQL in DuckDB (`sql_engine="duckdb"`), for what SQLite cannot say; the same face as `sandbox.Sandbox`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from sqlstream.errors import MissingDependencyError
from sqlstream.index.file.index import Index
from sqlstream.index.sql.dialect import check_repeatable
from sqlstream.index.sql.duckdb_engine import duckdb_select
from sqlstream.index.sql.query_process import Job, QueryLimits, QueryProcess
from sqlstream.index.sql.sandbox import BUDGET_SECONDS, DEFAULT_LIMITS


class DuckSandbox:
    """One user query, in DuckDB.

    Args:
        index: Whose file is queried; all rows of it, selected or not.
        query: The user's SQL, in DuckDB's dialect.
        scratch: A path for DuckDB's file; `close` removes it.
        budget_seconds: The query is stopped after this time, the copy of the rows not counted.
        limits: What else it may use.

    Raises:
        MissingDependencyError: DuckDB is not installed.
        QueryError: No single SELECT.
    """

    def __init__(
        self,
        index: Index,
        query: str,
        scratch: Path,
        *,
        budget_seconds: float = BUDGET_SECONDS,
        limits: QueryLimits = DEFAULT_LIMITS,
    ) -> None:
        try:
            self.statement = duckdb_select(query)
        except ImportError as error:
            raise MissingDependencyError("sql_engine='duckdb' needs DuckDB: pip install 'sqlstream[duckdb]'") from error
        check_repeatable(query, [column.name for column in index.columns], "duckdb")
        self.columns = [column.physical for column in index.columns]
        limits = replace(limits, seconds=budget_seconds).of(index)
        job = Job(index=index, query=query, statement=self.statement, engine="duckdb", scratch=scratch, limits=limits)
        self._process = QueryProcess(job)

    @property
    def process_id(self) -> int:
        """The process that runs it."""
        return self._process.pid

    def describe(self) -> list[str]:
        """Return the names of the query's result columns."""
        return self._process.describe()

    def run(self, statement: str, count: int) -> tuple[list[str], Iterator[list[tuple[Any, ...]]]]:
        """Return the names of the result of `statement`, and its rows as an index stores them, `count` at a time at most."""
        return self._process.run(statement, count)

    def result_fields(self) -> dict[str, pa.Field[Any]]:
        """Return the Arrow fields of the query's result by name.

        Raises:
            SchemaError: A type that no index can hold.
        """
        return self._process.result_fields()

    def close(self) -> None:
        """End the query, and remove its files."""
        self._process.close()
