"""A hold that is no row: locks of the kernel on files that were all here when their sample was planned."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import operator
import os
import select
import stat
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.model.rows import ReadyRow
from sqlstream.process import fork, interrupts
from sqlstream.process.fork import FORKS

MAX_KEPT = 64
"""Shards that a process keeps open: those of a default `shuffle_window`."""
_READ_PLAIN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # never through a link, never waiting for a pipe
_LOCK_SHARED_NOW = fcntl.LOCK_SH | fcntl.LOCK_NB
_OWNER_OF = select.epoll.fromfd
Noted: TypeAlias = dict[bytes, Any]
_locks: dict[str | int, weakref.ref[ReadLock]] = {}
"""All read locks: those that holds share by their path, others by identity."""


def is_object(status: os.stat_result, size_bytes: int) -> bool:
    """Return whether a file is what its row says: plain, of this size, and not removed."""
    return status.st_size == size_bytes and status.st_nlink > 0 and stat.S_ISREG(status.st_mode)


class ReadLock:
    """A file, open for reading, that no process removes meanwhile: it tries its exclusive lock first (`try_lock`).

    Python counts its users, and closes the file as the last one drops it; the kernel does when the process dies, and a forked
    child closes its copy. Opening and closing run in C from one system call to the other, so that no Ctrl-C falls between: in a
    function of ours, or in `__del__`, Python swallows what a signal handler raises, and the file would stay open. So an object
    of `select` owns the descriptor: it closes what it was given, whatever that is, when it is dropped, and nothing more.
    Rejected: `io.FileIO`, which takes 1.5 µs more, warns of what it closes, and does not close a directory that it was given.

    Args:
        path: Where the file is; holds that come later share its lock.
        size_bytes: What the file must have.
    """

    __slots__ = ("__weakref__", "is_held", "owners", "size_bytes")

    def __init__(self, path: str, size_bytes: int) -> None:
        self.owners: list[select.epoll] = []
        """The owner of its descriptor, while it is open."""
        self.size_bytes = size_bytes
        self.is_held = False
        """The file is locked, and is what its row says."""
        known = weakref.ref(self, functools.partial(_locks.pop, path))
        if _locks.setdefault(path, known) is not known:  # a thread opens the same just now; or one of our parent had it
            _locks[id(self)] = weakref.ref(self, functools.partial(_locks.pop, id(self)))


class KeptLocks:
    """Shards that stay open from one of their samples to the next; let go as soon as any process needs room."""

    def __init__(self) -> None:
        self._locks: dict[str, ReadLock] = {}
        fork.call_in_child(self, fork.Stage.MEMORY)

    def __len__(self) -> int:
        return len(self._locks)

    def after_fork_in_child(self) -> None:
        """They are our parent's."""
        self._locks = {}

    def keep(self, path: str, lock: ReadLock) -> None:
        """Keep a file open, as the last one used; the first of too many is let go."""
        locks = self._locks
        locks.pop(path, None)  # the caller has it, too: nothing is closed
        locks[path] = lock
        if len(locks) > MAX_KEPT:
            _repair_fork()
            with FORKS.mutex, contextlib.suppress(StopIteration, KeyError, RuntimeError):  # another thread has let go
                del locks[next(iter(locks))]

    def let_go(self) -> None:
        """Close those that no sample uses."""
        if self._locks:
            _repair_fork()
            with FORKS.mutex:
                self._locks.clear()


class ReadLocks:
    """The files of a cache directory that this process reads under locks: each is open once, however many holds share it.

    Args:
        data: The cache's folder of files.
        was_missed: Called with the objects of a hold, and what was noted with them, when not all are as the ledger said.
        kept: Shards that stay open.
    """

    def __init__(self, data: str, was_missed: Callable[[Sequence[ObjectRef], Noted], None], kept: KeptLocks) -> None:
        self.data = data
        self.was_missed = was_missed
        self.kept = kept

    def lock(self, path: str, size_bytes: int, files: dict[str, ReadLock]) -> bool:
        """Put the lock of a file into `files`; no variable of ours keeps it, else an error's traceback would.

        Returns:
            False if it cannot be opened, is something else than a plain file of this size, or a process removes it.
        """
        known = _locks.get(path)
        if known is not None and (found := known()) is not None and found.owners and found.is_held:
            files[path] = found
            return found.size_bytes == size_bytes
        found = None
        files[path] = ReadLock(path, size_bytes)
        owners = files[path].owners
        opening = map(_OWNER_OF, map(os.open, (path,), (_READ_PLAIN,)))  # in the guard, nothing is made that is collected
        if os.getpid() != FORKS.pid:  # as `_repair_fork` does, without its call: for each sample, twice
            FORKS.repair()
        try:
            with FORKS.mutex:
                owners.extend(opening)
            fd = owners[-1].fileno()
            fcntl.flock(fd, _LOCK_SHARED_NOW)
            files[path].is_held = is_object(os.fstat(fd), size_bytes)
        except OSError as error:
            if not interrupts.is_of_system_call(error):
                raise
            return False
        return files[path].is_held


_NO_FILES: dict[str, ReadLock] = {}
"""Of holds that are not claimed, for ever empty: a hundred of them are planned at a time, and the collector looks at dicts."""


class ReadHold:
    """Objects of one sample that were all here when it was planned; claimed, it keeps them there by locks on their files.

    A read hold has no row in the ledger; the shared lock on the file keeps it from eviction. It has those attributes of a
    `Hold` that waiting and reading need.

    Args:
        refs: Its objects.
        rows: What the ledger said of each.
        locks: Where the files are, and what locks them.
        noted: The objects whose uses were noted together, by key; the holds on them share it.
    """

    __slots__ = ("_locks", "_noted", "open_files", "paths", "refs", "rows")

    is_read_hold: ClassVar[bool] = True
    is_settled: ClassVar[bool] = True
    is_released: ClassVar[bool] = False
    outstanding: ClassVar[frozenset[bytes]] = frozenset()
    error: ClassVar[Exception | None] = None
    files: ClassVar[None] = None

    def __init__(self, refs: Sequence[ObjectRef], rows: Sequence[ReadyRow], locks: ReadLocks, noted: Noted) -> None:
        self.refs = refs
        self.paths: Sequence[str] = ()
        """Where its objects are, in their order, from the claim to the release."""
        self.open_files = _NO_FILES
        """The files by path, from the claim to the release: a reader of the object need not open it again."""
        self.rows = rows
        self._locks = locks
        self._noted = noted

    @property
    def charges(self) -> dict[bytes, int]:
        """What each of its objects counts on disk."""
        return {key: charged_bytes for key, _, charged_bytes, _ in self.rows}

    def claim(self) -> bool:
        """Lock the files; False, with none of them locked, when one is not what its row says, or cannot be locked.

        Its sample must then be acquired again, by rows.
        """
        if self.open_files:  # of a claim that a signal handler ended
            self.close()
        locks = self._locks
        files: dict[str, ReadLock] = {}
        paths: list[str] = []
        self.open_files, self.paths = files, paths
        for ref, (key, size_bytes, _, ext) in zip(self.refs, self.rows, strict=True):
            name = key.hex()
            path = f"{locks.data}/{name[:2]}/{name}{ext}"
            paths.append(path)
            # Two columns may name one object. False: it is gone or on its way out, or there are too few descriptors: the
            # ledger will tell.
            if path not in files and not locks.lock(path, size_bytes, files):
                self.close()
                locks.was_missed(self.refs, self._noted)
                return False
            if ref.members:
                locks.kept.keep(path, files[path])
        return True

    def close(self) -> None:
        """Give the locks back; safe to call twice, and in a forked child, whose copies are closed already."""
        if os.getpid() != FORKS.pid:
            FORKS.repair()
        with FORKS.mutex:
            self.open_files.clear()


def _repair_fork() -> None:
    """Do what is due in a child that was forked without Python's knowledge."""
    if os.getpid() != FORKS.pid:
        FORKS.repair()


class _Inherited:
    """What a forked child has open of its parent's."""

    def after_fork_in_child(self) -> None:
        """Close all of it."""
        for lock in filter(None, map(operator.call, [*_locks.values()])):
            while lock.owners:
                lock.owners.pop().close()  # a thread of our parent may have had it in hand: it would not be dropped


_inherited = _Inherited()
fork.call_in_child(_inherited, fork.Stage.DESCRIPTORS)
