"""Who goes first: uses noted in the touch log, drained into the entries' ranks by the process that needs room. SQL only.

A hit writes no entry: a window of uses is one row of `touch` (updates in place cost ten times the pins). `belady` adds
8 bytes a key: when it is used next, on a clock that counts the uses of this cache.

**One policy a directory.** Its name stands in the ledger. Who opens the directory with `eviction_policy=` sets it, unless
another living process holds to a different one by name: then that one stays, and the newcomer is told. Who gives no name has
no say. What the ranks meant to another policy is forgotten with the next evictions, some hundreds a transaction (a million at
once would hold the write lock for seconds); recency stays.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from sqlstream.cache.ledger.ledger import LedgerTransaction
from sqlstream.cache.model.policies import Policy, policy_in_ledger
from sqlstream.cache.model.refs import split_keys
from sqlstream.cache.model.rows import EntryRow

MAX_FORGOTTEN = 512
"""Ranks forgotten in one transaction: some ten milliseconds, and many more than are evicted in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionState:
    """What the ledger says of eviction."""

    policy: Policy
    num_uses: int
    """The clock of policies that look ahead."""


def eviction_state(tx: LedgerTransaction) -> EvictionState:
    """Return the policy in force and its clock."""
    name, num_uses = tx.connection.execute("SELECT policy, uses FROM meta").fetchone()
    return EvictionState(policy=policy_in_ledger(name), num_uses=num_uses)


def choose(tx: LedgerTransaction, owner: str, wish: str | None) -> str:
    """Note which policy an owner asks for, put it in force if no other owner objects, and return the one in force."""
    execute = tx.connection.execute
    current = str(execute("SELECT policy FROM meta").fetchone()[0])
    rival = execute("SELECT 1 FROM owner WHERE policy IS NOT NULL AND id <> ?", (owner,)).fetchone()
    if wish is not None and wish != current and rival is None:
        execute("UPDATE meta SET policy = ?", (wish,))
        current = wish
    execute("UPDATE owner SET policy = ? WHERE id = ?", (current if wish == current else None, owner))
    return current


def advance(tx: LedgerTransaction, num_uses: int) -> None:
    """Move the clock of the uses on."""
    tx.connection.execute("UPDATE meta SET uses = uses + ?", (num_uses,))


def note_uses(tx: LedgerTransaction, policy: Policy, ranks: Mapping[bytes, int | None]) -> None:
    """Note that objects were used now, each with its rank until its next use: one small row for a whole window."""
    if policy.on_use is None:
        return
    hints = struct.pack(f"<{len(ranks)}q", *(rank or 0 for rank in ranks.values())) if policy.looks_ahead else None
    tx.touch(list(ranks), hints)


def drain_touches(tx: LedgerTransaction, max_rows: int) -> bool:
    """Move up to `max_rows` touches, oldest first, into the entries; return whether more are left."""
    rows = tx.connection.execute("SELECT seq, keys, hints FROM touch ORDER BY seq LIMIT ?", (max_rows,)).fetchall()
    if not rows:
        return False
    policy = eviction_state(tx).policy
    uses: list[tuple[int, bytes, int] | tuple[int, int, bytes, int]] = []
    for seq, body, hints in rows:
        keys = split_keys(body)
        ticks = range(seq - len(keys) + 1, seq + 1)  # as `touch` has counted them
        if policy.looks_ahead:
            ranks = struct.unpack(f"<{len(keys)}q", hints or bytes(8 * len(keys)))
            uses += zip(ticks, ranks, keys, ticks, strict=True)
        else:
            uses += zip(ticks, keys, ticks, strict=True)
    if policy.on_use is not None:
        tx.connection.executemany(
            f"UPDATE entry SET {policy.on_use} WHERE key = ? AND state = 'ready' AND tick < ?",
            uses,
        )
    tx.connection.execute("DELETE FROM touch WHERE seq <= ?", (rows[-1][0],))
    return len(rows) == max_rows


def unpinned_in_order(tx: LedgerTransaction, limit: int) -> list[EntryRow]:
    """Return ready entries without a pin, those that the policy would evict first in front."""
    _forget_stale(tx, eviction_state(tx).policy)
    pinned = tx.pinned()
    cursor = tx.connection.execute(
        "SELECT key, state, size, charged_bytes, part, ext, url FROM entry INDEXED BY entry_by_rank WHERE state = 'ready' "
        "ORDER BY rank, tick"
    )
    try:
        return [EntryRow._make(row) for row in islice((row for row in cursor if row[0] not in pinned), limit)]
    finally:
        cursor.close()


def _forget_stale(tx: LedgerTransaction, policy: Policy) -> None:
    """Drop ranks that mean nothing to the policy."""
    if policy.stale_above is not None:
        tx.connection.execute(
            "UPDATE entry SET rank = NULL WHERE key IN (SELECT key FROM entry INDEXED BY entry_by_rank "
            f"WHERE state = 'ready' AND rank > {policy.stale_above} LIMIT ?)",
            (MAX_FORGOTTEN,),
        )
