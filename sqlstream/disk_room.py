"""Whether a disk has room: bytes, inodes, and what a quota leaves of them; and the cure where it refuses a write."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile

FULL = (errno.ENOSPC, errno.EDQUOT)
"""How a disk says that it has no room, neither bytes nor, to the same errors, inodes: by itself, or by a quota."""
_CURES = {
    **dict.fromkeys(FULL, "free space on that disk, lower the limit so that it fits, or give min_free_bytes"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise `ulimit -n`"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give the user of this process the right to read and write there"),
    errno.EROFS: "mount that disk writable",
    errno.EFBIG: "raise `ulimit -f`, or give a file system that takes files of that size",
    errno.EXDEV: "have data/ and part/ of the cache on one file system, in place of a link to another",
    errno.ENOENT: "a folder of the cache was removed meanwhile; the next use makes it again. Remove none while it is used",
}
_FEW_INODES = 16  # arbitrary: as many as others may give back before the message is made


def has_room(directory: str | os.PathLike[str], num_bytes: int, num_files: int) -> bool:
    """Return whether so many bytes and files are to be had in a directory.

    What the file system counts as free is taken for a moment, for it says nothing of quotas: ask where a write has failed.
    """
    status = os.statvfs(directory)
    has_inodes = not status.f_files or status.f_favail >= num_files  # some file systems do not count them
    if not has_inodes or status.f_bavail * status.f_frsize < num_bytes:
        return False
    try:
        with contextlib.ExitStack() as files:
            for i in range(num_files):
                file = files.enter_context(tempfile.TemporaryFile(dir=directory))  # without a name, so that a kill leaves none
                if i == 0:
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        return error.errno not in FULL
    return True


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Return what this user may still write to the file system of a path."""
    return (status := os.statvfs(path)).f_bavail * status.f_frsize


def lack_of_inodes(directory: str | os.PathLike[str]) -> str:
    """Return a clause for the message of a full disk: how few inodes are free; empty if there are some.

    The kernel has one text for both, and a user who looks at the bytes finds room.
    """
    with contextlib.suppress(OSError):
        status = os.statvfs(directory)
        if status.f_files and status.f_favail < _FEW_INODES:
            return f", {status.f_favail} of its {status.f_files} inodes are free (see `df -i`)"
    return ""


def cure_of(error: OSError) -> str:
    """Return what to do where a directory of the cache refused a file, as a clause for the message."""
    return _CURES.get(error.errno or 0, "look at that disk's health")
