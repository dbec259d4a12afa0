"""Locks that say to other processes that a ledger's WAL is in use, and that a forked child inherits.

SQLite's own are the process's (POSIX), and in its memory: a child that opens the ledger anew finds there that its parent has
them, and takes none. When the parent closed its connection, or any other process did, that one took itself for the last user,
and removed the WAL under the child: commits were lost, and pages of two WALs mixed in the ledger. A lock of an open file (OFD)
lives as long as one process has that file open. Rejected: to close the connection before each fork, since a fork waits for
nothing that another process may hold; locks that the child takes, since the parent may close before.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

_PLACES = (("", 0x40000002, 510), ("-shm", 128, 1))
"""Ending of a file, first byte, bytes: where SQLite looks for users before it removes the WAL, or takes itself for the first
(os_unix.c: SHARED_FIRST and SHARED_SIZE, UNIX_SHM_DMS)."""
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, process (0 for OFD)


def share(path: Path) -> list[int]:
    """Return descriptors that hold the shared locks of a ledger to which this process has a connection.

    Closing one drops SQLite's own locks on that file, too, as POSIX has it: close them with the connection, under the write
    lock, and leave them open where the connection is leaked.

    Raises:
        OSError: A file is gone, or no descriptor is left.
    """
    held: list[int] = []
    try:
        for ending, start, length in _PLACES:
            if ending and not os.path.exists(f"{path}{ending}"):
                continue  # another program removed it under its users
            held.append(os.open(f"{path}{ending}", os.O_RDONLY | os.O_CLOEXEC))
            fcntl.fcntl(held[-1], fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, start, length, 0))
    except OSError:
        close(held)
        raise
    return held


def close(held: list[int]) -> None:
    """Close descriptors and forget them: the locks go when no forked child has them."""
    while held:
        os.close(held.pop())
