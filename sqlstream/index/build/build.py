"""Builds an index from its source, or reuses the one that is there.

`open_index` is the facade; what is to be read is planned by `sources.plan`, written by `file.writer`, filtered by `select`.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from sqlstream.config import IndexOptions, check_at_least
from sqlstream.errors import SchemaError, SourceError
from sqlstream.index.build import select
from sqlstream.index.build.join import JoinedTables, TableRows, open_joins
from sqlstream.index.build.shared import build_shared, check_shareable
from sqlstream.index.file import versions
from sqlstream.index.file.index import Index
from sqlstream.index.file.intact import is_intact
from sqlstream.index.file.room import IndexRoom, RoomyReader
from sqlstream.index.file.store import IndexStore
from sqlstream.index.file.workplace import Workplace, sweep_dead, workplace
from sqlstream.index.file.writer import IndexWriter
from sqlstream.index.sources.base.base import TableFile
from sqlstream.index.sources.base.derived import DerivedTable, derived_rows
from sqlstream.index.sources.places.database import is_database
from sqlstream.index.sources.places.directory import DirectoryTable
from sqlstream.index.sources.plan.plan import SourcePlan, plan_sources, source_items
from sqlstream.index.sql.expressions import with_where
from sqlstream.index.types.models import FORMAT_VERSION, SourceFile, fingerprint, ruled
from sqlstream.index.types.values import declared
from sqlstream.progress import Progress, progress
from sqlstream.sample_types import SAMPLE_FIELDS
from sqlstream.storage.base import urls
from sqlstream.storage.base.checksum import is_content_hash
from sqlstream.storage.base.identity import Identity, object_name
from sqlstream.storage.base.protocols import RemoteReader

logger = logging.getLogger(__name__)


def open_index(
    options: IndexOptions,
    directory: Path,
    remote: RemoteReader,
    *,
    show_progress: bool = True,
    identity: Identity | None = None,
    store: IndexStore | None = None,
) -> Index:
    """Return the index of a source, built when no earlier run has built it.

    Args:
        options: The source, what is kept of it, and the filter.
        directory: Where index files are (`<dst>/index`); exists.
        remote: Reads what is not local.
        show_progress: Show a bar while building, if stderr is a terminal.
        identity: What else than its URL identifies a source; None: nothing.
        store: Where built indexes are shared; None: nowhere.

    Raises:
        ConfigError: The source is nothing that an index can be made of, or is of this machine and there is a `store`.
        SourceError: A file of it is broken, empty, or lacks what is asked for; `StorageError` when it cannot be reached.
        QueryError: The filter does not run, or keeps no row.
    """
    with planned(options, directory, remote) as (plan, roomy):
        check_shareable(plan, store)
        own_query = None if plan.has_database else options.sql_query  # a database has run it already
        options = replace(options, sql_query=with_where(own_query, options.where, options.sql_engine), where=None)
        base = _open_base(plan, options, directory, roomy, store, show_progress=show_progress, identity=identity)
    if options.sql_query is not None:
        base_key = ruled(target_of(plan, options, identity).key, base.meta)
        index = select.open_selection(base, options, directory, base_key=base_key, show_progress=show_progress)
        index.provenance = base.provenance
    else:
        index = base
    check_key(index, options)
    check_downloads(index, options)
    index.hold()
    return index


@contextlib.contextmanager
def planned(options: IndexOptions, directory: Path, remote: RemoteReader) -> Iterator[tuple[SourcePlan, RoomyReader]]:
    """Give what the source is, and a reader of it that asks for room; what dead builders left in `directory` is removed.

    Temporary files of the plan last as long as the context.

    Raises:
        ConfigError: A limit leaves nothing, or the source is nothing that an index can be made of.
    """
    for name, limit in (("max_size", options.max_size), ("max_index_files_to_use", options.max_index_files)):
        if limit is not None:
            check_at_least(name, limit, 1)
    sweep_dead(directory)
    room = IndexRoom(directory, options)
    roomy = RoomyReader(remote, room)
    with contextlib.ExitStack() as stack:

        def temporary(what: str) -> Path:
            """Return a path that is swept even if we are killed."""
            place = stack.enter_context(workplace(directory, uuid.uuid4().hex))  # of this process alone: no other one waits
            return place.temporary(what)

        yield plan_sources(options, temporary, roomy, room), roomy


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The index file that is wanted."""

    key: str
    """Its fingerprint."""
    lineage: str | None
    """Names source and options, whatever the version; None: its content has no versions."""
    digests: tuple[str, ...]
    """Of the parts."""
    max_size: int | None


def target_of(
    plan: SourcePlan, options: IndexOptions, identity: Identity | None = None, computed: Sequence[str] = ()
) -> Target:
    """Return which index file a plan and options make, read with what `identity` says.

    Args:
        plan: The source.
        options: What is kept of it.
        identity: What else than its URL identifies a source.
        computed: Columns to download that a query computes: they need not be there.
    """
    max_size = options.max_size if options.sql_query is None else None
    digests = plan.digests()
    settings: dict[str, object] = {
        "format": FORMAT_VERSION,
        "src": plan.src,  # the same files by another way: relative paths start elsewhere
        "base_url": urls.redact(plan.base_url) if plan.has_versions else None,  # else it is where we happen to run
        "keep": None if options.columns_to_keep is None else sorted(options.columns_to_keep),
        "download": sorted(options.columns_to_download),
        "allow_missing": options.allow_missing_columns,
        "key": plan.key_column,
        "max_size": max_size,
    }
    if computed and options.allow_missing_columns:
        settings["computed"] = sorted(computed)  # else they would be there, without values, and the query would give two
    if options.join is not None:
        settings["join"] = [[join.name, join.src, join.base_url] for join in plan.joins]
        settings["join_by"] = [options.join.on, options.join.missing]
    reading = [options.data_type, options.label_column, options.max_index_files]
    reading += [options.encoding, options.delimiter, options.quote_char]
    key, lineage = dict(settings), {**settings, "reading": reading}
    if identity is not None and (places := _places(plan, identity, has_hashed=False)):
        key["identity"] = places
    if names := _names(options):
        lineage["names"] = names  # `src` leaves out the query, by which a server may tell one table from another
    if plan.layout is not None:
        lineage["layout"] = plan.layout
    if plan.starts_at_tables:
        lineage["paths"] = "beside their tables"  # what an earlier version made of the same files is no version of this
    if identity is not None and (places := _places(plan, identity, has_hashed=True)):
        lineage["identity"] = places  # what lies elsewhere is no version of this source, whatever its ETag
    if options.lazy is not None:
        key["chunk_rows"] = lineage["chunk_rows"] = options.lazy.chunk_rows
    return Target(
        key=fingerprint({**key, "source": digests}),
        lineage=fingerprint(lineage) if plan.has_versions else None,
        digests=tuple(digests),
        max_size=max_size,
    )


def _names(options: IndexOptions) -> list[str]:
    """Return what identifies the sources, with what labels leave out; nothing if the labels do."""
    sources = [options.src, *({} if options.join is None else options.join.tables).values()]
    items = [item for source in sources for item in source_items(source)]
    texts = [item for item in items if isinstance(item, str) and not is_database(item)]
    names = list(map(object_name, texts))
    return [] if names == list(map(urls.redact, names)) else names


def _places(plan: SourcePlan, identity: Identity, *, has_hashed: bool) -> list[str]:
    """Return what options add to the names of the source's files.

    Args:
        plan: The source.
        identity: The options.
        has_hashed: Also to those of files whose ETags tell their content.
    """
    sources = [part.source for part in plan.all_parts]
    named = {file.url for file in sources if (has_hashed or not is_content_hash(file.etag)) and not is_database(file.url)}
    return sorted({identity.prefix(url) for url in named if urls.is_remote(url)} - {""})


def _open_base(
    plan: SourcePlan,
    options: IndexOptions,
    directory: Path,
    remote: RemoteReader,
    store: IndexStore | None,
    *,
    show_progress: bool,
    identity: Identity | None,
) -> Index:
    """Return the index file of all rows (or of the first `max_size` where no filter comes after)."""
    target = target_of(plan, options, identity, select.computed_downloads(options))
    index = Index(directory / f"{target.key}.sqlite", base_url=plan.paths_base_url)
    index.provenance = plan.provenance

    def build(place: Workplace) -> Index:
        temporary = place.temporary()
        num_known = _start_from_relative(plan, options, target, directory, temporary)
        _build(plan, options, place, remote, (target, temporary, num_known), show_progress=show_progress)
        return index

    def find() -> Index | None:
        if not index.is_usable():
            return None
        if index.meta.get("layout") == plan.layout:
            return index
        index.close()  # an earlier version, which gave directories fewer columns, built it
        return None

    def check() -> None:
        find_grown(plan, options, target, directory)

    return build_shared(store, options, (directory, target.key), find, build, check=check, show_progress=show_progress)


def _start_from_relative(plan: SourcePlan, options: IndexOptions, target: Target, directory: Path, temporary: Path) -> int:
    """Return how many parts are indexed already; `temporary` then is a copy of the index that has them.

    Raises:
        SourceChangedError: The source changed other than by growing, and that is what was asked for.
    """
    grown = find_grown(plan, options, target, directory)
    if grown is None:
        return 0
    logger.info("%s has grown by %d files: indexing these", plan.src, len(target.digests) - len(grown.parts))
    try:
        shutil.copyfile(grown.path, temporary)
    except FileNotFoundError:  # `cache clear --index` was faster
        return 0
    if is_intact(temporary, most_bytes=None) is False:
        logger.warning("the index file %s is damaged: indexing all files of %s again", grown.path, plan.src)
        temporary.unlink()
        return 0
    return len(grown.parts)


def find_grown(plan: SourcePlan, options: IndexOptions, target: Target, directory: Path) -> versions.Relative | None:
    """Return the index of an earlier version of the source, which only grew and has no joined tables; None: there is none.

    Raises:
        SourceChangedError: The source changed other than by growing, and that is what was asked for.
    """
    relatives = [] if target.lineage is None else versions.find_relatives(directory, target.lineage)
    is_copied = options.lazy is None
    if is_copied:
        relatives = [relative for relative in relatives if relative.path.stem != target.key]  # that one is damaged
    may_grow = target.max_size is None or not is_copied
    grown = versions.grown_from(relatives, target.digests) if may_grow else None
    if grown is None:
        named = [urls.redact(part.source.url) for part in plan.all_parts]
        versions.check_unchanged(relatives, target.digests, named, plan.src, options.on_source_change)
    return None if plan.joins else grown  # what names joined columns have was decided by files that are not read again


def _build(
    plan: SourcePlan,
    options: IndexOptions,
    place: Workplace,
    remote: RemoteReader,
    start: tuple[Target, Path, int],
    *,
    show_progress: bool,
) -> None:
    target, temporary, num_known = start
    max_size = target.max_size
    room = IndexRoom(temporary.parent, options)
    num_joined = len(plan.joined_parts)
    with (
        contextlib.closing(IndexWriter(temporary, plan.key_column, room=room)) as writer,
        open_joins(plan, options, place, remote, show_progress=show_progress) as joins,
    ):
        for part, digest in zip(plan.joined_parts, target.digests[:num_joined], strict=True):
            writer.add_source(part.source, digest)
        with progress(max_size, " rows", f"indexing {plan.src}", show_progress) as bar:
            for part, digest in zip(plan.parts[num_known:], target.digests[num_joined + num_known :], strict=True):
                with part.open(place.temporary, remote) as table:
                    names = begin_source(part.source, table, writer, options, (plan.key_column, digest), joins)
                    first_row = writer.num_rows
                    _copy_rows(table, names, writer, max_size, bar, joins)
                    if isinstance(table, DirectoryTable | DerivedTable):
                        writer.row_rule = writer.row_rule or table.row_rule
                        if options.path_prefix is None:  # of the very files that the rows name
                            writer.write_listed(first_row, joins.kept(table.listed()) if joins else table.listed())
                if writer.num_rows == max_size:
                    break
        more = {} if joins is None else {"joined": joins.given(plan.joins)}
        finish(writer, plan, options, target, **more)
    place.publish(temporary, f"{target.key}.sqlite")


def finish(writer: IndexWriter, plan: SourcePlan, options: IndexOptions, target: Target, **more: object) -> None:
    """Complete an index file whose rows are written; `more` is what it says of itself beside what all files say.

    Raises:
        SourceError: It has no rows; SchemaError: a column is missing.
    """
    _add_missing(writer, options, plan)
    if not writer.num_rows:
        why = " with a partner in every table of join" if plan.joins else ""
        raise SourceError(f"{plan.src} has no rows{why}: an index needs one at least")
    own: dict[str, object] = {"fingerprint": target.key, "lineage": target.lineage, "src": plan.src}
    if plan.layout is not None:
        own["layout"] = plan.layout
    writer.finish({**own, **more, "base_url": urls.redact(plan.base_url), "key_column": plan.key_column})


def begin_source(
    source: SourceFile,
    table: TableFile,
    writer: IndexWriter,
    options: IndexOptions,
    key_and_digest: tuple[str, str],
    joins: JoinedTables | None = None,
) -> list[str]:
    """Agree on the columns of one table, and of what is joined to it; return which of its own go into the index."""
    key_column, digest = key_and_digest
    schema = table.schema()
    own_names = kept_names(schema.names, options, key_column)
    joined = [] if joins is None else joins.begin(schema, urls.redact(source.url))
    names = [*own_names, *(field.name for field in joined)]
    if options.key_column is not None and key_column not in names and not select.computes_columns(options):
        raise _no_key_column(urls.redact(source.url), key_column, schema.names)
    if taken := [name for name in names if name in SAMPLE_FIELDS]:
        raise SchemaError(
            f"{urls.redact(source.url)} has a column {taken[0]!r}, a field that every sample gets, whose values would be lost: "
            "rename the column, or leave it out with index_cols_to_keep"
        )
    own = [schema.field(at) for at, name in enumerate(schema.names) if name in own_names]
    writer.begin_source(source, pa.schema([*own, *joined]), digest)
    return own_names


def _copy_rows(
    table: TableFile,
    names: Sequence[str],
    writer: IndexWriter,
    max_size: int | None,
    bar: Progress,
    joins: JoinedTables | None = None,
) -> None:
    """Append the rows of one table, with what is joined to them, or as many as `max_size` leaves."""
    for rows in map(TableRows.of, derived_rows(table, names)) if joins is None else joins.rows(table, names):
        taken = rows if max_size is None else rows.head(max_size - writer.num_rows)
        if taken.batch.num_rows:
            writer.write_batch(taken.batch, taken.as_written, taken.stored)
            bar.update(taken.batch.num_rows)
        if writer.num_rows == max_size:
            return


def kept_names(names: Sequence[str], options: IndexOptions, key_column: str) -> list[str]:
    """Return which columns of a file go into the index, each once, in the file's order."""
    if options.columns_to_keep is None:
        return list(dict.fromkeys(names))
    wanted = {key_column, *options.columns_to_download, *options.columns_to_keep}
    return [name for name in dict.fromkeys(names) if name in wanted]


def _add_missing(writer: IndexWriter, options: IndexOptions, plan: SourcePlan) -> None:
    """Add asked for columns that no file has, if that is allowed; they read as None. A query may give those to download."""
    may_be_given, computed = select.computes_columns(options), select.computed_downloads(options)
    for option, names, is_open in (
        ("columns_to_download", options.columns_to_download, may_be_given),
        ("index_cols_to_keep", options.columns_to_keep, False),
    ):
        for name in names or ():
            if name in writer.columns or name in computed:
                continue
            if not options.allow_missing_columns:
                if is_open:  # `select` looks at what the query gives
                    continue
                raise _no_column(option, name, plan.src, list(writer.columns))
            field = pa.field(name, pa.null())
            writer.add_column(field, declared(field))


def _no_column(option: str, name: str, src: str, names: Sequence[str]) -> SchemaError:
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
        raise _no_column("columns_to_download", absent, index.src, names)


def check_key(index: Index, options: IndexOptions) -> None:
    """Look whether the key column that is wanted can name the rows; where none was asked for, their numbers do.

    Raises:
        SchemaError: It was asked for, and is not there; SourceError: it has no value, or the same one twice.
    """
    problem, names = index.key_problem, [column.name for column in index.columns]
    if problem is None:
        return
    if options.key_column is None:
        if options.wanted_key in names:
            logger.warning("%s: %s, so samples are named by the numbers of their rows", index.src, problem)
        return
    if options.key_column not in names:
        raise _no_key_column(index.src, options.key_column, names)
    raise SourceError(
        f"{index.src}: {problem}: every sample needs a key of its own; mend the source, select other rows, name another column "
        "with index_col_name, or leave that out: then row numbers are the keys"
    )


def _no_key_column(source: str, key_column: str, names: Sequence[str]) -> SchemaError:
    return SchemaError(
        f"{source} has no index column {key_column!r}: it has {_listed(names)}; "
        "name the one that identifies a sample with index_col_name, or leave that out: then row numbers are the keys"
    )


def _listed(columns: Sequence[str]) -> str:
    names = [repr(column) for column in columns]
    return ", ".join(names[:30]) + (f" and {len(names) - 30} more" if len(names) > 30 else "") if names else "no columns"
