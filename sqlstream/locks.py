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
- Inside `uninterrupted()` no KeyboardInterrupt is raised: half a change to pins would be a leak. Ctrl-C takes effect at its
  end, or at once while we only wait for a lock that others hold.
- A fork that runs no hooks (a C library's) is noticed by the process id, the next time the guard is asked for.
- A lock on a part or an owner file is ended by `close_descriptor`, never by an explicit unlock: LOCK_UN would drop it for
  the helper's duplicate of the same open file as well.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, without its enums: they cost ten times the call
import contextlib
import errno
import fcntl
import os
import resource
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

import portalocker


class ForkAware(Protocol):
    """What holds something that a forked child must not use."""

    def after_fork_in_child(self) -> None:
        """Forget everything that belongs to the parent; reopen on the next use."""


_READ_PLAIN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # never through a link, never waiting for a pipe
_LOCK_SHARED_NOW = fcntl.LOCK_SH | fcntl.LOCK_NB
HIGH_DESCRIPTOR = 4096
"""Above what programs have open, and small enough for the kernel's table of descriptors: 32 KiB."""
HIGH_RESERVE = 64
"""So many below the process's limit, where that is lower: room for the caches of one process."""

_mutex = threading.RLock()
_pid = os.getpid()
_descriptors: set[int] = set()
_fork_aware: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_leaked: list[object] = []
_read: dict[int, tuple[weakref.ref[ReadLocks], list[int]]] = {}
"""All read locks, by identity, with the descriptors that are open."""


def fork_guard() -> threading.RLock:
    """Return the process mutex: held, no other thread forks, opens a guarded descriptor or is inside a ledger transaction.

    Ask for it anew each time (`with fork_guard():`): a forked child gets another one.
    """
    if os.getpid() != _pid:
        _after_fork_in_child()
    return _mutex


def is_guarded() -> bool:
    """Return whether this thread holds the guard."""
    return fork_guard()._is_owned()  # type: ignore[attr-defined, no-any-return]  # what threading.Condition asks, too


_NOTHING = contextlib.nullcontext()


class _Interrupts:
    """Puts SIGINT off in the main thread, the only one in which Python raises KeyboardInterrupt.

    The handler is replaced for the time being, not for good: others (asyncio, notebooks) look at who handles SIGINT.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._thread = 0
        self._original: Callable[[int, FrameType | None], Any] | None = None
        self._is_pending = False
        self._may_raise = False

    def put_off(self) -> contextlib.AbstractContextManager[None]:
        if self._depth or threading.current_thread() is not threading.main_thread():
            return _NOTHING
        return self

    def __enter__(self) -> None:
        handler = _signal.getsignal(signal.SIGINT)
        if not callable(handler):
            return
        self._original = handler
        _signal.signal(signal.SIGINT, self._on_interrupt)
        self._depth, self._thread = 1, threading.get_ident()

    def __exit__(self, *exception: object) -> None:
        if self._depth:
            self._depth = 0
            self._restore()

    @contextlib.contextmanager
    def let_in(self) -> Iterator[None]:
        if self._original is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._may_raise = True
        try:
            if self._is_pending:
                self._on_interrupt(signal.SIGINT, None)
            yield
        finally:
            self._may_raise = False

    def after_fork_in_child(self) -> None:
        """The parent's main thread may have put off an interrupt that is not ours."""
        self._is_pending = False
        if not self._depth or self._forked_elsewhere():
            self._depth = 0
            self._restore()

    def _forked_elsewhere(self) -> bool:
        """Return whether another thread than the one inside `put_off` forked: it is the child's only one."""
        return self._thread != threading.get_ident()

    def _restore(self) -> None:
        """Give SIGINT back to its handler, and hand over what came: the very last act, nothing is held any more."""
        if self._original is None:
            return
        original, self._original = self._original, None
        _signal.signal(signal.SIGINT, original)
        if self._is_pending:
            self._is_pending = False
            original(signal.SIGINT, None)

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._may_raise and self._original is not None:
            self._is_pending = False
            self._original(signum, frame)
        else:
            self._is_pending = True


_interrupts = _Interrupts()


def uninterrupted() -> contextlib.AbstractContextManager[None]:
    """Return a context in which Ctrl-C waits for the end of the body; nests, and costs a few microseconds."""
    return _interrupts.put_off()


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Return a context for a wait in the kernel inside `uninterrupted()`: Ctrl-C ends the wait; the caller cleans up."""
    return _interrupts.let_in()


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


def raise_descriptor(fd: int) -> int:
    """Return a recorded descriptor in place of `fd`, of a high number: of a dying process's files, it is closed among the last.

    The kernel closes them in the order of their numbers: whoever finds this one's lock free knows that the others are closed.
    """
    with fork_guard():
        soft_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        least = HIGH_DESCRIPTOR if soft_limit == resource.RLIM_INFINITY else min(HIGH_DESCRIPTOR, soft_limit - HIGH_RESERVE)
        try:
            raised = adopt_descriptor(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(least, fd)))
        except OSError:  # a limit lower than the numbers in use: the order is a comfort
            return fd
        close_descriptor(fd)
        return raised


def close_descriptor(fd: int) -> None:
    """Close a recorded descriptor, and with it the locks that no other duplicate holds."""
    with fork_guard():
        _descriptors.discard(fd)
        os.close(fd)


def lock_blocking(fd: int) -> None:
    """Wait for the exclusive lock on `fd`; the wait is in the kernel, first come first served as far as it can be."""
    if not try_lock(fd):  # portalocker's checks cost seven times a free lock
        with interruptible():
            portalocker.lock(fd, portalocker.LockFlags.EXCLUSIVE)


def unlock(fd: int) -> None:
    """Give back a lock that no other process holds a duplicate of (the ledger's door)."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def try_lock(fd: int) -> bool:
    """Return True if the exclusive lock on `fd` is ours now, False if someone alive holds it."""
    return _try(fd, fcntl.LOCK_EX)


def is_locked(fd: int) -> bool:
    """Return whether someone alive holds the exclusive lock of the file behind `fd`; two who ask do not disturb each other."""
    return not _try(fd, fcntl.LOCK_SH)


def open_shared(path: str | os.PathLike[str]) -> int | None:
    """Return a descriptor that marks the file at `path` as in use until it is closed; None when the file is gone.

    Whoever wants to remove the file tries its exclusive lock (`try_lock`), and leaves it alone when that is refused.
    """
    try:
        fd = open_descriptor(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    if _try(fd, fcntl.LOCK_SH) and os.fstat(fd).st_nlink:
        return fd
    close_descriptor(fd)
    return None


class ReadLocks:
    """Files, open for reading, that nobody removes meanwhile: whoever wants to tries their exclusive lock first (`try_lock`).

    The kernel gives them back when the process dies, Python when it forgets this, and a forked child closes its copies. To be
    used again and again: a new one takes longer than to open a file. Opening and closing run in C from the system call to the
    note of it, so that no Ctrl-C falls between the two. Rejected: `__del__`, in which a Ctrl-C would be lost; `io.FileIO`,
    which takes 1.5 µs more and does not close a directory that it was given.
    """

    __slots__ = ("__weakref__", "_fds", "files")

    def __init__(self) -> None:
        self._fds: list[int] = []
        self.files: dict[str, tuple[int, int]] = {}
        """What is open, by path: descriptor and size."""
        with fork_guard():
            _read[id(self)] = (weakref.ref(self, _close_forgotten), self._fds)

    def add(self, path: str, size_bytes: int) -> None:
        """Open and lock a file.

        Args:
            path: The file.
            size_bytes: What it must have.

        Raises:
            OSError: It cannot be opened, is something else than such a plain file, or somebody removes it (BlockingIOError).
        """
        fds = self._fds
        with fork_guard():
            fds.extend(map(os.open, (path,), (_READ_PLAIN,)))
        fd = fds[-1]
        fcntl.flock(fd, _LOCK_SHARED_NOW)
        status = os.fstat(fd)
        if status.st_size != size_bytes or not status.st_nlink or status.st_mode & 0o170000 != 0o100000:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        self.files[path] = fd, size_bytes

    def close(self) -> None:
        """Give all of them back; safe to call twice."""
        with fork_guard():
            self.files.clear()
            _close_all(self._fds)


def _close_all(fds: list[int]) -> None:
    """Close and forget all of them, in C from end to end."""
    any(map(os.close, map(fds.pop, (-1,) * len(fds))))


def _close_forgotten(forgotten: weakref.ref[ReadLocks]) -> None:
    """Close what nobody has any more; without the guard, for this runs wherever garbage is collected."""
    for key, (known, fds) in list(_read.items()):
        if known is forgotten:
            _close_all(fds)
            del _read[key]


def lock_holder(path: str | os.PathLike[str]) -> int | None:
    """Return the pid of a process that holds the lock of the file at `path`; None where the system does not tell."""
    with contextlib.suppress(OSError):
        inode = os.stat(path).st_ino
        with open("/proc/locks", encoding="ascii") as lines:
            for fields in map(str.split, lines):
                if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode):
                    return int(fields[4])
    return None


def _try(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
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
    global _mutex, _pid
    _pid = os.getpid()
    _mutex = threading.RLock()  # another thread may have waited for the old one
    _interrupts.after_fork_in_child()
    for fd in _descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)
    _descriptors.clear()
    for locked, fds in _read.values():
        _close_all(fds)
        if (inherited := locked()) is not None:
            inherited.files.clear()
    for holder in list(_fork_aware):
        holder.after_fork_in_child()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
