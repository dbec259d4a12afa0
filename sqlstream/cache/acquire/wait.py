"""Waiting: for objects that are on their way, and in the queue for room, where the oldest waiter of the node goes first."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from sqlstream.cache.acquire.downloads import Downloads
from sqlstream.cache.acquire.holds import Hold, Holds
from sqlstream.cache.acquire.owner import Owner
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.ledger.ledger import Ledger, LedgerTransaction
from sqlstream.cache.model.rows import EntryRow
from sqlstream.cache.recovery.free_space import FreeSpace
from sqlstream.errors import CacheFullError
from sqlstream.process import fork
from sqlstream.process.interrupts import Changes

logger = logging.getLogger(__name__)

SHORTEST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.001, 0.02
"""How often something that another process does is looked at; no lock is held, one look costs microseconds."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Ticket:
    """A thread in line; forgotten with its frame, whatever ended that."""

    line: RoomQueue
    need_bytes: int = 0

    def wait_for(self, need_bytes: int) -> None:
        """Take or keep the place in the ledger, for so many bytes."""
        self.need_bytes = need_bytes
        self.line.enter()


class RoomQueue:
    """Which threads of this process wait for room, as one place in the ledger: that of the first of them.

    Args:
        ledger: The directory's ledger.
        owner: This process in the ledger.
    """

    def __init__(self, ledger: Ledger, owner: Owner) -> None:
        self._ledger = ledger
        self._owner = owner
        self.after_fork_in_child()
        fork.call_in_child(self, fork.Stage.MEMORY)

    def after_fork_in_child(self) -> None:
        """No thread waits in the child."""
        self._places: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._is_entered = False

    @contextlib.contextmanager
    def place(self) -> Iterator[Ticket]:
        """A place for the calling thread, given up at the end of the body."""
        place = Ticket(line=self)
        with self._owner.state:
            self._places.add(place)
        try:
            yield place
        finally:
            with self._owner.state:
                self._places.discard(place)
            if place.need_bytes:
                self._owner.run(self._write)

    def wait_for_change(self, settled: Changes) -> None:
        """Wait until something on this node may have given room back, a download has ended, or for a moment."""
        seen = self._ledger.changes()
        deadline = time.monotonic() + 10 * LONGEST_LOOK_SECONDS
        look_seconds = SHORTEST_LOOK_SECONDS
        while time.monotonic() < deadline and self._ledger.changes() == seen:
            if settled.wait(look_seconds):
                return
            look_seconds = min(2 * look_seconds, LONGEST_LOOK_SECONDS)

    def no_room(self, need_bytes: int, waited: float, free_space: FreeSpace) -> CacheFullError:
        """Return the error for a wait that was too long; it names the processes that pin."""
        pins = self._ledger.pinned_bytes_by_owner()
        holders = ", ".join(f"{name} (pid {pid}): {num_bytes} bytes" for name, pid, num_bytes in pins) or "no process"
        return CacheFullError(
            f"no room for {need_bytes} bytes under the cache limit of {self._ledger.account().limit_bytes} bytes after "
            f"{waited:.0f} s; {f'{free_space.describe()}; ' if free_space.is_bounded else ''}"
            f"pinned by {holders}: raise cache_limit, or release paths sooner"
        )

    def enter(self) -> None:
        """Write this process's place."""
        self._owner.run(self._write)

    @property
    def is_stale(self) -> bool:
        """Whether the ledger says that this process waits, and no thread does (Ctrl-C between two steps)."""
        return self._is_entered and not self._need_bytes

    def leave_if_nobody_waits(self, tx: LedgerTransaction) -> None:
        """Give a stale place up."""
        if self.is_stale:
            self._write(tx)

    @property
    def _need_bytes(self) -> int:
        with self._owner.state:
            return max((place.need_bytes for place in self._places), default=0)

    def _write(self, tx: LedgerTransaction) -> None:
        assert self._owner.id is not None
        need_bytes = self._need_bytes
        if need_bytes:
            self._is_entered = True
            tx.wait_in_line(self._owner.id, need_bytes)
        elif self._is_entered:
            tx.leave_line(self._owner.id)
            self._is_entered = False


LEADER_PATIENCE_SECONDS = 60.0
"""After so long we say who downloads what we wait for: longer than most downloads, short enough to find a stopped leader."""


class DownloadWaiter:
    """Settles holds.

    Args:
        disk: The directory's files.
        ledger: The directory's ledger.
        downloads: What this process leads.
        holdings: What it holds.
    """

    def __init__(self, disk: Disk, ledger: Ledger, downloads: Downloads, holdings: Holds) -> None:
        self._disk = disk
        self._ledger = ledger
        self._downloads = downloads
        self._holdings = holdings

    def wait(self, hold: Hold, timeout_seconds: float | None = None) -> bool:
        """Wait until every object of `hold` is here, or one failed; return whether it is settled."""
        if not hold.outstanding and hold.error is None:
            return True
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        look_seconds = SHORTEST_LOOK_SECONDS
        complain_at = time.monotonic() + LEADER_PATIENCE_SECONDS
        while not hold.is_settled:
            if time.monotonic() > deadline:
                return False
            if time.monotonic() > complain_at:
                complain_at = math.inf
                self._name_leaders(hold)
            self._look_at_others(hold)
            self._downloads.settled.wait(look_seconds, is_over=lambda: hold.is_settled)
            look_seconds = min(2 * look_seconds, LONGEST_LOOK_SECONDS)
        return True

    def _name_leaders(self, hold: Hold) -> None:
        """Log whom we wait for: a download may be long, and its leader may be stopped."""
        for row in self._ledger.find(list(hold.outstanding - self._downloads.leads.keys())).values():
            if row.part is not None:
                leader = self._disk.part_holder(row.part)
                logger.warning(
                    "waiting for %s for %.0f s; %s downloads it: if that process is stopped, continue or end it",
                    row.url,
                    LEADER_PATIENCE_SECONDS,
                    f"process {leader}" if leader else "another process",
                )

    def _look_at_others(self, hold: Hold) -> None:
        """Settle the objects of `hold` that other processes lead, as far as they are done."""
        with self._holdings.owner.state:
            awaited = hold.outstanding - self._downloads.leads.keys()
        if not awaited:
            return
        rows = self._ledger.find(list(awaited))
        for key in awaited:
            row = rows.get(key)
            if row is not None and row.is_ready:
                if self._disk.data_size(key, row.ext) == row.size_bytes:
                    self._holdings.arrive(hold, key, row.charged_bytes)
                else:
                    hold.is_void = True
            else:
                self._look_at_part(hold, key, row)

    def _look_at_part(self, hold: Hold, key: bytes, row: EntryRow | None) -> None:
        """Settle an object that another process still leads by the ledger; its part tells whether it does."""
        is_live = None if row is None or row.part is None else self._disk.part_is_live(row.part)
        size_bytes = None if row is None or is_live is not None else self._disk.data_size(key, row.ext)
        if size_bytes is not None:  # whole and renamed, its row follows; our pin is on it already
            self._holdings.arrive(hold, key, self._disk.unit.charge(size_bytes))
        elif not is_live:
            hold.is_void = True  # its leader gave up or died: the next process that acquires it leads
