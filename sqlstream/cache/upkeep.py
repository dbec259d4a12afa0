"""What the keeper's thread does for others, and for later: give back, write what has waited for long, restore the ballast."""

from __future__ import annotations

from sqlstream.cache.bypass import Bypass
from sqlstream.cache.disk import Disk
from sqlstream.cache.holds import Holdings
from sqlstream.cache.ledger import Ledger
from sqlstream.cache.line import Line

REVOKE_TICKS = 8
"""Others who have waited for so many ticks get what is prefetched; sooner, much would be fetched twice for nothing."""
FLUSH_TICKS = 10
"""After so many ticks of the keeper (a quarter of a second) without a transaction, what waits is written."""
BALLAST_TICKS = 200
"""How often the keeper tries to take the ballast of a full disk back: every 5 s."""


class Upkeep:
    """The keeper's work on one cache directory.

    Args:
        disk: The directory's files.
        ledger: The directory's ledger.
        holdings: What this process holds.
        bypass: The way around a cache that fails.
        line: This process's place in the line for room.
    """

    def __init__(self, disk: Disk, ledger: Ledger, holdings: Holdings, bypass: Bypass, line: Line) -> None:
        self._disk = disk
        self._ledger = ledger
        self._holdings = holdings
        self._owner = holdings.owner
        self._bypass = bypass
        self._line = line
        self._ticks_waited: dict[str, int] = {}
        self._idle_ticks = self._seen_transactions = 0

    def run(self, num_expected: int) -> bool:
        """Give back for others who wait, write what has waited for long; return whether there is more to come.

        Args:
            num_expected: Processes that will share the limit.
        """
        if not self._bypass.is_cache_left_alone:
            with self._bypass.tolerated():
                return self._run_once(num_expected)
        return True

    def _run_once(self, num_expected: int) -> bool:
        self._look_at_waiters(num_expected)
        num_transactions = self._ledger.database.num_transactions
        self._idle_ticks = self._idle_ticks + 1 if num_transactions == self._seen_transactions else 0
        self._seen_transactions = num_transactions
        if self._idle_ticks >= FLUSH_TICKS:
            self._owner.flush()
            if self._line.is_stale:
                self._owner.run(self._line.leave_if_nobody_waits)
        if self._disk.is_ballast_dropped and self._idle_ticks % BALLAST_TICKS == 0:
            self._disk.restore_ballast()
        return bool(
            self._owner.is_waiting or self._holdings.num_revocable or self._line.is_stale or self._disk.is_ballast_dropped
        )

    def _look_at_waiters(self, num_expected: int) -> None:
        """Write what was deferred as soon as another process waits for room; revoke what is prefetched if that did not help."""
        waiting = [owner for owner in self._ledger.waiting_owners() if owner != self._owner.id]
        self._ticks_waited = {owner: self._ticks_waited.get(owner, 0) + 1 for owner in waiting}
        if not waiting:
            return
        if any(ticks > REVOKE_TICKS and self._disk.owner_is_live(owner) for owner, ticks in self._ticks_waited.items()):
            self._holdings.revoke_prefetched()
            self._holdings.trim_retained(self._ledger.share_bytes(num_expected))
        self._owner.flush()
