"""The outer lock of a directory: who may write, one process after the other, in the order in which they came."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from sqlstream import locks

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0
"""After so long at the door we say whom we wait for."""


class Door:
    """The outer lock of one directory: `lock`, and `gate` as the queue before it.

    flock alone is unfair (4 processes in a tight loop: longest wait 175 ms; with the gate 12 ms).
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock_path = f"{directory}/lock"
        self._lock: int | None = None
        self._gate: int | None = None
        self._inode: os.stat_result | None = None
        """Of the lock file that is open: it cannot change while it is."""

    def enter(self) -> None:
        """Wait for the door; call under `locks.fork_guard()`."""
        if self._gate is None:
            self._gate = self._open("gate")
        if self._lock is None:
            self._lock = self._open("lock")
            self._inode = os.fstat(self._lock)
        try:
            locks.lock_blocking(self._gate)
            self._wait_lock(self._lock)
        finally:
            locks.unlock(self._gate)

    def relock(self) -> None:
        """Take the lock of an entered door once more, for the last act before `close`, also if its file was replaced."""
        if self._lock is not None:
            locks.lock_blocking(self._lock)

    def leave(self) -> None:
        """Give the door back; harmless when it was not entered."""
        if self._lock is not None:
            locks.unlock(self._lock)

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

    def _wait_lock(self, fd: int) -> None:
        """Wait for the lock as the first in line; the thread that would complain starts while the holder works."""
        if locks.try_lock(fd):
            return
        timer = threading.Timer(PATIENCE_SECONDS, self._complain)
        timer.daemon = True
        timer.start()
        try:
            locks.lock_blocking(fd)
        finally:
            timer.cancel()

    def _complain(self) -> None:
        holder = locks.lock_holder(self._directory / "lock")
        logger.warning(
            "waiting for the cache's door at %s for %.0f s; %s holds it: if that process is stopped, continue or end it",
            self._directory,
            PATIENCE_SECONDS,
            f"process {holder}" if holder else "another process",
        )


def same_file(path: str | Path, status: os.stat_result) -> bool:
    """Return True if `path` is still the file that `status` was taken from."""
    try:
        now = os.stat(path)
    except FileNotFoundError:
        return False
    return (now.st_dev, now.st_ino) == (status.st_dev, status.st_ino)
