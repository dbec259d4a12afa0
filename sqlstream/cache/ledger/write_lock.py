"""The outer lock of a directory: who may write, one process after the other, in the order in which they came."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from sqlstream.errors import CacheDirectoryError
from sqlstream.process import locks
from sqlstream.process.lock_wait import lock_blocking

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0
"""Far longer than transactions take, short enough to find a process that is stopped."""


class WriteLock:
    """The outer lock of one directory: `lock`, and `gate` as the queue before it.

    flock alone is unfair (4 processes in a tight loop: longest wait 175 ms; with the gate 12 ms). Threads of this process queue
    before it: a lock of the kernel does not keep them apart.

    Args:
        directory: Where its files are.
        when_replaced: Closes what was opened in a directory that another one has replaced, this lock included.
        is_there: Returns whether what is at its path may have our files; None: any directory may.
        patience_seconds: After so long the log says whom we wait for.
    """

    def __init__(
        self,
        directory: Path,
        when_replaced: Callable[[], None] | None = None,
        is_there: Callable[[], bool] | None = None,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.turn = locks.Turn(f"the cache ledger in {directory}")
        self._when_replaced = when_replaced or self.close
        self._is_there = is_there or directory.is_dir
        self._directory = directory
        self._patience_seconds = patience_seconds
        self._lock_path = f"{directory}/lock"
        self._lock: int | None = None
        self._gate: int | None = None
        self._inode: os.stat_result | None = None
        """Of the lock file that is open: it cannot change while it is."""

    def take(self) -> bool:
        """Take our turn, and the lock of the directory that is at the path now.

        Returns:
            False, with nothing held, when a signal came first: let it through, and ask again. Not done here, so that what
            its handler raises is not taken for an error of the directory.

        Raises:
            CacheDirectoryError: It is gone.
        """
        is_entered = False
        if self.turn.take():
            try:
                is_entered = self._enter_current()
            finally:
                if not is_entered:
                    self.leave()
        return is_entered

    def _enter_current(self) -> bool:
        for _ in range(10):  # someone replaces the directory again and again: not our case to win
            if not self.is_open and not self._is_there():
                raise CacheDirectoryError(f"the cache directory {self._directory} is gone: create the dataset or cache anew")
            if not self.enter():
                return False
            if self.is_current():
                return True
            self._when_replaced()
        raise CacheDirectoryError(f"{self._directory} is being replaced all the time: stop what deletes it")

    def retake(self) -> None:
        """Take our turn and the lock, if it is open, for the last act before `close`, also if its file was replaced."""
        section = locks.uninterrupted()
        while not self.turn.take():
            section.let_through()
        while self._lock is not None and not lock_blocking(self._lock):
            locks.unlock(self._lock)
            section.let_through()

    def enter(self) -> bool:
        """Wait for the lock; False, with nothing held, when a signal came first. Call with the `Turn`."""
        if self._gate is None:
            self._gate = self._open("gate")
        if self._lock is None:
            self._lock = self._open("lock")
            self._inode = os.fstat(self._lock)
        is_entered = False
        try:
            is_entered = lock_blocking(self._gate) and self._wait_lock(self._lock)
        finally:
            locks.unlock(self._gate)
            if not is_entered:
                locks.unlock(self._lock)
        return is_entered

    def try_relock(self) -> bool:
        """Take the lock once more without waiting; False when another process has it."""
        return self._lock is None or locks.try_lock(self._lock)

    def leave(self) -> None:
        """Give lock and turn back; harmless when it is not our turn."""
        if self.turn.is_mine:
            if self._lock is not None:
                locks.unlock(self._lock)
            self.turn.give_back()

    @property
    def is_open(self) -> bool:
        """Whether this process has the lock file open."""
        return self._lock is not None

    def is_current(self) -> bool:
        """Return False when the lock file was replaced (`rm -rf` and a new cache at the same path)."""
        return self._inode is not None and same_file(self._lock_path, self._inode)

    def close(self) -> None:
        """Close both files."""
        for fd in (self._lock, self._gate):
            if fd is not None:
                locks.close_descriptor(fd)
        self._lock = self._gate = self._inode = None

    def forget(self) -> None:
        """Drop descriptors that belong to the parent process; `locks` has closed them."""
        self._lock = self._gate = self._inode = None

    def _open(self, name: str) -> int:
        return locks.open_descriptor(self._directory / name, os.O_RDWR | os.O_CREAT)

    def _wait_lock(self, fd: int) -> bool:
        """Wait for the lock as the first in line; the thread that would complain starts while the holder works."""
        if locks.try_lock(fd):
            return True
        timer = threading.Timer(self._patience_seconds, self._complain)
        timer.daemon = True
        with contextlib.suppress(RuntimeError, MemoryError):  # no more threads: then nothing is said
            timer.start()
        try:
            return lock_blocking(fd)
        finally:
            timer.cancel()

    def _complain(self) -> None:
        holder = locks.lock_holder(self._directory / "lock")
        logger.warning(
            "waiting for the write lock of the cache at %s for %.0f s; %s holds it: if that process is stopped, "
            "continue or end it",
            self._directory,
            self._patience_seconds,
            f"process {holder}" if holder else "another process",
        )


def same_file(path: str | Path, status: os.stat_result) -> bool:
    """Return True if `path` is still the file that `status` was taken from; False also if that cannot be seen."""
    try:
        now = os.stat(path)
    except OSError:  # whoever opens it then names the reason
        return False
    return (now.st_dev, now.st_ino) == (status.st_dev, status.st_ino)


def write_durably(path: Path, content: bytes = b"") -> None:
    """Make a file that is there after a loss of power."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        os.pwrite(fd, content, 0)
        os.fsync(fd)
    finally:
        os.close(fd)
