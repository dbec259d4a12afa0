"""Which objects this process used, and how often they were here: told to the ledger in batches.

Order, times and counters are hints: a process that dies takes at most a batch of them along. So single hits write no row of
their own. The times of last uses are noted at every fill of the cache, the order only where it matters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from itertools import islice, repeat, starmap
from typing import NamedTuple

from sqlstream.cache.acquire.owner import Owner
from sqlstream.cache.ledger.eviction import note_uses
from sqlstream.cache.ledger.last_uses import note_last_uses
from sqlstream.cache.ledger.ledger import LedgerTransaction
from sqlstream.cache.model.policies import Policy
from sqlstream.process import fork

TOUCH_ABOVE = 0.5
"""The order of uses is noted only when the cache is fuller than this share of its limit: below, nothing is evicted soon."""
BATCH = 192
"""Uses written together: three windows of a stream, or many single hits; more would not fit into one page of the ledger."""


class UseRules(NamedTuple):
    """What is to be noted of a use."""

    policy: Policy
    """The eviction policy in force."""
    is_order_needed: bool
    """The cache is so full that it matters what is used."""

    @classmethod
    def of(cls, policy: Policy, charged_bytes: int, limit_bytes: int | None) -> UseRules:
        """Return the rules of a cache with `charged_bytes` under a limit."""
        return cls(policy, limit_bytes is not None and charged_bytes > TOUCH_ABOVE * limit_bytes)


class _Noted(NamedTuple):
    """What is to be known of uses beside the objects that were here."""

    num_misses: int
    num_taken_back: int = 0
    """Hits that were none after all."""
    policy: Policy | None = None
    ranks: Mapping[bytes, int | None] = {}


class UsageLog:
    """Uses that wait for a transaction. Any thread notes them, without a lock; transactions gather them.

    Args:
        owner: Whose transactions they go with.
    """

    def __init__(self, owner: Owner) -> None:
        self.after_fork_in_child()
        fork.call_in_child(self, fork.Stage.MEMORY)
        owner.defer(self)

    def after_fork_in_child(self) -> None:
        """The parent tells its own."""
        self._hits: deque[bytes] = deque()
        """Objects that were here, by their keys, as often as they were."""
        self._noted: deque[_Noted] = deque()
        self._noted_policy: Policy | None = None
        """That of the last uses that were noted."""
        self._num_bypassed: deque[int] = deque()
        """Objects that were read past the cache; they are not worth a transaction of their own."""
        self._num_counting = 0
        self._forget()

    def _forget(self) -> None:
        self._num_hits = self._num_misses = 0
        self._policy: Policy | None = None
        self._ranks: dict[bytes, int | None] = {}
        self._keys: set[bytes] = set()
        self._is_written = False

    def note(
        self,
        hits: Collection[bytes],
        rules: UseRules,
        num_misses: int = 0,
        all_ranks: Mapping[bytes, int | None] | None = None,
    ) -> None:
        """Count uses that nothing rolls back any more.

        Args:
            hits: The objects that were here, by their keys.
            rules: What is to be noted.
            num_misses: How many were not here.
            all_ranks: What a policy that looks ahead makes of each use, and maybe of others.
        """
        self._hits.extend(hits)  # most hits leave nothing else: no object that the garbage collector would look at
        if rules.is_order_needed:
            ranks = dict.fromkeys(hits) if all_ranks is None else {key: all_ranks[key] for key in hits}
            self._noted.append(_Noted(num_misses, 0, rules.policy, ranks))
        elif num_misses or rules.policy is not self._noted_policy:
            self._noted.append(_Noted(num_misses, 0, rules.policy))
        self._noted_policy = rules.policy

    def note_bypassed(self, num_objects: int) -> None:
        """Count objects that were read past the cache, with whatever transaction works again."""
        self._num_bypassed.append(num_objects)

    def take_back(self, num_hits: int) -> None:
        """Uncount hits that were none after all."""
        self._noted.append(_Noted(0, num_hits))

    @property
    def is_waiting(self) -> bool:
        """Whether there are any."""
        return bool(self._hits or self._noted or self._num_hits or self._num_misses)

    def _gather(self) -> None:
        """Add up what was noted; in a transaction."""
        num_hits = len(self._hits)  # others note more meanwhile
        self._num_hits += num_hits
        self._keys.update(starmap(self._hits.popleft, repeat((), num_hits)))
        while self._noted:
            noted = self._noted.popleft()
            self._num_hits -= noted.num_taken_back
            self._num_misses += noted.num_misses
            if noted.policy is not None and noted.policy is not self._policy:
                self._policy, self._ranks = noted.policy, {}
            for key in self._ranks.keys() & noted.ranks:  # in the order of their last use
                del self._ranks[key]
            self._ranks.update(noted.ranks)

    def write(self, tx: LedgerTransaction, *, is_flush: bool) -> None:
        """Write them if they are worth a row, or if this is a flush."""
        self._is_written = False
        if self._num_bypassed:
            self._num_counting = len(self._num_bypassed)
            tx.count({"bypassed": sum(islice(self._num_bypassed, self._num_counting))})
        self._gather()
        if is_flush or self._num_hits + self._num_misses >= BATCH:
            self.write_now(tx)

    def write_now(self, tx: LedgerTransaction) -> None:
        """Write them, once a transaction: a process that evicts must know what this one used."""
        if self._is_written:
            return
        self._gather()
        if not self._num_hits and not self._num_misses:
            return
        if self._ranks and self._policy is not None:
            note_uses(tx, self._policy, self._ranks)
        if self._keys:
            note_last_uses(tx, self._keys)
        tx.count({"hits": self._num_hits, "misses": self._num_misses})
        self._is_written = True

    def written(self) -> None:
        """They are committed."""
        while self._num_counting:
            self._num_bypassed.popleft()
            self._num_counting -= 1
        if self._is_written:
            self._forget()

    def give_up(self) -> None:
        """They are lost."""
        self.after_fork_in_child()
