"""The wait for a lock on a file, which the kernel ends.

Apart from `locks`: portalocker imports for a fifth of the time in which a process of ours starts, and most of these never wait.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial

try:
    import portalocker
except FileNotFoundError:  # its module asks for a temporary directory, which it does not use here: /tmp is full, or read-only
    tempfile.tempdir = os.sep
    try:
        import portalocker
    finally:
        tempfile.tempdir = None  # who needs one asks anew

from sqlstream.process import locks


def lock_blocking(fd: int) -> bool:
    """Wait for the exclusive lock on `fd`; the wait is in the kernel, first come first served as far as it can be.

    Returns:
        False if a signal came in a section: then the lock may be ours or not; unlock it, and let the signal through.
    """
    if locks.try_lock(fd):  # portalocker's checks cost seven times a free lock
        return True
    return locks.uninterrupted().wait_in_kernel(partial(portalocker.lock, fd, portalocker.LockFlags.EXCLUSIVE))
