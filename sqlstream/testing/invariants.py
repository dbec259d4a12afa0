"""The promises of a cache directory, checked from outside: what the ledger says against what the disk holds.

L1 charged ≥ bytes on disk. L2 charged ≤ limit. L3 totals equal the sums. L4 a file in data/ is complete. L5 a pinned file is
there. L6 at most one live leader per key. L7 at rest, after reaping, charged equals the disk. (L8, no process waits for room
while it holds pins of unyielded samples, is a property of processes; it shows as a deadlock.) One unit: a shard is there whole,
or by members.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sqlstream.cache.files.disk import Disk
from sqlstream.cache.ledger.database import Database
from sqlstream.cache.ledger.ledger import Ledger, LedgerTransaction
from sqlstream.cache.model.rows import EntryRow
from sqlstream.cache.recovery import rebuild, recover

REST_SECONDS = 120.0
"""Longest time that a helper outlives its process on a busy machine; it looks for its parent every 2 s."""


def check_invariants(directory: str | os.PathLike[str], *, at_rest: bool = False) -> None:
    """Raise AssertionError, with every broken promise and its numbers, unless the cache directory keeps L1 to L7.

    Runs under the write lock, so it may be called while others work.

    Args:
        directory: The cache directory.
        at_rest: No process uses it any more: reap first, then L7 must hold, too.
    """
    found = violations(directory, at_rest=at_rest)
    assert not found, f"{directory}: " + "; ".join(found)


def violations(directory: str | os.PathLike[str], *, at_rest: bool = False) -> list[str]:
    """Return every broken promise of a cache directory as a line of text; see `check_invariants`."""
    disk = Disk(Path(directory))
    if at_rest:
        _wait_for_helpers(disk)
    database = Database(disk.root / "ledger.sqlite", refill=lambda connection: rebuild.refill(connection, disk))
    try:
        database.read("SELECT * FROM entry LIMIT 1")  # a damaged ledger is rebuilt here
        disk.unit.num_bytes = Ledger(database).unit()[0] or disk.unit.num_bytes
        with Ledger(database).transaction() as tx:
            if at_rest:
                recover.reap(tx, disk)
            return [*_of_account(tx, disk), *_of_entries(tx, disk), *(_of_rest(tx, disk) if at_rest else ())]
    finally:
        database.close()


def _wait_for_helpers(disk: Disk) -> None:
    """Wait until the helpers of killed processes have ended, too; a moment, and they hold their parts until then."""
    deadline = time.monotonic() + REST_SECONDS
    while any(map(disk.part_is_live, disk.scan_parts())) and time.monotonic() < deadline:
        time.sleep(0.01)


def _rows(tx: LedgerTransaction) -> list[EntryRow]:
    query = "SELECT key, state, size, charged_bytes, part, ext, url FROM entry"
    return [EntryRow._make(row) for row in tx.connection.execute(query).fetchall()]


def _of_account(tx: LedgerTransaction, disk: Disk) -> Iterator[str]:
    account, sums = tx.account(), tx.sums()
    on_disk = sum(file.allocated_bytes for file in disk.scan_data()) + sum(map(disk.allocated_part_bytes, disk.scan_parts()))
    if account.charged_bytes < on_disk:
        yield f"L1: {account.charged_bytes} bytes charged, {on_disk} on disk"
    given = [row[0] for row in tx.connection.execute("SELECT limit_bytes FROM owner WHERE limit_bytes IS NOT NULL").fetchall()]
    limit_bytes = min([*given, *([] if account.limit_bytes is None else [account.limit_bytes])], default=None)
    if limit_bytes is not None and account.charged_bytes > limit_bytes:
        yield f"L2: {account.charged_bytes} bytes charged, the limit is {limit_bytes}"
    if (account.entries, account.ready_bytes, account.filling_bytes) != sums:
        yield f"L3: totals are {account.entries, account.ready_bytes, account.filling_bytes}, the sums {sums}"


def _of_entries(tx: LedgerTransaction, disk: Disk) -> Iterator[str]:
    # Pins of a process that has died are none, though its row stays until it is reaped: an emergency asks the files alone.
    pins = tx.connection.execute("SELECT key, owner FROM pin").fetchall()
    live = {owner for owner in {owner for _, owner in pins} if disk.owners.is_live(owner)}
    pinned = {key for key, owner in pins if owner in live}
    for row in _rows(tx):
        if not row.is_ready:
            continue
        size_bytes = disk.data_size(row.key, row.ext)
        if size_bytes is None and row.key in pinned:
            yield f"L5: {row.key.hex()} is pinned, its file is gone"
        elif size_bytes is not None and size_bytes != row.size_bytes:
            yield f"L4: {row.key.hex()} has {size_bytes} bytes, its row says {row.size_bytes}"
    both = "SELECT DISTINCT whole.url FROM entry AS member JOIN entry AS whole ON whole.key = member.shard"
    for (url,) in tx.connection.execute(both).fetchall():
        yield f"one unit: {url} is there whole and by members"
    leaders = Counter(name.partition(".")[0] for name in disk.scan_parts() if disk.part_is_live(name))
    rowless = {name.partition(".")[0] for name in disk.scan_parts()} - {row.key.hex() for row in _rows(tx)}
    for key, num_leaders in leaders.items():
        # A part is created before the write lock is taken; the loser of that race gives it up, without a byte.
        num_filled = sum(disk.allocated_part_bytes(name) > 0 for name in disk.scan_parts() if name.startswith(key))
        if num_filled > 1 and key not in rowless:
            yield f"L6: {key} has {num_leaders} live leaders"


def _of_rest(tx: LedgerTransaction, disk: Disk) -> Iterator[str]:
    account = tx.account()
    on_disk = sum(disk.unit.charge(file.size_bytes) for file in disk.scan_data())
    if account.charged_bytes != on_disk or account.filling_bytes:
        yield f"L7: {account.ready_bytes} + {account.filling_bytes} bytes charged at rest, {on_disk} on disk"
    if parts := disk.scan_parts():
        yield f"L7: parts are left at rest: {parts}"
    if owners := tx.owners():
        yield f"L7: owners are left at rest: {owners}"
    if files := disk.owners.scan():
        yield f"L7: owner files are left at rest: {files}"
