"""Which index file is wanted: its build key, and the earlier versions that it may go on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlstream.config import DamagedShards, IndexOptions
from sqlstream.index.file import versions
from sqlstream.index.sources.places.database import is_database
from sqlstream.index.sources.plan.plan import source_items
from sqlstream.index.sources.plan.source_plan import SourcePlan
from sqlstream.index.types.models import FORMAT_VERSION, fingerprint
from sqlstream.storage.base import urls
from sqlstream.storage.base.checksum import is_content_hash
from sqlstream.storage.base.identity import Identity, object_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The index file that is wanted."""

    key: str
    """Its fingerprint."""
    lineage: str | None
    """Names source and options, whatever the version; None: its content has no versions."""
    content_lineage: str | None
    """The same of an index whose content stays in place, from which earlier versions may not go on."""
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
    if options.index_members:
        lineage["index_members"] = list(options.index_members)
    if options.damaged_shards is not DamagedShards.RAISE:
        lineage["damaged_shards"] = options.damaged_shards  # the key has both by the parts
    if options.missing_shards.leaves_out:
        lineage["missing_shards"] = options.missing_shards
    if options.lazy is not None:
        key["chunk_rows"] = lineage["chunk_rows"] = options.lazy.chunk_rows
    return Target(
        key=fingerprint({**key, "source": digests}),
        lineage=fingerprint(lineage) if plan.has_versions else None,
        content_lineage=fingerprint({**lineage, "content": "in place"}) if plan.has_versions else None,
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


def find_grown(plan: SourcePlan, options: IndexOptions, target: Target, directory: Path) -> versions.Relative | None:
    """Return the index of an earlier version of the source, which only grew and has no joined tables; None: there is none.

    Raises:
        SourceChangedError: The source changed other than by growing, and that is what was asked for.
    """
    lineages = {lineage for lineage in (target.lineage, target.content_lineage) if lineage is not None}
    relatives = versions.find_relatives(directory, lineages) if lineages else []
    is_copied = options.lazy is None
    if is_copied:
        relatives = [relative for relative in relatives if relative.path.stem != target.key]  # that one is damaged
    may_grow = target.max_size is None or not is_copied
    grown = versions.grown_from(relatives, target.digests) if may_grow else None
    if grown is None:
        named = [urls.redact(part.source.url) for part in plan.all_parts]
        versions.check_unchanged(relatives, target.digests, named, plan.src, options.on_source_change)
    return None if plan.joins else grown  # what names joined columns have was decided by files that are not read again
