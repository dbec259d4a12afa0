"""fsspec: local files, every scheme that obstore does not serve, and `storage_options={'backend': 'fsspec'}`.

Its file systems differ in care, so lengths are checked here: the HTTP one gives the whole file for a range that is ignored.
Objects are read in blocks, since `cat_file` would hold them whole in memory: a head and one range request for each block.
"""

from __future__ import annotations

import os
import posixpath
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
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
from sqlstream.storage.backends.answers import BodyRange, check_part, exact
from sqlstream.storage.base.protocols import ObjectInfo, RangeBytes, check_length, check_reaches, read_range
from sqlstream.storage.base.retry import error_for_status
from sqlstream.storage.base.service_errors import read_error
from sqlstream.storage.base.settings import OWN_KEYS, SCHEMES
from sqlstream.storage.base.urls import is_remote, local_path, redact, redact_text, scheme

_BLOCK_BYTES = 8 << 20  # of one range request: as s3transfer cuts its parts
MAX_FILE_SYSTEMS = 128
"""File systems that are kept; fsspec makes one for each host, and of those that are not asynchronous one for each thread."""
_END_OF_PATH = re.compile("[?#]")
_VERSIONS = ("ETag", "etag", "md5", "mtime", "checksum", "blob_id")
_CHANGED = ("LastModified", "last_modified", "updated", "modified", "modify", "modificationTime", "last_write_time")
"""Names of the time of an object's last change, beside `mtime`, in the file systems."""
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
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "'sqlstream-data[s3]'"),
    **dict.fromkeys(("gs", "gcs"), "'sqlstream-data[gcs]'"),
    **dict.fromkeys(("az", "abfs", "abfss"), "adlfs"),
    "hf": "huggingface_hub",
    "sftp": "paramiko",
}
"""What pip installs for a scheme, where it is more than fsspec."""

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
    "ftplib.error_temp": TransientStorageError,
    "paramiko.ssh_exception.AuthenticationException": AccessDeniedError,
    "paramiko.ssh_exception.BadHostKeyException": StorageError,
    "paramiko.ssh_exception.NoValidConnectionsError": TransientStorageError,
    "paramiko.ssh_exception.SSHException": TransientStorageError,
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
        is_of_client = type(cause).__module__ == "aiohttp.http_exceptions"  # its own 400 for what it cannot read, or is cut
        if not is_of_client and (status := _status_of(cause)) is not None and status >= 300:
            said = cause if read_error(str(cause)) else error  # s3fs keeps the message alone
            return error_for_status(status, url, detail=redact_text(str(said)))
        cause = cause.__cause__
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
    ours = next(ERRORS[name] for name in names if name in ERRORS)
    if ours is StorageError and isinstance(error, OSError) and error.errno is None:  # of a client: "Socket is closed"
        ours = TransientStorageError
    if ours is MissingDependencyError:
        package = _PACKAGES.get(scheme(url))
        cure = f"pip install {package}" if package else "install the package that it names"
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
        self._used: OrderedDict[str, Any] = OrderedDict()

    def head(self, url: str) -> ObjectInfo:
        """Return size and etag of one object."""
        deadline = time.monotonic() + self._options.total_timeout_seconds
        with self._opened(url) as (file_system, path):
            return _object_info(url, _details(url, file_system, path, deadline))

    def get(self, url: str, *, start: int = 0, stop: int | None = None, etag: str | None = None) -> FsspecStream:
        """Open the object, whole or a range."""
        deadline = time.monotonic() + self._options.total_timeout_seconds
        with self._opened(url) as (file_system, path):
            info = _object_info(url, _details(url, file_system, path, deadline))
            if etag and info.etag != etag:
                raise ObjectChangedError(f"{redact(url)} is not the version that was asked for", url=redact(url))
            size = info.size_bytes
            check_reaches(url, start, start, size)
            end = size if stop is None else stop if size is None else min(stop, size)
            part = BodyRange(start=start, stop=end, total_bytes=size)
            check_part(url, part, start=start, stop=stop, is_whole=size is None and start == 0 and stop is None)
            blocks = _blocks(file_system, path, part, deadline)
        looks_again = bool(start or stop is not None or etag)
        return FsspecStream(
            info, exact(url, blocks, part), lambda: self.head(url), start=start, looks_again=looks_again, deadline=deadline
        )

    def get_range(self, url: str, start: int, stop: int, *, etag: str | None = None) -> RangeBytes:
        """Return exactly the bytes `[start, stop)`; also from a server that ignores ranges."""
        return read_range(self, url, start, stop, etag)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below `prefix`, sorted by name; fsspec gives the listing whole."""
        with self._opened(prefix) as (file_system, path):
            file_system.invalidate_cache()
            found = file_system.find(path, detail=True)
        root = path.rstrip("/") + "/"
        for name in sorted(found):
            url = name
            if is_remote(prefix):  # as the prefix is spelled: `unstrip_protocol` leaves the host out
                in_root = name.startswith(root) and "::" not in prefix
                url = f"{prefix.rstrip('/')}/{name[len(root) :]}" if in_root else file_system.unstrip_protocol(name)
            if after and url <= after:
                continue
            if is_remote(prefix):
                yield _object_info(url, found[name])
            else:
                with _mapped(name):
                    details = _with_version(found[name], name)
                yield _object_info(name, details)

    def put(self, url: str, path: Path) -> None:
        """Store a local file as an object; what is no object store gets it under another name first."""
        with self._opened(url) as (file_system, name):
            if scheme(url) in SCHEMES:
                file_system.put_file(str(path), name)
                return
            part = f"{name}.{uuid.uuid4().hex[:12]}.part"
            file_system.makedirs(posixpath.dirname(name), exist_ok=True)
            try:
                file_system.put_file(str(path), part)
                file_system.mv(part, name)
            except BaseException:
                with suppress(Exception):
                    file_system.rm_file(part)
                raise

    def forget(self) -> None:
        """Have fsspec forget the file systems that were made here."""
        with self._lock:
            while self._used:
                token, file_system = self._used.popitem()
                type(file_system)._cache.pop(token, None)

    @contextmanager
    def _opened(self, url: str) -> Iterator[tuple[Any, str]]:
        """Yield the file system of a URL and the path there.

        One that cannot be reached is forgotten, so that the next try makes another one: what is not asynchronous has one
        connection from its start, and none once that has ended.
        """
        with _mapped(url):
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

    def _locate(self, url: str) -> tuple[Any, str]:
        """Return the file system of a URL and the path there."""
        if not is_remote(url):
            return fsspec.filesystem("file"), str(local_path(url))
        if (file_system := self._options.storage_options.get("filesystem")) is not None:
            return _checked_file_system(file_system, url)
        with self._lock:  # fsspec's registry of instances is no place for 16 threads at once
            try:
                options = _constructor_options(scheme(url), self._options)  # before gcsfs is imported
                head = _head(fsspec.get_filesystem_class(scheme(url)), url)
                file_system, path = fsspec.core.url_to_fs(head, **options)
            except ValueError as error:  # no such protocol, or a value that its constructor refuses
                raise ConfigError(f"{redact(url)}: {redact_text(str(error))}", url=redact(url)) from error
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


def _bounded(file_system: Any, name: str, deadline: float) -> Callable[..., Any]:
    """Return a method of a file system that gives up at the deadline, if fsspec made it of an asynchronous one.

    What others do is bounded by their own timeouts, and by the helper's end (`helper.look`).
    """
    method: Callable[..., Any] = getattr(file_system, name)
    if name not in vars(file_system):  # where `fsspec.asyn.mirror_sync_methods` puts them
        return method
    return partial(method, timeout=max(0.001, deadline - time.monotonic()))


def _details(url: str, file_system: Any, path: str, deadline: float) -> Mapping[str, Any]:
    """Return what a file system knows of an object; of S3 that refuses to say it, raise what it says to a GET of one byte.

    Only the answer to a GET has a body that says why.
    """
    try:
        details: Mapping[str, Any] = _bounded(file_system, "info", deadline)(path)
    except Exception as error:
        if scheme(url) in ("s3", "s3a") and not isinstance(map_error(error, url), TransientStorageError):
            _bounded(file_system, "cat_file", deadline)(path, start=0, end=1)
        raise
    return details if is_remote(url) else _with_version(details, path)


def _with_version(details: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return what fsspec knows of a local file, with its version as an index names it: fsspec gives a float of fewer digits."""
    return {**details, "mtime": os.stat(path).st_mtime_ns}


def _blocks(file_system: Any, path: str, part: BodyRange, deadline: float) -> Iterator[bytes]:
    """Yield the bytes of a part: one range request for each block, which a file object would not promise.

    At the object's end one byte more is asked for: of another object that is longer by now, the start would be the whole.
    Local files and objects of unknown length are read as files.
    """
    start, stop = part.start, part.stop
    if stop is not None and "file" not in file_system.protocol:
        while start < stop:
            end = min(start + _BLOCK_BYTES, stop)
            block: bytes = _bounded(file_system, "cat_file", deadline)(path, start=start, end=end + (end == part.total_bytes))
            if len(block) > end - start and len(block) == part.total_bytes:  # a server without ranges sent the whole object
                block = block[start:end]
            check_length(path, received=len(block), expected=end - start)
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
        if stop is not None and stop == part.total_bytes:
            check_length(path, received=stop + len(file.read(1)), expected=stop)


class FsspecStream:
    """An object that is read block by block."""

    def __init__(
        self,
        info: ObjectInfo,
        blocks: Iterator[memoryview],
        head_again: Callable[[], ObjectInfo],
        *,
        start: int,
        looks_again: bool,
        deadline: float,
    ) -> None:
        self.info = info
        self.start = start
        self.num_extra_requests = 0
        self._blocks = blocks
        self._head_again = head_again
        self._looks_again = looks_again
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
            yield block
            if time.monotonic() > self._deadline:
                raise TransientStorageError(f"{redact(self.info.url)}: it took too long", url=redact(self.info.url))
        if num_blocks > 1 or self._looks_again:  # else it is whole, and one block is of one version, whichever
            self.num_extra_requests += 1
            if not self._head_again().may_be(self.info):
                where = redact(self.info.url)
                raise ObjectChangedError(f"{where} changed while it was read: read it again", url=where)

    def close(self) -> None:
        """Give up what is left."""
        if isinstance(self._blocks, Generator):
            self._blocks.close()


def _object_info(url: str, details: Mapping[str, Any]) -> ObjectInfo:
    if details.get("type") == "directory":
        raise ObjectNotFoundError(f"{redact(url)} is a directory, not an object", url=redact(url))
    etag = next((details[name] for name in _VERSIONS if details.get(name) is not None), None)
    changed = next((details[name] for name in _CHANGED if details.get(name) is not None), None)
    return ObjectInfo(
        url=url,
        size_bytes=details.get("size"),
        etag=None if etag is None else str(etag),
        last_modified=None if changed is None else str(changed),
        is_of_file_system=not _is_of_seconds(etag),
    )


def _is_of_seconds(version: object) -> bool:
    """Return whether a version is a time that tells no two changes within a second apart, as SFTP has it."""
    return version.microsecond == 0 if isinstance(version, datetime) else isinstance(version, float) and version.is_integer()


@contextmanager
def _mapped(url: str) -> Iterator[None]:
    """Raise our error in place of a file system's."""
    try:
        yield
    except SqlStreamError:
        raise
    except Exception as error:
        raise map_error(error, url) from error
