"""What a filter would keep, and what the columns of an index hold; both read all rows and write nothing."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from sqlstream.errors import QueryError
from sqlstream.index.build.select import row_ids
from sqlstream.index.file.connection import reading
from sqlstream.index.file.index import Index
from sqlstream.index.sql.dialect import shortened
from sqlstream.index.sql.sandbox import Sandbox
from sqlstream.index.types.models import ROW, quote
from sqlstream.index.types.origins import JoinedColumns
from sqlstream.index.types.values import unsigned_back

_ROWS_AT_A_TIME = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCount:
    """What a filter keeps of one source file."""

    source: str
    num_rows: int
    num_kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRange:
    """What one column holds."""

    name: str
    num_nulls: int
    """NaN counts as NULL, as in SQL."""
    least: Any
    """As SQL has it, of unsigned numbers the number; None when all are NULL."""
    greatest: Any


def explain(index: Index, query: str) -> list[SourceCount]:
    """Return how many rows of each source file the query would keep.

    Raises:
        QueryError: It does not run, or does not give rows of the index.
    """
    with reading(index.path) as connection:
        sources = connection.execute("SELECT url, first_row FROM sources ORDER BY position").fetchall()
    sources = sources[sum(join.num_sources for join in JoinedColumns.of(index.meta)) :]  # these have no rows of their own
    starts = np.array([first_row for _, first_row in sources] or [0], np.int64)  # [num_sources]
    kept = np.zeros(len(starts), np.int64)  # [num_sources]
    with contextlib.closing(Sandbox(index, query)) as sandbox:
        names = sandbox.describe()
        if ROW not in names:
            raise QueryError(
                f"the query {shortened(query)!r} gives no {ROW!r}, so it is unknown whose rows it keeps: begin it with SELECT *"
            )
        _, batches = sandbox.run(f"SELECT {ROW} FROM ({sandbox.statement})", _ROWS_AT_A_TIME)
        for batch in batches:
            owners = np.searchsorted(starts, row_ids([row for (row,) in batch], index, query), side="right") - 1  # [n]
            kept += np.bincount(owners, minlength=len(starts))
    sizes = np.diff(starts, append=index.num_rows)  # [num_sources]
    urls = [url for url, _ in sources] or [index.src]
    return [
        SourceCount(source=url, num_rows=size, num_kept=count)
        for url, size, count in zip(urls, sizes.tolist(), kept.tolist(), strict=True)
    ]


def column_ranges(index: Index) -> list[ColumnRange]:
    """Return nulls, least and greatest value of each column."""
    parts = [f"count(*) - count({name}), min({name}), max({name})" for name in (quote(c.physical) for c in index.sql_columns)]
    with reading(index.path) as connection:
        found: list[Any] = []
        for start in range(0, len(parts), 500):  # SQLite gives at most 2000 columns
            found += connection.execute(f"SELECT {', '.join(parts[start : start + 500])} FROM dataframe").fetchone()
    ranges = []
    for at, column in enumerate(index.sql_columns):
        num_nulls, *ends = found[3 * at : 3 * at + 3]
        least, greatest = map(unsigned_back, ends) if column.type == "uint64" else ends
        ranges.append(ColumnRange(name=column.name, num_nulls=num_nulls, least=least, greatest=greatest))
    return ranges
