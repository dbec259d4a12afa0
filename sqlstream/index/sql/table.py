"""The table that a query sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sqlstream.index.types.models import Column

if TYPE_CHECKING:
    from sqlstream.index.file.index import Index  # numpy and Arrow: the process of a query for SQLite needs neither


@dataclass(frozen=True, slots=True, kw_only=True)
class QueriedTable:
    """An index file as a query sees it: all of its rows, selected or not."""

    path: Path
    """The SQLite file."""
    num_rows: int
    """Rows in it."""
    columns: tuple[Column, ...]
    """The columns of a row, in the source's order."""
    sql_columns: tuple[Column, ...]
    """Those of them that SQL sees."""

    @classmethod
    def of(cls, index: Index) -> QueriedTable:
        """Return the table of an index."""
        columns, seen = (
            tuple(replace(column) for column in columns)  # without the Arrow field that a column may keep beside its own
            for columns in (index.columns, index.sql_columns)
        )
        return cls(path=index.path, num_rows=index.num_rows, columns=columns, sql_columns=seen)
