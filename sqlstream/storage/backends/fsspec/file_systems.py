"""The file systems of URLs, which fsspec makes and keeps."""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import fsspec
import fsspec.core

from sqlstream.config import StorageOptions
from sqlstream.errors import ConfigError, SqlStreamError, StorageError, TransientStorageError
from sqlstream.storage.backends.fsspec.errors import map_error, mapped
from sqlstream.storage.base.settings import OWN_KEYS
from sqlstream.storage.base.urls import is_remote, local_name, redact, redact_text, scheme

MAX_FILE_SYSTEMS = 128
"""File systems that are kept; fsspec makes one for each host, and of those that are not asynchronous one for each thread."""
_END_OF_PATH = re.compile("[?#]")
_UNSIGNED: dict[str, dict[str, object]] = {
    "s3": {"anon": True},
    "s3a": {"anon": True},
    "gs": {"token": "anon"},
    "gcs": {"token": "anon"},
    "az": {"anon": True},
    "abfs": {"anon": True},
    "abfss": {"anon": True},
    "hf": {"token": False},
}
"""Options that keep a file system from looking for credentials by itself."""


class FileSystems:
    """Those of one set of options.

    Args:
        options: What they are made with.
    """

    def __init__(self, options: StorageOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._used: OrderedDict[str, Any] = OrderedDict()

    @contextmanager
    def opened(self, url: str) -> Iterator[tuple[Any, str]]:
        """Yield the file system of a URL and the path there.

        One that cannot be reached is forgotten, so that the next try makes another one: what is not asynchronous has one
        connection from its start, and none once that has ended.
        """
        with mapped(url):
            file_system, path = self._locate(url)
            try:
                yield file_system, path
            except Exception as error:
                ours = error if isinstance(error, SqlStreamError) else map_error(error, url)
                if isinstance(ours, TransientStorageError) and not file_system.async_impl:
                    with self._lock:
                        self._used.pop(file_system._fs_token, None)
                        type(file_system)._cache.pop(file_system._fs_token, None)
                raise

    def forget(self) -> None:
        """Have fsspec forget the file systems that were made here."""
        with self._lock:
            while self._used:
                token, file_system = self._used.popitem()
                type(file_system)._cache.pop(token, None)

    def _locate(self, url: str) -> tuple[Any, str]:
        """Return the file system of a URL and the path there."""
        if not is_remote(url):
            return fsspec.filesystem("file"), local_name(url)
        if (file_system := self._options.storage_options.get("filesystem")) is not None:
            return _checked_file_system(file_system, url)
        with self._lock:  # fsspec's registry of instances is no place for 16 threads at once
            try:
                options = _constructor_options(scheme(url), self._options)  # before gcsfs is imported
                head = _head(fsspec.get_filesystem_class(scheme(url)), url)
                file_system, path = fsspec.core.url_to_fs(head, **options)
            except ValueError as error:  # no such protocol, or a value that its constructor refuses
                name = scheme(url)
                cure = f"; correct the scheme, or name a function that reads it: providers={{{name!r}: 'module:function'}}"
                cure = "" if name in fsspec.available_protocols() else cure
                raise ConfigError(f"{redact(url)}: {redact_text(str(error))}{cure}", url=redact(url)) from error
            self._keep(file_system)
        if (listings := getattr(file_system, "dircache", None)) is not None:
            listings.use_listings_cache = False  # as an option it would reach SSHClient.connect, which refuses it
        if hasattr(file_system, "retries"):
            file_system.retries = 1  # s3fs, gcsfs: the number of tries; ours are counted above
        return file_system, path if "::" in url else _path_in(file_system, url)

    def _keep(self, file_system: Any) -> None:
        """Have fsspec forget the file systems that were not used for longest: each has a host and a connection of its own.

        One that is still read from ends with its last reader.
        """
        self._used[file_system._fs_token] = file_system
        self._used.move_to_end(file_system._fs_token)
        while len(self._used) > MAX_FILE_SYSTEMS:
            token, oldest = self._used.popitem(last=False)
            type(oldest)._cache.pop(token, None)


def _checked_file_system(file_system: Any, url: str) -> tuple[Any, str]:
    """Return the file system object that the user gave, and the path of a URL there."""
    if not isinstance(file_system, fsspec.AbstractFileSystem):
        kind = type(file_system).__name__
        raise ConfigError(f"storage_options['filesystem'] is a {kind}: give an fsspec file system", url=redact(url))
    return file_system, _path_in(file_system, url)


def _head(file_system: Any, url: str) -> str:
    """Return a URL without what its file system would take for a query or fragment, and for options of its constructor.

    To all else here `?` and `#` belong to the name of an object.
    """
    if "::" in url or not {"url_query", "url_fragment"} & file_system._get_kwargs_from_urls(url).keys():
        return url
    return _END_OF_PATH.split(url, maxsplit=1)[0]


def _path_in(file_system: Any, url: str) -> str:
    """Return the path of a URL in its file system.

    Raises:
        StorageError: It would ask for an object of another name: its methods read a path as a URL once more.
    """
    head = _head(file_system, url)
    path = str(file_system._strip_protocol(head)) + url[len(head) :]
    asked = str(file_system._strip_protocol(path))
    if asked != path or (head != url and not url.endswith(path)):
        where = redact(url)
        text = f"{where}: fsspec's file system of {scheme(url)} would ask for {asked!r}, which is another object"
        raise StorageError(f"{text}: give the object another name", url=where)
    return path


def _constructor_options(kind: str, options: StorageOptions) -> dict[str, Any]:
    """Return what the file system of a scheme is made with: the user's options, and our timeouts where it takes them."""
    given = {key: value for key, value in options.storage_options.items() if key not in OWN_KEYS}
    if not options.is_signed:
        given |= _UNSIGNED.get(kind, {})
    if kind in ("s3", "s3a"):
        for key in ("key", "secret", "token"):
            if not isinstance(given.get(key), str | None):  # botocore's own errors name none of them
                raise ConfigError(f"storage_options[{key!r}] is a {type(given[key]).__name__}: give a text")
        region = given.pop("region", None)
        if region is not None:
            nested = given.get("client_kwargs")
            given["client_kwargs"] = {"region_name": region, **(nested if isinstance(nested, Mapping) else {})}
        timeouts = {"connect_timeout": options.connect_timeout_seconds, "read_timeout": options.read_timeout_seconds}
        nested = given.get("config_kwargs")
        user = nested if isinstance(nested, Mapping) else {}
        given["config_kwargs"] = {**timeouts, "retries": {"total_max_attempts": 1}, **user}
    elif kind in ("gs", "gcs") and given.get("endpoint_url"):
        # An emulator: before it is imported, gcsfs must be told not to ask Google over gRPC which type a bucket has (minutes).
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    elif kind in ("http", "https"):
        given.setdefault("headers", {"Accept-Encoding": "identity"})
    return given
