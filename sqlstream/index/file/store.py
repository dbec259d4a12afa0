"""A store of built indexes that nodes share: what one of them has built, the others download.

    <store>/<build key>.<16 digits of its SHA-256>.sqlite   an index file
    <store>/<build key>.json                                says which of these it is; written last

So an index is there whole or not at all, also if a process dies in between. Of two nodes that put one, the last one wins: each
has put a file of its own, and the rows are equal. Files that no manifest names are left of those who lost or died.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Protocol

from sqlstream import __version__
from sqlstream.errors import ConfigError, IndexDatabaseError, MigrationError, ObjectNotFoundError
from sqlstream.index.file.connection import damaged, reading
from sqlstream.index.file.index import NAMED, Index
from sqlstream.index.file.intact import is_intact
from sqlstream.index.file.room import IndexRoom
from sqlstream.index.file.workplace import Workplace, sync
from sqlstream.index.types.models import FORMAT_VERSION
from sqlstream.index.types.origins import is_local_database
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader, RemoteWriter
from sqlstream.storage.base.settings import SCHEMES

logger = logging.getLogger(__name__)

STORE_VERSION = 1
"""Grows when an older sqlstream would misread a manifest."""
_MANIFEST = re.compile(r"([0-9a-f]{32})\.json")
_MAX_MANIFEST_BYTES = 1 << 16  # ours have 300
_TABLES = ("columns", "meta", "rows", "sources")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a store says of an index."""

    key: str
    """The build key."""
    size_bytes: int
    sha256: str
    src: str
    """The source, without credentials; for people."""
    sqlstream_version: str = __version__
    format_version: int = FORMAT_VERSION
    store_version: int = STORE_VERSION

    def __post_init__(self) -> None:
        """Check what names of files are made of, and what is computed with."""
        if not (re.fullmatch(r"[0-9a-f]{32}", self.key) and re.fullmatch(r"[0-9a-f]{64}", self.sha256)):
            raise ValueError("it has no key and SHA-256 in hexadecimal digits")
        if type(self.size_bytes) is not int or self.size_bytes < 1:
            raise ValueError(f"size_bytes={self.size_bytes!r} is no size")
        if (self.store_version, self.format_version) != (STORE_VERSION, FORMAT_VERSION):
            raise MigrationError(
                f"sqlstream {self.sqlstream_version} put the index {self.key} there in format {self.store_version}."
                f"{self.format_version}, and this one reads {STORE_VERSION}.{FORMAT_VERSION}"
            )

    @property
    def file_name(self) -> str:
        """The name of the index file in the store."""
        return f"{self.key}.{self.sha256[:16]}.sqlite"


_FIELDS = frozenset(field.name for field in fields(Manifest))


class ReaderAndWriter(RemoteReader, RemoteWriter, Protocol):
    """What a store is read and written with."""


class IndexStore:
    """Indexes below one URL, or in one directory.

    Args:
        url: Where they are: an object store, or a directory that all nodes see.
        remote: Reads and writes there.

    Raises:
        ConfigError: Nothing can be written there.
    """

    def __init__(self, url: str, remote: ReaderAndWriter) -> None:
        if not isinstance(url, str) or not url:
            raise ConfigError(f"index_store={url!r} is no URL: give one, such as s3://bucket/indexes/")
        if SCHEMES.get(urls.scheme(url)) == "http":
            raise ConfigError(
                f"index_store={urls.redact(url)} can only be read: give an object store (s3://, gs://, az://) or a directory"
            )
        place = url if urls.is_remote(url) else str(Path(os.path.expanduser(urls.local_path(url))).absolute())
        self._prefix = place.rstrip("/") + "/"
        self._remote = remote

    def __str__(self) -> str:
        """Return the URL, without credentials."""
        return urls.redact(self._prefix)

    def find(self, key: str) -> Manifest | None:
        """Return what the store says of an index; None when it has none.

        Raises:
            IndexDatabaseError: It says what makes no sense.
            MigrationError: Another version of sqlstream put it there, in its own format.
            StorageError: The store cannot be read.
        """
        url = f"{self._prefix}{key}.json"
        try:
            size = self._remote.head(url).size_bytes
            if size is None or size > _MAX_MANIFEST_BYTES:
                raise IndexDatabaseError(f"{urls.redact(url)} has {size} bytes, which no manifest has")
            (text,) = self._remote.get_ranges(url, [(0, size)], size)
        except ObjectNotFoundError:
            return None
        try:
            manifest = Manifest(**{name: value for name, value in json.loads(text).items() if name in _FIELDS})
            if manifest.key != key:
                raise ValueError(f"it is that of {manifest.key}")
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise IndexDatabaseError(f"{urls.redact(url)} is no manifest of an index ({error})") from error
        return manifest

    def choose(self, beginning: str | None) -> Manifest:
        """Return the index whose build key begins so; the only one if nothing is given.

        Raises:
            ConfigError: None, or several.
        """
        names = (info.url.rpartition("/")[2] for info in self._remote.list(self._prefix))
        keys = sorted(match[1] for name in names if (match := _MANIFEST.fullmatch(name)))
        chosen = [key for key in keys if key.startswith(beginning or "")]
        manifest = self.find(chosen[0]) if len(chosen) == 1 else None
        if manifest is not None:
            return manifest
        if not keys:
            raise ConfigError(f"{self} holds no index: check the URL, or put one there with `sqlstream index push`")
        problem = "there are several" if beginning is None else f"--index={beginning!r} fits {len(chosen)} of them"
        raise ConfigError(f"which index of {self}? {problem}: give --index with the start of one of {', '.join(keys)}")

    def take(self, manifest: Manifest, place: Workplace, room: IndexRoom) -> Path:
        """Download an index, and give it its name when it is found to be whole.

        Args:
            manifest: What the store says of it.
            place: The right to make it.
            room: Is asked as it grows.

        Raises:
            IndexDatabaseError: It is not what the manifest says.
            StorageError: It cannot be read.
        """
        temporary, url = place.temporary("download"), self._prefix + manifest.file_name
        self._remote.download(url, temporary, room)
        _check(temporary, manifest)
        sync(temporary)
        return place.publish(temporary, f"{manifest.key}.sqlite")

    def put(self, path: Path) -> Manifest:
        """Put an index there, in the place of one that is there.

        Raises:
            ConfigError: It is one that other nodes would not look for.
            IndexDatabaseError: It is damaged.
            StorageError: It cannot be written.
        """
        if is_intact(path, most_bytes=None) is False:  # its hash would be the right one, and each node would take it
            raise damaged(path, "its checksum is another one")
        with contextlib.closing(Index(path)) as index:
            index.hold()  # no process removes it meanwhile
            meta = index.meta
            if "query" in meta:
                raise ConfigError(f"{path} is the result of a query, which each node computes: put the index of all rows there")
            check_shared(_sources(path), index.base_url)
            with open(path, "rb") as file:
                digest, size = hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size
            manifest = Manifest(key=str(meta["fingerprint"]), size_bytes=size, sha256=digest, src=index.src)
            self._remote.upload(path, self._prefix + manifest.file_name)
        with tempfile.TemporaryDirectory(prefix="sqlstream-store-") as directory:
            text = Path(directory, "manifest.json")
            text.write_text(json.dumps(asdict(manifest), indent=2))
            self._remote.upload(text, f"{self._prefix}{manifest.key}.json")
        return manifest


def check_shared(sources: Iterable[str], base_url: str) -> None:
    """Raise unless all nodes see these sources under the same names.

    Args:
        sources: URLs of the tables.
        base_url: Where relative paths in them start; of a database that is here, and nothing starts there.

    Raises:
        ConfigError: One is a path of this machine, or a table in memory.
    """
    are_databases = True
    for url in sources:
        is_database = urls.scheme(url).partition("+")[0] in urls.DATABASES
        are_databases = are_databases and is_database
        if not urls.is_remote(url) or (is_database and is_local_database(url)):
            raise _not_shared(url)
    if not are_databases and not urls.is_remote(base_url):
        raise _not_shared(base_url)


def _not_shared(place: str) -> ConfigError:
    return ConfigError(
        f"{urls.redact(place)} is of this machine, and an index store has indexes of what every node sees under one URL: "
        "put the tables on a server, or leave the store out"
    )


def _check(path: Path, manifest: Manifest) -> None:
    """Raise unless a file is the index that a manifest names."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if (size, digest) != (manifest.size_bytes, manifest.sha256):
        raise IndexDatabaseError(
            f"{manifest.file_name} has {size} bytes with SHA-256 {digest[:16]}…, and its manifest says {manifest.size_bytes} "
            f"with {manifest.sha256[:16]}…"
        )
    with reading(path) as connection:
        tables = {
            name
            for name, sql in connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
            if not str(sql).upper().startswith("CREATE VIRTUAL")
        }
    if not tables.issuperset(_TABLES):
        raise IndexDatabaseError(f"{manifest.file_name} lacks the tables {', '.join(sorted(set(_TABLES) - tables))}")
    with contextlib.closing(Index(path)) as index:
        if missing := sorted(set(NAMED).difference(index.meta)):
            raise IndexDatabaseError(f"{manifest.file_name} does not say its {', '.join(missing)}")
        if index.meta["fingerprint"] != manifest.key:
            raise IndexDatabaseError(f"{manifest.file_name} is the index {index.meta['fingerprint']}")
        try:
            check_shared(_sources(path), index.base_url)
        except ConfigError as error:  # its rows would be judged as the user's own
            raise IndexDatabaseError(f"{manifest.file_name} names sources that no shared index has ({error})") from error


def _sources(path: Path) -> list[str]:
    with reading(path) as connection:
        return [url for (url,) in connection.execute("SELECT url FROM sources")]
