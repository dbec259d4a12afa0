"""What the ledger knows of shards: which of their members are here, and in what unit each dataset fetches them."""

from __future__ import annotations

from typing import NamedTuple

from sqlstream.cache.ledger.ledger import ENTRY_COLUMNS, Ledger, LedgerTransaction
from sqlstream.cache.model.rows import EntryRow
from sqlstream.config import ShardUnit

_CHOSEN = (
    "SELECT owner, unit, reason FROM shard_unit WHERE dataset = ? AND wish = ? AND epoch = ? "
    "AND unit IN ('members', 'whole')"  # what else a damaged row has is chosen anew
)


class ShardWish(NamedTuple):
    """Who asks in what unit shards are fetched."""

    dataset: int
    """Its id."""
    wish: str
    """What was asked for, and what is taken of the shards."""
    epoch: int


class ChosenUnit(NamedTuple):
    """In what unit shards are fetched, and why."""

    unit: ShardUnit
    reason: str


def members_of(tx: LedgerTransaction, shard: bytes) -> list[EntryRow]:
    """Return the members of a shard that are here or on their way.

    Args:
        tx: The transaction.
        shard: Key of the whole.
    """
    rows = tx.connection.execute(f"SELECT {ENTRY_COLUMNS} FROM entry INDEXED BY entry_by_shard WHERE shard = ?", (shard,))
    return [EntryRow._make(row) for row in rows.fetchall()]


def chosen_unit(ledger: Ledger, wish: ShardWish) -> tuple[str, ChosenUnit] | None:
    """Return which owner has chosen, and what; None: no process has."""
    rows = ledger.database.read(_CHOSEN, wish)
    return (rows[0][0], ChosenUnit(ShardUnit(rows[0][1]), rows[0][2])) if rows else None


def note_unit(tx: LedgerTransaction, wish: ShardWish, owner: str, chosen: ChosenUnit, instead_of: str | None) -> bool:
    """Note what an owner has chosen, in place of what another has that is dead, and of earlier epochs.

    Returns:
        False if a third process was faster.
    """
    row = tx.connection.execute(_CHOSEN, wish).fetchone()
    if row is not None and row[0] != instead_of:
        return False
    tx.connection.execute("DELETE FROM shard_unit WHERE dataset = ? AND wish = ? AND epoch <= ?", wish)
    tx.connection.execute("INSERT INTO shard_unit VALUES (?, ?, ?, ?, ?, ?)", (*wish, owner, chosen.unit.value, chosen.reason))
    return True
