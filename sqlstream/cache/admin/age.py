"""Objects that came longer ago than a user of a cache allows: they go before all others, and are fetched again."""

from __future__ import annotations

import math
import time

from sqlstream.cache.acquire.room import MAX_EVICTIONS
from sqlstream.cache.directory import CacheDirectory
from sqlstream.cache.ledger.ledger import LedgerTransaction
from sqlstream.cache.recovery import recover
from sqlstream.config import INT64_MAX, check_at_least, parse_duration
from sqlstream.errors import ConfigError

_OLD = "SELECT key FROM entry WHERE state = 'ready' AND created_at NOT BETWEEN ? AND ? ORDER BY created_at"
_LOOKS = 10
"""Looks in the time that an object may stay: it stays a tenth longer at most. Each reads all rows of the ledger."""
_LEAST_SECONDS = 1.0  # between two looks


def age_seconds(max_age: str | float | None) -> float | None:
    """Return `max_age` in seconds; None: no limit.

    Raises:
        ConfigError: It is no time above 0.
    """
    if max_age is None:
        return None
    seconds = parse_duration(max_age, "max_age") if isinstance(max_age, str) else check_at_least("max_age", max_age, 0.0)
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"max_age={max_age!r} is no time: give seconds above 0, or a text such as '12h', '7d'; None: no limit"
        )
    return float(seconds)


class MaxAge:
    """Removes what is older than a user allows, but for what a process holds: when it is opened, and from time to time.

    Args:
        directory: The cache.
        seconds: Longest time that an object may stay after it came.
    """

    def __init__(self, directory: CacheDirectory, seconds: float) -> None:
        self._directory = directory
        self._seconds = seconds
        self._next_look = -math.inf

    def remove_older(self) -> None:
        """Remove it, if the last look is long enough ago."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + max(_LEAST_SECONDS, self._seconds / _LOOKS)
        at = time.time()  # a clock that was ahead has left times to come: how long ago that was is not known
        young = max(math.floor(at - self._seconds), 0), min(math.ceil(at + self._seconds), INT64_MAX)  # as `created_at` is
        old = [key for (key,) in self._directory.ledger.database.read(_OLD, young)]
        if old:
            self._directory.kept.let_go()
        for start in range(0, len(old), MAX_EVICTIONS):
            self._remove(old[start : start + MAX_EVICTIONS], young)

    def _remove(self, keys: list[bytes], young: tuple[int, int]) -> None:
        """Remove entries that no process holds or has fetched again, in a transaction: others go on between two."""

        def remove(tx: LedgerTransaction) -> None:
            kept = tx.pinned() | tx.created_since(keys, *young)
            rows = [row for row in tx.find(keys).values() if row.is_ready and row.key not in kept]
            recover.remove(tx, self._directory.disk, rows)

        self._directory.owner.run(remove)
