"""Files, open for reading, that are kept from being removed."""

from __future__ import annotations

import fcntl
import functools
import operator
import os
import weakref
from collections.abc import Iterator
from itertools import chain

from sqlstream.cache.files.locked_files import is_object
from sqlstream.process import fork, interrupts, locks

_READ_PLAIN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # never through a link, never waiting for a pipe
_LOCK_SHARED_NOW = fcntl.LOCK_SH | fcntl.LOCK_NB
_read: dict[int, tuple[weakref.ref[ReadLocks], list[int]]] = {}
"""All read locks, by identity, with the descriptors that are open."""


class ReadLocks:
    """Files, open for reading, that no process removes meanwhile: it tries their exclusive lock first (`try_lock`).

    The kernel gives them back when the process dies, Python when it forgets this, and a forked child closes its copies. To be
    used again and again: a new one takes longer than to open a file. Opening and closing run in C from the system call to the
    note of it, so that no Ctrl-C falls between the two. What Python calls as it forgets this is C, too: in a function of ours
    or in `__del__`, it swallows what a signal handler raises, and the files would stay open. Rejected: `io.FileIO`, which
    takes 1.5 µs more and does not close a directory that it was given.
    """

    __slots__ = ("__weakref__", "_fds", "files")

    def __init__(self) -> None:
        self._fds: list[int] = []
        self.files: dict[str, tuple[int, int]] = {}
        """What is open, by path: descriptor and size."""
        forgotten = functools.partial(functools.reduce, operator.is_, _forgetting(id(self), self._fds))
        _read[id(self)] = (weakref.ref(self, forgotten), self._fds)

    def add(self, path: str, size_bytes: int) -> bool:
        """Open and lock a file; `close`, if that fails, or raises what a signal handler raised.

        Args:
            path: The file.
            size_bytes: What it must have.

        Returns:
            False if it cannot be opened, is something else than such a plain file, or a process removes it.
        """
        fds = self._fds
        opening = map(os.open, (path,), (_READ_PLAIN,))  # in the guard, no object is made that the garbage collector looks at
        try:
            with locks.fork_guard():
                fds.extend(opening)
            fd = fds[-1]
            fcntl.flock(fd, _LOCK_SHARED_NOW)
            status = os.fstat(fd)
        except OSError as error:
            if not interrupts.is_of_system_call(error):
                raise
            return False
        if not is_object(status, size_bytes):
            return False
        self.files[path] = fd, size_bytes
        return True

    def close(self) -> None:
        """Give all of them back; safe to call twice."""
        closing = _closing(self._fds)
        with locks.fork_guard():
            self.files.clear()
            any(closing)


def _closing(fds: list[int]) -> Iterator[None]:
    """Return what closes and forgets all that `fds` will hold, as it is iterated: in C from end to end."""
    num_left = iter(fds.__len__, 0)
    return map(os.close, map(fds.pop, map(operator.not_, num_left)))  # not_(num_left) is 0: the index of the first


def _forgetting(key: int, fds: list[int]) -> Iterator[object]:
    """The same, and it forgets the entry of `fds`."""
    return chain(_closing(fds), map(_read.pop, (key,)))


class _Inherited:
    """What a forked child has open of its parent's."""

    def after_fork_in_child(self) -> None:
        """Close all of it."""
        for locked, fds in _read.values():
            any(_closing(fds))
            if (inherited := locked()) is not None:
                inherited.files.clear()


_inherited = _Inherited()
fork.call_in_child(_inherited, fork.Stage.DESCRIPTORS)
