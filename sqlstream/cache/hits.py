"""Samples whose objects are all here, one at a time: random access, where a whole passage is too much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlstream import locks
from sqlstream.cache import recover
from sqlstream.cache.disk import Disk, changed_files
from sqlstream.cache.holds import NOTHING, Hold, Holdings
from sqlstream.cache.keys import ObjectRef
from sqlstream.cache.owner import Owner
from sqlstream.cache.policy import Policy
from sqlstream.cache.rows import ReadyRow
from sqlstream.cache.uses import Uses
from sqlstream.errors import CacheDamagedError, CacheDiskError

HITS_A_PASSAGE = 64
"""Single hits between two looks at limit and policy."""


class Hits:
    """Holds what is here.

    Args:
        disk: The directory's files.
        owner: This process in the ledger.
        holdings: What it holds.
        uses: Where hits are noted.
    """

    def __init__(self, disk: Disk, owner: Owner, holdings: Holdings, uses: Uses) -> None:
        self._disk = disk
        self._owner = owner
        self._holdings = holdings
        self._uses = uses
        self._policy: Policy | None = None
        self._is_order_needed = False
        self._num_left = 0

    def learn(self, policy: Policy, *, is_order_needed: bool) -> None:
        """Take over what a passage has asked the ledger for; it holds for the next `HITS_A_PASSAGE` hits."""
        self._policy, self._is_order_needed = policy, is_order_needed
        self._num_left = HITS_A_PASSAGE

    def acquire(self, refs: Sequence[ObjectRef]) -> Hold | None:
        """Return a hold on one sample whose objects are here; None: this takes a passage."""
        policy, self._num_left = self._policy, self._num_left - 1
        if policy is None or policy.looks_ahead or self._num_left < 0:
            return None
        hold: Hold | None = None
        try:
            with locks.uninterrupted(), self._owner.transaction() as tx:
                assert self._owner.id is not None
                ready = tx.find_ready([ref.key for ref in refs])
                if any(ref.key not in ready for ref in refs):
                    return None
                charges = {key: row[2] for key, row in ready.items()}
                hold = Hold(refs, self._owner.id, charges, NOTHING, sum(charges.values()))
                self._holdings.add([hold])
        except BaseException as error:
            if hold is not None:
                self._holdings.release(hold)
            if isinstance(error, CacheDamagedError | CacheDiskError):
                return None  # by now it may have been mended
            raise
        with locks.fork_guard():
            self._uses.note(len(ready), 0, policy, dict.fromkeys(ready) if self._is_order_needed else {})
        self.check_files([hold], ready)
        return hold

    def check_files(self, holds: Sequence[Hold], ready: Mapping[bytes, ReadyRow]) -> None:
        """Look at each file that is said to be here, now that it is pinned; one changed behind our back is fetched again."""
        changed = changed_files(self._disk, ready.values())
        for hold in holds if changed else ():
            for key in hold.charges.keys() & changed:
                self._owner.run(lambda tx, key=key: recover.quarantine(tx, self._disk, key, self._owner.id))  # type: ignore[misc]
                hold.is_void = True
