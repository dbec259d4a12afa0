"""Indexes of wids: what shards there are, read from JSON, from a list, or made of them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlstream import Cache
from sqlstream.config import default_cache_directory
from sqlstream.errors import AccessDeniedError, ConfigError, ObjectNotFoundError, SourceError, StorageError
from sqlstream.index.sources.base.access import stat_file
from sqlstream.index.sources.base.byte_source import bytes_of
from sqlstream.storage.base.urls import is_command, is_remote, local_path, redact, without_file
from sqlstream.storage.members.mds.shards import leaves_directory


def described(shards: Any, base: str | None, options: Mapping[str, Any] | None, cache_dir: str | None) -> dict[str, Any]:
    """Return an index as a dict, its shards with URLs that do not depend on its place.

    Raises:
        ConfigError: It names other indexes, or is none.
        AccessDeniedError: It is a remote one, and names a shard that is not below the base that the user gives.
    """
    if isinstance(shards, str):
        document, start = _read(shards, cache_dir), shards.rpartition("/")[0]
    else:
        document, start = {"wids_version": 1, "shardlist": list(shards)}, ""
    document |= dict(options or {})
    if "datasets" in document and not document.get("shardlist"):
        raise ConfigError(f"{shards!r} names other indexes (datasets): open each, and join them with torch's ConcatDataset")
    start = start if base is None else base
    found = document.get("shardlist")
    if not found or not all(isinstance(some, Mapping) and {"url", "nsamples"} <= some.keys() for some in found):
        raise ConfigError(f"{str(shards)[:200]!r} is no index of wids: it has no shardlist of url and nsamples")
    is_foreign = isinstance(shards, str) and is_remote(shards) and "shardlist" not in (options or {})
    if base is not None and is_foreign and (wrong := [some["url"] for some in found if leaves_directory(some["url"])]):
        raise AccessDeniedError(
            f"{redact(shards)} names {redact(wrong[0])}, which is not below base={base!r}: a remote index names no other place "
            "there; leave base= out, or give the shards as a list"
        )
    return {**document, "shardlist": [{**shard, "url": _joined(start, shard["url"])} for shard in found]}


def _read(path: str, cache_dir: str | None) -> dict[str, Any]:
    """Return the document of an index.

    Raises:
        ConfigError: It is no object of JSON.
        SourceError: It is no JSON.
        StorageError: It is not there, or cannot be read.
    """
    if is_remote(path):
        with Cache(cache_dir or default_cache_directory()) as cache:
            source = bytes_of(stat_file(path, cache.fetcher), cache.fetcher)
            data = source.read_at(0, source.size_bytes)
    else:
        try:
            data = Path(local_path(path)).read_bytes()
        except FileNotFoundError as error:
            raise ObjectNotFoundError(f"the index {path} is not there: check the path") from error
        except OSError as error:
            raise StorageError(f"the index {path} cannot be read ({error}): check the path, and its rights") from error
    try:
        document = json.loads(data)
    except ValueError as error:
        raise SourceError(f"{redact(path)} is no index of wids, since it is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{redact(path)} is no index of wids: it has a {type(document).__name__} and no object")
    return document


def _joined(start: str, url: str) -> str:
    return url if is_remote(url) or url.startswith(("/", "pipe:", "file:")) or not start else f"{start.rstrip('/')}/{url}"


def _absolute(url: str) -> str:
    path = without_file(url)
    return url if is_remote(path) or is_command(path) else str(local_path(path).absolute())


def written(document: dict[str, Any], cache_dir: str | None) -> Path:
    """Return the path of an index with a document, beside the cache: named by its content.

    Its shards have absolute paths: a relative one of it would start at the cache.
    """
    shards = [{**shard, "url": _absolute(shard["url"])} for shard in document["shardlist"]]
    text = json.dumps({**document, "shardlist": shards, "wids_version": 1}, sort_keys=True)
    cache = Path(os.path.abspath(os.path.expanduser(cache_dir or default_cache_directory())))  # `.` has no name
    folder = cache.parent / f"{cache.name}-wids"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{hash_of(text)}.json"
    if not path.exists():
        aside = path.with_suffix(f".{uuid.uuid4().hex}")
        try:
            aside.write_text(text)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    return path


def hash_of(text: str) -> str:
    """Return the name of a text: 16 characters of its hash."""
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())[:16].decode()
