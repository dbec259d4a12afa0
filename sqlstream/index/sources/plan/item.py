"""From one of the sources that users write as `src` to its parts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from sqlstream.config import IndexOptions
from sqlstream.errors import ConfigError
from sqlstream.index.file.room import IndexRoom
from sqlstream.index.sources.base.access import shard_file, stat_file
from sqlstream.index.sources.base.base import Reading
from sqlstream.index.sources.base.spool import Spool
from sqlstream.index.sources.formats import by_extension
from sqlstream.index.sources.places import folder, hive, path_list, wildcard
from sqlstream.index.sources.places.database import is_database
from sqlstream.index.sources.places.directory import KEY
from sqlstream.index.sources.places.listing import Listing
from sqlstream.index.sources.places.memory import as_table, is_function
from sqlstream.index.sources.plan import described
from sqlstream.index.sources.plan.parts import (
    DatabasePart,
    DerivedPart,
    DirectoryPart,
    FilePart,
    MemoryPart,
    MetadataPart,
    ShardPart,
    SourcePart,
    Temporary,
)
from sqlstream.index.sources.plan.source_plan import SourcePlan
from sqlstream.index.sources.shards.by_name import layout_of, shard_urls
from sqlstream.index.sources.shards.samples import KEY as SHARD_KEY
from sqlstream.index.types.models import SourceFile
from sqlstream.index.types.origins import Provenance, is_local_database
from sqlstream.sample_types import DataSampleType
from sqlstream.storage.base import urls
from sqlstream.storage.base.access import OWN_ROWS, Origin, Rules, origin_at
from sqlstream.storage.base.credentials import place_of
from sqlstream.storage.base.protocols import CALLS_AT_A_TIME, RemoteReader
from sqlstream.storage.base.unfinished import JOURNAL_NAME


def as_named(item: Any) -> Any:
    """Return a source that is named by a path as a text, `~` expanded; what is not named as it is."""
    named = os.fspath(item) if isinstance(item, os.PathLike) else item
    return os.path.expanduser(named) if isinstance(named, str) else named


def label(item: Any, number: int = 0) -> str:
    """Return what a source is called: its URL without credentials, or what kind of table it is."""
    if isinstance(item, str):
        return urls.redact(item)
    return f"{(_function_name(item) or type(item).__name__)} {number}"


def _called(item: object) -> str:
    """Return what errors call a source that is no text."""
    name = _function_name(item)
    return "src" if name is None else f"src={name}"


def _function_name(item: object) -> str | None:
    """Return the name of a function; None: it is an object of another kind."""
    if not is_function(item):
        return None
    name = getattr(item, "__qualname__", None)
    return name if isinstance(name, str) else type(item).__name__


def _new_spool(temporary: Temporary, room: IndexRoom) -> Spool:
    path = temporary("rows")
    return Spool(path, room.on_growth(path))


def plan_item(
    item: Any, options: IndexOptions, temporary: Temporary, remote: RemoteReader, room: IndexRoom, *, is_first: bool
) -> SourcePlan:
    """Return the plan of one source, which may be the first of several."""
    if isinstance(item, str):
        return _plan_named(item, options, temporary, remote, is_first=is_first)
    table = as_table(item, partial(_new_spool, temporary, room), _called(item))
    return _plan(item, options, os.getcwd(), [MemoryPart(table=table, digest=table.digest())], has_versions=False)


def _plan_named(item: str, options: IndexOptions, temporary: Temporary, remote: RemoteReader, *, is_first: bool) -> SourcePlan:
    """Return the plan of one source that is a path, a URL or a wildcard."""
    if is_database(item):
        if options.sql_query is None:
            raise ConfigError(f"{urls.redact(item)} is a database: give sql_query, which it runs: 'SELECT … FROM …'")
        part = DatabasePart(url=item, query=options.sql_query, version=options.source_version)
        return _plan(item, options, os.getcwd(), [part], has_versions=False)
    src = absolute(item)
    if (plan := _plan_shards(item, src, options, temporary, remote, is_first=is_first)) is not None:
        return plan
    if wildcard.has_wildcard(item):  # by what the user wrote: marks in the name of the working directory are none
        pattern = item if urls.is_remote(item) else wildcard.anchored(item)
        by_extension.check_table(pattern, pattern)
        root = wildcard.fixed_part(pattern)
        return _tables(item, options, wildcard.match_files(pattern, remote), root.rstrip("/") or urls.parent(pattern), root)
    if _is_directory(src, options):
        return _directory(src, options, remote)
    if by_extension.format_of(src) == by_extension.PATH_LIST:
        listed = stat_file(src, remote)
        paths = path_list.read_paths(listed, temporary("list"), remote)[: options.max_index_files]
        files = path_list.list_files(listed, paths, _rules(options, listed), remote)
        return _tables(item, options, files, urls.parent(src), listed=listed)
    by_extension.check_table(src, src)
    return _tables(item, options, [stat_file(src, remote)], urls.parent(src))


def _plan_shards(
    item: str, src: str, options: IndexOptions, temporary: Temporary, remote: RemoteReader, *, is_first: bool
) -> SourcePlan | None:
    """Return the plan of shards; their own keys name samples, if they can. None: the source is none of them.

    For a lazy index the version of the first remote shard is asked for: those of the others as they are needed.
    """
    num_looked_at = None if options.lazy is None else int(is_first)
    if (
        not urls.is_command(src)
        and not wildcard.has_wildcard(item)
        and (index := described.find_index(src, options.data_type, temporary, remote)) is not None
    ):
        parts = described.shard_parts(index, options, _rules(options, index.file), remote, num_looked_at)
        return _plan(item, options, urls.parent(index.file.url), parts, listed=index.file)
    named = shard_urls(item, allow_pipes=options.allow_pipes)
    if named is None:
        return None
    files = _shard_files(named, options, remote, num_looked_at)
    layouts = (
        (file, layout_of(file.url, options.label_column, options.index_members)) for file in files[: options.max_index_files]
    )
    part = partial(ShardPart, damaged=options.damaged_shards, missing=options.missing_shards)
    parts = [part(source=file, layout=layout) for file, layout in layouts if layout is not None]
    plan = _plan(item, options, urls.parent(files[0].url), parts)
    return plan if options.key_column is not None else replace(plan, key_column=SHARD_KEY)


def _rules(options: IndexOptions, listed: SourceFile) -> Rules:
    """Return what a list of files may name."""
    return Rules(allowed_roots=options.allowed_roots, credential_hosts=options.credential_hosts, places=places_of([listed.url]))


def _shard_files(
    named: Sequence[str], options: IndexOptions, remote: RemoteReader, num_looked_at: int | None
) -> list[SourceFile]:
    """Return the files that URLs, wildcards and commands name, in their order.

    Args:
        named: URLs and wildcards.
        options: What becomes of files that are not there, and what the user calls the version of what commands print.
        remote: Lists, and asks for versions.
        num_looked_at: Remote files whose versions are asked for, where a URL names them: the first ones; None: all.
    """
    missing = options.missing_shards

    def find(url: str, *, is_looked_at: bool) -> list[SourceFile]:
        if urls.is_command(url):
            return [described.command_file(url, options.source_version)]
        if wildcard.has_wildcard(url):
            return wildcard.match_files(url, remote)
        is_left = urls.is_remote(url) and not is_looked_at
        return [SourceFile(url=url, size_bytes=None, etag=None) if is_left else shard_file(absolute(url), remote, missing)]

    are_looked_at = [num_looked_at is None or number < num_looked_at for number in range(len(named))]
    if num_looked_at is not None or len(named) == 1:
        return [file for url, is_one in zip(named, are_looked_at, strict=True) for file in find(url, is_looked_at=is_one)]
    with ThreadPoolExecutor(CALLS_AT_A_TIME, thread_name_prefix="shard") as pool:
        return [file for files in pool.map(partial(find, is_looked_at=True), named) for file in files]


def absolute(src: str) -> str:
    """Return a path from the root on; a URL as it is."""
    return src if urls.is_remote(src) else str(urls.local_path(src).absolute()) + _slash(src)


def _plan(
    item: Any,
    options: IndexOptions,
    base_url: str,
    parts: Iterable[SourcePart],
    *,
    has_versions: bool = True,
    listed: SourceFile | None = None,
) -> SourcePlan:
    """Return the plan of one source; `listed` is the list that names its parts, if one does."""
    parts = tuple(parts)
    return SourcePlan(
        src=label(item),
        base_url=base_url,
        paths_base_url=base_url,
        key_column=options.wanted_key,
        parts=parts,
        provenance=_provenance([part.source for part in parts], listed),
        has_versions=has_versions,
    )


def _provenance(tables: Sequence[SourceFile], listed: SourceFile | None) -> Provenance:
    """Return who wrote tables: what a remote list names is foreign, wherever it lies."""
    if listed is None or not urls.is_remote(listed.url):
        return Provenance(tables=tuple(map(_origin, tables)), places=places_of(file.url for file in tables))
    is_private = _origin(listed).is_private
    origins = (Origin(is_foreign=True, is_private=is_private and _origin(file).is_private) for file in tables)
    return Provenance(tables=tuple(origins), places=places_of([listed.url]))


def _origin(file: SourceFile) -> Origin:
    return OWN_ROWS if is_local_database(file.url) else origin_at(file.url, is_private=file.is_private)


def places_of(named: Iterable[str]) -> frozenset[str]:
    """Return the hosts and buckets that are named."""
    return frozenset(place_of(url) for url in named if urls.is_remote(url) and not is_database(url)) - {""}


def _tables(
    item: str,
    options: IndexOptions,
    files: list[SourceFile],
    base_url: str,
    hive_root: str | None = None,
    *,
    listed: SourceFile | None = None,
) -> SourcePlan:
    chosen = files[: options.max_index_files]
    parts: list[SourcePart] = [FilePart(source=file, reading=_reading(options)) for file in chosen]
    if hive_root is not None:
        constants = hive.partitions([file.url for file in chosen], hive_root)
        parts = [DerivedPart(part=part, constants=own) if own else part for part, own in zip(parts, constants, strict=True)]
    is_own_list = listed is not None and not urls.is_remote(listed.url) and options.path_prefix is None
    if not (is_own_list and any(urls.is_remote(file.url) for file in chosen)):
        return _plan(item, options, base_url, parts, listed=listed)
    plan = _plan(item, options, base_url, [_at_its_place(part, options) for part in parts], listed=listed)
    return replace(plan, starts_at_tables=True)


def _at_its_place(part: SourcePart, options: IndexOptions) -> SourcePart:
    """Return a remote table whose relative paths start beside it: below the local list that names it they were all refused."""
    url = urls.redact(part.source.url)  # credentials in it are not for an index file
    columns = options.columns_to_download
    if not urls.is_remote(url):
        return part
    return DerivedPart(part=part, base_url=urls.parent(url), path_columns=columns, keeps_rooted=True)


def _reading(options: IndexOptions) -> Reading:
    return Reading(delimiter=options.delimiter, quote_char=options.quote_char, encoding=options.encoding)


def _directory(src: str, options: IndexOptions, remote: RemoteReader) -> SourcePlan:
    listing = Listing(src, remote)
    base_url = listing.directory.rstrip("/") or "/"
    if options.data_type is None:
        found, tables, beside = [], set(), ""
        for file in listing.files():
            if file.url == described.INDEX:  # which `described.find_index` has read
                beside = f", and its {described.INDEX} describes no shards: it is cut off, or of another program"
            elif ".mds" in file.url.rpartition("/")[2]:
                beside = beside or f", nor an {described.INDEX}, which comes last where shards of MDS are written"
            if file.url.rpartition("/")[2] == JOURNAL_NAME:  # of a writing, and no table
                continue
            if folder.METADATA.fullmatch(file.url):
                found.append(file)
            elif by_extension.is_table(file.url) or layout_of(file.url) is not None:
                tables.add(by_extension.wildcard_with(file.url))
        found.sort(key=attrgetter("url"))
        if found:
            files = [SourceFile(url=listing.directory + file.url, size_bytes=file.size_bytes, etag=file.etag) for file in found]
            parts = [
                MetadataPart(
                    file=FilePart(source=file, reading=_reading(options)),
                    root=listing.directory,
                    key_column=options.wanted_key,
                )
                for file in files[: options.max_index_files]
            ]
            return _plan(src, options, base_url, parts)
        raise ConfigError(
            f"{urls.redact(src)} is a directory: "
            + (
                f"name tables or shards in it by a wildcard, {urls.redact(listing.directory + min(tables))}, or "
                if tables
                else ""
            )
            + f"give data_type, which says whose files make a sample: one of {', '.join(DataSampleType)} "
            f"(it has no metadata.csv, .jsonl or .parquet that would say it{beside})"
        )
    if options.wanted_key != KEY:
        raise ConfigError(
            f"index_col_name={options.key_column!r}: the key column of a directory is always {KEY!r}; leave it out"
        )
    kind = DataSampleType.from_str(options.data_type)
    part = DirectoryPart(listing=listing, kind=kind, version=listing.version(), label_column=options.label_column)
    return _plan(src, options, base_url, [part])


def _is_directory(src: str, options: IndexOptions) -> bool:
    """Return True for a local directory, a slash at the end, or a remote name without extension when a data_type is given."""
    if not urls.is_remote(src):
        return src.endswith("/") or os.path.isdir(urls.local_path(src))
    return src.endswith("/") or (options.data_type is not None and not urls.extension(src))


def _slash(src: str) -> str:
    return "/" if src.endswith("/") and src != "/" else ""
