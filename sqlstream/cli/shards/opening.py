"""What the commands that look at shards have in common."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sqlstream.cli.options import storage_options

if TYPE_CHECKING:
    from sqlstream.write.check import ShardReader


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
