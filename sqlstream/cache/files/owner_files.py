"""The files of owners: one for each process that uses a cache, locked for its life."""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Callable, Collection
from typing import NamedTuple

from sqlstream.cache.files import layout, locked_files
from sqlstream.cache.model import refs
from sqlstream.errors import CacheDirectoryError
from sqlstream.process import locks

_NOTE = struct.Struct("<qqQ")


class OwnerNote(NamedTuple):
    """What an owner's file says of it."""

    pid: int
    limit_bytes: int | None
    pinned: Collection[bytes]


class OwnerFiles:
    """The folder of owner files of one cache directory.

    Args:
        folder: The folder.
        make_folders: Makes it where it is gone.
        on_full: Gives room to a full disk.
    """

    def __init__(self, folder: str, make_folders: Callable[[], None], on_full: Callable[[], None]) -> None:
        self._folder = folder
        self._make_folders = make_folders
        self._on_full = on_full

    def create(self, owner: str) -> int:
        """Return the locked descriptor of a new owner file; under the write lock, and before its row exists.

        Raises:
            CacheDirectoryError: A stranger holds the file's lock.
        """
        path = f"{self._folder}/{owner}"
        try:
            fd = locked_files.create_locked(path)
        except FileNotFoundError:
            self._make_folders()
            fd = locked_files.create_locked(path)
        if fd is None:
            raise CacheDirectoryError(f"another program than sqlstream locks files in {self._folder}: find out which")
        return locks.raise_descriptor(fd)  # a file that this process reads is closed before its pins are free

    def write_note(self, fd: int, note: OwnerNote) -> None:
        """Write down what a rebuild of the ledger must know of an owner."""
        body = b"".join(note.pinned)
        head = _NOTE.pack(note.pid, -1 if note.limit_bytes is None else note.limit_bytes, len(body))
        locked_files.write_note(fd, head + body, self._on_full)

    def read_note(self, owner: str) -> OwnerNote | None:
        """Return what an owner wrote down last; None when it has not yet."""
        with contextlib.suppress(FileNotFoundError):
            raw = locked_files.read_note(f"{self._folder}/{owner}")
            if len(raw) >= _NOTE.size:
                pid, limit_bytes, length = _NOTE.unpack_from(raw)
                pinned = refs.split_keys(raw[_NOTE.size : _NOTE.size + length])
                return OwnerNote(pid=pid, limit_bytes=None if limit_bytes < 0 else limit_bytes, pinned=pinned)
        return None

    def remove_dead(self, owner: str) -> None:
        """Unlink an owner file that has no row, unless a process holds it; only under the write lock."""
        locked_files.unlink_unlocked(f"{self._folder}/{owner}")

    def is_live(self, owner: str) -> bool:
        """Return whether the process behind an owner file lives: the kernel holds its lock."""
        return bool(locked_files.is_locked(f"{self._folder}/{owner}"))

    def remove(self, owner: str) -> None:
        """Unlink a dead owner's file; only under the write lock."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._folder}/{owner}")

    def scan(self) -> list[str]:
        """Return the ids of all owner files."""
        return [file.name for file in layout.entries_of(self._folder) if re.fullmatch(r"[0-9a-f]{32}", file.name)]
