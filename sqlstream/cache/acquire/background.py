"""The background thread of a cache: gives back what others wait for, writes what was deferred, restores the ballast.

It works while the trainer computes, and ends when there is nothing to do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sqlstream.cache.acquire.holds import Holds
from sqlstream.cache.acquire.room import Limits
from sqlstream.cache.acquire.wait import RoomQueue
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.files.read_hold import KeptLocks
from sqlstream.cache.ledger.ledger import Ledger
from sqlstream.errors import CacheError
from sqlstream.process import fork, interrupts, locks

REVOKE_TICKS = 8
"""Others who have waited for so many ticks get what is prefetched; sooner, much would be fetched twice for nothing."""
FLUSH_TICKS = 10
"""After so many ticks of the background thread (a quarter of a second) without a transaction, what waits is written."""
BALLAST_TICKS = 200
"""How often the background thread tries to take the ballast of a full disk back: every 5 s."""


class BackgroundWork:
    """What the background thread does for one cache directory.

    Args:
        disk: The directory's files.
        ledger: The directory's ledger.
        holdings: What this process holds.
        line: This process's place in the line for room.
        limits: The directory's limit.
        kept: Shards that this process keeps open.
    """

    def __init__(self, disk: Disk, ledger: Ledger, holdings: Holds, line: RoomQueue, limits: Limits, kept: KeptLocks) -> None:
        self._disk = disk
        self._ledger = ledger
        self._holdings = holdings
        self._owner = holdings.owner
        self._room_queue = line
        self._limits = limits
        self._kept = kept
        self._ticks_waited: dict[str, int] = {}
        self._idle_ticks = self._seen_transactions = 0

    def run(self) -> bool:
        """Give back for others who wait, write what has waited for long; return whether there is more to come."""
        self._look_at_waiters()
        num_transactions = self._ledger.database.num_transactions
        self._idle_ticks = self._idle_ticks + 1 if num_transactions == self._seen_transactions else 0
        self._seen_transactions = num_transactions
        if self._idle_ticks >= FLUSH_TICKS:
            if self._owner.is_waiting:
                self._owner.flush()
                self._limits.keep()  # what was given back may be above a limit that was lowered
            if self._room_queue.is_stale:
                self._owner.run(self._room_queue.leave_if_nobody_waits)
        if self._disk.is_ballast_dropped and self._idle_ticks % BALLAST_TICKS == 0:
            self._disk.restore_ballast()
        return bool(
            self._owner.is_waiting
            or self._holdings.num_revocable
            or len(self._kept)
            or self._room_queue.is_stale
            or self._disk.is_ballast_dropped
        )

    def _look_at_waiters(self) -> None:
        """Write what was deferred as soon as another process waits for room; revoke what is prefetched if that did not help."""
        waiting = [owner for owner in self._ledger.waiting_owners() if owner != self._owner.id]
        self._ticks_waited = {owner: self._ticks_waited.get(owner, 0) + 1 for owner in waiting}
        if not waiting:
            return
        self._kept.let_go()
        if any(ticks > REVOKE_TICKS and self._disk.owners.is_live(owner) for owner, ticks in self._ticks_waited.items()):
            self._holdings.revoke_prefetched()
            self._holdings.trim_retained(self._ledger.share_bytes(self._owner.num_expected))
        self._owner.flush()


logger = logging.getLogger(__name__)

TICK_SECONDS = 0.025
"""How often the background thread looks while there is anything to do."""
FAILED_SECONDS = 1.0
"""How long it leaves a cache alone that failed."""
IDLE_SECONDS = 0.3
"""Without anything to do for so long, its thread ends: a loop that was left must leave no thread behind."""


class BackgroundThread:
    """Calls `work` every tick from `wake()` on, until it returns False.

    Args:
        work: Returns whether there is more to do.
    """

    def __init__(self, work: Callable[[], bool]) -> None:
        self._work = work
        self._state = locks.StateLock()
        self.after_fork_in_child()
        fork.call_in_child(self, fork.Stage.MEMORY)

    def after_fork_in_child(self) -> None:
        """The thread stays with the parent."""
        self._thread: threading.Thread | None = None
        self._is_awake = threading.Event()
        self.is_woken = False
        """The same, but for the moment after it is cleared: to ask the event costs a hit 0.3 us."""
        self._is_over = threading.Event()
        self._has_warned = False

    def wake(self) -> None:
        """There is something to do."""
        if self.is_woken:
            return
        with self._state:
            self._is_awake.set()
            self.is_woken = True
            if self._thread is None and not self._is_over.is_set():
                thread = threading.Thread(target=self._run, name="sqlstream-cache-background", daemon=True)
                try:
                    thread.start()
                except (
                    RuntimeError,
                    MemoryError,
                ) as error:  # the next wake tries again
                    self.is_woken = False
                    if not self._has_warned:
                        self._has_warned = True
                        logger.warning("the cache's background thread does not start (%s): raise `ulimit -u`", error)
                else:
                    self._thread = thread

    def stop(self) -> None:
        """End the thread and wait for it."""
        with self._state:
            self._is_over.set()
            self._is_awake.set()
            self.is_woken = True  # nothing wakes it any more
            thread = self._thread
        if thread is not None:
            interrupts.join(thread)

    def _run(self) -> None:
        interrupts.be_service()
        is_over, is_awake = self._is_over, self._is_awake
        said = ""
        while not is_over.wait(TICK_SECONDS):
            with self._state:
                if is_over.is_set():  # `stop` may have set both by now
                    return
                is_awake.clear()  # before the work: what comes from now on sets it again
                self.is_woken = False
            try:
                if self._work():
                    is_awake.set()
            except Exception as error:
                if str(error) != said:
                    said = str(error)
                    text = "the cache's background thread failed (%s); it tries again every %g s"
                    has_cure = isinstance(error, CacheError)  # which its text names; else it is a fault of ours
                    logger.log(logging.ERROR, text, error, FAILED_SECONDS, exc_info=not has_cure)
                is_over.wait(FAILED_SECONDS)
            if not is_awake.wait(IDLE_SECONDS) and self._ends():
                return

    def _ends(self) -> bool:
        """Return whether there was no wake: the thread ends, and the next wake starts another one."""
        with self._state:
            if self._is_awake.is_set():
                return False
            self._thread = None
            return True
