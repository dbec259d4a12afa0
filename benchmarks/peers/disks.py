"""Gives every run the same disk: its files in a place of their own, and the data in the page cache."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_TOPDIR_FL = 0x80086601, 0x40086602, 0x00020000
"""Of <linux/fs.h>, for 64-bit machines."""
READ_BYTES = 1 << 22


def scattered(directory: Path) -> Path:
    """Make a directory, ask ext4 to put each directory in it far from the others (as `chattr +T`), and return it.

    ext4 without a journal does not use again, for minutes, the inodes of files just deleted, and each new file searches past
    all of them: the second of two cold runs in one place took three times the first one's system time, whosever files were
    deleted in between. Other file systems have no such flag, and no need of it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            flags = bytearray(8)
            fcntl.ioctl(descriptor, FS_IOC_GETFLAGS, flags)
            wanted = int.from_bytes(flags, "little") | FS_TOPDIR_FL
            fcntl.ioctl(descriptor, FS_IOC_SETFLAGS, wanted.to_bytes(8, "little"))
    finally:
        os.close(descriptor)
    return directory


def read_all(place: Path, *, but: str | tuple[str, ...]) -> int:
    """Read the files of the data once, and return how many bytes.

    A machine that was idle, or busy with other files, may have put them out of memory.

    Args:
        place: The data.
        but: Folders whose names begin with this, or with one of these, are left out.
    """
    num_bytes = 0
    for folder, folders, files in os.walk(place):
        folders[:] = [name for name in folders if not name.startswith(but)]
        for name in files:
            with contextlib.suppress(OSError), open(os.path.join(folder, name), "rb") as file:
                while chunk := file.read(READ_BYTES):
                    num_bytes += len(chunk)
    return num_bytes
