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

from sqlstream.config import IndexOptions
from sqlstream.errors import DamagedShardError, SchemaError, SourceError
from sqlstream.index.build import select
from sqlstream.index.build.checks import check_downloads, check_key, no_column, no_key_column
from sqlstream.index.build.content import open_part, with_content
from sqlstream.index.build.join import JoinedTables, TableRows, open_joins
from sqlstream.index.build.shards import ShardIndex, shards_ahead
from sqlstream.index.build.shared import build_shared, check_shareable
from sqlstream.index.build.target import Target, find_grown, target_of
from sqlstream.index.file.index import Index
from sqlstream.index.file.intact import is_intact
from sqlstream.index.file.room import IndexRoom, RoomyReader
from sqlstream.index.file.store import IndexStore
from sqlstream.index.file.workplace import Workplace, sweep_dead, workplace
from sqlstream.index.file.writer import IndexWriter
from sqlstream.index.named.find import chained_columns
from sqlstream.index.sources.base.base import TableFile
from sqlstream.index.sources.base.derived import DerivedTable, derived_rows
from sqlstream.index.sources.places.directory import DirectoryTable
from sqlstream.index.sources.plan.parts import ShardPart, innermost, parquet_part
from sqlstream.index.sources.plan.plan import plan_sources
from sqlstream.index.sources.plan.source_plan import SourcePlan
from sqlstream.index.sources.shards.layout import KeepsShards, Scratch, ShardFiles, Walks
from sqlstream.index.sql.expressions import with_where
from sqlstream.index.types.models import SourceFile, ruled
from sqlstream.index.types.pandas_import import load_pandas
from sqlstream.index.types.values import declared
from sqlstream.process.threads import check_threads
from sqlstream.progress import Progress, progress
from sqlstream.sample_types import SAMPLE_FIELDS
from sqlstream.storage.base import urls
from sqlstream.storage.base.identity import Identity
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
    keep: KeepsShards | None = None,
) -> Index:
    """Return the index of a source, built when no earlier run has built it.

    Args:
        options: The source, what is kept of it, and the filter.
        directory: Where index files are (`<dst>/index`); exists.
        remote: Reads what is not local.
        show_progress: Show a bar while building, if stderr is a terminal.
        identity: What else than its URL identifies a source; None: nothing.
        store: Where built indexes are shared; None: nowhere.
        keep: Keeps whole shards that are read for the index; None: nothing does.

    Raises:
        ConfigError: The source is nothing that an index can be made of, or is of this machine and there is a `store`.
        SourceError: A file of it is broken, empty, or lacks what is asked for; `StorageError` when it cannot be reached.
        QueryError: The filter does not run, or keeps no row.
    """
    with planned(options, directory, remote) as (plan, roomy):
        check_shareable(plan, store)
        own_query = None if plan.has_database else options.sql_query  # a database has run it already
        options = replace(options, sql_query=with_where(own_query, options.where, options.sql_engine), where=None)
        reading = SourceReading(remote=roomy, keep=keep or (lambda _, __: None), show_progress=show_progress)
        base = _open_base(plan, options, directory, reading, store, identity=identity)
    if options.sql_query is not None:
        with contextlib.closing(base):  # its file is opened anew for what is selected
            base_key = ruled(target_of(plan, options, identity).key, base.meta)
            index = select.open_selection(base, options, directory, base_key=base_key, show_progress=show_progress)
        index.provenance = base.provenance
    else:
        index = base
    index = with_content(index, plan)
    index.engine = options.sql_engine
    if isinstance(index, ShardIndex):
        index.warn_of_damage()
        index.warn_of_missing_versions()
    check_key(index, options)
    check_downloads(index, options)
    index.hold()
    return index


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReading:
    """How a source is read."""

    remote: RemoteReader
    """Reads what is not local."""
    keep: KeepsShards
    """Keeps whole shards."""
    show_progress: bool
    """Show a bar, if stderr is a terminal."""

    def files(self, plan: SourcePlan) -> ShardFiles | None:
        """Return what brings the shards of a source whole; None: it has no remote ones, or nothing does."""
        shards = [part.source for part in map(innermost, plan.parts) if isinstance(part, ShardPart)]
        shards = [shard for shard in shards if urls.is_remote(shard.url)]
        return self.keep(plan.src, shards) if shards else None


@contextlib.contextmanager
def planned(options: IndexOptions, directory: Path, remote: RemoteReader) -> Iterator[tuple[SourcePlan, RoomyReader]]:
    """Give what the source is, and a reader of it that asks for room; what dead builders left in `directory` is removed.

    Temporary files of the plan last as long as the context.

    Raises:
        ConfigError: The source is nothing that an index can be made of.
    """
    sweep_dead(directory)
    room = IndexRoom(directory, options)
    roomy = RoomyReader(remote, room)
    with contextlib.ExitStack() as stack:

        def temporary(what: str) -> Path:
            """Return a path that is swept even if we are killed."""
            place = stack.enter_context(workplace(directory, uuid.uuid4().hex))  # of this process alone: no other one waits
            return place.temporary(what)

        yield plan_sources(options, temporary, roomy, room), roomy


def _open_base(
    plan: SourcePlan,
    options: IndexOptions,
    directory: Path,
    reading: SourceReading,
    store: IndexStore | None,
    *,
    identity: Identity | None,
) -> Index:
    """Return the index file of all rows (or of the first `max_size` where no filter comes after)."""
    target = target_of(plan, options, identity, select.computed_downloads(options))
    index = Index(directory / f"{target.key}.sqlite", base_url=plan.paths_base_url)
    index.provenance = plan.provenance

    def build(place: Workplace) -> Index:
        check_threads(f"read {plan.src}")
        temporary = place.temporary()
        num_known = _start_from_relative(plan, options, target, directory, temporary)
        _build(plan, options, place, reading, (target, temporary, num_known))
        return index

    def find() -> Index | None:
        if not index.is_usable():
            return None
        if index.meta.get("layout") in (plan.layout, _content_layout(plan)):
            return index
        index.close()  # an earlier version, which gave directories fewer columns, built it
        return None

    def check() -> None:
        find_grown(plan, options, target, directory)

    return build_shared(store, options, (directory, target.key), find, build, check=check, show_progress=reading.show_progress)


def _content_layout(plan: SourcePlan) -> str:
    """Return the layout of an index whose content stays in place: earlier versions, which would miss it, build theirs."""
    return "content in place" if plan.layout is None else f"content in place, {plan.layout}"


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


def _build(
    plan: SourcePlan,
    options: IndexOptions,
    place: Workplace,
    reading: SourceReading,
    start: tuple[Target, Path, int],
) -> None:
    target, temporary, num_known = start
    remote, show_progress = reading.remote, reading.show_progress
    max_size = target.max_size
    if plan.joins or not all(parquet_part(part) or isinstance(innermost(part), ShardPart) for part in plan.parts):
        load_pandas()
    room = IndexRoom(temporary.parent, options)
    own_room = IndexRoom(temporary.parent, options)  # that of the writer waits for what asks this one
    scratch = Scratch(place.temporary, own_room.on_growth, reading.files(plan), walks=Walks())
    num_joined = len(plan.joined_parts)
    with (
        contextlib.closing(IndexWriter(temporary, plan.key_column, room=room)) as writer,
        open_joins(plan, options, place, remote, show_progress=show_progress) as joins,
    ):
        for part, digest in zip(plan.joined_parts, target.digests[:num_joined], strict=True):
            writer.add_source(part.source, digest)
        damages: list[DamagedShardError] = []
        shards = shards_ahead(plan.parts[num_known:], scratch, remote)
        unit = " shards" if len(shards) else " rows"
        with (
            shards,
            progress(len(shards) or max_size, unit, f"indexing {plan.src}", show_progress) as bar,
        ):
            room.before_refusal = shards.go_alone
            for number, part in enumerate(plan.parts[num_known:], num_known):
                with open_part(part, number, plan, options, scratch, remote, shards) as (table, content, damage):
                    key_and_digest = (plan.key_column, target.digests[num_joined + number])
                    if content is not None and damage is not None:
                        writer.add_source(part.source, key_and_digest[1])
                        content.write(writer, number, writer.num_rows, joins)
                        damages.append(damage)
                        bar.update(1)
                        continue
                    names = begin_source(part.source, table, writer, options, key_and_digest, joins)
                    first_row = writer.num_rows
                    if content is not None:
                        writer.leave_in_place(content.names, content.digest)
                    _copy_rows(table, names, writer, max_size, None if len(shards) else bar, joins)
                    if content is not None:
                        content.write(writer, number, first_row, joins)
                    if isinstance(table, DirectoryTable | DerivedTable):
                        writer.row_rule = writer.row_rule or table.row_rule
                        if options.path_prefix is None:  # of the very files that the rows name
                            writer.write_listed(first_row, joins.kept(table.listed()) if joins else table.listed())
                if len(shards):
                    bar.update(1)
                if writer.num_rows == max_size:
                    break
        if damages and len(damages) == len(plan.parts):
            raise SourceError(f"{plan.src} has no rows: all of its {len(damages)} shards are damaged. The first: {damages[0]}")
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
        why = " with a partner in every table of join" if plan.joins else "" if writer.offered else " with a column"
        raise SourceError(f"{plan.src} has no rows{why}: an index needs one at least")
    own: dict[str, object] = {"fingerprint": target.key, "lineage": target.lineage, "src": plan.src}
    own |= chained_columns(writer, options.path_columns)
    if writer.leaves_content:
        own |= {"lineage": target.content_lineage, "layout": _content_layout(plan)}
    elif plan.layout is not None:
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
    writer.offered |= dict.fromkeys(schema.names)
    joined = [] if joins is None else joins.begin(schema, urls.redact(source.url))
    names = [*own_names, *(field.name for field in joined)]
    if options.key_column is not None and key_column not in names and not select.computes_columns(options):
        raise no_key_column(urls.redact(source.url), key_column, schema.names)
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
    bar: Progress | None,
    joins: JoinedTables | None = None,
) -> None:
    """Append the rows of one table, with what is joined to them, or as many as `max_size` leaves; a bar counts them."""
    for rows in map(TableRows.of, derived_rows(table, names)) if joins is None else joins.rows(table, names):
        taken = rows if max_size is None else rows.head(max_size - writer.num_rows)
        if taken.batch.num_rows:
            writer.write_batch(taken.batch, taken.as_written, taken.stored)
            if bar is not None:
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
        ("index_members", options.index_members if options.columns_to_keep is None else (), False),
    ):
        for name in names or ():
            if name in writer.columns or name in computed:
                continue
            if not options.allow_missing_columns:
                if is_open:  # `select` looks at what the query gives
                    continue
                raise no_column(option, name, plan.src, list(writer.offered | dict.fromkeys(writer.columns)))
            field = pa.field(name, pa.null())
            writer.add_column(field, declared(field))
