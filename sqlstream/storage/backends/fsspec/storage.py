"""Objects by fsspec: heads, bodies, listings, uploads.

Its file systems differ in care, so lengths are checked here: the HTTP one gives the whole file for a range that is ignored.
Objects are read in blocks, since `cat_file` would hold them whole in memory: a head and one range request for each block.
"""

from __future__ import annotations

import os
import posixpath
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from sqlstream.config import StorageOptions
from sqlstream.errors import ObjectChangedError, ObjectNotFoundError, TransientStorageError
from sqlstream.storage.backends.answers import BodyRange, check_part, exact
from sqlstream.storage.backends.fsspec.errors import map_error, mapped
from sqlstream.storage.backends.fsspec.file_systems import FileSystems
from sqlstream.storage.base.protocols import ObjectInfo, RangeBytes, check_length, check_reaches, read_range
from sqlstream.storage.base.settings import SCHEMES
from sqlstream.storage.base.urls import is_remote, redact, scheme

_BLOCK_BYTES = 8 << 20  # of one range request: as s3transfer cuts its parts
_VERSIONS = ("ETag", "etag", "md5", "mtime", "checksum", "blob_id")
_CHANGED = ("LastModified", "last_modified", "updated", "modified", "modify", "modificationTime", "last_write_time")
"""Names of the time of an object's last change, beside `mtime`, in the file systems."""


class FsspecStorage:
    """Objects of any file system that fsspec knows.

    Args:
        options: What these are made with.
    """

    def __init__(self, options: StorageOptions) -> None:
        self._options = options
        self._file_systems = FileSystems(options)

    def head(self, url: str) -> ObjectInfo:
        """Return size and etag of one object."""
        deadline = time.monotonic() + self._options.total_timeout_seconds
        with self._file_systems.opened(url) as (file_system, path):
            return _object_info(url, _details(url, file_system, path, deadline))

    def get(self, url: str, *, start: int = 0, stop: int | None = None, etag: str | None = None) -> FsspecStream:
        """Open the object, whole or a range."""
        deadline = time.monotonic() + self._options.total_timeout_seconds
        with self._file_systems.opened(url) as (file_system, path):
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
        with self._file_systems.opened(prefix) as (file_system, path):
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
                with mapped(name):
                    details = _with_version(found[name], name)
                yield _object_info(name, details)

    def put(self, url: str, path: Path) -> None:
        """Store a local file as an object; what is no object store gets it under another name first."""
        with self._file_systems.opened(url) as (file_system, name):
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
        self._file_systems.forget()


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
            with mapped(self.info.url):
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
