"""Where index files grow: one builder a fingerprint, temporary names, and nothing left of builders that died.

A process that makes or removes temporary files of a fingerprint holds the kernel lock on `<fingerprint>.lock`, from before the
first of them exists until the last is renamed or gone. So a temporary file whose lock is free belongs to no process.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from sqlstream.errors import CacheDirectoryError, CacheDiskError, IndexDatabaseError, SqlStreamError
from sqlstream.index.file.intact import check_plain
from sqlstream.process import locks
from sqlstream.process.lock_wait import lock_blocking
from sqlstream.progress import Progress, progress

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LOCK, _TEMPORARY = ".lock", ".tmp"
_SPILL = ".d"  # of the directory that DuckDB makes beside a temporary file
_ERRNO_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_SQLITE_OF_THE_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
LOOK_SECONDS = 0.25
"""How often a bar for people moves."""


class Workplace:
    """The right to build one fingerprint, and the temporary files of doing so."""

    def __init__(self, directory: Path, key: str) -> None:
        self._directory, self._key = directory, key

    @property
    def directory(self) -> Path:
        """Where index files are."""
        return self._directory

    def temporary(self, what: str = "part") -> Path:
        """Return a new path for a temporary file."""
        return self._directory / f"{self._key}.{uuid.uuid4().hex[:12]}.{what}{_TEMPORARY}"

    def publish(self, temporary: Path, name: str) -> Path:
        """Rename a whole, synced file to its final name; after this it survives a power cut."""
        path = self._directory / name
        os.rename(temporary, path)
        sync(self._directory)
        return path

    def sweep(self) -> None:
        """Remove this fingerprint's temporary files."""
        for path in self._directory.glob(f"{self._key}.*{_TEMPORARY}*"):  # SQLite may have left a -journal beside one
            if path.is_dir() and not path.is_symlink():
                if path.suffix == _SPILL:
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    logger.warning("%s is a directory, which sqlstream never makes there: remove it", path)
                continue
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def workplace(
    directory: Path, key: str, *, show_progress: bool = False, is_brief: bool = False, look_seconds: float = LOOK_SECONDS
) -> Iterator[Workplace]:
    """Yield the right to build `key`, after a wait for the process that has it; remove temporary files that the body leaves.

    A child that is forked in the body, by a signal handler for instance, and leaves it, leaves all to its parent.

    Args:
        directory: Where index files are.
        key: What is built.
        show_progress: While waiting, show how far the other one is, if stderr is a terminal.
        is_brief: The work takes a moment: nothing is said while waiting.
        look_seconds: How often it looks how far the other one is.

    Raises:
        CacheDirectoryError: The directory, or what is built in it, was removed meanwhile.
        CacheDiskError: The disk is full, or cannot be written to.
    """
    held: list[int] = []
    pid = os.getpid()
    try:
        is_ours = _acquire(directory, key, held, locks.try_lock)
        while not is_ours:
            if not is_brief:
                logger.info("another process builds the index %s: waiting for it", key)
            with _shown(directory, key, show_progress and not is_brief, look_seconds):
                is_ours = _acquire(directory, key, held, _wait_for)
        place = Workplace(directory, key)
        try:
            place.sweep()
            yield place
        finally:
            if os.getpid() == pid:
                place.sweep()
    except Exception as error:
        if _is_removed(error, directory):
            raise CacheDirectoryError(
                f"{directory} was removed, or a file in it, while the index {key} was built there ({error}): open the dataset "
                "anew"
            ) from error
        if _is_of_the_disk(error):
            raise CacheDiskError(
                f"the index {key} cannot be written into {directory} ({error}): free space on that disk, and where TMPDIR is, "
                "which SQLite sorts in; or look at its health and its rights"
            ) from error
        raise
    finally:
        try:
            _release(directory, key, held, pid)
        except BaseException:  # of a handler before it: this process would wait for its own lock for ever
            _release(directory, key, held, pid)
            raise


def _is_removed(error: Exception, directory: Path) -> bool:
    """Return whether an error is one of what another program has removed here; what lies elsewhere is named by who reads it."""
    if isinstance(error, SqlStreamError):
        return False
    is_here = isinstance(error, FileNotFoundError) and str(error.filename).startswith(f"{directory}{os.sep}")
    return is_here or not os.path.isdir(directory)


def _is_of_the_disk(error: Exception) -> bool:
    """Return whether an error of what writes here, Python, SQLite, Arrow or DuckDB, is one of the disk."""
    if isinstance(error, SqlStreamError):
        return False
    if isinstance(error, sqlite3.Error):
        return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _SQLITE_OF_THE_DISK
    if isinstance(error, OSError) and error.errno in _ERRNO_OF_THE_DISK:
        return True
    return type(error).__name__ == "IOException" and any(os.strerror(number) in str(error) for number in _ERRNO_OF_THE_DISK)


def build_once(
    directory: Path,
    key: str,
    find: Callable[[], T | None],
    build: Callable[[Workplace], T],
    *,
    show_progress: bool = False,
    is_brief: bool = False,
) -> T:
    """Return what `find` finds, else what `build` makes: one process at a time, and none after another one has done it.

    Args:
        directory: Where index files are.
        key: What is built.
        find: Returns it, or None when it is not there, or damaged.
        build: Makes it.
        show_progress: As for `workplace`.
        is_brief: As for `workplace`.
    """
    if (found := find()) is not None:
        return found
    with workplace(directory, key, show_progress=show_progress, is_brief=is_brief) as place:
        found = find()  # another process may have built it while we waited
        return build(place) if found is None else found


def sweep_dead(directory: Path) -> None:
    """Remove what builders that died have left in `directory`; those at work are not disturbed."""
    try:
        keys = {path.name.partition(".")[0] for path in directory.iterdir() if _TEMPORARY in path.name or path.suffix == _LOCK}
    except FileNotFoundError:  # removed a moment ago: who builds there says so
        return
    for key in keys:
        held: list[int] = []
        try:
            if _acquire(directory, key, held, locks.try_lock):
                Workplace(directory, key).sweep()
        except IndexDatabaseError as error:  # a stranger in the place of another index's lock does not concern us
            logger.warning("%s", error)
        finally:
            try:
                _release(directory, key, held)
            except BaseException:  # of a handler before it
                _release(directory, key, held)
                raise


def sync(path: Path) -> None:
    """Have a file, or the names in a directory, survive a power cut."""
    with locks.uninterrupted():  # a handler that raised between two lines would leave it open
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _wait_for(fd: int) -> bool:
    """Wait for the process that has the lock; signals are handed over meanwhile."""
    section = locks.uninterrupted()
    while not lock_blocking(fd):
        locks.unlock(fd)
        section.let_through()
    return True


def _acquire(directory: Path, key: str, held: list[int], lock: Callable[[int], bool]) -> bool:
    """Open and lock the lock file; put the descriptor into `held`, before a handler can raise. False if `lock` refuses."""
    path = directory / (key + _LOCK)
    with locks.uninterrupted():
        while True:
            check_plain(path)
            fd = locks.open_descriptor(path, os.O_RDWR | os.O_CREAT)
            try:
                if not lock(fd):
                    return False
                if _is_still(path, fd):  # else its holder has removed it meanwhile, and a newer one counts
                    held.append(fd)
                    return True
            finally:
                if fd not in held:
                    locks.close_descriptor(fd)


@contextlib.contextmanager
def _shown(directory: Path, key: str, show: bool, look_seconds: float) -> Iterator[None]:
    """Show how many bytes another builder has written, while the body waits for it."""
    if not show:
        yield
        return
    with progress(None, "B", "waiting for the index that another process builds", show) as bar:
        is_over = threading.Event()
        watcher = threading.Thread(
            target=_watch, args=(directory, key, bar, is_over, look_seconds), name="waiting", daemon=True
        )
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()


def _watch(directory: Path, key: str, bar: Progress, is_over: threading.Event, look_seconds: float) -> None:
    seen = 0
    while not is_over.wait(look_seconds):
        written = 0
        for path in directory.glob(f"{key}.*{_TEMPORARY}"):
            with contextlib.suppress(FileNotFoundError):
                written += path.stat().st_size
        bar.update(max(0, written - seen))
        seen = max(seen, written)


def _release(directory: Path, key: str, held: list[int], pid: int | None = None) -> None:
    """Give the lock back, if it is held, and by process `pid` if that is given; safe to call twice."""
    with locks.uninterrupted():
        if held and pid in (None, os.getpid()):
            try:
                (directory / (key + _LOCK)).unlink(missing_ok=True)  # while it is ours
            finally:
                locks.close_descriptor(held.pop())


def _is_still(path: Path, fd: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(fd))
    return False
