"""Making room under the limit: who is evicted, in which order of effects, and who may take the room.

Unlink, then uncount: whatever dies in between, the ledger counts too much, never too little.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from enum import Enum, auto

from sqlstream.cache import recover
from sqlstream.cache.disk import Disk
from sqlstream.cache.eviction import drain_touches, unpinned_in_order
from sqlstream.cache.free_space import FreeSpace
from sqlstream.cache.ledger import LedgerTransaction
from sqlstream.cache.rows import EntryRow

MAX_EVICTIONS = 32
"""Files unlinked in one transaction, so that the door is held for milliseconds."""
MAX_LOOKED_AT = 4096
"""Entries whose files are tried in one transaction, many more than processes read at once: on a disk that removes nothing
(read-only, failing) an eviction must end."""
MAX_DRAINED_TOUCHES = 20
"""Touch rows (some windows of keys each) drained in one transaction, for the same reason."""
HYSTERESIS = 0.95
"""Evict down to this share of the limit where possible, so that not every reservation has to."""


Run = Callable[[Callable[[LedgerTransaction], int]], int]
"""Runs work in a transaction and returns its result."""


class Room(Enum):
    """What `make_room` found."""

    ENOUGH = auto()
    AGAIN = auto()
    """Progress was made, but one transaction may not do more: commit, then ask again."""
    NONE = auto()
    """Everything left is pinned or on its way: somebody must give something back first."""


def make_room(
    tx: LedgerTransaction,
    disk: Disk,
    need_bytes: int,
    *,
    owner: str,
    keep: Set[bytes] = frozenset(),
    in_line: bool = True,
    free_space: FreeSpace | None = None,
) -> Room:
    """Evict until `need_bytes` more fit under the limit, and leave free what must stay free.

    Args:
        tx: The transaction that will then count the bytes.
        disk: Where the files are.
        need_bytes: What is to be counted.
        owner: Who asks.
        keep: Keys that are about to be pinned in this transaction.
        in_line: Leave room for owners that have waited longer; False for whoever has waited long enough.
        free_space: What must stay free; None: nothing.
    """
    account = tx.account()
    wanted = need_bytes + (_claims_before(tx, disk, owner) if in_line and account.limit_bytes is not None else 0)
    short_bytes = 0 if free_space is None else free_space.missing_bytes(tx, need_bytes)
    if account.has_room(wanted):
        return Room.ENOUGH if not short_bytes else _make_free(tx, disk, short_bytes, keep)
    assert account.limit_bytes is not None
    if forget_limit_of_the_dead(tx, disk, owner):
        return Room.AGAIN
    if wanted > account.limit_bytes:
        return Room.NONE  # those before us take all of it: no eviction of ours helps
    if recover.reap_owners(tx, disk) or drain_touches(tx, MAX_DRAINED_TOUCHES):
        return Room.AGAIN  # the dead give back before the living lose anything
    missing = max(short_bytes, account.charged_bytes + wanted - account.limit_bytes)
    surplus = account.charged_bytes + wanted - int(account.limit_bytes * HYSTERESIS)
    freed = evict(tx, disk, max(missing, surplus), keep=keep)
    if freed >= missing:
        return Room.ENOUGH
    return Room.AGAIN if freed or recover.reap(tx, disk) else Room.NONE


def _make_free(tx: LedgerTransaction, disk: Disk, num_bytes: int, keep: Set[bytes]) -> Room:
    """Give the file system `num_bytes` back."""
    if drain_touches(tx, MAX_DRAINED_TOUCHES):
        return Room.AGAIN
    freed = evict(tx, disk, num_bytes, keep=keep)
    if freed >= num_bytes:
        return Room.ENOUGH
    return Room.AGAIN if freed or recover.reap(tx, disk) else Room.NONE


def evict(tx: LedgerTransaction, disk: Disk, num_bytes: int, *, keep: Set[bytes] = frozenset()) -> int:
    """Evict unpinned entries in the order of the policy, at most `MAX_EVICTIONS`, for `num_bytes`; return the bytes freed."""
    width = 4 * MAX_EVICTIONS + len(keep)
    gone: list[EntryRow] = []
    while num_bytes > 0:
        rows = unpinned_in_order(tx, width)
        free = [row for row in rows if row.key not in keep]
        gone = recover.remove(tx, disk, free, num_bytes=num_bytes, at_most=MAX_EVICTIONS)
        if gone or len(rows) < width or width >= MAX_LOOKED_AT:
            break
        width *= 4  # somebody reads all of these, or they cannot be removed: look further
    freed = sum(row.charged_bytes for row in gone)
    tx.count({"evictions": len(gone), "evicted_bytes": freed})
    return freed


def make_space(run: Run, disk: Disk, need_bytes: int) -> None:
    """Give a full disk `need_bytes` back, and some more: by eviction, whatever the limit says."""
    wanted = run(lambda tx: max(need_bytes, int((1 - HYSTERESIS) * tx.account().charged_bytes)))
    while wanted > 0 and (freed := run(lambda tx, rest=wanted: evict(tx, disk, rest))):  # type: ignore[misc]  # default of a lambda
        wanted -= freed


def _claims_before(tx: LedgerTransaction, disk: Disk, owner: str) -> int:
    """Return the bytes that living owners wait for since longer than `owner`: the oldest waiter goes first."""
    claims = 0
    for waiter, waiting_bytes in tx.waits_before(owner).items():
        if disk.owner_is_live(waiter):
            claims += waiting_bytes
    return claims


def forget_limit_of_the_dead(tx: LedgerTransaction, disk: Disk, owner: str) -> bool:
    """Return whether the limit in force was that of owners who are dead; they are reaped then. Ask before a limit refuses."""
    bound = tx.owners_at_limit()
    return owner not in bound and not any(disk.owner_is_live(other) for other in bound) and recover.reap_owners(tx, disk) > 0
