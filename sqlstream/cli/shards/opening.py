"""What the commands that look at shards have in common."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sqlstream.cli.options import storage_options

if TYPE_CHECKING:
    from sqlstream.write.check import KnownShard, ShardReader


@contextlib.contextmanager
def shard_reader(options: argparse.Namespace, places: Sequence[str]) -> Iterator[ShardReader]:
    """Give what reads shards; a helper process runs only where one of the places is remote."""
    from sqlstream.config import StorageOptions
    from sqlstream.storage.base import urls
    from sqlstream.storage.fetcher import Fetcher
    from sqlstream.write.check import ShardReader

    if not any(urls.is_remote(place) for place in places):
        yield ShardReader(None)
        return
    fetcher = Fetcher(StorageOptions(storage_options=storage_options(options.storage_option)))
    try:
        yield ShardReader(fetcher)
    finally:
        fetcher.close()


def find_shards(reader: ShardReader, src: str) -> tuple[KnownShard, ...]:
    """Return the shards that a command is given, which a wildcard may name, too.

    Raises:
        ConfigError: There are none.
        SourceError: The same of a wildcard; or an index is damaged.
    """
    from sqlstream.index.sources.places import wildcard
    from sqlstream.storage.base.protocols import NO_REQUESTS

    if not wildcard.has_wildcard(src):
        return reader.find(src)
    files = wildcard.match_files(src, reader.remote or NO_REQUESTS)
    return tuple(shard for file in files for shard in reader.find(file.url))
