"""Removing entries on request: everything, a dataset's, or what has not been used for long; never a pinned file."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from sqlstream.cache.acquire.room import MAX_EVICTIONS
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.ledger.last_uses import RecentUses
from sqlstream.cache.ledger.ledger import Ledger
from sqlstream.cache.model.rows import EntryRow
from sqlstream.cache.recovery import recover
from sqlstream.errors import ConfigError
from sqlstream.process import locks


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearReport:
    """What `clear` removed, and what it left."""

    removed_entries: int = 0
    removed_bytes: int = 0
    kept_pinned_entries: int = 0
    """Pinned by a row or read under a lock, or not to be removed: the log says why."""
    kept_pinned_bytes: int = 0
    kept_filling_entries: int = 0
    removed_index_files: int = 0


def clear(ledger: Ledger, disk: Disk, *, dataset: str | None, older_than_seconds: float | None, index: bool) -> ClearReport:
    """Remove what matches, `MAX_EVICTIONS` files a transaction, so that others go on meanwhile.

    Args:
        ledger: The account.
        disk: The files.
        dataset: Only entries of the dataset of this name.
        older_than_seconds: Only files whose last use that the ledger knows is so long ago; 0: all.
        index: Index files that no process uses, too.

    Raises:
        ConfigError: There is no dataset of this name.
    """
    where = "TRUE"
    parameters: tuple[int, ...] = ()
    with ledger.transaction() as tx:
        recover.reap(tx, disk)
        if dataset is not None:
            names = dict(tx.connection.execute("SELECT name, id FROM dataset").fetchall())
            if dataset not in names:
                raise ConfigError(f"no dataset {dataset!r} in this cache: it has {', '.join(sorted(names)) or 'none'}")
            where, parameters = "dataset = ?", (names[dataset],)
    removed_entries = removed_bytes = 0
    read: list[EntryRow] = []
    recent = RecentUses(time.time() - older_than_seconds) if older_than_seconds else None
    after = b""
    while rows := ledger.matching_after(after, MAX_EVICTIONS, where, parameters):
        after = rows[-1].key
        with ledger.transaction() as tx:
            keys = [row.key for row in rows]
            left = tx.pinned()
            if recent is not None:
                left |= recent.among(tx, keys)
            free = [row for row in tx.find(keys).values() if row.is_ready and row.key not in left]
            gone = recover.remove(tx, disk, free)
        read += set(free).difference(gone)
        removed_entries += len(gone)
        removed_bytes += sum(row.charged_bytes for row in gone)
    with ledger.transaction() as tx:
        kept = tx.connection.execute(
            "SELECT count(*), coalesce(sum(charged_bytes), 0) FROM entry WHERE state = 'ready' "
            f"AND key IN (SELECT key FROM pin) AND {where}",
            parameters,
        ).fetchone()
        filling = tx.connection.execute(
            f"SELECT count(*) FROM entry WHERE state = 'filling' AND {where}", parameters
        ).fetchone()
    return ClearReport(
        removed_entries=removed_entries,
        removed_bytes=removed_bytes,
        kept_pinned_entries=kept[0] + len(read),
        kept_pinned_bytes=kept[1] + sum(row.charged_bytes for row in read),
        kept_filling_entries=filling[0],
        removed_index_files=_clear_index(disk) if index else 0,
    )


def _clear_index(disk: Disk) -> int:
    """Remove index files whose lock is free: every process that uses an index holds a shared one."""
    num_removed = 0
    for path in disk.index_files():
        with locks.uninterrupted():
            fd = locks.open_descriptor(path, os.O_RDWR)
            try:
                if locks.try_lock(fd):
                    path.unlink()
                    num_removed += 1
            finally:
                locks.close_descriptor(fd)
    return num_removed
