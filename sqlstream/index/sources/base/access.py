"""How sources are reached: local files in place, remote ones through the helper process, errors with the source's name."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from sqlstream.config import MissingShards
from sqlstream.errors import (
    AccessDeniedError,
    FetchCancelledError,
    ObjectNotFoundError,
    SourceChangedError,
    SourceError,
    StorageError,
)
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.access import OWN, Access
from sqlstream.storage.base.etags import has_own_version, same_version
from sqlstream.storage.base.protocols import RemoteReader

_PROBED_BYTES = 64 << 10
"""Of either end of a file: the whole of a small table, and the footer of most of the large ones. Arbitrary."""


_OF_A_FILE = frozenset(
    {errno.EISDIR, errno.ELOOP, errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.ENAMETOOLONG}
)
"""Errors of a path or the disk below it; those of room and of memory have errors of their own."""


@contextlib.contextmanager
def named_errors(src: str) -> Iterator[None]:
    """Say which source it was, and the cure, in what storage or the disk raises."""
    name = urls.redact(src)
    try:
        yield
    except (ObjectNotFoundError, FileNotFoundError, NotADirectoryError) as error:
        braces = "; braces name several shards, and of tables give a list or a wildcard" if "{" in src else ""
        raise ObjectNotFoundError(
            f"the source {name} does not exist ({error}): check src and the spelling{braces}", url=name
        ) from error
    except (AccessDeniedError, PermissionError) as error:
        raise AccessDeniedError(
            f"the source {name} may not be read ({error}): check its permissions, or the credentials in storage_options",
            url=name,
        ) from error
    except StorageError as error:
        raise type(error)(f"the source {name} cannot be read: {error}", **{**error.context, "url": name}) from error
    except OSError as error:
        if error.errno not in _OF_A_FILE:
            raise
        raise StorageError(
            f"the source {name} cannot be read ({error}): check the path, and the disk or mount", url=name
        ) from error


def lost_file(path: str, error: OSError) -> StorageError:
    """Return the error of a local file that was there when it was indexed, and cannot be read now."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        cure = "put it back (is its disk mounted?), or open a dataset of what is left"
        return ObjectNotFoundError(f"{path} is gone since it was indexed: {cure}", url=path)
    if isinstance(error, PermissionError):
        return AccessDeniedError(f"{path} may not be read since it was indexed: check its permissions", url=path)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StorageError(f"{path} cannot be opened ({error.strerror}): raise `ulimit -n`", url=path)
    return StorageError(f"{path} cannot be read since it was indexed ({error}): check its disk or mount", url=path)


def indexed_status(path: str) -> os.stat_result:
    """Return what the disk says now of a local file that was indexed.

    Raises:
        StorageError: It is gone, or may not be read.
    """
    try:
        return os.stat(path)
    except OSError as error:
        raise lost_file(path, error) from error


def indexed_file(path: str) -> SourceFile:
    """Return a local file that was indexed, with the version that it has now; see `indexed_status`."""
    return _versioned(Path(path), indexed_status(path))


def local_file(path: Path) -> SourceFile:
    """Return a local file with its version."""
    return _versioned(path, path.stat())


def _versioned(path: Path, status: os.stat_result) -> SourceFile:
    try:
        str(path).encode()
    except UnicodeEncodeError as error:  # bytes of a name that are no text: SQLite would not keep it
        raise SourceError(f"the name {str(path)!r} is not UTF-8: rename it") from error
    return SourceFile(url=str(path), size_bytes=status.st_size, etag=str(status.st_mtime_ns))


def is_version(file: SourceFile, status: os.stat_result) -> bool:
    """Return whether what is known of a local file is that of a version of it, as `local_file` returned that."""
    return (status.st_size, str(status.st_mtime_ns)) == (file.size_bytes, file.etag)


def reader_for(remote: RemoteReader, access: Access) -> RemoteReader:
    """Return a reader with this access."""
    return remote if access == OWN else remote.with_access(access)


def stat_file(url: str, remote: RemoteReader, access: Access = OWN) -> SourceFile:
    """Return one file, local or remote, with its version."""
    with named_errors(url):
        if not urls.is_remote(url):
            path = urls.local_path(url).absolute()
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise StorageError("it is a directory, a pipe or a device, and no file", url=url)
            os.close(os.open(path, os.O_RDONLY))  # a file that may not be read is refused here, by name
            return local_file(path)
        reader = reader_for(remote, access)
        info = reader.head(url)
        content = _content(url, info.size_bytes, reader) if info.version is None and info.size_bytes else ""
        return SourceFile(
            url=url,
            size_bytes=info.size_bytes,
            etag=info.version,
            content=content,
            access=access,
            is_private=info.is_private,
        )


def shard_file(url: str, remote: RemoteReader, missing: MissingShards, access: Access = OWN) -> SourceFile:
    """Return a shard with its version; without one, where it cannot be asked for and `missing` says to go on."""
    try:
        return stat_file(url, remote, access)
    except StorageError as error:
        if not leaves_out(error, missing):
            raise
        is_missing = isinstance(error, ObjectNotFoundError)
        return SourceFile(url=url, size_bytes=None, etag=None, access=access, is_missing=is_missing)


def leaves_out(error: Exception, missing: MissingShards) -> bool:
    """Return whether a shard that fails with an error is left out."""
    if isinstance(error, ObjectNotFoundError):
        return missing.leaves_out
    is_unreadable = isinstance(error, StorageError) and not isinstance(error, FetchCancelledError)
    return is_unreadable and missing is MissingShards.SKIP_UNREADABLE


def _content(url: str, size_bytes: int, remote: RemoteReader) -> str:
    """Return a digest of the first and the last bytes of a file, whose server names neither a version nor a time of change."""
    spans = {(0, min(size_bytes, _PROBED_BYTES)), (max(0, size_bytes - _PROBED_BYTES), size_bytes)}
    digest = blake2b(digest_size=16)
    for data in remote.get_ranges(url, sorted(spans), size_bytes):
        digest.update(data)
    return digest.hexdigest()


@contextlib.contextmanager
def local_copy(file: SourceFile, temporary: Path, remote: RemoteReader) -> Iterator[Path]:
    """Yield a local path with the content of `file`: itself if it is local, else a download that is removed afterwards.

    Raises:
        SourceChangedError: It is not the version that was found before.
    """
    if not urls.is_remote(file.url):
        yield Path(file.url)
        with named_errors(file.url):
            check_same(file, local_file(Path(file.url)))
        return
    try:
        with named_errors(file.url):
            info = reader_for(remote, file.access).download(file.url, temporary)
        check_same(file, SourceFile(url=file.url, size_bytes=info.size_bytes, etag=info.version))
        if file.is_private and not info.is_private:
            raise SourceChangedError(f"{urls.redact(file.url)} was found in a private network and came from a public one")
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def check_same(before: SourceFile, now: SourceFile) -> None:
    """Raise SourceChangedError if a file is known to be another version than it was before."""
    etags = (before.etag, now.etag) if has_own_version(before.etag) == has_own_version(now.etag) else (None, None)
    if same_version(*etags):  # answers to HEAD and GET may spell it differently
        etags = None, None
    for was, is_now in (etags, (before.size_bytes, now.size_bytes)):
        if None not in (was, is_now) and was != is_now:
            raise SourceChangedError(
                f"{urls.redact(before.url)} changed while it was indexed ({was} is now {is_now}): "
                "wait until its writer is done, and start again"
            )
