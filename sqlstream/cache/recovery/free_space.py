"""What the file system leaves to the cache: the floor under its free space, and what it held when it was found full."""

from __future__ import annotations

import contextlib
import os
import time

from sqlstream.cache.files.disk import Disk
from sqlstream.cache.files.layout import filesystem_kind
from sqlstream.cache.ledger.ledger import LedgerTransaction
from sqlstream.cache.model.rows import EntryRow
from sqlstream.errors import CacheDiskError, CacheError, CacheFullError
from sqlstream.storage.base.urls import redact

FULL_SECONDS = 60.0
"""How long a disk that was found full counts as full: others may leave it meanwhile. Arbitrary."""


class FreeSpace:
    """What must stay free, as the users of this process asked for it: the most that anybody did.

    A disk that is full before that has a limit, too: what the cache had there when it was found full, of bytes, inodes or a
    quota, of which statistics name the first alone.

    Args:
        disk: The directory's files; its `free_bytes` is asked before each reservation.
        full_seconds: How long a disk that was found full counts as full.
    """

    def __init__(self, disk: Disk, full_seconds: float = FULL_SECONDS) -> None:
        self._disk = disk
        self._full_seconds = full_seconds
        self._wishes: dict[int, int] = {}
        self.min_bytes = 0
        """What must stay free."""
        self._held_when_full = self._free_when_full = 0
        """Bytes of the cache on a disk that was found full, and bytes that were free there (inodes or a quota were not)."""
        self._full_until = 0.0

    @property
    def is_bounded(self) -> bool:
        """There is a floor, or the disk was found full a moment ago."""
        return bool(self.min_bytes) or time.monotonic() < self._full_until

    def note_full(self, tx: LedgerTransaction) -> None:
        """Note that the disk has no room, though all was evicted that may be."""
        self._held_when_full, self._free_when_full = self._held_bytes(tx), self._disk.free_bytes()
        self._full_until = time.monotonic() + self._full_seconds

    def ask(self, user: int, min_free_bytes: int) -> None:
        """Note what one user (a dataset or cache object) of this process wants; 0: nothing any more."""
        self._wishes.pop(user, None)
        if min_free_bytes:
            self._wishes[user] = min_free_bytes
        self.min_bytes = max(self._wishes.values(), default=0)

    def missing_bytes(self, tx: LedgerTransaction, need_bytes: int) -> int:
        """Return how many bytes must be freed before `need_bytes` more may be counted; 0: none.

        What is counted and not yet allocated is as good as taken.
        """
        return max(self._missing_to_floor(tx, need_bytes), self._missing_when_full(tx, need_bytes))

    def _missing_to_floor(self, tx: LedgerTransaction, need_bytes: int) -> int:
        if not self.min_bytes:
            return 0
        missing = self.min_bytes + need_bytes - self._disk.free_bytes()
        if missing + tx.account().filling_bytes <= 0:
            return 0
        return max(0, missing + self._unallocated_bytes(tx))

    def _missing_when_full(self, tx: LedgerTransaction, need_bytes: int) -> int:
        if need_bytes > self._held_when_full or time.monotonic() >= self._full_until:  # if it is so large, the disk will tell
            return 0
        missing = tx.account().charged_bytes + need_bytes - self._held_when_full
        if missing <= 0:
            return 0
        given_back = self._held_when_full - self._held_bytes(tx)
        left_by_others = self._disk.free_bytes() - self._free_when_full - given_back
        return max(0, missing - max(0, left_by_others))

    def _held_bytes(self, tx: LedgerTransaction) -> int:
        return tx.account().charged_bytes - self._unallocated_bytes(tx)

    def _unallocated_bytes(self, tx: LedgerTransaction) -> int:
        return sum(_unallocated_bytes(self._disk, row) for row in tx.fillings())

    def cannot_hold(self, tx: LedgerTransaction, url: str, need_bytes: int) -> CacheError | None:
        """Return why the object at `url` can never come, were all of the cache given up for it; None: it can."""
        wanted_bytes, free_bytes = need_bytes + self.min_bytes, self._disk.free_bytes()
        if wanted_bytes <= free_bytes or wanted_bytes <= free_bytes + tx.account().charged_bytes:
            return None
        url = redact(url)
        text = f"{url} needs {need_bytes} bytes on disk: {self.describe()}, and the whole cache is too little to give up"
        if self.min_bytes:
            return CacheFullError(f"{text}. Free space there, or lower min_free_bytes", url=url)
        return CacheDiskError(f"{text}. Free space there, or give a directory on a larger disk", url=url)

    def describe(self) -> str:
        """Return file system, free space and what bounds it as a clause of an error."""
        kind = filesystem_kind(self._disk.root)
        text = f"the {kind or 'unknown'} file system of {self._disk.root} has {self._disk.free_bytes()} bytes free"
        if self.min_bytes:
            return f"{text}, of which min_free_bytes={self.min_bytes} must stay"
        return f"{text}, and it was found full" if self.is_bounded else text


def take_first_limit(tx: LedgerTransaction, disk: Disk) -> int | None:
    """Put a limit in force where there was never one: what is here, and half of the free space; return it, else None."""
    if tx.has_limit():
        return None
    limit_bytes = tx.account().charged_bytes + disk.free_bytes() // 2
    tx.take_first_limit(limit_bytes)
    return limit_bytes


def _unallocated_bytes(disk: Disk, row: EntryRow) -> int:
    """Return what an object on its way counts and does not take on disk yet."""
    with contextlib.suppress(FileNotFoundError):
        return max(0, row.charged_bytes - os.lstat(f"{disk.root}/part/{row.part}").st_blocks * 512)
    return 0  # whole and renamed
