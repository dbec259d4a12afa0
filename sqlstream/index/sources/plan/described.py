"""Sources that an index file of their own describes: those of MosaicML Streaming and wids."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from sqlstream.config import IndexOptions
from sqlstream.errors import ConfigError, ObjectNotFoundError, SourceError
from sqlstream.index.sources.base.access import local_copy, named_errors, stat_file
from sqlstream.index.sources.base.byte_source import ByteSource, LocalBytes, bytes_of
from sqlstream.index.sources.formats.by_extension import format_of
from sqlstream.index.sources.places.path_list import list_files
from sqlstream.index.sources.plan.parts import ShardPart, Temporary
from sqlstream.index.sources.shards.layout import ShardLayout
from sqlstream.index.sources.shards.mds_shard import MdsLayout
from sqlstream.index.sources.shards.tar_shard import TarShard
from sqlstream.index.types.models import SourceFile, fingerprint
from sqlstream.storage.base import urls
from sqlstream.storage.base.access import ALLOWED_COMMAND, Rules, command_denied
from sqlstream.storage.base.protocols import RemoteReader
from sqlstream.storage.members.braces import url_of
from sqlstream.storage.members.mds.shards import MdsShard, is_mds_index, parse_index

INDEX = "index.json"
_MAX_BYTES = 1 << 30
"""Of an index file: some 10^6 shards."""
_LOOKED_AT_BYTES = 256 << 10
"""Of a .json file, to tell an object from an array of rows: so many come as fast as one, and are all of most index files."""


class WidsShard(NamedTuple):
    """A TAR archive of a wids index."""

    url: str
    """As written: relative to the index file, or absolute."""
    num_samples: int | None
    num_bytes: int | None


class IndexFile(NamedTuple):
    """An index file that describes shards."""

    file: SourceFile
    shards: tuple[MdsShard | WidsShard, ...]


def find_index(src: str, data_type: str | None, temporary: Temporary, remote: RemoteReader) -> IndexFile | None:
    """Return the index file that a source is, or that its directory holds; None: there is none.

    Args:
        src: The source, an absolute path or a URL.
        data_type: What kind of samples a directory has; None: its index file says it.
        temporary: Gives a path for the index file, if its server does not say how long it is.
        remote: Reads what is not local.

    Raises:
        SourceError: It is damaged, or of another version.
    """
    file = _index_file(src, data_type, remote)
    if file is None or (read := _read(file, temporary, remote)) is None:
        return None
    name, (data, document) = urls.redact(file.url), read
    if is_mds_index(document):
        return IndexFile(file, parse_index(data, name))
    if "wids_version" in document:
        return IndexFile(file, _wids_shards(document, name))
    if {"chunks", "config"} <= document.keys():
        raise ConfigError(f"{name} is an index of LitData, whose chunks are not read: read the data from where it came")
    return None


def _index_file(src: str, data_type: str | None, remote: RemoteReader) -> SourceFile | None:
    if format_of(src) == ".json":
        return stat_file(src, remote)
    is_directory = src.endswith("/") or (not urls.is_remote(src) and os.path.isdir(urls.local_path(src)))
    if data_type is not None or not is_directory:
        return None
    try:
        return stat_file(src.rstrip("/") + "/" + INDEX, remote)
    except ObjectNotFoundError:
        return None


def _read(file: SourceFile, temporary: Temporary, remote: RemoteReader) -> tuple[bytes, Mapping[str, Any]] | None:
    """Return a file and the object of JSON that it is; None: it is another kind of file, such as an array of rows.

    Without a length there are no ranges: then it is downloaded, and again where it is a table.
    """
    name = urls.redact(file.url)
    with contextlib.ExitStack() as opened, named_errors(file.url):
        source: ByteSource
        if file.size_bytes is None:
            source = LocalBytes(opened.enter_context(local_copy(file, temporary("index"), remote)))
        else:
            source = bytes_of(file, remote)
        head = source.read_at(0, _LOOKED_AT_BYTES)
        if not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            return None
        if source.size_bytes > _MAX_BYTES:
            raise SourceError(f"{name} has {source.size_bytes} bytes: an index of shards has {_MAX_BYTES} at most")
        data = head if source.size_bytes <= len(head) else source.read_at(0, source.size_bytes)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None  # read as a table, it is an error that says what is wrong
    return (data, document) if isinstance(document, Mapping) else None


def _wids_shards(document: Mapping[str, Any], name: str) -> tuple[WidsShard, ...]:
    found = document.get("shardlist")
    if not isinstance(found, list) or not all(isinstance(some, dict) and isinstance(some.get("url"), str) for some in found):
        raise SourceError(f"{name} is a wids index without a shardlist of objects with a url: write it again with widsindex")
    return tuple(WidsShard(some["url"], some.get("nsamples"), some.get("filesize")) for some in found)


def command_file(command: str, version: str | None) -> SourceFile:
    """Return the shard that a command prints which the user named, and said that it is to be run.

    Args:
        command: With its `pipe:`.
        version: What the user calls the version of its output; None: there is one for ever.
    """
    name = fingerprint({"command": command} if version is None else {"command": command, "version": version})
    return SourceFile(url=command, size_bytes=None, etag=None, content=name, access=ALLOWED_COMMAND)


def _named_shard(shard: MdsShard | WidsShard, listed: SourceFile, options: IndexOptions) -> MdsShard | WidsShard:
    """Return a shard with the URL that its command names, if one names it, and with the path of `file:path`.

    Raises:
        AccessDeniedError: A remote index names a command.
        ConfigError: A local one does, and it is not to be run.
    """
    if not isinstance(shard, WidsShard):
        return shard
    if not urls.is_command(shard.url):  # a remote index names no file of this machine, however that is spelled
        return shard if urls.is_remote(listed.url) else shard._replace(url=urls.without_file(shard.url))
    if urls.is_remote(listed.url):
        raise command_denied(shard.url, listed.url)
    return shard._replace(url=url_of(shard.url, allow_pipes=options.allow_pipes))


def shard_parts(
    index: IndexFile, options: IndexOptions, rules: Rules, remote: RemoteReader, num_looked_at: int | None = None
) -> list[ShardPart]:
    """Return the shards of an index file.

    Args:
        index: The index file: a remote one may name what a row of a remote table may.
        options: How shards are read, and how many.
        rules: What that is.
        remote: Asks for versions.
        num_looked_at: Of so many shards, the first ones; None: of all.

    Raises:
        ObjectNotFoundError: One is not there.
        AccessDeniedError: A remote index names what it may not.
    """
    directory = urls.parent(index.file.url).rstrip("/") + "/"
    shards = [_named_shard(shard, index.file, options) for shard in index.shards[: options.max_index_files]]
    named = [shard.url if isinstance(shard, WidsShard) else (shard.zip or shard.raw).basename for shard in shards]
    listed = [urls.join(directory, name) for name in named if not urls.is_command(name)]
    found = iter(list_files(index.file, listed, rules, remote, num_looked_at, options.missing_shards))
    version = options.source_version
    files = [command_file(name, version) if urls.is_command(name) else next(found) for name in named]
    parts: list[ShardPart] = []
    for shard, file in zip(shards, files, strict=True):
        layout: ShardLayout
        if isinstance(shard, WidsShard):
            num_bytes = shard.num_bytes
            layout = TarShard(num_samples=shard.num_samples, num_bytes=num_bytes, index_members=options.index_members)
        else:
            num_bytes = (shard.zip or shard.raw).bytes
            layout = MdsLayout(
                shard=shard,
                directory=directory,
                is_decoded=options.decode,
                allow_pickle=options.allow_pickle,
                index_members=options.index_members,
            )
        source = replace(file, size_bytes=num_bytes if file.size_bytes is None else file.size_bytes)
        parts.append(ShardPart(source=source, layout=layout, damaged=options.damaged_shards, missing=options.missing_shards))
    return parts
