"""Which objects this process used, and how often they were here: told to the ledger in batches.

Order and counters are hints: a process that dies takes at most a batch of them along. So single hits write no row of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlstream import locks
from sqlstream.cache.eviction import note_uses
from sqlstream.cache.ledger import LedgerTransaction
from sqlstream.cache.owner import Owner
from sqlstream.cache.policy import Policy

BATCH = 192
"""Uses written together: three windows of a stream, or many single hits; more would not fit into one page of the ledger."""


class Uses:
    """Uses that wait for a transaction; guarded by `locks.fork_guard()`.

    Args:
        owner: Whose transactions they go with.
    """

    def __init__(self, owner: Owner) -> None:
        self.after_fork_in_child()
        locks.call_after_fork(self)
        owner.defer(self)

    def after_fork_in_child(self) -> None:
        """The parent tells its own."""
        self._num_hits = self._num_misses = 0
        self._policy: Policy | None = None
        self._ranks: dict[bytes, int | None] = {}
        self._is_written = False

    def note(self, num_hits: int, num_misses: int, policy: Policy, ranks: Mapping[bytes, int | None]) -> None:
        """Count uses that are committed.

        Args:
            num_hits: How many objects were here.
            num_misses: How many were not.
            policy: The eviction policy in force.
            ranks: What it makes of the hits; empty where the cache is far from full.
        """
        self._num_hits += num_hits
        self._num_misses += num_misses
        if policy is not self._policy:
            self._policy, self._ranks = policy, {}
        for key in self._ranks.keys() & ranks:  # in the order of their last use
            del self._ranks[key]
        self._ranks.update(ranks)

    def take_back(self, num_hits: int) -> None:
        """Uncount hits that were none after all."""
        with locks.fork_guard():
            self._num_hits -= num_hits

    @property
    def is_waiting(self) -> bool:
        """Whether there are any."""
        return bool(self._num_hits or self._num_misses)

    def write(self, tx: LedgerTransaction, *, is_flush: bool) -> None:
        """Write them if they are worth a row, or if this is a flush."""
        self._is_written = False
        if is_flush or self._num_hits + self._num_misses >= BATCH:
            self.write_now(tx)

    def write_now(self, tx: LedgerTransaction) -> None:
        """Write them, once a transaction: whoever evicts must know what this process used."""
        if self._is_written or not self.is_waiting:
            return
        if self._ranks and self._policy is not None:
            note_uses(tx, self._policy, self._ranks)
        tx.count({"hits": self._num_hits, "misses": self._num_misses})
        self._is_written = True

    def written(self) -> None:
        """They are committed."""
        if self._is_written:
            self.after_fork_in_child()
