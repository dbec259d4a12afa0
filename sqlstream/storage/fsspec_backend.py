"""fsspec: local files, every scheme that obstore does not serve, and `storage_options={'backend': 'fsspec'}`.

Its file systems differ in care, so lengths are checked here: the HTTP one gives the whole file for a range that is ignored.
Objects are read in blocks, since `cat_file` would hold them whole in memory: a head and one range request for each block.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import fsspec
import fsspec.core

from sqlstream.config import StorageOptions
from sqlstream.errors import (
    AccessDeniedError,
    ConfigError,
    MissingDependencyError,
    ObjectChangedError,
    ObjectNotFoundError,
    SqlStreamError,
    StorageError,
    TransientStorageError,
)
from sqlstream.storage.base import ObjectInfo, RangeBytes, check_length
from sqlstream.storage.retry import error_for_status
from sqlstream.storage.settings import OWN_KEYS
from sqlstream.storage.urls import is_remote, local_path, redact, redact_text, scheme

_BLOCK_BYTES = 8 << 20  # of one range request: as s3transfer cuts its parts
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}

ERRORS: dict[str, type[SqlStreamError]] = {
    "builtins.FileNotFoundError": ObjectNotFoundError,
    "builtins.IsADirectoryError": ObjectNotFoundError,
    "builtins.NotADirectoryError": ObjectNotFoundError,
    "builtins.PermissionError": AccessDeniedError,
    "botocore.exceptions.NoCredentialsError": AccessDeniedError,
    "botocore.exceptions.PartialCredentialsError": AccessDeniedError,
    "botocore.exceptions.ProfileNotFound": ConfigError,
    "builtins.TimeoutError": TransientStorageError,  # asyncio's and fsspec's too
    "builtins.ConnectionError": TransientStorageError,
    "builtins.EOFError": TransientStorageError,  # asyncio.IncompleteReadError
    "socket.gaierror": TransientStorageError,
    "aiohttp.client_exceptions.ClientSSLError": StorageError,
    "aiohttp.client_exceptions.InvalidURL": StorageError,
    "aiohttp.client_exceptions.ClientError": TransientStorageError,
    "botocore.exceptions.SSLError": StorageError,
    "botocore.exceptions.HTTPClientError": TransientStorageError,
    "botocore.exceptions.IncompleteReadError": TransientStorageError,
    "botocore.exceptions.ResponseStreamingError": TransientStorageError,
    "gcsfs.retry.ChecksumError": TransientStorageError,
    "fsspec.exceptions.BlocksizeMismatchError": StorageError,
    "builtins.ImportError": MissingDependencyError,
    "builtins.TypeError": ConfigError,  # an option that the file system's constructor does not know
    "builtins.Exception": StorageError,
}
"""Every error that we know and ours for it, by name, since the packages may be missing; the nearest base class holds."""


def map_error(error: Exception, url: str) -> SqlStreamError:
    """Return our error for one of a file system's, from its HTTP status if it or its cause has one."""
    where = redact(url)
    cause: BaseException | None = error
    while cause is not None:
        if (status := _status_of(cause)) is not None and status >= 300:
            return error_for_status(status, url, detail=redact_text(str(error)))
        cause = cause.__cause__
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
    ours = next(ERRORS[name] for name in names if name in ERRORS)
    if ours is MissingDependencyError:
        extra = _EXTRAS.get(scheme(url))
        cure = f"pip install 'sqlstream[{extra}]'" if extra else "install the package that it names"
        return MissingDependencyError(f"{where}: {error}: {cure}", url=where)
    return ours(f"{where}: {redact_text(str(error)) or type(error).__name__}", url=where)


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status in an error of botocore (`response`), aiohttp (`status`) or gcsfs (`code`)."""
    response = getattr(error, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, Mapping) else {}
    for status in (metadata.get("HTTPStatusCode"), getattr(error, "status", None), getattr(error, "code", None)):
        if isinstance(status, int) and 100 <= status < 600:
            return status
    return None


class FsspecStorage:
    """File systems are made by fsspec and kept by it, one for each set of options."""

    def __init__(self, options: StorageOptions) -> None:
        self._options = options
        self._lock = threading.Lock()

    def head(self, url: str) -> ObjectInfo:
        """Return size and etag of one object."""
        with _mapped(url):
            file_system, path = self._locate(url)
            return _object_info(url, file_system.info(path))

    def get(self, url: str, *, start: int = 0, stop: int | None = None, etag: str | None = None) -> FsspecStream:
        """Open the object, whole or a range."""
        with _mapped(url):
            file_system, path = self._locate(url)
            info = _object_info(url, file_system.info(path))
            if etag and info.etag != etag:
                raise ObjectChangedError(f"{redact(url)} is not the version that was asked for", url=redact(url))
            blocks = _blocks(file_system, path, start, info.size_bytes if stop is None else stop)
        deadline = time.monotonic() + self._options.total_timeout_seconds
        return FsspecStream(info, blocks, lambda: self.head(url), start=start, deadline=deadline)

    def get_range(self, url: str, start: int, stop: int, *, etag: str | None = None) -> RangeBytes:
        """Return exactly the bytes `[start, stop)`; also from a server that ignores ranges."""
        if start >= stop:
            return RangeBytes(data=b"", etag=etag)
        with _mapped(url):
            file_system, path = self._locate(url)
            data: bytes = file_system.cat_file(path, start=start, end=stop)
            info = _object_info(url, file_system.info(path))  # after the bytes: what changed meanwhile shows
            if len(data) > stop - start and len(data) == info.size_bytes:
                data = data[start:stop]
        if etag and info.etag != etag:
            raise ObjectChangedError(f"{redact(url)} changed while it was read: read it again", url=redact(url))
        check_length(url, received=len(data), expected=stop - start)
        return RangeBytes(data=data, etag=info.etag)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object below `prefix`, sorted by name; fsspec gives the listing whole."""
        with _mapped(prefix):
            file_system, path = self._locate(prefix)
            file_system.invalidate_cache()
            found = file_system.find(path, detail=True)
        for name in sorted(found):
            url = file_system.unstrip_protocol(name) if is_remote(prefix) else name
            yield _object_info(url, found[name])

    def _locate(self, url: str) -> tuple[Any, str]:
        """Return the file system of a URL and the path there."""
        if not is_remote(url):
            return fsspec.filesystem("file"), str(local_path(url))
        if (file_system := self._options.storage_options.get("filesystem")) is not None:
            return _checked_file_system(file_system, url)
        with self._lock:  # fsspec's registry of instances is no place for 16 threads at once
            try:
                file_system, path = fsspec.core.url_to_fs(url, **_constructor_options(scheme(url), self._options))
            except ValueError as error:  # no such protocol, or a value that its constructor refuses
                raise ConfigError(f"{redact(url)}: {redact_text(str(error))}", url=redact(url)) from error
        if hasattr(file_system, "retries"):
            file_system.retries = 1  # s3fs, gcsfs: the number of tries; ours are counted above
        return file_system, path


def _checked_file_system(file_system: Any, url: str) -> tuple[Any, str]:
    """Return the file system object that the user gave, and the path of a URL there."""
    if not isinstance(file_system, fsspec.AbstractFileSystem):
        kind = type(file_system).__name__
        raise ConfigError(f"storage_options['filesystem'] is a {kind}: give an fsspec file system", url=redact(url))
    return file_system, file_system._strip_protocol(url)


def _constructor_options(kind: str, options: StorageOptions) -> dict[str, Any]:
    """Return what the file system of a scheme is made with: the user's options, and our timeouts where it takes them."""
    given = {key: value for key, value in options.storage_options.items() if key not in OWN_KEYS}
    if kind in ("s3", "s3a"):
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
    return {**given, "use_listings_cache": False}


def _blocks(file_system: Any, path: str, start: int, stop: int | None) -> Iterator[bytes]:
    """Yield the bytes `[start, stop)`: one range request for each block, which a file object would not promise.

    Local files and objects of unknown length are read as files.
    """
    if stop is not None and "file" not in file_system.protocol:
        while start < stop:
            end = min(start + _BLOCK_BYTES, stop)
            block: bytes = file_system.cat_file(path, start=start, end=end)
            if len(block) > end - start:  # a server without ranges sent the whole object
                block = block[start:stop]
            if not block:
                return
            yield block
            start += len(block)
        return
    with file_system.open(path, "rb") as file:
        if start:
            file.seek(start)
        while stop is None or start < stop:
            block = file.read(_BLOCK_BYTES if stop is None else min(_BLOCK_BYTES, stop - start))
            if not block:
                return
            yield block
            start += len(block)


class FsspecStream:
    """An object that is read block by block."""

    def __init__(
        self,
        info: ObjectInfo,
        blocks: Iterator[bytes],
        head_again: Callable[[], ObjectInfo],
        *,
        start: int,
        deadline: float,
    ) -> None:
        self.info = info
        self.start = start
        self.num_extra_requests = 0
        self._blocks = blocks
        self._head_again = head_again
        self._deadline = deadline

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes in order; blocks of one object must be of one version."""
        num_blocks = 0
        while True:
            with _mapped(self.info.url):
                block = next(self._blocks, None)
            if block is None:
                break
            num_blocks += 1
            self.num_extra_requests += 1
            yield memoryview(block)
            if time.monotonic() > self._deadline:
                raise TransientStorageError(f"{redact(self.info.url)}: it took too long", url=redact(self.info.url))
        if num_blocks > 1:
            self.num_extra_requests += 1
            if self._head_again().etag != self.info.etag:
                where = redact(self.info.url)
                raise ObjectChangedError(f"{where} changed while it was read: read it again", url=where)

    def close(self) -> None:
        """Give up what is left."""
        if isinstance(self._blocks, Generator):
            self._blocks.close()


def _object_info(url: str, details: Mapping[str, Any]) -> ObjectInfo:
    if details.get("type") == "directory":
        raise ObjectNotFoundError(f"{redact(url)} is a directory, not an object", url=redact(url))
    etag = next((details[name] for name in ("ETag", "etag", "md5", "mtime") if details.get(name) is not None), None)
    return ObjectInfo(url=url, size_bytes=details.get("size"), etag=None if etag is None else str(etag))


@contextmanager
def _mapped(url: str) -> Iterator[None]:
    """Raise our error in place of a file system's."""
    try:
        yield
    except SqlStreamError:
        raise
    except Exception as error:
        raise map_error(error, url) from error
