"""From what users write as `src` to the parts that make the index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlstream.config import IndexOptions, SourceOptions
from sqlstream.errors import ConfigError
from sqlstream.index.file.room import IndexRoom
from sqlstream.index.sources.base.derived import SOURCE_COLUMN
from sqlstream.index.sources.formats import by_extension
from sqlstream.index.sources.places.database import is_database
from sqlstream.index.sources.plan.item import absolute, as_named, label, places_of, plan_item
from sqlstream.index.sources.plan.parts import (
    DerivedPart,
    DirectoryPart,
    FilePart,
    MetadataPart,
    ShardPart,
    SourcePart,
    Temporary,
    innermost,
)
from sqlstream.index.sources.plan.source_plan import JoinedSource, SourcePlan
from sqlstream.index.sources.shards.zip_shard import ZipShard
from sqlstream.index.types.origins import Provenance
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader

_OF_SHARDS = ("index_members", "damaged_shards", "missing_shards", "new_parts", "decode")
"""Options that say how shards are read; `allow_…` are permissions, which may go beyond what a source needs."""
_CSV = frozenset((".csv", ".tsv"))
_OF_TEXTS = {"delimiter": _CSV, "quote_char": _CSV, "encoding": by_extension.TEXTS}
"""Options that say how tables of texts are read, and the extensions of these."""


def plan_sources(options: IndexOptions, temporary: Temporary, remote: RemoteReader, room: IndexRoom) -> SourcePlan:
    """Return what `options.src` is.

    Args:
        options: Source, data type, limits.
        temporary: Gives paths for what is needed until the index is built.
        remote: Heads, lists and downloads.
        room: Is asked as temporary files grow.

    Raises:
        ConfigError: It is nothing that an index can be made of, or an option is for sources of another kind.
        ObjectNotFoundError: It does not exist.
        AccessDeniedError: It may not be read.
    """
    plan = _plan_sources(options, temporary, remote, room)
    _check_options(plan, options)
    return plan


def _plan_sources(options: IndexOptions, temporary: Temporary, remote: RemoteReader, room: IndexRoom) -> SourcePlan:
    """Return the plan of sources, or of a joined table, which has the options of the source."""
    items = source_items(options.src)
    plans = [plan_item(item, options, temporary, remote, room, is_first=not number) for number, item in enumerate(items)]
    joined = _plan_joins(options, temporary, remote, room)
    labels = [label(item, number) for number, item in enumerate(items)]
    own_base = None if options.path_prefix is None else absolute(as_named(options.path_prefix)).rstrip("/") or "/"
    bases = list(dict.fromkeys(plan.base_url for plan in [*plans, *joined.values()]))
    are_absolute = len(bases) > 1 and own_base is None
    parts: list[SourcePart] = []
    for plan, name in zip(plans, labels, strict=True):
        constants = {SOURCE_COLUMN: name} if len(plans) > 1 else {}
        base = _own_base(plan) if are_absolute else None
        for part in plan.parts:
            needs_more = constants or base is not None
            parts.append(
                DerivedPart(part=part, constants=constants, base_url=base, path_columns=options.path_columns)
                if needs_more
                else part
            )
    has_database = any(isinstance(item, str) and is_database(item) for item in items)
    _check_kinds(plans, labels)
    keys = {plan.key_column for plan in plans}
    assert len(keys) == 1  # a directory refuses another key column than its own
    return SourcePlan(
        src=" + ".join(labels),
        base_url=own_base or bases[0],
        paths_base_url=own_base or next((base for base in bases if not urls.is_remote(base)), bases[0]),
        key_column=keys.pop(),
        parts=tuple(parts),
        provenance=_merged([plan.provenance for plan in [*joined.values(), *plans]], own_base),
        has_database=has_database,
        has_versions=all(plan.has_versions for plan in [*plans, *joined.values()]),
        starts_at_tables=any(plan.starts_at_tables for plan in plans),
        joins=tuple(
            JoinedSource(name=name, src=plan.src, parts=plan.parts, base_url=_own_base(plan) if are_absolute else None)
            for name, plan in joined.items()
        ),
    )


def _check_kinds(plans: Sequence[SourcePlan], labels: Sequence[str]) -> None:
    """Raise ConfigError if some sources are shards, and others are none."""
    are_shards = [any(isinstance(innermost(part), ShardPart) for part in plan.parts) for plan in plans]
    if len(set(are_shards)) > 1:
        shard, other = labels[are_shards.index(True)], labels[are_shards.index(False)]
        raise ConfigError(
            f"src has shards ({shard}) beside {other}, whose rows have no content in shards: give them to two datasets"
        )


def _check_options(plan: SourcePlan, options: IndexOptions) -> None:
    """Raise ConfigError if an option is for sources of another kind: it would change nothing, and the user not know."""
    parts = [innermost(part) for part in plan.parts]
    if parts and not any(isinstance(part, ShardPart) for part in parts):
        defaults = SourceOptions()
        for name in _OF_SHARDS:
            if (value := getattr(options, name)) != getattr(defaults, name):
                shown = repr(str(value)) if isinstance(value, str) else value
                raise ConfigError(f"{name}={shown} is for shards (TAR, ZIP, MDS), and {plan.src} is none: leave it out")
    joined = [innermost(part) for join in plan.joins for part in join.parts]
    formats = {
        by_extension.format_of(part.source.url) for part in (*parts, *joined) if isinstance(part, FilePart | MetadataPart)
    }
    for name, used in _OF_TEXTS.items():
        value = getattr(options, name)
        if parts and value != getattr(SourceOptions(), name) and not formats & used:
            kinds = ", ".join(sorted(used))
            raise ConfigError(f"{name}={value!r} is for tables of texts ({kinds}), and {plan.src} has none: leave it out")
    has_folders = any(
        isinstance(part, DirectoryPart) or (isinstance(part, ShardPart) and isinstance(part.layout, ZipShard)) for part in parts
    )
    if options.label_column is not None and parts and not has_folders:
        raise ConfigError(
            f"label_column={options.label_column!r} is for a directory of samples, or ZIP files, and {plan.src} is none: leave "
            "it out"
        )


def _plan_joins(options: IndexOptions, temporary: Temporary, remote: RemoteReader, room: IndexRoom) -> dict[str, SourcePlan]:
    """Return the plan of each joined table, read as the source is.

    Raises:
        ConfigError: It is a database, or a directory of samples.
    """
    plans: dict[str, SourcePlan] = {}
    if options.join is None:
        return plans
    for name, table in options.join.tables.items():
        own = replace(
            options, src=table, join=None, key_column=options.join.on, data_type=None, label_column=None, index_members=()
        )
        own = replace(own, max_index_files=None)
        if any(isinstance(item, str) and is_database(item) for item in source_items(table)):
            raise ConfigError(f"join has a database as {name!r}: join in its own SQL, or export what it has to a table file")
        try:
            plans[name] = _plan_sources(own, temporary, remote, room)
        except ConfigError as error:
            kinds = "a table file, a wildcard, a text file of paths, a folder with metadata, a table in memory or a function"
            raise ConfigError(f"the table {name!r} of join must be {kinds}: {error}") from error
    return plans


def _own_base(plan: SourcePlan) -> str:
    """Return where relative paths of one of several sources start.

    Raises:
        ConfigError: It has credentials, which would stand in the index with each path.
    """
    if urls.redact(plan.base_url) != plan.base_url:
        raise ConfigError(
            f"{urls.redact(plan.base_url)} is one of several sources and has credentials in its URL, which an index must not "
            "hold: give them in storage_options"
        )
    return plan.base_url


def source_items(src: Any) -> list[Any]:
    """Return the sources in `src`: it is one, or a list of them; a list of dicts is one table.

    Raises:
        ConfigError: It is empty, or no path.
    """
    if isinstance(src, list | tuple) and not any(isinstance(item, Mapping) for item in src):
        items = [as_named(item) for item in src]
    else:
        items = [as_named(src)]
    if not items or any(isinstance(item, str) and not item for item in items):
        raise ConfigError("src is empty: give a table file, a wildcard, a text file of paths, or a directory")
    for item in items:
        if isinstance(item, str) and "\0" in item:
            raise ConfigError(f"src has a NUL in it, as no path may: {urls.redact(item)!r}")
    return items


def _merged(sources: Sequence[Provenance], own_base: str | None) -> Provenance:
    """Return the provenance of several sources; the base of relative paths is a place that the user named, too."""
    return Provenance(
        tables=tuple(origin for one in sources for origin in one.tables),
        places=places_of([own_base] if own_base else []).union(*(one.places for one in sources)),
    )
