"""The floor under the file system's free space: a second limit, which others on the same file system fill, too."""

from __future__ import annotations

import contextlib
import os

from sqlstream.cache.files.disk import Disk
from sqlstream.cache.files.layout import filesystem_kind
from sqlstream.cache.ledger.ledger import LedgerTransaction
from sqlstream.cache.model.rows import EntryRow


class FreeSpace:
    """What must stay free, as the users of this process asked for it: the most that anybody did.

    Args:
        disk: The directory's files; its `free_bytes` is asked before each reservation.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._wishes: dict[int, int] = {}
        self.min_bytes = 0
        """What must stay free."""

    def ask(self, user: int, min_free_bytes: int) -> None:
        """Note what one user (a dataset or cache object) of this process wants; 0: nothing any more."""
        self._wishes[user] = min_free_bytes
        self.min_bytes = max(self._wishes.values())

    def missing_bytes(self, tx: LedgerTransaction, need_bytes: int) -> int:
        """Return how many bytes must be freed before `need_bytes` more may be counted; 0: none.

        What is counted and not yet allocated is as good as taken.
        """
        if not self.min_bytes:
            return 0
        missing = self.min_bytes + need_bytes - self._disk.free_bytes()
        if missing + tx.account().filling_bytes <= 0:
            return 0
        return max(0, missing + sum(_unallocated_bytes(self._disk, row) for row in tx.fillings()))

    def can_ever_hold(self, tx: LedgerTransaction, need_bytes: int) -> bool:
        """Return whether there were room for `need_bytes` if all of the cache were given up."""
        return not self.min_bytes or need_bytes + self.min_bytes <= self._disk.free_bytes() + tx.account().charged_bytes

    def describe(self) -> str:
        """Return file system, free space and floor as a clause of an error."""
        kind = filesystem_kind(self._disk.root)
        return (
            f"the {kind or 'unknown'} file system of {self._disk.root} has {self._disk.free_bytes()} bytes free, of which "
            f"min_free_bytes={self.min_bytes} must stay"
        )


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
