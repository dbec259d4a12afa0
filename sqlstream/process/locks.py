"""Locks on files and in memory, and the descriptors that a forked child closes (`fork` has the order of all that).

Words: a *descriptor* is a file descriptor that must not live on in a forked child (a lock, a part file, an
owner file, one end of the helper's socket): a child that kept it would keep the lock alive after our death,
or keep the helper from seeing the end of its pipe.

The locks of a thread, in the order in which it may take them; what is not named is taken by itself:
- `Turn`: the queue of this process's threads before something that other processes may hold. One for each ledger. A signal ends
  the wait for it. `os.fork` never takes it.
- the lock of the kernel on a file (`flock`): belongs to the open file, the kernel drops it when the last descriptor is closed,
  whatever the process died of. Rejected: `lockf` (per process, dropped by any close), pid files and heartbeats (break with pid
  namespaces, stopped processes and clocks).
- `ForkLock`: held while a connection to SQLite is used, and by `os.fork`: SQLite has mutexes of its own, which a child would
  inherit as they are. Taken behind the kernel's lock, so that no thread waits for another process while holding it.
- `StateLock`: guards what the objects of one cache keep in memory; never held across I/O. `os.fork` does not take it: a child
  throws away what it guards (`fork.ForkAware`), and gets a new one.
- `fork_guard()`: the process mutex of descriptors. Every descriptor is created and recorded under it, and `os.fork` takes it,
  so that the child knows all of them and closes them.

A fork that runs no hooks (a C library's) is noticed by the process id, the next time that a lock is asked for. A lock on a part
or an owner file is ended by `close_descriptor`, never by an explicit unlock: LOCK_UN would drop it for the helper's duplicate
of the same open file as well. Signals: see `interrupts`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TypeVar

from sqlstream.errors import CacheError
from sqlstream.process import fork, interrupts
from sqlstream.process.fork import FORKS, Stage
from sqlstream.process.interrupts import here

uninterrupted = interrupts.uninterrupted
fork_guard, is_guarded, notice_fork = fork.fork_guard, fork.is_guarded, fork.notice_fork

HIGH_DESCRIPTOR = 4096
"""Above what programs have open, and small enough for the kernel's table of descriptors: 32 KiB."""
HIGH_RESERVE = 64
"""So many below the process's limit, where that is lower: room for the caches of one process."""

T = TypeVar("T")

_leaked: list[object] = []


class _Descriptors:
    """The recorded descriptors of this process."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        fork.call_in_child(self, Stage.DESCRIPTORS)

    def after_fork_in_child(self) -> None:
        """Close all of them, once the kernel's table of descriptors is as large as `raise_descriptor` needs it.

        It grows at once as long as this process has one thread; later the kernel waits for all processors, 13 ms (m).
        """
        for fd in self.numbers:
            with contextlib.suppress(OSError):
                os.close(_high_duplicate(fd))
                break
        for fd in self.numbers:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.numbers.clear()


_descriptors = _Descriptors()


class StateLock:
    """Guards what one object, or several that belong together, keep in memory. Held for moments, inside a section; nests."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        fork.call_in_child(self, Stage.LOCKS)

    def __enter__(self) -> None:
        section = here.section
        if section.depth == 0:
            if os.getpid() != FORKS.pid:
                notice_fork()
            if section.is_main:
                section.put_off()
        section.depth += 1  # as `Section.__enter__` does, without its calls: half of those that a hit makes
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()
        section = here.section
        if section.depth == 1 and (section.originals or section.late):
            section.end()
        else:
            section.depth -= 1

    def take_all(self, found: Iterator[T]) -> list[T]:
        """Return what an iterator that is written in C gives, taken while this is held.

        No bytecode that looks for signals runs meanwhile, so none is put off: that takes longer than to read a row (m).
        """
        if os.getpid() != FORKS.pid:
            notice_fork()
        section = here.section
        try:
            with self._lock:
                section.depth += 1  # finalizers wait; from here to the end of the lock there is no call of Python's
                try:
                    return [*found]
                finally:
                    section.depth -= 1
        finally:
            if section.late and not section.depth:
                section.end()

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]  # what threading.Condition asks, too

    def try_for(self, seconds: float) -> bool:
        """Take it if it is free in time; then give it back with `__exit__`."""
        uninterrupted().__enter__()
        if self._lock.acquire(timeout=seconds):
            return True
        uninterrupted().__exit__(None, None, None)
        return False

    def after_fork_in_child(self) -> None:
        """Another thread of the parent may have held it; a thread that forks while it holds it goes on holding it."""
        if not self.is_mine:
            self._lock = threading.RLock()


class ForkLock(StateLock):
    """The same, and no other thread forks meanwhile."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()
        fork.enclose(self, Stage.FORK_LOCKS)

    def before_fork(self) -> None:
        """Wait until no other thread has it."""
        self._lock.acquire()

    def after_fork(self, *, is_child: bool) -> None:
        """Give it back."""
        del is_child  # the same in both
        self._lock.release()


class Turn:
    """The queue of this process's threads before something that other processes may hold as well.

    Args:
        what: Names it in an error.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.after_fork_in_child()
        fork.call_in_child(self, Stage.LOCKS)

    def after_fork_in_child(self) -> None:
        """No thread has it in a child."""
        self._lock = threading.Lock()
        self._holder = 0

    @property
    def is_mine(self) -> bool:
        """Whether this thread has it."""
        return self._holder == threading.get_ident()

    def take(self) -> bool:
        """Wait for our turn, inside a section; False if a signal came first, and is to be let through.

        Raises:
            CacheError: This thread has it: a finalizer or a handler asks in the middle of its work.
        """
        notice_fork()
        if not self._lock.acquire(blocking=False):
            if self.is_mine:
                raise CacheError(
                    f"{self._what} is in use by this very thread, and it was interrupted in the middle: ask again later"
                )
            section = uninterrupted()
            while not self._lock.acquire(timeout=interrupts.JOIN_SECONDS if section.is_main else -1):
                if section.has_signal:
                    return False
        self._holder = threading.get_ident()
        return True

    def give_back(self) -> None:
        """Let the next thread in; harmless in a child that was forked meanwhile."""
        if self.is_mine:
            self._holder = 0
            self._lock.release()


def leak(thing: object) -> None:
    """Keep `thing` alive for ever, also while Python tidies up at its end.

    For SQLite connections inherited over a fork: to close one in the child corrupted the database in 10 trials out of 10, and
    would wait for a mutex that another thread of the parent may have held.
    """
    _leaked.append(thing)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def occupy_standard_descriptors() -> None:
    """Open the null device as descriptors 0 to 2 where this process was started without them.

    Else our files would get these numbers, and whatever prints to standard output or error would write into them.
    """
    with uninterrupted(), fork_guard():
        for fd in range(3):
            try:
                os.fstat(fd)
            except OSError:
                opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
                os.set_inheritable(opened, True)


def open_descriptor(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """Return a new descriptor on `path` that forked children close."""
    with fork_guard():
        return adopt_descriptor(os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode))


def adopt_descriptor(fd: int) -> int:
    """Record `fd` as one that forked children close; call it under `fork_guard()`, where `fd` was created."""
    _descriptors.numbers.add(fd)
    return fd


def share_descriptor(fd: int) -> int:
    """Take `fd` out of those that forked children close; call it under `fork_guard()`."""
    _descriptors.numbers.discard(fd)
    return fd


def raise_descriptor(fd: int) -> int:
    """Return a recorded descriptor in place of `fd`, of a high number: of a dying process's files, it is closed among the last.

    The kernel closes them in the order of their numbers: once this one's lock is free, the others are closed.
    """
    with fork_guard():
        try:
            raised = adopt_descriptor(_high_duplicate(fd))
        except OSError:  # a limit lower than the numbers in use: the order is a comfort
            return fd
        close_descriptor(fd)
        return raised


def _high_duplicate(fd: int) -> int:
    soft_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    least = HIGH_DESCRIPTOR if soft_limit == resource.RLIM_INFINITY else min(HIGH_DESCRIPTOR, soft_limit - HIGH_RESERVE)
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(least, fd))


def close_descriptor(fd: int) -> None:
    """Close a recorded descriptor, and with it the locks that no other duplicate holds."""
    with fork_guard():
        _descriptors.numbers.discard(fd)
        os.close(fd)


def close_descriptors(fds: list[int]) -> None:
    """Close recorded descriptors and take them out of the list; a handler that raises finds all of it done, or nothing."""
    with uninterrupted():
        while fds:
            close_descriptor(fds.pop())


def unlock(fd: int) -> None:
    """Give back a lock that no other process holds a duplicate of (the ledger's lock)."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Return True if the lock on `fd`, an exclusive one if not said, is ours now, False if someone alive holds it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def is_locked(fd: int) -> bool:
    """Return whether someone alive holds the exclusive lock of the file behind `fd`; two who ask do not disturb each other."""
    return not try_lock(fd, fcntl.LOCK_SH)


def open_shared(path: str | os.PathLike[str]) -> int | None:
    """Return a descriptor that marks the file at `path` as in use until it is closed; None when the file is gone.

    A process that wants to remove the file tries its exclusive lock (`try_lock`), and leaves it alone when that is refused.
    """
    try:
        fd = open_descriptor(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        if try_lock(fd, fcntl.LOCK_SH) and os.fstat(fd).st_nlink:
            return fd
    except OSError:  # the kernel has no room for more locks
        close_descriptor(fd)
        raise
    close_descriptor(fd)
    return None


def lock_holder(path: str | os.PathLike[str]) -> int | None:
    """Return the pid of a process that holds the lock of the file at `path`; None where the system does not tell."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        with open("/proc/locks", encoding="ascii") as lines:
            return holder_among(lines, status)
    return None


def holder_among(lines: Iterable[str], status: os.stat_result) -> int | None:
    """Return the pid of a process that holds the lock of a file, by the lines of /proc/locks; None: none of them does.

    Files of several file systems have one inode number: to name another process would have a user end it.
    """
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    for fields in map(str.split, lines):
        place, _, inode = fields[5].rpartition(":")
        if fields[1] == "FLOCK" and inode == str(status.st_ino) and (place == device or _has_open(int(fields[4]), status)):
            return int(fields[4])
    return None


def _has_open(pid: int, status: os.stat_result) -> bool:
    """Return whether a process has a file open: a subvolume of btrfs has another device here than in /proc/locks."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed since
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), status):
                    return True
    return False
