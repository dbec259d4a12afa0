"""Sources that an index file of their own describes: `index.json` of MosaicML Streaming."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sqlstream.config import IndexOptions
from sqlstream.errors import ObjectNotFoundError, SourceError
from sqlstream.index.sources.base.access import named_errors, stat_file
from sqlstream.index.sources.base.byte_source import bytes_of
from sqlstream.index.sources.plan.parts import ShardPart
from sqlstream.index.sources.shards.mds_shard import MdsLayout
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader
from sqlstream.storage.members.mds import MdsShard, is_mds_index, parse_index

INDEX = "index.json"
_MAX_BYTES = 1 << 30
"""Of an index file: some 10^6 shards."""
_LOOKED_AT_BYTES = 4096
"""Of a .json file, to tell an object from an array of rows."""
_HEADS_AT_A_TIME = 16


class IndexFile(NamedTuple):
    """An index file that describes shards."""

    file: SourceFile
    shards: tuple[MdsShard, ...]


def find_index(src: str, data_type: str | None, remote: RemoteReader) -> IndexFile | None:
    """Return the index file that a source is, or that its directory holds; None: there is none.

    Args:
        src: The source, an absolute path or a URL.
        data_type: What kind of samples a directory has; None: its index file says it.
        remote: Reads what is not local.

    Raises:
        SourceError: It is damaged, or of another version.
    """
    if urls.extension(src) == ".json":
        file = stat_file(src, remote)
    elif data_type is None and (src.endswith("/") or (not urls.is_remote(src) and Path(urls.local_path(src)).is_dir())):
        try:
            file = stat_file(src.rstrip("/") + "/" + INDEX, remote)
        except ObjectNotFoundError:
            return None
    else:
        return None
    name = urls.redact(file.url)
    with named_errors(file.url):
        source = bytes_of(file, remote)
        head = source.read_at(0, _LOOKED_AT_BYTES)
        if not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            return None  # an array of rows
        if source.size_bytes > _MAX_BYTES:
            raise SourceError(f"{name} has {source.size_bytes} bytes: an index of shards has {_MAX_BYTES} at most")
        data = head if source.size_bytes <= len(head) else source.read_at(0, source.size_bytes)
    try:
        document = json.loads(data)
    except ValueError:
        return None  # read as a table, it is an error that says what is wrong
    return IndexFile(file, parse_index(data, name)) if is_mds_index(document) else None


def shard_parts(index: IndexFile, options: IndexOptions, remote: RemoteReader) -> Iterator[ShardPart]:
    """Yield the shards of an index file, several of them looked at side by side.

    Raises:
        SourceError: A shard has another size than the index says.
        ObjectNotFoundError: One is not there.
    """
    directory = urls.parent(index.file.url).rstrip("/") + "/"
    shards = index.shards[: options.max_index_files]

    def part(shard: MdsShard) -> ShardPart:
        stored = shard.zip or shard.raw
        file = stat_file(directory + stored.basename, remote)
        if file.size_bytes is not None and file.size_bytes != stored.bytes:
            raise SourceError(
                f"{urls.redact(file.url)} has {file.size_bytes} bytes, and {urls.redact(index.file.url)} says {stored.bytes}: "
                "one of them is of another version"
            )
        layout = MdsLayout(shard=shard, directory=directory, is_decoded=options.decode, allow_pickle=options.allow_pickle)
        return ShardPart(source=replace(file, size_bytes=stored.bytes), layout=layout)

    with ThreadPoolExecutor(_HEADS_AT_A_TIME, thread_name_prefix="shard") as pool:
        yield from pool.map(part, shards)
