"""Joins the indexes of parts into one: of MDS and the split formats, as MosaicML Streaming joins them, and of tars for wids.

    out/00000-of-00002/index.json, shard.00000.mds, …
    out/00001-of-00002/index.json, shard.00000.mds, …
    out/index.json              names the shards of all parts, in the order of the parts, whenever each was written

Archives and Parquet files have no index: readers take those of all parts by a wildcard.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sqlstream.config import StorageOptions
from sqlstream.errors import ConfigError, SourceError
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader
from sqlstream.storage.base.unfinished import JOURNAL_NAME
from sqlstream.storage.fetcher import Fetcher
from sqlstream.storage.members.mds.shards import is_mds_index
from sqlstream.write.base.journal import parse_journal, put_bytes, read_object, read_text
from sqlstream.write.base.options import ReaderWriter
from sqlstream.write.base.place import place_of
from sqlstream.write.formats.wids import wids_index

INDEX_NAME = "index.json"
_PART = re.compile(r"(\d+)-of-(\d+)")
_SAME = ("source", "column_names", "column_encodings")
"""Settings of a writing that choose what its samples are; sizes of shards and compression may differ."""
_FILES = ("raw_data", "zip_data", "raw_meta", "zip_meta")


class Merged(NamedTuple):
    """What an index says that was made of others."""

    url: str
    """Where it is, without credentials."""
    num_parts: int
    num_shards: int
    num_samples: int


def merge(
    out: str | Path, *, storage_options: Mapping[str, object] | None = None, remote: ReaderWriter | None = None
) -> Merged:
    """Write one index over those of the directories below an output, and return what it says.

    Args:
        out: A directory or a URL: what the parts were written to.
        storage_options: Settings of the storage backend.
        remote: What reads and stores objects; None: a helper process for this call.

    Raises:
        ConfigError: There are no parts, one of i-of-n is missing, a part has no index, or its journal says that it is not
            finished, is another part, or has samples of another source.
        SourceError: An index is damaged, or of another kind than the first.
    """
    place = place_of(out)
    prefix = place.remote or f"{place.local}/"
    with _opened(storage_options, remote, prefix) as store:
        names = _part_names(prefix, store)
        found = [(name, read_object(store, f"{prefix}{name}/{INDEX_NAME}")) for name in names]
        lacking = [name for name, data in found if data is None]
        if lacking:
            raise ConfigError(f"{place}: part {lacking[0]} has no {INDEX_NAME}: it is not finished, or its format has none")
        _check_journals({name: read_text(store, f"{prefix}{name}/{JOURNAL_NAME}") for name in names}, str(place))
        content, num_shards, num_samples = merged_index([(name, data or b"") for name, data in found], str(place))
        put_bytes(store, f"{prefix}{INDEX_NAME}", content)
    return Merged(f"{str(place).rstrip('/')}/{INDEX_NAME}", len(names), num_shards, num_samples)


@contextlib.contextmanager
def _opened(
    storage_options: Mapping[str, object] | None, remote: ReaderWriter | None, prefix: str
) -> Iterator[ReaderWriter | None]:
    if remote is not None or not urls.is_remote(prefix):
        yield remote
        return
    fetcher = Fetcher(StorageOptions(storage_options=storage_options or {}))
    try:
        yield fetcher
    finally:
        fetcher.close()


def _part_names(prefix: str, store: RemoteReader | None) -> list[str]:
    """Return the names of the directories of parts, in their order."""
    if urls.is_remote(prefix):
        assert store is not None, urls.redact(prefix)
        below = (info.url.removeprefix(prefix).split("/") for info in store.list(prefix))
        names = {parts[0] for parts in below if len(parts) > 1}
    elif Path(prefix).is_dir():
        names = {path.name for path in Path(prefix).iterdir() if path.is_dir()}
    else:
        names = set()
    where = urls.redact(prefix)
    numbered = {name: match for name in names if (match := _PART.fullmatch(name))}
    if not numbered:
        found = sorted(names, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
        if not found:
            raise ConfigError(f"{where} has no parts: write them with part=(i, n), or into a directory each")
        return found
    totals = {int(match[2]) for match in numbered.values()}
    if len(totals) > 1:
        raise ConfigError(f"{where} has parts of {sorted(totals)}: remove those of an earlier writing")
    (total,) = totals
    by_number = {int(match[1]): name for name, match in numbered.items()}
    if missing := [number for number in range(total) if number not in by_number]:
        raise ConfigError(f"{where} lacks {len(missing)} of {total} parts, first part {missing[0]}: write them, then merge")
    return [by_number[number] for number in range(total)]


def _check_journals(texts: Mapping[str, str | None], where: str) -> None:
    """Raise unless parts are finished, and those of i-of-n are of one writing, as far as their journals say."""
    first: tuple[str, Mapping[str, Any]] | None = None
    for name, text in texts.items():
        if text is None:
            continue
        journal = parse_journal(text, f"{where}: the journal of part {name}") if "\n" in text else None
        if journal is None or not journal.is_complete:
            raise ConfigError(f"{where}: part {name} is not finished, says its journal: write it with resume, then merge")
        if (match := _PART.fullmatch(name)) is None:  # directories of their own may hold anything
            continue
        part = journal.settings.get("part")
        if part and part != [int(match[1]), int(match[2])]:
            raise ConfigError(f"{where}: {name} holds part {part[0]} of {part[1]}, says its journal: write it anew, then merge")
        settings = {key: _parsed(value) for key in _SAME if (value := journal.settings.get(key))}
        if first is None:
            first = name, settings
        for key in settings.keys() & first[1].keys():
            if settings[key] != first[1][key]:
                what, one, two = _difference(key, first[1][key], settings[key])
                raise ConfigError(
                    f"{where}: part {first[0]} was written with {what}={one!r}, part {name} with {two!r}: write the parts of "
                    "one source in one way, then merge"
                )


def _parsed(value: object) -> object:
    """Return a setting, that of the command line as the dict that it is."""
    try:
        return json.loads(value) if isinstance(value, str) and value.startswith("{") else value
    except ValueError:
        return value


def _difference(what: str, one: object, two: object) -> tuple[str, object, object]:
    """Return where two settings that differ do so first, and the values there."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        for key in sorted({*one, *two}):
            if one.get(key) != two.get(key):
                return _difference(f"{what}.{key}", one.get(key), two.get(key))
    return what, one, two


def merged_index(indexes: Sequence[tuple[str, bytes]], where: str) -> tuple[bytes, int, int]:
    """Return one index of several, with its number of shards and of samples.

    Args:
        indexes: (name of the directory, index in it).
        where: What messages call the place.

    Raises:
        SourceError: One is damaged, or they are of two kinds.
    """
    shards: list[dict[str, Any]] = []
    num_samples = 0
    kinds: dict[bool, str] = {}
    names: list[str] = []
    for directory, content in indexes:
        try:
            document = json.loads(content)
            is_mosaic = is_mds_index(document)
            kinds.setdefault(is_mosaic, directory)
            entries = document["shards" if is_mosaic else "shardlist"]
            shards += [_moved(dict(entry), directory, is_mosaic) for entry in entries]
            num_samples += sum(entry["samples" if is_mosaic else "nsamples"] for entry in entries)
            names.append("" if is_mosaic else str(document.get("name", "")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(f"{where}: the index of {directory} is no index of MDS or wids ({error!r})") from error
    if len(kinds) > 1:
        raise SourceError(f"{where}: {kinds[True]} is MDS and {kinds[False]} is tars: merge parts of one format")
    if True in kinds:
        return json.dumps({"version": 2, "shards": shards}).encode(), len(shards), num_samples
    return wids_index(shards, names[0]), len(shards), num_samples


def _moved(entry: dict[str, Any], directory: str, is_mosaic: bool) -> dict[str, Any]:
    """Return what an index says of a shard, seen from the directory above."""
    if not is_mosaic:
        place = urls.without_file(entry["url"])
        if not urls.is_remote(place) and not place.startswith("/"):
            entry["url"] = f"{directory}/{place}"
        return entry
    for key in _FILES:
        if entry.get(key):
            entry[key] = {**entry[key], "basename": f"{directory}/{entry[key]['basename']}"}
    return entry
