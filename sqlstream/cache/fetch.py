"""Acquiring and giving back the objects of samples; waiting for what others bring, and for room.

What is here is pinned, what is not is led by one process of the node. Others that find a download under way look at its
part's lock: the death of a leader (and its helper) frees it, and the next acquirer takes over with a new part.

Nobody waits for room while it keeps anything from others: before waiting, a process gives up what it prefetched and then
what it retained; and a process that sleeps in its trainer does the same when it sees others in line (`_watch_others`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from sqlstream import locks
from sqlstream.cache.disk import Disk
from sqlstream.cache.downloads import Downloads
from sqlstream.cache.holds import Hold, Holdings
from sqlstream.cache.keys import ObjectRef
from sqlstream.cache.ledger import Ledger
from sqlstream.cache.owner import Owner
from sqlstream.cache.passage import Passage
from sqlstream.cache.room import Room
from sqlstream.errors import CacheError, CacheFullError
from sqlstream.storage.fetcher import Fetcher

logger = logging.getLogger(__name__)

SHORTEST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.001, 0.02
"""How often something that another process does is looked at; no lock is held, one look costs microseconds."""
PATIENCE_SECONDS = 2.0
"""After so long in line for room, older waiters are no longer let through first: one of them may be stopped."""
PRESSURE_SECONDS = 0.05
"""How often a process with revocable pins looks whether others wait for room."""
MAX_UNWRITTEN_RELEASES = 64
"""Releases that wait for the next transaction; more are written by one of their own."""


class Acquirer:
    """Acquires, waits for and releases objects, for all users of a cache directory in this process.

    Args:
        disk: The directory's files.
        ledger: The directory's ledger.
        room_timeout_seconds: How long to wait for others to give room back.
    """

    def __init__(self, disk: Disk, ledger: Ledger, *, room_timeout_seconds: float = 120.0) -> None:
        self.owner = Owner(disk, ledger)
        self.holdings = Holdings(self.owner)
        self.downloads = Downloads(disk, self.owner, self.holdings)
        self._disk = disk
        self._ledger = ledger
        self._room_timeout_seconds = room_timeout_seconds
        self._share_bytes: int | None = None
        self._has_warned = False
        self.after_fork_in_child()
        locks.call_after_fork(self)

    def after_fork_in_child(self) -> None:
        """Threads stay with the parent."""
        self._watcher: threading.Thread | None = None
        self._wake = threading.Event()

    # -- acquiring ----------------------------------------------------------------------------------------------------

    def acquire(self, groups: Sequence[Sequence[ObjectRef]], fetcher: Fetcher) -> list[Hold]:
        """Return holds on the longest prefix of `groups` (the objects of one sample each) for which there is room now."""
        holds: list[Hold] = []
        while len(holds) < len(groups):
            passage = self._pass(groups[len(holds) :], fetcher)
            holds += passage.holds
            if passage.room is not Room.AGAIN:
                break
        return holds

    def acquire_one(self, group: Sequence[ObjectRef], fetcher: Fetcher) -> Hold:
        """Return a hold on one sample's objects, waiting for room if need be.

        Raises:
            CacheFullError: Nobody gave room back in time.
        """
        started = time.monotonic()
        is_in_line = False
        try:
            while True:
                waited = time.monotonic() - started
                passage = self._pass([group], fetcher, must_fit=True, in_line=waited < PATIENCE_SECONDS)
                if passage.holds:
                    return passage.holds[0]
                if passage.room is Room.AGAIN or self._give_something_back():
                    continue
                if waited > self._room_timeout_seconds:
                    raise self._no_room(passage.need_bytes, waited)
                with self.owner.transaction() as tx:
                    tx.wait_in_line(self.owner.id or "", passage.need_bytes)
                    is_in_line = True
                self._wait_for_change(LONGEST_LOOK_SECONDS * 10)
        finally:
            if is_in_line:
                with self.owner.transaction() as tx:
                    tx.leave_line(self.owner.id or "")

    def _pass(
        self, groups: Sequence[Sequence[ObjectRef]], fetcher: Fetcher, *, must_fit: bool = False, in_line: bool = True
    ) -> Passage:
        """Go through the door once, then send what is to be downloaded."""
        keys = {ref.key for group in groups for ref in group}
        missing = keys - self._ledger.find(list(keys)).keys() - self.downloads.leads.keys()
        parts = {key: self._disk.create_part(key) for key in missing}  # file work stays outside the door
        passage: Passage | None = None
        try:
            with self.owner.transaction() as tx:
                assert self.owner.id is not None
                passage = Passage(
                    owner=self.owner.id,
                    disk=self._disk,
                    downloads=self.downloads,
                    holdings=self.holdings,
                    fetcher=fetcher,
                    window=keys,
                    parts=parts,
                    must_fit=must_fit,
                    in_line=in_line,
                )
                passage.run(tx, groups)
        except BaseException:
            if passage is not None:
                self.downloads.discard(passage.leads)
                for hold in passage.holds:
                    self.holdings.release(hold)
            raise
        finally:
            self._disk.discard_parts(parts.values())
        self._share_bytes = passage.share_bytes
        self.downloads.start(passage.leads)
        for hold in passage.holds:
            self._check_files(hold, passage)
        if passage.holds and passage.share_bytes is not None:
            self._watch_others()
        return passage

    def _check_files(self, hold: Hold, passage: Passage) -> None:
        """Look at each file that is said to be here, now that it is pinned; one changed behind our back is fetched again."""
        for ref in hold.refs:
            if ref.key in hold.outstanding:
                continue
            row = passage.found[ref.key]
            if self._disk.data_size(row.key, row.ext) != row.size_bytes:
                self._quarantine(row.key)
                hold.is_void = True

    def _quarantine(self, key: bytes) -> None:
        with self.owner.transaction() as tx:
            row = tx.find([key]).get(key)
            if row is None or not row.is_ready:
                return
            size_bytes = self._disk.data_size(key, row.ext)
            if size_bytes == row.size_bytes:
                return
            if size_bytes is not None and tx.pinned_by_others(key, self.owner.id):
                raise CacheError(
                    f"the cached file of {row.url} has {size_bytes} bytes instead of {row.size_bytes}, and another process "
                    f"reads it: find out what writes into {self._disk.root}/data"
                )
            logger.warning("the cached file of %s was changed or removed by somebody else: fetching it again", row.url)
            self._disk.remove_data(key, row.ext)
            tx.remove([key])

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, hold: Hold, timeout_seconds: float | None = None) -> bool:
        """Wait until every object of `hold` is here, or one failed; return whether it is settled."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        look_seconds = SHORTEST_LOOK_SECONDS
        while not hold.is_settled:
            if deadline is not None and time.monotonic() > deadline:
                return False
            self._look_at_others(hold)
            with self.downloads.settled:
                if not hold.is_settled:
                    self.downloads.settled.wait(look_seconds)
            look_seconds = min(2 * look_seconds, LONGEST_LOOK_SECONDS)
        return True

    def _look_at_others(self, hold: Hold) -> None:
        """Settle the objects of `hold` that other processes lead, as far as they are done."""
        with locks.fork_guard():
            awaited = hold.outstanding - self.downloads.leads.keys()
        if not awaited:
            return
        rows = self._ledger.find(list(awaited))
        for key in awaited:
            row = rows.get(key)
            if row is not None and row.is_ready:
                if self._disk.data_size(key, row.ext) == row.size_bytes:
                    self.holdings.set_charge(hold, key, row.charged_bytes)
                    hold.outstanding.discard(key)
                else:
                    hold.is_void = True
            elif row is None or self._disk.part_is_live(row.part or "") is False:
                hold.is_void = True  # its leader gave up or died: whoever acquires next leads

    def _wait_for_change(self, timeout_seconds: float) -> None:
        """Wait until something on this node may have given room back."""
        seen = self._ledger.changes()
        deadline = time.monotonic() + timeout_seconds
        look_seconds = SHORTEST_LOOK_SECONDS
        while time.monotonic() < deadline and self._ledger.changes() == seen:
            with self.downloads.settled:
                if self.downloads.settled.wait(look_seconds):
                    return
            look_seconds = min(2 * look_seconds, LONGEST_LOOK_SECONDS)

    # -- giving back --------------------------------------------------------------------------------------------------

    def release(self, hold: Hold) -> None:
        """Give a hold back; it reaches the ledger with the next transaction, or when many have gathered."""
        self.holdings.release(hold)
        if self.owner.num_unwritten > MAX_UNWRITTEN_RELEASES:
            self.owner.flush()

    def retain(self, hold: Hold, capacity: int) -> None:
        """Keep the paths of a used hold valid for the next `capacity` ones, within this process's share of the limit."""
        self.holdings.retain(hold, capacity=capacity, share_bytes=self._share_bytes)
        if self.owner.num_unwritten > MAX_UNWRITTEN_RELEASES:
            self.owner.flush()

    def close(self) -> None:
        """Give everything back and end the watcher."""
        self._wake.set()
        if self._watcher is not None:
            self._watcher.join()
        self.owner.close()

    def _give_something_back(self) -> bool:
        """Revoke what is prefetched, else the oldest retained hold; True if that helped anybody."""
        if not self.holdings.revoke_prefetched():
            if not self.holdings.release_oldest_retained():
                return False
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "the cache limit is too small to keep the paths of yielded samples valid: raise cache_limit, "
                    "or read the files in transforms"
                )
        self.owner.flush()
        return True

    def _no_room(self, need_bytes: int, waited: float) -> CacheFullError:
        pins = self._ledger.pinned_bytes_by_owner()
        holders = ", ".join(f"{name} (pid {pid}): {num_bytes} bytes" for name, pid, num_bytes in pins) or "nobody"
        limit_bytes = self._ledger.account().limit_bytes
        return CacheFullError(
            f"no room for {need_bytes} bytes under the cache limit of {limit_bytes} bytes after {waited:.0f} s; pinned by "
            f"{holders}: raise cache_limit, or release paths sooner"
        )

    # -- others -------------------------------------------------------------------------------------------------------

    def _watch_others(self) -> None:
        """Have a thread give back for as long as there is something that others may want."""
        with locks.fork_guard():
            if self._watcher is None or not self._watcher.is_alive():
                self._wake.clear()
                self._watcher = threading.Thread(target=self._watch, name="sqlstream-cache-pressure", daemon=True)
                self._watcher.start()

    def _watch(self) -> None:
        waiting_before: set[str] = set()
        while self.holdings.num_revocable and not self._wake.wait(PRESSURE_SECONDS):
            try:
                waiting = {owner for owner in self._ledger.waiting_owners() if owner != self.owner.id}
                if any(self._disk.owner_is_live(owner) for owner in waiting & waiting_before):
                    self.holdings.revoke_prefetched()
                    self.holdings.trim_retained(self._ledger.share_bytes())
                    self.owner.flush()
                waiting_before = waiting
            except Exception:
                logger.exception("watching for processes that wait for room failed; prefetched samples stay pinned")
                return
