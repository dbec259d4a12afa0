"""Acquiring and giving back the objects of samples; waiting for what others bring, and for room.

What is here is pinned, what is not is led by one process of the node. Others that find a download under way look at its
part's lock: the death of a leader (and its helper) frees it, and the next acquirer takes over with a new part.

No process waits for room while it keeps room from others: before waiting, a process gives up what it prefetched and then
what it retained; and a process that sleeps in its trainer does the same when it sees others in line (`_watch_others`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

from sqlstream.cache.acquire.background import BackgroundThread, BackgroundWork
from sqlstream.cache.acquire.checksums import Checksums
from sqlstream.cache.acquire.downloads import Downloads
from sqlstream.cache.acquire.hits import Lookup, check_files
from sqlstream.cache.acquire.holds import AnyHold, Hold, Holds
from sqlstream.cache.acquire.owner import Owner
from sqlstream.cache.acquire.reserve import AcquireTransaction
from sqlstream.cache.acquire.room import Limits, Room, make_space_after
from sqlstream.cache.acquire.uses import UsageLog, UseRules
from sqlstream.cache.acquire.wait import DownloadWaiter, RoomQueue, wait_for_change
from sqlstream.cache.files.disk import Disk, Part
from sqlstream.cache.files.read_hold import ReadHold, ReadLockPool
from sqlstream.cache.ledger.ledger import Ledger
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.model.tuning import CacheTuning
from sqlstream.cache.recovery import recover
from sqlstream.cache.recovery.free_space import FreeSpace
from sqlstream.errors import CacheDamagedError, CacheDiskError, CacheError, CacheFullError
from sqlstream.process import interrupts, locks
from sqlstream.storage.fetcher import Fetcher

logger = logging.getLogger(__name__)

MAX_UNWRITTEN = 64
"""Releases that wait for the next transaction; more are written by one of their own."""
MAX_UNPREPARED = 4
"""For so few objects, and after a window of hits, a look ahead costs more than part files created under the write lock."""
MAX_DOWNLOADED_TOGETHER = 128
"""Objects of one call of `acquire_many` that are downloaded at a time: an eighth of the usual 1024 descriptors."""
PATHS_GIVEN_UP = (
    "the cache limit is too small to keep the paths of yielded samples valid: raise cache_limit, "
    "or read the files in transforms"
)


class Acquirer:
    """Acquires, waits for and releases objects, for all users of a cache directory in this process.

    Args:
        disk: The directory's files.
        ledger: The directory's ledger.
        tuning: Times and thresholds.
    """

    def __init__(self, disk: Disk, ledger: Ledger, tuning: CacheTuning) -> None:
        self.owner = Owner(disk, ledger)
        self.holdings = Holds(self.owner)
        self.uses = UsageLog(self.owner)
        self._lookup = Lookup(ledger, self.owner, self.uses, tuning.num_hits_a_look)
        self._read_locks = ReadLockPool(disk.data, self.uses.take_back)
        self._background = BackgroundThread(lambda: self._background_work.run(self.num_expected))
        self.downloads = Downloads(disk, self.owner, self.holdings, self._background.wake, tuning.allocate_from_bytes)
        self._room_queue = RoomQueue(self.owner)
        self.limits = Limits(disk, ledger, self.owner)
        self.checksums = Checksums(disk, ledger, self.owner, self.downloads)
        self._background_work = BackgroundWork(disk, ledger, self.holdings, self._room_queue, self.limits)
        self._waiter = DownloadWaiter(disk, ledger, self.downloads, self.holdings)
        self._disk = disk
        self._ledger = ledger
        self._tuning = tuning
        self.num_expected = 1
        """Processes that will share the limit: the first DataLoader worker must not take what the others come for."""
        self._share_bytes: int | None = None
        self._expects_misses = True
        self._has_warned = False

    # -- acquiring ----------------------------------------------------------------------------------------------------

    @overload
    def acquire(self, groups: Sequence[Sequence[ObjectRef]], fetcher: Fetcher) -> list[Hold]: ...
    @overload
    def acquire(self, groups: Sequence[Sequence[ObjectRef]], fetcher: Fetcher, *, for_reading: bool) -> Sequence[AnyHold]: ...
    def acquire(
        self, groups: Sequence[Sequence[ObjectRef]], fetcher: Fetcher, *, for_reading: bool = False
    ) -> Sequence[AnyHold]:
        """Return holds on the longest prefix of `groups` (the objects of one sample each) for which there is room now.

        With `for_reading`, the caller only reads the files between claim and release, and hands no path out: where
        all objects are here, no transaction is needed (`ReadHold`).
        """
        if for_reading and not self._expects_misses and (ready := self._lookup.find(groups)) is not None:
            self._background.wake()
            return [ReadHold(group, ready, self._read_locks) for group in groups]
        found: list[Hold] = []
        while len(found) < len(groups):
            acquired = self._acquire_window(groups[len(found) :], fetcher)
            found += acquired.holds
            if acquired.room is not Room.AGAIN:
                break
        return found

    @overload
    def acquire_one(self, group: Sequence[ObjectRef], fetcher: Fetcher) -> Hold: ...
    @overload
    def acquire_one(self, group: Sequence[ObjectRef], fetcher: Fetcher, *, for_reading: bool) -> AnyHold: ...
    def acquire_one(self, group: Sequence[ObjectRef], fetcher: Fetcher, *, for_reading: bool = False) -> AnyHold:
        """Return a hold on one sample's objects, waiting for room if need be; for `for_reading` see `acquire`.

        Raises:
            CacheFullError: No process gave room back in time.
        """
        if for_reading and (ready := self._lookup.find([group])) is not None:
            self._background.wake()
            return ReadHold(group, ready, self._read_locks)
        rules = self._lookup.known(1)
        holds = self._acquire_window([group], fetcher, must_fit=True, rules=rules).holds
        return (holds or self._acquire_in_line([group], fetcher))[0]

    def _acquire_in_line(self, groups: Sequence[Sequence[ObjectRef]], fetcher: Fetcher) -> list[Hold]:
        """Return a hold on one sample's objects: ask again and again, and give back meanwhile."""
        started = time.monotonic()
        has_more_to_give = True
        with self._room_queue.place() as place:
            while True:
                waited = time.monotonic() - started
                in_line = waited < self._tuning.queue_patience_seconds
                acquired = self._acquire_window(
                    groups, fetcher, must_fit=True, takes_least=not has_more_to_give, in_line=in_line
                )
                if acquired.holds:
                    return acquired.holds
                if acquired.room is Room.AGAIN:
                    continue
                had_more_to_give, has_more_to_give = has_more_to_give, self._give_something_back()
                if has_more_to_give or had_more_to_give:
                    continue
                if waited > self._tuning.room_timeout_seconds:
                    raise _no_room(self._ledger, acquired.need_bytes, waited, self.downloads.free_space)
                place.wait_for(acquired.need_bytes)
                wait_for_change(self._ledger, self.downloads)

    def _acquire_window(
        self,
        groups: Sequence[Sequence[ObjectRef]],
        fetcher: Fetcher,
        *,
        must_fit: bool = False,
        takes_least: bool = False,
        in_line: bool = True,
        rules: UseRules | None = None,
    ) -> AcquireTransaction:
        """Acquire a window in one transaction, then send what is to be downloaded; once more if the ledger has just failed."""
        with locks.uninterrupted():
            try:
                return self._acquire_once(
                    groups, fetcher, must_fit=must_fit, takes_least=takes_least, in_line=in_line, rules=rules
                )
            except (CacheDamagedError, CacheDiskError) as error:
                make_space_after(error, self.owner.run, self._disk, num_files=sum(map(len, groups)))
                return self._acquire_once(
                    groups, fetcher, must_fit=must_fit, takes_least=takes_least, in_line=in_line, rules=None
                )

    def _acquire_once(
        self,
        groups: Sequence[Sequence[ObjectRef]],
        fetcher: Fetcher,
        *,
        must_fit: bool,
        takes_least: bool,
        in_line: bool,
        rules: UseRules | None,
    ) -> AcquireTransaction:
        keys = dict.fromkeys([ref.key for group in groups for ref in group]).keys()  # in the order of their use
        parts: dict[bytes, Part] = {}
        if self._expects_misses and len(keys) > MAX_UNPREPARED:  # file work stays before the write lock is taken
            parts = _create_parts(self._disk, keys - self._ledger.find(keys).keys() - self.downloads.leads.keys())
        acquired: AcquireTransaction | None = None
        try:
            with self.owner.transaction() as tx:
                assert self.owner.id is not None
                self._room_queue.leave_if_nobody_waits(tx)
                acquired = AcquireTransaction(
                    owner=self.owner.id,
                    disk=self._disk,
                    downloads=self.downloads,
                    holdings=self.holdings,
                    uses=self.uses,
                    fetcher=fetcher,
                    window=keys,
                    parts=parts,
                    must_fit=must_fit,
                    takes_least=takes_least,
                    in_line=in_line,
                    num_expected=self.num_expected,
                    rules=rules,
                )
                acquired.run(tx, groups)
        except BaseException:
            if acquired is not None:
                self.downloads.discard(acquired.leads)
                for hold in acquired.holds:
                    self.holdings.release(hold)
            raise
        finally:
            if parts:
                self._disk.discard_parts(parts.values())
        if acquired.has_looked:
            self._share_bytes, self._expects_misses = acquired.share_bytes, bool(acquired.leads)
            assert acquired.rules is not None
            self._lookup.learn(acquired.rules)
        acquired.note_uses()
        if acquired.leads:
            fetcher.share_node(acquired.num_sharing)
            self.downloads.start(acquired.leads)
        check_files(self._disk, self.owner, acquired.holds, acquired.ready)
        if acquired.holds and self._share_bytes is not None:
            self._background.wake()
        return acquired

    def wait(self, hold: Hold, timeout_seconds: float | None = None) -> bool:
        """Wait until every object of `hold` is here, or one failed; return whether it is settled."""
        return self._waiter.wait(hold, timeout_seconds)

    # -- giving back --------------------------------------------------------------------------------------------------

    def release(self, hold: Hold) -> None:
        """Give a hold back; it reaches the ledger with the next transaction, or when many have gathered."""
        self.holdings.release(hold)
        self._bound_unwritten()

    def retain(self, hold: AnyHold) -> Hold:
        """Keep the paths of a used hold valid until it is released, within this process's share of the limit.

        Returns:
            The hold that keeps them: another one in the place of a read hold.
        """
        if isinstance(hold, ReadHold):
            hold = self.holdings.take_over(hold)
        self.holdings.retain(hold, share_bytes=self._share_bytes)
        self._bound_unwritten()
        return hold

    def _bound_unwritten(self) -> None:
        num_unwritten = self.owner.num_changes - self.owner.num_committed + len(self.holdings.released)
        # An iterator may be collected in the middle of a transaction: then the background thread writes it.
        if num_unwritten > MAX_UNWRITTEN and not interrupts.is_inside():
            self.owner.flush()
        elif not self._background.is_woken:
            self._background.wake()

    def hand_over(self, give: Callable[[int], None]) -> None:
        """End, and leave the pins of retained holds to the process that `give` gives a descriptor to; see `Owner.hand_over`."""
        if not self.holdings.num_retained:
            return
        self._background.stop()
        self.holdings.revoke_prefetched()
        with contextlib.suppress(CacheError):  # as this process ends: the next one reaps what is left of it
            self.owner.hand_over(give)

    def close(self) -> None:
        """Give everything back and end the background thread."""
        with self.limits.kept_at_the_end(), contextlib.ExitStack() as steps:
            steps.callback(self.owner.close)
            steps.callback(self._background.stop)

    def _give_something_back(self) -> bool:
        """Revoke the prefetched hold that is needed last, else the oldest retained one; True if there was any."""
        if not self.holdings.revoke_prefetched(at_most=1):
            if not self.holdings.release_oldest_retained() and not _take_from_ended(self.owner, self._disk):
                return False
            self.warn_of_paths()
        self.owner.flush()
        return True

    def warn_of_paths(self) -> None:
        """Say once that the limit leaves too little room for the paths that should stay valid."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(PATHS_GIVEN_UP)


@contextlib.contextmanager
def downloaded_ahead(acquirer: Acquirer, refs: Sequence[ObjectRef], fetcher: Fetcher) -> Iterator[None]:
    """Download objects that the body is to hold together, some at a time, and keep them by holds that others may revoke.

    A download keeps its file open until its row is ready, and a process has few descriptors; a pin by row takes none.
    """
    kept: list[Hold] = []
    start = 0 if len(refs) > MAX_DOWNLOADED_TOGETHER else len(refs)
    try:
        while start < len(refs):
            holds = acquirer.acquire([[ref] for ref in refs[start : start + MAX_DOWNLOADED_TOGETHER]], fetcher)
            if not (holds or kept):
                break  # no room for a single one: who asks for all of them waits for it, or hears why not
            for hold in kept if not holds else ():
                acquirer.holdings.release(hold)
            kept = [*kept, *holds] if holds else []
            start += len(holds)
            for hold in holds:
                acquirer.wait(hold)
                if hold.error is not None:
                    raise hold.error
            acquirer.owner.flush()
        yield
    finally:
        for hold in kept:
            acquirer.holdings.release(hold)


def _take_from_ended(owner: Owner, disk: Disk) -> bool:
    """Take the pins that ended workers left for batches under way; return whether there were any."""
    return owner.run(lambda tx: recover.take_from_ended(tx, disk)) > 0


def _no_room(ledger: Ledger, need_bytes: int, waited: float, free_space: FreeSpace) -> CacheFullError:
    pins = ledger.pinned_bytes_by_owner()
    holders = ", ".join(f"{name} (pid {pid}): {num_bytes} bytes" for name, pid, num_bytes in pins) or "no process"
    return CacheFullError(
        f"no room for {need_bytes} bytes under the cache limit of {ledger.account().limit_bytes} bytes after {waited:.0f} s; "
        f"{f'{free_space.describe()}; ' if free_space.min_bytes else ''}"
        f"pinned by {holders}: raise cache_limit, or release paths sooner"
    )


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
            f"cannot create files in {disk.root} ({error.strerror}): free space on that disk, or raise `ulimit -n`"
        ) from error
    return parts
