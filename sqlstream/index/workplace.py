"""Where index files grow: one builder a fingerprint, temporary names, and nothing left of builders that died.

Whoever makes or removes temporary files of a fingerprint holds the kernel lock on `<fingerprint>.lock`, from before the first
of them exists until the last is renamed or gone. So a temporary file whose lock is free belongs to nobody.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from sqlstream import locks

logger = logging.getLogger(__name__)

_LOCK, _TEMPORARY = ".lock", ".tmp"


class Workplace:
    """The right to build one fingerprint, and the temporary files of doing so."""

    def __init__(self, directory: Path, key: str) -> None:
        self._directory, self._key = directory, key

    def temporary(self, what: str = "part") -> Path:
        """Return a new path for a temporary file."""
        return self._directory / f"{self._key}.{uuid.uuid4().hex[:12]}.{what}{_TEMPORARY}"

    def publish(self, temporary: Path, name: str) -> Path:
        """Rename a whole, synced file to its final name; after this it survives a power cut."""
        path = self._directory / name
        os.rename(temporary, path)
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        return path

    def sweep(self) -> None:
        """Remove this fingerprint's temporary files."""
        for path in self._directory.glob(f"{self._key}.*{_TEMPORARY}*"):  # SQLite may have left a -journal beside one
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def workplace(directory: Path, key: str) -> Iterator[Workplace]:
    """Yield the right to build `key`, after waiting for whoever has it; temporary files that the body leaves are removed."""
    fd = _acquire(directory, key, must_wait=True)
    assert fd is not None
    place = Workplace(directory, key)
    try:
        place.sweep()
        yield place
    finally:
        place.sweep()
        _release(directory, key, fd)


def sweep_dead(directory: Path) -> None:
    """Remove what builders that died have left in `directory`; those at work are not disturbed."""
    keys = {path.name.partition(".")[0] for path in directory.iterdir() if _TEMPORARY in path.name or path.suffix == _LOCK}
    for key in keys:
        fd = _acquire(directory, key, must_wait=False)
        if fd is not None:
            Workplace(directory, key).sweep()
            _release(directory, key, fd)


def _acquire(directory: Path, key: str, *, must_wait: bool) -> int | None:
    """Return the locked descriptor, or None when another one has it and we must not wait."""
    path = directory / (key + _LOCK)
    while True:
        fd = locks.open_descriptor(path, os.O_RDWR | os.O_CREAT)
        try:
            if not locks.try_lock(fd):
                if not must_wait:
                    locks.close_descriptor(fd)
                    return None
                logger.warning("another process builds the index %s: waiting for it", key)
                locks.lock_blocking(fd)
            if _is_still(path, fd):  # else its holder has removed it meanwhile, and a newer one counts
                return fd
        except BaseException:
            locks.close_descriptor(fd)
            raise
        locks.close_descriptor(fd)


def _release(directory: Path, key: str, fd: int) -> None:
    (directory / (key + _LOCK)).unlink(missing_ok=True)  # while it is ours
    locks.close_descriptor(fd)


def _is_still(path: Path, fd: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(fd))
    return False
