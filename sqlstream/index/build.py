"""Builds an index from its source, or reuses the one that is there.

`open_index` is the facade; what is to be read is planned by `sources.plan`, written by `writer`, filtered by `select`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from pathlib import Path

import pyarrow as pa

from sqlstream.config import IndexOptions, check_at_least
from sqlstream.errors import ConfigError, SchemaError, SourceError
from sqlstream.index import select
from sqlstream.index.models import FORMAT_VERSION, SourceFile, fingerprint
from sqlstream.index.sources.access import local_copy
from sqlstream.index.sources.base import TableFile
from sqlstream.index.sources.directory import DirectoryTable
from sqlstream.index.sources.formats import open_table
from sqlstream.index.sources.plan import SourcePlan, plan_sources
from sqlstream.index.store import Index
from sqlstream.index.values import declared
from sqlstream.index.workplace import Workplace, sweep_dead, workplace
from sqlstream.index.writer import IndexWriter
from sqlstream.progress import Progress, progress
from sqlstream.storage import urls
from sqlstream.storage.base import RemoteReader

logger = logging.getLogger(__name__)


def open_index(options: IndexOptions, directory: Path, remote: RemoteReader, *, show_progress: bool = True) -> Index:
    """Return the index of a source, built when no earlier run has built it.

    Args:
        options: The source, what is kept of it, and the filter.
        directory: Where index files are (`<dst>/index`); exists.
        remote: Reads what is not local.
        show_progress: Show a bar while building, if stderr is a terminal.

    Raises:
        ConfigError: The source is nothing that an index can be made of.
        SourceError: A file of it is broken, empty, or lacks what is asked for; `StorageError` when it cannot be reached.
        QueryError: The filter does not run, or keeps no row.
    """
    _check(options)
    sweep_dead(directory)
    plan = _plan(options, directory, remote)
    base = _open_base(plan, options, directory, remote, show_progress=show_progress)
    if options.sql_query is not None:
        return select.open_selection(base, options, directory, show_progress=show_progress)
    if base.key_problem is not None:
        raise _key_error(base)
    return base


def _check(options: IndexOptions) -> None:
    for name, limit in (("max_size", options.max_size), ("max_index_files_to_use", options.max_index_files)):
        if limit is not None:
            check_at_least(name, limit, 1)
    if not options.src:
        raise ConfigError("src is empty: give a table file, a wildcard, a text file of paths, or a directory")


def _plan(options: IndexOptions, directory: Path, remote: RemoteReader) -> SourcePlan:
    with contextlib.ExitStack() as stack:

        def temporary() -> Path:
            """Return a path that is swept even if we are killed."""
            place = stack.enter_context(workplace(directory, fingerprint({"list": options.src})))
            return place.temporary("list")

        return plan_sources(options, temporary, remote)


def _open_base(plan: SourcePlan, options: IndexOptions, directory: Path, remote: RemoteReader, *, show_progress: bool) -> Index:
    """Return the index file of all rows (or of the first `max_size` where no filter comes after)."""
    max_size = options.max_size if options.sql_query is None else None
    key = fingerprint(
        {
            "format": FORMAT_VERSION,
            "source": plan.identity(),
            "src": urls.redact(plan.src),  # the same files by another way: relative paths start elsewhere
            "base_url": urls.redact(plan.base_url),
            "keep": None if options.columns_to_keep is None else sorted(options.columns_to_keep),
            "download": sorted(options.columns_to_download),
            "allow_missing": options.allow_missing_columns,
            "key": plan.key_column,
            "max_size": max_size,
        }
    )
    index = Index(directory / f"{key}.sqlite", base_url=plan.base_url)
    if index.is_usable():
        return index
    with workplace(directory, key) as place:
        if not index.is_usable():  # nobody has built it while we waited
            _build(plan, options, place, remote, (key, max_size), show_progress=show_progress)
    return index


def _build(
    plan: SourcePlan,
    options: IndexOptions,
    place: Workplace,
    remote: RemoteReader,
    target: tuple[str, int | None],
    *,
    show_progress: bool,
) -> None:
    key, max_size = target
    temporary = place.temporary()
    with contextlib.closing(IndexWriter(temporary, plan.key_column)) as writer:
        description = f"indexing {urls.redact(plan.src)}"
        tables = _tables(plan, place, remote)
        with progress(max_size, " rows", description, show_progress) as bar:
            for source, table in tables:
                names = _begin(source, table, writer, options, plan.key_column)
                _copy_rows(table, names, writer, max_size, bar)
                if writer.num_rows == max_size:
                    tables.close()
                    break
        _add_missing(writer, options, plan)
        if not writer.num_rows:
            raise SourceError(f"{urls.redact(plan.src)} has no rows: an index needs one at least")
        src, base_url = urls.redact(plan.src), urls.redact(plan.base_url)
        writer.finish({"fingerprint": key, "src": src, "base_url": base_url, "key_column": plan.key_column})
    place.publish(temporary, f"{key}.sqlite")


def _tables(plan: SourcePlan, place: Workplace, remote: RemoteReader) -> Generator[tuple[SourceFile, TableFile], None, None]:
    """Yield each table of the source, open, one at a time; remote ones are on the local disk only for that time."""
    if plan.directory is not None:
        assert plan.kind is not None
        table = DirectoryTable(plan.directory, plan.kind, place.temporary("listing"))
        try:
            table.read(plan.version)
            yield SourceFile(url=plan.directory.directory, size_bytes=None, etag=plan.version[0]), table
        finally:
            table.close()
    for file in plan.files:
        with local_copy(file, place.temporary("download"), remote) as path:
            yield file, open_table(path, file.url)


def _begin(source: SourceFile, table: TableFile, writer: IndexWriter, options: IndexOptions, key_column: str) -> list[str]:
    """Agree on the columns of one table; return which of them go into the index."""
    schema = table.schema()
    names = kept_names(schema.names, options, key_column)
    if key_column not in names:
        raise SchemaError(
            f"{urls.redact(source.url)} has no index column {key_column!r}: it has {_listed(schema.names)}; "
            "name the one that identifies a sample with index_col_name"
        )
    writer.begin_source(source, pa.schema([schema.field(at) for at, name in enumerate(schema.names) if name in names]))
    return names


def _copy_rows(table: TableFile, names: Sequence[str], writer: IndexWriter, max_size: int | None, bar: Progress) -> None:
    """Append the rows of one table, or as many as `max_size` leaves."""
    for batch in table.batches(names):
        taken = batch if max_size is None else batch.slice(0, max_size - writer.num_rows)
        if taken.num_rows:
            writer.write_batch(taken)
            bar.update(taken.num_rows)
        if writer.num_rows == max_size:
            return


def kept_names(names: Sequence[str], options: IndexOptions, key_column: str) -> list[str]:
    """Return which columns of a file go into the index, each once, in the file's order."""
    if options.columns_to_keep is None:
        return list(dict.fromkeys(names))
    wanted = {key_column, *options.columns_to_download, *options.columns_to_keep}
    return [name for name in dict.fromkeys(names) if name in wanted]


def _add_missing(writer: IndexWriter, options: IndexOptions, plan: SourcePlan) -> None:
    """Add asked for columns that no file has, if that is allowed; they read as None."""
    for option, names in (
        ("columns_to_download", options.columns_to_download),
        ("index_cols_to_keep", options.columns_to_keep),
    ):
        for name in names or ():
            if name in writer.columns:
                continue
            if not options.allow_missing_columns:
                raise SchemaError(
                    f"{option} names {name!r}, but {urls.redact(plan.src)} has no such column: "
                    f"it has {_listed(list(writer.columns))}; correct the name, "
                    "or set allow_missing_columns=True to read it as None"
                )
            field = pa.field(name, pa.null())
            writer.add_column(field, declared(field))


def _key_error(index: Index) -> SourceError:
    return SourceError(
        f"{index.src}: {index.key_problem}: every sample needs a key of its own; "
        "mend the source, or name another column with index_col_name"
    )


def _listed(columns: Sequence[str]) -> str:
    names = [repr(column) for column in columns]
    return ", ".join(names[:30]) + (f" and {len(names) - 30} more" if len(names) > 30 else "") if names else "no columns"
