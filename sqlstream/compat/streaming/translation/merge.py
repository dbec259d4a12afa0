"""Joins the indexes of parts into one, as MosaicML's `merge_index` does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from sqlstream.config import StorageOptions
from sqlstream.errors import ConfigError, SourceError
from sqlstream.storage.base import urls
from sqlstream.storage.fetcher import Fetcher
from sqlstream.write import Out
from sqlstream.write.base.journal import put_bytes, read_object
from sqlstream.write.base.place import OutputPlace, place_of
from sqlstream.write.merge import merged_index

INDEX = "index.json"
Part = str | tuple[str, str]
"""Where the index of a part is: a path, a URL, or (path, URL)."""


def merge_parts(parts: Sequence[Part] | None, out: Out, *, keep_local: bool) -> None:
    """Write an index of the shards of all parts.

    Args:
        parts: Their indexes, in the order of the shards; None: those in the subdirectories of `out`, by name.
        out: Where the index goes; shards are named by their way from there.
        keep_local: Keep the local file of an output that has a URL as well.

    Raises:
        ConfigError: There is no part.
        SourceError: One is not there, or no index.
    """
    place = place_of(out)
    fetcher = Fetcher(StorageOptions())
    try:
        found = list(_parts_below(place, fetcher) if parts is None else map(_existing, parts))
        if not found:
            raise ConfigError(f"there is no part to merge: neither a list, nor a subdirectory of {place} with an {INDEX}")
        indexes = [(_way_to(where, place), _read(where, fetcher)) for where in dict.fromkeys(found)]
        content, _, _ = merged_index(indexes, str(place))
        _write(content, place, fetcher, keep_local=keep_local)
    finally:
        fetcher.stop()


def _existing(part: Part) -> str:
    """Return where a part is read: its path, if that is there."""
    if isinstance(part, str):
        return part.strip().rstrip("/")
    local, remote = (text.strip().rstrip("/") for text in part)
    return local if os.path.exists(local) else remote


def _parts_below(place: OutputPlace, fetcher: Fetcher) -> Iterator[str]:
    found = [] if place.local is None else sorted(str(path) for path in place.local.glob(f"**/{INDEX}"))
    if place.remote is not None:
        there = sorted(info.url for info in fetcher.list(place.remote) if info.url.endswith(f"/{INDEX}"))
        found = there if len(there) > len(found) else found
    own = {f"{base}/{INDEX}" for base in (str(place.local), (place.remote or "").rstrip("/"))}
    return (where for where in found if where not in own)


def _read(where: str, fetcher: Fetcher) -> bytes:
    """Return the index of a part."""
    data = read_object(fetcher, where)
    if data is None:
        raise SourceError(f"{urls.redact(where)} is not there: write the part, or leave it out")
    return data


def _way_to(where: str, place: OutputPlace) -> str:
    """Return the directory of a part as seen from the output; elsewhere it is named alone, as MosaicML does."""
    directory = urls.parent(where).rstrip("/") if urls.is_remote(where) else str(urls.local_path(where).absolute().parent)
    for base in (place.local, place.remote):
        root = "" if base is None else str(base).rstrip("/") + "/"
        if root and directory.startswith(root):
            return directory.removeprefix(root)
    return directory.rpartition("/")[2]


def _write(index: bytes, place: OutputPlace, fetcher: Fetcher, *, keep_local: bool) -> None:
    if place.remote is not None:
        put_bytes(fetcher, place.remote + INDEX, index)
    if place.local is not None and (keep_local or place.remote is None):
        put_bytes(fetcher, str(place.local / INDEX), index)
