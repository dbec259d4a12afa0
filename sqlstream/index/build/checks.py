"""Whether an index has the columns that were asked for: those to download, one that can name its rows, those of a query."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sqlstream.config import IndexOptions
from sqlstream.errors import SchemaError, SourceError
from sqlstream.index.file.index import Index
from sqlstream.index.sql.dialect import renamed, shortened
from sqlstream.index.types.models import NO_NAMES, ROW, identity

logger = logging.getLogger(__name__)


def no_column(option: str, name: str, src: str, names: Sequence[str]) -> SchemaError:
    """Return the error of an option that names a column which is not there."""
    return SchemaError(
        f"{option} names {name!r}, but {src} has no such column: it has {_listed(names)}; correct the name, compute it "
        f"(sql_query='SELECT *, … AS {name} FROM dataframe'), or set allow_missing_columns=True to read it as None"
    )


def check_downloads(index: Index, options: IndexOptions) -> None:
    """Look for the columns to download: an index file without them may have been built for a query that gives them.

    Raises:
        SchemaError: One is not there, and must be.
    """
    names = [column.name for column in index.columns]
    absent = next((name for name in options.columns_to_download if name not in names), None)
    if absent is not None and not options.allow_missing_columns:
        raise no_column("columns_to_download", absent, index.src, names)


def check_key(index: Index, options: IndexOptions) -> None:
    """Look whether the key column that is wanted can name the rows; where none was asked for, their numbers do.

    Raises:
        SchemaError: It was asked for, and is not there; SourceError: it has no value, or the same one twice.
    """
    problem, names = index.key_problem, [column.name for column in index.columns]
    if problem is None:
        return
    if options.key_column is None:
        has_values = any(column.name == options.wanted_key and not column.is_content for column in index.columns)
        if index.wanted_key == options.wanted_key and has_values:
            logger.warning("%s: %s, so samples are named by the numbers of their rows", index.src, problem)
        return
    if options.key_column not in names:
        raise no_key_column(index.src, options.key_column, names)
    raise SourceError(
        f"{index.src}: {problem}: every sample needs a key of its own; mend the source, select other rows, name another column "
        "with index_col_name, or leave that out: then row numbers are the keys"
    )


def warn_of_names(index: Index, query: str, engine: str) -> None:
    """Say of a column that a query names that SQL calls something else so: the number of a row, or a column of another case."""
    if (column := renamed(query, index.columns, engine)) is not None:
        what = "a truth value" if identity(column.name) in NO_NAMES else "another column"
        what = "the number of a row" if column.name.lower() == ROW else what
        logger.warning(
            "the query %r names %r, which is %s in SQL (case does not count there): the source's column %r is called %r",
            shortened(query), column.name, what, column.name, column.physical,
        )  # fmt: skip


def no_key_column(source: str, key_column: str, names: Sequence[str]) -> SchemaError:
    """Return the error of a source without the column that is to name samples."""
    return SchemaError(
        f"{source} has no index column {key_column!r}: it has {_listed(names)}; "
        "name the one that identifies a sample with index_col_name, or leave that out: then row numbers are the keys"
    )


def _listed(columns: Sequence[str]) -> str:
    names = [repr(column) for column in columns]
    return ", ".join(names[:30]) + (f" and {len(names) - 30} more" if len(names) > 30 else "") if names else "no columns"
