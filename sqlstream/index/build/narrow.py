"""Some of the rows that an index selects, as another index of the same file: nothing of the source is read again."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from sqlstream.config import IndexOptions
from sqlstream.index.build.content_index import ContentIndex
from sqlstream.index.build.lazy import LazyIndex
from sqlstream.index.build.lazy_build import with_filter
from sqlstream.index.build.select import open_selection
from sqlstream.index.file.index import Index
from sqlstream.index.sql.expressions import condition_of, one_expression, rows_of


def narrowed(
    index: Index,
    options: IndexOptions,
    directory: Path,
    *,
    where: str | None = None,
    num_rows: int | None = None,
    show_progress: bool = True,
) -> Index:
    """Return the index of some of the rows that an index selects, in their order; it is as open as that one.

    Args:
        index: The rows.
        options: Those that it was opened with.
        directory: Where index files are.
        where: A condition that they must fulfil, in the dialect of `options`; None: nothing.
        num_rows: At most so many of these, from the first on; None: all.
        show_progress: Show a bar while it is filtered, if stderr is a terminal.

    Raises:
        QueryError: The condition does not run, or keeps no row.
        ConfigError: The index is lazy, its number of rows is limited, and rows are to be filtered after that.
    """
    if isinstance(index, LazyIndex):
        condition = None if where is None else condition_of(None, where)
        return with_filter(index.narrowed(condition, num_rows), directory)
    selection, engine = index.selection, options.sql_engine
    if where is None:
        query, limits = "SELECT * FROM dataframe", [num_rows]
        if selection is not None:
            query, limits = selection.query, [num_rows, selection.max_size]
    else:
        query, limits = f"SELECT * FROM {rows_of(selection)} WHERE ({one_expression('where', where, engine)})", [num_rows]
    max_size = min((limit for limit in limits if limit is not None), default=None)
    wanted = replace(options, sql_query=query, where=None, max_size=max_size)
    with contextlib.closing(index.whole()) as base:
        part = open_selection(base, wanted, directory, show_progress=show_progress)
    part.provenance = index.provenance
    if isinstance(index, ContentIndex):
        part = index.like(part)
    if part.path == index.path:  # a row has the number that it had
        part.named_members = index.named_members
    part.hold()
    return part
