"""Errors of the disk that a dataset is written to: they say which one, and the cure."""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator

from sqlstream.errors import SqlStreamError, StorageError

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)
TEMPORARY_CURE = "free space there, or have TMPDIR name a directory with room"


def is_of_the_disk(error: BaseException) -> bool:
    """Return whether an error is the system's own, of a disk that is full, read-only or broken."""
    return isinstance(error, OSError) and not isinstance(error, SqlStreamError) and error.errno in _OF_THE_DISK


@contextlib.contextmanager
def named_disk(place: str) -> Iterator[None]:
    """Say what could not be written, and the cure.

    Raises:
        StorageError: The disk is full, read-only or broken.
    """
    try:
        yield
    except OSError as error:
        if not is_of_the_disk(error):
            raise
        cure = "free space there, or look at that disk's health and rights, and write it again"
        raise StorageError(f"{place} cannot be written ({error}): {cure}", errno=error.errno) from error


@contextlib.contextmanager
def temporary_disk(purpose: str) -> Iterator[None]:
    """Say that it is the temporary directory that takes no bytes.

    Args:
        purpose: What lies there, such as 'shards wait there for their upload'.

    Raises:
        StorageError: It is full, read-only or broken, or there is none.
    """
    try:
        yield
    except OSError as error:
        is_of_download = isinstance(error, SqlStreamError) and error.context.get("errno") in _OF_THE_DISK
        if not is_of_download and not _is_lacking(error) and not is_of_the_disk(error):
            raise
        raise temporary_error(purpose, error) from error


def _is_lacking(error: OSError) -> bool:
    """Return whether there is no temporary directory: `tempfile` found none, or that which it found is gone."""
    if isinstance(error, SqlStreamError) or error.errno != errno.ENOENT:
        return False
    return error.filename is None or str(error.filename).startswith(tempfile.gettempdir())


def temporary_error(purpose: str, error: OSError) -> StorageError:
    """Return the error of a temporary directory that takes no bytes."""
    try:
        where = tempfile.gettempdir()
    except OSError:
        where = "no temporary directory"
    text = f"{where} cannot be written ({error}), and {purpose}: {TEMPORARY_CURE}"
    return StorageError(text, errno=error.errno, is_temporary=True)
