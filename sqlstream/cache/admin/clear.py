"""Removing entries on request: everything, a dataset's, or what has not been used for long; never a pinned file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from sqlstream.cache.acquire.room import MAX_EVICTIONS
from sqlstream.cache.files import locked_files
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.ledger.last_uses import RecentUses
from sqlstream.cache.ledger.ledger import Ledger, LedgerTransaction
from sqlstream.cache.model.rows import EntryRow
from sqlstream.cache.recovery import recover
from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError

_TEMPORARY = ".tmp"
"""In the name of what a builder of an index writes; see `index.file.workplace`."""


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
        ConfigError: There is no dataset of this name, or `older_than_seconds` is no time.
    """
    from sqlstream.cache.ledger import queries

    if older_than_seconds is not None:
        check_at_least("older_than_seconds", older_than_seconds, 0.0)
    dataset_id = ledger.run(lambda tx: _begin(tx, disk, dataset))
    removed_entries = removed_bytes = 0
    read: list[EntryRow] = []
    recent = RecentUses(time.time() - older_than_seconds) if older_than_seconds else None
    after = b""
    while rows := ledger.ready_after(after, MAX_EVICTIONS, dataset_id):
        after = rows[-1].key
        removed = ledger.run(partial(_remove, disk=disk, keys=[row.key for row in rows], recent=recent))
        read += removed.read
        removed_entries += len(removed.gone)
        removed_bytes += sum(row.charged_bytes for row in removed.gone)
    with ledger.transaction() as tx:
        pinned = queries.ready_and_pinned(tx.connection, dataset_id)
        num_filling = queries.num_filling(tx.connection, dataset_id)
    return ClearReport(
        removed_entries=removed_entries,
        removed_bytes=removed_bytes,
        kept_pinned_entries=pinned["entries"] + len(read),
        kept_pinned_bytes=pinned["bytes"] + sum(row.charged_bytes for row in read),
        kept_filling_entries=num_filling,
        removed_index_files=_clear_index(disk) if index else 0,
    )


class _Removed(NamedTuple):
    """What one transaction removed, and what a process reads under a lock."""

    gone: list[EntryRow]
    read: set[EntryRow]


def _begin(tx: LedgerTransaction, disk: Disk, dataset: str | None) -> int | None:
    """Give back what the dead held, and return the number of a dataset; None: all of them."""
    from sqlstream.cache.ledger import queries

    recover.reap(tx, disk)
    if dataset is None:
        return None
    ids = queries.dataset_ids(tx.connection)
    if dataset not in ids:
        raise ConfigError(f"no dataset {dataset!r} in this cache: it has {', '.join(sorted(ids)) or 'none'}")
    return ids[dataset]


def _remove(tx: LedgerTransaction, *, disk: Disk, keys: Sequence[bytes], recent: RecentUses | None) -> _Removed:
    left = tx.pinned()
    if recent is not None:
        left |= recent.among(tx, keys)
    free = [row for row in tx.find(keys).values() if row.is_ready and row.key not in left]
    gone = recover.remove(tx, disk, free)
    return _Removed(gone, set(free).difference(gone))


def _clear_index(disk: Disk) -> int:
    """Remove index files whose lock is free: every process that uses an index holds a shared one.

    A builder holds the lock of its `.lock` file, and none on its temporary files; names with a dot in front are a moment old.
    """
    num_removed = 0
    for path in disk.index_files():
        builder = path.with_name(f"{path.name.partition('.')[0]}.lock")
        is_temporary = _TEMPORARY in path.name
        if not path.name.startswith(".") and not (is_temporary and locked_files.is_locked(str(builder))):
            num_removed += locked_files.unlink_unlocked(str(path))
    return num_removed
