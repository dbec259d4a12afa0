"""Acquiring and giving back the objects of samples; waiting for what others bring, and for room.

What is here is pinned, what is not is led by one process of the node. Others that find a download under way look at its
part's lock: the death of a leader (and its helper) frees it, and the next acquirer takes over with a new part.

No process waits for room while it keeps room from others: before waiting, a process gives up what it prefetched and then
what it retained; and a process that sleeps in its trainer does the same when it sees others in line (`_watch_others`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from sqlstream.cache.acquire.background import BackgroundThread
from sqlstream.cache.acquire.downloads import Downloads
from sqlstream.cache.acquire.hits import Lookup, check_files
from sqlstream.cache.acquire.holds import Hold, Holds
from sqlstream.cache.acquire.outcomes import DownloadSource
from sqlstream.cache.acquire.owner import Owner
from sqlstream.cache.acquire.reserve import AcquireTransaction, NextUses
from sqlstream.cache.acquire.room import NUM_TRIES, Room, make_space_after, says_full
from sqlstream.cache.acquire.uses import UseRules
from sqlstream.cache.acquire.wait import RoomQueue
from sqlstream.cache.files.disk import Disk, Part
from sqlstream.cache.files.read_hold import KeptLocks
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.model.tuning import CacheTuning
from sqlstream.cache.recovery import recover
from sqlstream.disk_room import cure_of, lack_of_inodes
from sqlstream.errors import CacheDamagedError, CacheDiskError
from sqlstream.process import interrupts, locks

logger = logging.getLogger(__name__)

MAX_UNWRITTEN = 64
"""Releases that wait for the next transaction; more are written by one of their own."""
MAX_UNPREPARED = 4
"""For so few objects, and after a window of hits, a look ahead costs more than part files created under the write lock."""
PATHS_GIVEN_UP = (
    "the cache limit, or its disk, is too small to keep the paths of yielded samples valid: raise cache_limit, "
    "or read the files in transforms"
)


class Acquirer:
    """Acquires, waits for and releases objects, for all users of a cache directory in this process.

    Args:
        disk: The directory's files.
        holds: What this process holds.
        lookup: What is here.
        downloads: What this process leads.
        queue: This process's place in the queue for room.
        background: The thread that writes what waits.
        tuning: Times and thresholds.
        kept: Shards that stay open.
    """

    def __init__(
        self,
        disk: Disk,
        holds: Holds,
        lookup: Lookup,
        downloads: Downloads,
        queue: RoomQueue,
        background: BackgroundThread,
        tuning: CacheTuning,
        kept: KeptLocks,
    ) -> None:
        self._disk = disk
        self._holds = holds
        self._owner = holds.owner
        self._lookup = lookup
        self._downloads = downloads
        self._queue = queue
        self._background = background
        self._tuning = tuning
        self._kept = kept
        self._share_bytes: int | None = None
        self._has_warned = False

    # -- acquiring ----------------------------------------------------------------------------------------------------

    def acquire(self, groups: Sequence[Sequence[ObjectRef]], source: DownloadSource, next_uses: NextUses = None) -> list[Hold]:
        """Return holds on the longest prefix of `groups` (the objects of one sample each) for which there is room now."""
        found: list[Hold] = []
        width = len(groups)
        while len(found) < len(groups):
            some = slice(len(found), len(found) + width)
            try:
                acquired = self._acquire_window(groups[some], source, None if next_uses is None else next_uses[some])
            except CacheDiskError as error:  # no room for a file each; of what is waited for, `acquire_one` tells
                if not says_full(error):
                    raise
                if width == 1:
                    break
                width //= 2
                continue
            found += acquired.holds
            if acquired.room is not Room.AGAIN:
                break
        return found

    def acquire_one(self, group: Sequence[ObjectRef], source: DownloadSource, next_use: int | None = None) -> Hold:
        """Return a hold on one sample's objects, waiting for room if need be.

        Raises:
            CacheFullError: No process gave room back in time.
        """
        rules = self._lookup.known(1)
        holds = self._acquire_needed([group], source, [next_use], rules=rules).holds
        return (holds or self._acquire_in_line([group], source, [next_use]))[0]

    def _acquire_in_line(
        self, groups: Sequence[Sequence[ObjectRef]], source: DownloadSource, next_uses: NextUses
    ) -> list[Hold]:
        """Return a hold on one sample's objects: ask again and again, and give back meanwhile."""
        started = time.monotonic()
        has_more_to_give = True
        with self._queue.place() as place:
            while True:
                waited = time.monotonic() - started
                in_line = waited < self._tuning.queue_patience_seconds
                acquired = self._acquire_needed(groups, source, next_uses, takes_least=not has_more_to_give, in_line=in_line)
                if acquired.holds:
                    return acquired.holds
                if acquired.room is Room.AGAIN:
                    continue
                had_more_to_give, has_more_to_give = has_more_to_give, self._give_something_back()
                if has_more_to_give or had_more_to_give:
                    continue
                if waited > self._tuning.room_timeout_seconds:
                    raise self._queue.no_room(acquired.need_bytes, waited, self._downloads.free_space)
                place.wait_for(acquired.need_bytes)
                self._queue.wait_for_change(self._downloads.settled)

    def _acquire_needed(
        self,
        groups: Sequence[Sequence[ObjectRef]],
        source: DownloadSource,
        next_uses: NextUses,
        *,
        takes_least: bool = False,
        in_line: bool = True,
        rules: UseRules | None = None,
    ) -> AcquireTransaction:
        """Acquire what is waited for; on a disk that stays full, what is fetched ahead gives way to it."""
        num_left = NUM_TRIES
        while True:
            try:
                return self._acquire_window(
                    groups, source, next_uses, must_fit=True, takes_least=takes_least, in_line=in_line, rules=rules
                )
            except CacheDiskError as error:
                num_left -= 1
                if not (num_left and says_full(error) and self._downloads.give_way(self._disk.unit.charge(1))):
                    raise

    def _acquire_window(
        self,
        groups: Sequence[Sequence[ObjectRef]],
        source: DownloadSource,
        next_uses: NextUses = None,
        *,
        must_fit: bool = False,
        takes_least: bool = False,
        in_line: bool = True,
        rules: UseRules | None = None,
    ) -> AcquireTransaction:
        """Acquire a window in one transaction, then send what is to be downloaded.

        Once more if the ledger has just failed, and again while the disk is full and others take what is evicted for it.
        """
        num_left = NUM_TRIES
        with locks.uninterrupted():
            while True:
                try:
                    return self._acquire_once(
                        groups, source, next_uses, must_fit=must_fit, takes_least=takes_least, in_line=in_line, rules=rules
                    )
                except (CacheDamagedError, CacheDiskError) as error:
                    num_left -= 1
                    if not num_left:
                        raise
                    rules = None
                    if not make_space_after(error, self._owner, self._disk, num_files=sum(map(len, groups))):
                        num_left = 1

    def _acquire_once(
        self,
        groups: Sequence[Sequence[ObjectRef]],
        source: DownloadSource,
        next_uses: NextUses = None,
        *,
        must_fit: bool,
        takes_least: bool,
        in_line: bool,
        rules: UseRules | None,
    ) -> AcquireTransaction:
        self._kept.let_go()  # it may need room: then any of them may be the one to go
        keys = dict.fromkeys([ref.key for group in groups for ref in group]).keys()  # in the order of their use
        parts: dict[bytes, Part] = {}
        if self._lookup.expects_misses and len(keys) > MAX_UNPREPARED:  # file work stays before the write lock is taken
            parts = _create_parts(self._disk, self._lookup.missing(keys) - self._downloads.leads.keys())
        acquired: AcquireTransaction | None = None
        try:
            with self._owner.transaction() as tx:
                assert self._owner.id is not None
                self._queue.leave_if_nobody_waits(tx)
                acquired = AcquireTransaction(
                    owner=self._owner.id,
                    disk=self._disk,
                    downloads=self._downloads,
                    holdings=self._holds,
                    uses=self._lookup.uses,
                    source=source,
                    window=keys,
                    parts=parts,
                    must_fit=must_fit,
                    takes_least=takes_least,
                    in_line=in_line,
                    num_expected=self._owner.num_expected,
                    rules=rules,
                    next_uses=next_uses,
                )
                acquired.run(tx, groups)
        except BaseException:
            if acquired is not None:
                self._downloads.discard(acquired.leads)
                for hold in acquired.holds:
                    self._holds.release(hold)
            raise
        finally:
            if parts:
                self._disk.discard_parts(parts.values())
        if acquired.has_looked:
            self._share_bytes, self._lookup.expects_misses = acquired.share_bytes, bool(acquired.leads)
            assert acquired.rules is not None
            self._lookup.learn(acquired.rules)
        acquired.note_uses()
        if acquired.leads:
            source.share_node(acquired.num_sharing)
            self._downloads.start(acquired.leads)
        check_files(self._disk, self._owner, acquired.holds, acquired.ready)
        if acquired.holds and self._share_bytes is not None:
            self._background.wake()
        return acquired

    # -- giving back --------------------------------------------------------------------------------------------------

    def release(self, hold: Hold) -> None:
        """Give a hold back; it reaches the ledger with the next transaction, or when many have gathered."""
        self._holds.release(hold)
        self._bound_unwritten()

    def retain(self, hold: Hold) -> None:
        """Keep the paths of a used hold valid until it is released, within this process's share of the limit."""
        self._holds.retain(hold, share_bytes=self._share_bytes)
        self._bound_unwritten()

    def _bound_unwritten(self) -> None:
        num_unwritten = self._owner.num_changes - self._owner.num_committed + len(self._holds.released)
        # An iterator may be collected in the middle of a transaction: then the background thread writes it.
        if num_unwritten > MAX_UNWRITTEN and not interrupts.is_inside():
            self._owner.flush()
        elif not self._background.is_woken:
            self._background.wake()

    def _give_something_back(self) -> bool:
        """Revoke the prefetched hold that is needed last, else the oldest retained one; True if there was any."""
        if not self._holds.revoke_prefetched(at_most=1):
            if not self._holds.release_oldest_retained() and not _take_from_ended(self._owner, self._disk):
                return False
            self.warn_of_paths()
        self._owner.flush()
        return True

    def warn_of_paths(self) -> None:
        """Say once that the limit leaves too little room for the paths that should stay valid."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(PATHS_GIVEN_UP)


def _take_from_ended(owner: Owner, disk: Disk) -> bool:
    """Take the pins that ended workers left for batches under way; return whether there were any."""
    return owner.run(lambda tx: recover.take_from_ended(tx, disk)) > 0


def _create_parts(disk: Disk, missing: Iterable[bytes]) -> dict[bytes, Part]:
    """Return a locked part file for each key.

    Raises:
        CacheDiskError: They cannot be created.
    """
    parts: dict[bytes, Part] = {}
    try:
        for key in missing:
            parts[key] = disk.create_part(key)
    except OSError as error:
        disk.discard_parts(parts.values())
        raise CacheDiskError(
            f"cannot create files in {disk.root} ({error.strerror}{lack_of_inodes(disk.root)}): {cure_of(error)}"
        ) from error
    return parts
