"""A shard is in a cache whole, or by members, never both: what is here, or on its way, wins over what is wished."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from sqlstream.cache.acquire.room import MAX_EVICTIONS, Room
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.ledger.ledger import LedgerTransaction
from sqlstream.cache.ledger.shard_units import members_of
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.model.rows import EntryRow
from sqlstream.cache.recovery import recover


class GivenUp(NamedTuple):
    """What became of the members of a shard."""

    room: Room
    """ENOUGH: none is left; AGAIN: some are left, but one transaction may not remove more; NONE: one is used, or on its way."""
    gone: Sequence[EntryRow] = ()
    """Those that were removed."""


def wholes_of(groups: Iterable[Iterable[ObjectRef]]) -> Set[bytes]:
    """Return the keys of the shards whose members are asked for."""
    return {ref.shard.key for group in groups for ref in group if ref.shard is not None}


def give_up_members(tx: LedgerTransaction, disk: Disk, shard: bytes) -> GivenUp:
    """Evict the members of a shard that is to come whole, unless one of them is pinned, read or on its way.

    Args:
        tx: The transaction that then reserves the whole.
        disk: Where the files are.
        shard: Key of the whole.
    """
    rows = members_of(tx, shard)
    if not rows:
        return GivenUp(Room.ENOUGH)
    if any(not row.is_ready and not recover.settle_filling(tx, disk, row) for row in rows):
        return GivenUp(Room.NONE)
    rows, pinned = members_of(tx, shard), tx.pinned()
    if any(row.key in pinned for row in rows):
        return GivenUp(Room.NONE)
    gone = recover.remove(tx, disk, rows, at_most=MAX_EVICTIONS)
    tx.count({"evictions": len(gone), "evicted_bytes": sum(row.charged_bytes for row in gone)})
    if len(gone) == len(rows):
        return GivenUp(Room.ENOUGH, gone)
    return GivenUp(Room.AGAIN if len(gone) == MAX_EVICTIONS else Room.NONE, gone)
