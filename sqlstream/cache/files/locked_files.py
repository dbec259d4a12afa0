"""Files that a lock keeps: a process removes one under its exclusive lock, or leaves it to the process that has that lock.

What opens a file to look at its lock does so in a section: a descriptor that a signal handler left open would keep the lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable

from sqlstream.cache.files import layout
from sqlstream.disk_room import FULL
from sqlstream.process import locks


def create_locked(path: str) -> int | None:
    """Return a descriptor on a new file, locked; None when another process locked or took the file in between."""
    fd = locks.open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        if locks.try_lock(fd) and os.fstat(fd).st_nlink > 0:
            return fd
    except OSError:  # the kernel has no room for more locks
        locks.close_descriptor(fd)
        raise
    locks.close_descriptor(fd)
    return None


def create_note(path: str, num_bytes: int) -> None:
    """Have a small file of ours with room for so many bytes, before the disk is full; what is in it stays."""
    with contextlib.suppress(OSError):  # the disk is full now, or this is no file: writing it says so
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            if os.fstat(fd).st_size < num_bytes:
                os.posix_fallocate(fd, 0, num_bytes)
        finally:
            os.close(fd)


def read_note(path: str) -> bytes:
    """Return what a small file of ours holds; of a pipe in its place, for whose writer all would wait, nothing.

    Raises:
        FileNotFoundError: There is none.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
        return file.read() or b""


def open_note(path: str, on_full: Callable[[], None]) -> int:
    """Return a descriptor on a small file of ours; a disk without inodes is given some by `on_full`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno not in FULL:
            raise
        on_full()
        return os.open(path, flags, 0o600)


def write_note(fd: int, body: bytes, on_full: Callable[[], None]) -> None:
    """Write a small file of ours from its start, all of it; a full disk is given room by `on_full`."""
    num_written = 0
    try:
        num_written = os.pwrite(fd, body, 0)
    except OSError as error:
        if error.errno not in FULL:
            raise
    if num_written < len(body):  # a disk that becomes full takes a part, and says so at the next write only
        on_full()
    while num_written < len(body):
        num_written += os.pwrite(fd, body[num_written:], num_written)


def unlink_unlocked(path: str) -> bool:
    """Unlink a file under its lock, so that a process which creates and locks it notices; return whether that was done."""
    with locks.uninterrupted(), contextlib.suppress(FileNotFoundError):
        fd = locks.open_descriptor(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            if locks.try_lock(fd):
                os.unlink(path)
                return True
        finally:
            locks.close_descriptor(fd)
    return False


def unlink_unread(path: str, *, is_ours: bool) -> bool:
    """Unlink a data file under its exclusive lock; False when a process reads it under a shared one (`ReadLock`).

    Rejected: to truncate it, too, so that a reader which has opened and not yet locked it keeps no blocks. Who had the path
    while it was pinned may still have the file mapped (SIGBUS), open (a lazy decoder) or linked to another name.

    Args:
        path: The file.
        is_ours: This process has its exclusive lock: it came a moment ago.
    """
    if is_ours:
        os.unlink(path)
        return True
    with locks.uninterrupted():
        try:
            fd = locks.open_descriptor(path, os.O_RDWR | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            os.unlink(path)  # a link or a socket: no reader takes it for an object
            return True
        try:
            is_free = locks.try_lock(fd)
            if is_free:
                os.unlink(path)
            return is_free
        finally:
            locks.close_descriptor(fd)


def is_locked(path: str) -> bool | None:
    """Return whether any process holds the lock of the file at `path`; None when there is no file.

    Raises:
        CacheDiskError: It cannot be opened.
    """
    with locks.uninterrupted():  # what a handler raises is no error of the disk
        try:
            fd = locks.open_descriptor(path, os.O_RDWR)
            try:
                return locks.is_locked(fd)
            finally:
                locks.close_descriptor(fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise layout.unreadable(path, error) from error


def is_read(path: str) -> bool:
    """Return whether any process reads a data file under a lock."""
    with locks.uninterrupted(), contextlib.suppress(OSError):
        fd = locks.open_descriptor(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            return not locks.try_lock(fd)
        finally:
            locks.close_descriptor(fd)
    return False
