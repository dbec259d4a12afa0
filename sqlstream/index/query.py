"""A user's query on the rows that an index selects, answered as an Arrow table."""

from __future__ import annotations

import contextlib
from itertools import chain
from pathlib import Path

import pyarrow as pa

from sqlstream.config import IndexOptions
from sqlstream.errors import ConfigError
from sqlstream.index.build.lazy import LazyIndex
from sqlstream.index.file.index import Index
from sqlstream.index.file.workplace import workplace
from sqlstream.index.sql.dialect import bracketed
from sqlstream.index.sql.expressions import rows_of
from sqlstream.index.sql.sandbox import Sandbox
from sqlstream.index.sql.sqlite_engine import SELECTED
from sqlstream.index.sql.syntax_trees import renamed_columns
from sqlstream.index.types.arrow import table_of
from sqlstream.index.types.models import VIEWS, fingerprint, identity
from sqlstream.index.types.result_column import ResultColumn
from sqlstream.index.types.values import columns_of

_ROWS_AT_A_TIME = 8192


def query_rows(index: Index, sql: str, options: IndexOptions, directory: Path) -> pa.Table:
    """Return the result of a SELECT on the selected rows of an index.

    Args:
        index: The rows: `dataframe`, or `samples`, in the query.
        sql: The query, in the dialect of `options`.
        options: Those that the index was opened with.
        directory: Where index files are; DuckDB's temporary file is there.

    Returns:
        Its columns with the types that the source has for these names, as far as the values fit, else with what SQLite gives.

    Raises:
        QueryError: It is no SELECT, does not run, is not allowed, or takes too long.
        ConfigError: The index is lazy: its rows are not here.
    """
    if isinstance(index, LazyIndex):
        raise ConfigError(
            f"query() needs all rows, and those of {index.src} stay in their files: head() shows the first ones, or leave "
            "lazy_index_chunk_size out"
        )
    key = fingerprint({"query": sql, "rows": index.fingerprint})
    with workplace(directory, key, is_brief=True) as place, contextlib.ExitStack() as sandboxes:

        def sandbox_of(query: str) -> Sandbox:
            made = Sandbox(index, query, engine=options.sql_engine, scratch=place.temporary("duckdb"))
            return sandboxes.enter_context(contextlib.closing(made))

        sandbox = sandbox_of(sql)  # what is wrong with it is said of the user's own text
        if index.selection is not None:
            sandbox = sandbox_of(_on_selected_rows(index, sql, options.sql_engine))
        known = sandbox.result_fields()
        names, batches = sandbox.run(sandbox.statement, _ROWS_AT_A_TIME)
        logical = {identity(column.physical): column.name for column in index.sql_columns}
        read, renamed = sandbox.columns_read, renamed_columns(sql)
        kinds = [ResultColumn(logical.get(identity(name), name), index, read, renamed) for name in names]
        rows = list(chain.from_iterable(batches))
    for kind, values in zip(kinds, columns_of(rows), strict=False):  # of an empty result there are none
        kind.look_at(values)
    fields = [known.get(name) or kind.field(None) for name, kind in zip(names, kinds, strict=True)]
    shown = [name if kind.name in names else kind.name for name, kind in zip(names, kinds, strict=True)]  # `row_1` beside `row`
    return table_of([field.with_name(name) for field, name in zip(fields, shown, strict=True)], rows)


def _on_selected_rows(index: Index, sql: str, engine: str) -> str:
    """Return the query with the selected rows under the names of the table, which the filter itself needs, too."""
    views = ", ".join(f"{view} AS (SELECT * FROM {SELECTED})" for view in VIEWS)
    selected = f"{SELECTED} AS (SELECT * FROM {rows_of(index.selection)})"
    return f"WITH {selected} SELECT * FROM (WITH {views} SELECT * FROM {bracketed(sql, engine)})"
