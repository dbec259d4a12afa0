"""Kernel locks on files, and what must be right when a process forks.

Words: a *descriptor* is a file descriptor that must not live on in a forked child (a lock, a part file, an
owner file, one end of the helper's socket): a child that kept it would keep the lock alive after our death,
or keep the helper from seeing the end of its pipe.

Promises:
- Every such descriptor is created and recorded under `fork_guard()`, which `os.fork` takes first. So the child
  knows all of them, closes them, and no thread is inside a ledger transaction at that moment.
- Locks are `flock`s: they belong to the open file, the kernel drops them when the last descriptor is closed,
  whatever the process died of. Rejected: `lockf` (per process, dropped by any close), pid files and
  heartbeats (break with pid namespaces, stopped processes and clocks).
- A lock on a part or an owner file is ended by `close_descriptor`, never by an explicit unlock: LOCK_UN would drop it for
  the helper's duplicate of the same open file as well.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import weakref
from typing import Protocol

import portalocker


class ForkAware(Protocol):
    """What holds something that a forked child must not use."""

    def after_fork_in_child(self) -> None:
        """Forget everything that belongs to the parent; reopen on the next use."""


_mutex = threading.RLock()
_descriptors: set[int] = set()
_fork_aware: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_leaked: list[object] = []


def fork_guard() -> threading.RLock:
    """Return the process mutex: held, no other thread forks, opens a guarded descriptor or is inside a ledger transaction.

    Ask for it anew each time (`with fork_guard():`): a forked child gets another one.
    """
    return _mutex


def call_after_fork(holder: ForkAware) -> None:
    """Have `holder.after_fork_in_child()` called in every forked child, for as long as it lives."""
    with fork_guard():
        _fork_aware.add(holder)


def leak(thing: object) -> None:
    """Keep `thing` alive until the process ends.

    For SQLite connections inherited over a fork: to close one in the child corrupted the database in 10 trials out of 10.
    """
    _leaked.append(thing)


def open_descriptor(path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
    """Return a new descriptor on `path` that forked children close."""
    with fork_guard():
        return adopt_descriptor(os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=dir_fd))


def adopt_descriptor(fd: int) -> int:
    """Record `fd` as one that forked children close; call it under `fork_guard()`, where `fd` was created."""
    _descriptors.add(fd)
    return fd


def close_descriptor(fd: int) -> None:
    """Close a recorded descriptor, and with it the locks that no other duplicate holds."""
    with fork_guard():
        _descriptors.discard(fd)
        os.close(fd)


def lock_blocking(fd: int) -> None:
    """Wait for the exclusive lock on `fd`; the wait is in the kernel, first come first served as far as it can be."""
    portalocker.lock(fd, portalocker.LockFlags.EXCLUSIVE)


def unlock(fd: int) -> None:
    """Give back a lock that no other process holds a duplicate of (the ledger's door)."""
    portalocker.unlock(fd)


def try_lock(fd: int) -> bool:
    """Return True if the exclusive lock on `fd` is ours now, False if someone alive holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _before_fork() -> None:
    _mutex.acquire()


def _after_fork_in_parent() -> None:
    _mutex.release()


def _after_fork_in_child() -> None:
    global _mutex
    _mutex = threading.RLock()  # another thread may have waited for the old one
    for fd in _descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)
    _descriptors.clear()
    for holder in list(_fork_aware):
        holder.after_fork_in_child()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
