"""Room under the limit: who is evicted, in which order of effects, who may take the room, and which limit holds.

Unlink, then uncount: whatever dies in between, the ledger counts too much, never too little. The smallest limit that living
users gave holds; a user who gives none takes what is in force and changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence, Set
from enum import Enum, auto
from typing import NamedTuple

from sqlstream.cache.acquire.holds import Holds
from sqlstream.cache.acquire.owner import Owner
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.ledger.eviction import drain_touches, unpinned_in_order
from sqlstream.cache.ledger.ledger import Ledger, LedgerTransaction
from sqlstream.cache.model.rows import EntryRow
from sqlstream.cache.recovery import recover
from sqlstream.cache.recovery.free_space import FreeSpace
from sqlstream.config import AS_IT_IS, Limit
from sqlstream.disk_room import FULL
from sqlstream.errors import CacheDiskError, CacheError

logger = logging.getLogger(__name__)

MAX_EVICTIONS = 32
"""Files unlinked in one transaction, so that the write lock is held for milliseconds."""
MAX_LOOKED_AT = 4096
"""Entries whose files are tried in one transaction, many more than processes read at once: on a disk that removes nothing
(read-only, failing) an eviction must end."""
MAX_DRAINED_TOUCHES = 20
"""Touch rows (some windows of keys each) drained in one transaction, for the same reason."""
HYSTERESIS = 0.95
"""Evict down to this share of the limit where possible, so that not every reservation has to."""


NUM_TRIES = 3
"""How often a file is written while other processes take what eviction gives back. Arbitrary."""

NUM_INODES = 2
"""What an object takes: a file, and the folder that it may be the first of."""


class Freed(NamedTuple):
    """What an eviction gave back."""

    num_bytes: int
    num_files: int


class Room(Enum):
    """What `make_room` found."""

    ENOUGH = auto()
    AGAIN = auto()
    """Progress was made, but one transaction may not do more: commit, then ask again."""
    NONE = auto()
    """Everything left is pinned or on its way: a process must give something back first."""


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
        in_line: Leave room for owners that have waited longer; False for a process that has waited long enough.
        free_space: What must stay free; None: nothing.
    """
    account = tx.account()
    wanted = need_bytes + (claims_before(tx, disk, owner) if in_line and account.limit_bytes is not None else 0)
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
    freed = evict(tx, disk, max(missing, surplus), keep=keep).num_bytes
    if freed >= missing:
        return Room.ENOUGH
    return Room.AGAIN if freed or recover.reap(tx, disk) else Room.NONE


def _make_free(tx: LedgerTransaction, disk: Disk, num_bytes: int, keep: Set[bytes]) -> Room:
    """Give the file system `num_bytes` back."""
    if drain_touches(tx, MAX_DRAINED_TOUCHES):
        return Room.AGAIN
    freed = evict(tx, disk, num_bytes, keep=keep).num_bytes
    if freed >= num_bytes:
        return Room.ENOUGH
    return Room.AGAIN if freed or recover.reap(tx, disk) else Room.NONE


def evict(
    tx: LedgerTransaction,
    disk: Disk,
    num_bytes: int,
    *,
    num_files: int = 0,
    keep: Set[bytes] = frozenset(),
    at_most: int = MAX_EVICTIONS,
    max_looked_at: int = MAX_LOOKED_AT,
) -> Freed:
    """Evict unpinned entries in the order of the policy, `at_most` of them, for `num_bytes` and `num_files`."""
    width = 4 * at_most + len(keep)
    gone: list[EntryRow] = []
    while num_bytes > 0 or num_files > 0:
        rows = unpinned_in_order(tx, width)
        free = [row for row in rows if row.key not in keep]
        gone = recover.remove(tx, disk, free, num_bytes=num_bytes, num_files=num_files, at_most=at_most)
        if gone or len(rows) < width or width >= max_looked_at:
            break
        width *= 4  # all of these are read, or cannot be removed: look further
    freed = Freed(sum(row.charged_bytes for row in gone), len(gone))
    tx.count({"evictions": freed.num_files, "evicted_bytes": freed.num_bytes})
    return freed


def make_space(owner: Owner, disk: Disk, need_bytes: int, num_files: int) -> None:
    """Give a full disk bytes and inodes back, and some more: by eviction, whatever the limit says.

    Each transaction removes files before its COMMIT needs room in the ledger: so it finds some without the ballast, too.
    """
    left: Freed | None = None

    def evict_some(tx: LedgerTransaction) -> Freed:
        nonlocal left
        left = left or Freed(max(need_bytes, int((1 - HYSTERESIS) * tx.account().charged_bytes)), num_files)
        return evict(tx, disk, left.num_bytes, num_files=left.num_files)

    while left is None or left.num_bytes > 0 or left.num_files > 0:
        freed = owner.run(evict_some)
        if not freed.num_files:
            return
        assert left is not None
        left = Freed(left.num_bytes - freed.num_bytes, left.num_files - freed.num_files)


def says_full(error: BaseException) -> bool:
    """Return whether an error says that the disk has no room, bytes or inodes."""
    causes = error, error.__cause__
    return any(isinstance(cause, OSError) and cause.errno in FULL for cause in causes) or (
        isinstance(error, CacheDiskError) and error.context.get("errno") in FULL
    )


def make_space_after(error: Exception, owner: Owner, disk: Disk, *, need_bytes: int = 0, num_files: int = 1) -> bool:
    """Give a disk room if `error` says that it has none, bytes or inodes; return whether it says so."""
    if not says_full(error):
        return False
    if not disk.was_told_full:  # for an object or a window each: what is evicted, statistics count
        disk.was_told_full = True
        logger.warning(
            "the disk below the cache at %s has no room (%s): evicting to go on", disk.root, str(error.__cause__ or error)
        )
    with contextlib.suppress(CacheError):  # the next try tells what is wrong
        make_space(owner, disk, need_bytes, num_files)
    with contextlib.suppress(CacheError):
        disk.remove_empty_folders()
    return True


def despite_full_disk(owner: Owner, disk: Disk, write: Callable[[], None], *, need_bytes: int = 0) -> None:
    """Call `write`; on a disk without room or inodes, evict and call it again."""
    for num_left in reversed(range(NUM_TRIES)):
        try:
            return write()
        except OSError as error:
            if not num_left or not make_space_after(error, owner, disk, need_bytes=need_bytes):
                raise
    return None


def give_way(
    owner: Owner, disk: Disk, holds: Holds, free_space: FreeSpace, need_bytes: int, *, pauses_seconds: Sequence[float]
) -> bool:
    """On a disk that stays full, give back what is fetched ahead, the half that is needed last, or else the oldest paths.

    Args:
        owner: This process in the ledger.
        disk: Where the files are.
        holds: What it holds.
        free_space: Learns that the disk is full: from then on that is a limit, under which others give back, too.
        need_bytes: What there is no room for.
        pauses_seconds: Between looks at the disk, for others to give back.

    Returns:
        False if there was nothing to give back, and others give nothing: the disk is too small.
    """
    num_prefetched = holds.num_prefetched
    num_revoked = holds.revoke_prefetched(at_most=num_prefetched // 2, spares_needed=True)
    gave_back = num_revoked > 0 or holds.release_oldest_retained()

    def others_do(tx: LedgerTransaction) -> bool:
        if disk.has_room(need_bytes + disk.kept_bytes, NUM_INODES):
            return True
        free_space.note_full(tx)
        is_shared = tx.outlook().num_pinning_owners > 1 or tx.account().filling_bytes > need_bytes  # which may be given up
        return is_shared and free_space.missing_bytes(tx, need_bytes) > 0

    for pause_seconds in pauses_seconds:
        with contextlib.suppress(CacheError):  # the ledger has no room either
            if owner.run(others_do) or gave_back:
                return True
        time.sleep(pause_seconds)
    return gave_back


def claims_before(tx: LedgerTransaction, disk: Disk, owner: str) -> int:
    """Return the bytes that living owners wait for since longer than `owner`: the oldest waiter goes first."""
    claims = 0
    for waiter, waiting_bytes in tx.waits_before(owner).items():
        if disk.owners.is_live(waiter):
            claims += waiting_bytes
    return claims


def forget_limit_of_the_dead(tx: LedgerTransaction, disk: Disk, owner: str) -> bool:
    """Return whether the limit in force was that of owners who are dead; they are reaped then. Ask before a limit refuses."""
    bound = tx.owners_at_limit()
    if not bound or owner in bound or any(disk.owners.is_live(other) for other in bound):
        return False
    return recover.reap_owners(tx, disk) > 0


class Limits:
    """What the users in this process want of the limit.

    Args:
        disk: The directory's files.
        ledger: The directory's ledger.
        owner: This process in the ledger.
    """

    def __init__(self, disk: Disk, ledger: Ledger, owner: Owner) -> None:
        self._disk = disk
        self._ledger = ledger
        self._owner = owner

    def give(self, user: int, limit: Limit) -> None:
        """Put a user's limit in force; down to it, or to what is pinned, is evicted before this returns."""
        before = self._ledger.account()
        self._owner.set_limit(user, limit)
        if limit is AS_IT_IS or limit is None or before.charged_bytes <= limit:
            return
        if before.limit_bytes is None or limit < before.limit_bytes:
            others = [name for owner, name in self._ledger.owner_names().items() if self._is_other(owner)]
            logger.warning(
                "the cache %s holds %d bytes, and a limit of %d bytes is given: evicting down to it, or to what is pinned%s",
                self._disk.root,
                before.charged_bytes,
                limit,
                f"; also used by {', '.join(others)}" if others else "",
            )
        self.keep()

    def keep(self) -> None:
        """Evict what is above the limit, as far as it is not pinned: a limit may have been lowered meanwhile."""
        if not self._ledger.account().has_room(0):
            while self._owner.run(self._evict, is_flush=True) is Room.AGAIN:
                pass

    @contextlib.contextmanager
    def kept_at_the_end(self) -> Iterator[None]:
        """The same once the owner is closed in the body: what it pinned may go now. Who only looked removes nothing."""
        room = Room.NONE if self._owner.id is None else Room.AGAIN
        yield
        while room is Room.AGAIN and not self._ledger.account().has_room(0):
            with self._ledger.transaction() as tx:
                room = make_room(tx, self._disk, 0, owner="", in_line=False)

    def _is_other(self, owner: str) -> bool:
        return owner != self._owner.id and self._disk.owners.is_live(owner)

    def _evict(self, tx: LedgerTransaction) -> Room:
        assert self._owner.id is not None
        return make_room(tx, self._disk, 0, owner=self._owner.id, in_line=False)
