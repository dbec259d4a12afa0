"""Which file is a shard, by its name."""

from __future__ import annotations

import os
import re

from sqlstream.errors import ConfigError
from sqlstream.index.sources.shards.layout import ShardLayout
from sqlstream.index.sources.shards.record_shard import RecordShard
from sqlstream.index.sources.shards.tar_shard import TarShard
from sqlstream.index.sources.shards.zip_shard import ZipShard
from sqlstream.storage.base import urls
from sqlstream.storage.members import braces
from sqlstream.storage.members.names import tar_extension
from sqlstream.storage.members.records import EXTENSIONS

_ZIP = re.compile(r"\.zip$", re.IGNORECASE)


def layout_of(url: str, label_column: str | None = None, index_members: tuple[str, ...] = ()) -> ShardLayout | None:
    """Return how a file is read by its name; None: it is no shard. What a command prints is a TAR, as WebDataset takes it.

    Args:
        url: The file.
        label_column: Column for the folder of each sample in a ZIP; None: none.
        index_members: Columns of members that are parsed.

    Example:
        >>> layout_of("s3://bucket/train-000.tar") == TarShard(), layout_of("photos.zip") == ZipShard(), layout_of("a.csv")
        (True, True, None)
    """
    name = urls.named(url)
    if urls.is_command(url) or tar_extension(url):
        return TarShard(index_members=index_members)
    if (layout := EXTENSIONS.get(urls.extension(name.rpartition("/")[2]))) is not None:
        return RecordShard(layout=layout)
    return ZipShard(label_column=label_column, index_members=index_members) if _ZIP.search(name) else None


def says_compressed(url: str) -> bool:
    """Return whether a shard is compressed as a whole by its name: its first bytes tell for sure."""
    return not urls.is_command(url) and tar_extension(url) not in ("", ".tar")


def shard_urls(text: str, *, allow_pipes: bool = False) -> list[str] | None:
    """Return the shards that a text names, with braces, `::`, variables and `pipe:` as WebDataset takes them; None: none.

    A local file of exactly that name comes first.

    Args:
        text: `s3://bucket/train-{000..127}.tar`, `a.tar::b.tar`, `pipe:aws s3 cp s3://bucket/a.tar -`.
        allow_pipes: Commands that do more than print an object are to be run.

    Raises:
        ConfigError: Braces are not closed, a program names no URL, or only some of the names are shards.

    Example:
        >>> shard_urls("s-{00..02}.tar"), shard_urls("table.csv")
        (['s-00.tar', 's-01.tar', 's-02.tar'], None)
    """
    if not urls.is_remote(text) and os.path.exists(urls.local_path(text)):  # unlike Path.exists, no error
        return [text] if layout_of(text) is not None else None
    if layout_of(text) is None and f"::{urls.COMMAND}" not in text:
        return None
    found = [braces.url_of(shard, allow_pipes=allow_pipes) for shard in braces.expand(text)]
    if (other := next((url for url in found if layout_of(url) is None), None)) is not None:
        raise ConfigError(
            f"src names {urls.redact(other)} beside shards, and its name is not one of a shard: name shards alone"
        )
    return found
