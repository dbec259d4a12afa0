"""Samples whose objects are all here: one at a time by rows, or by read locks alone (no transaction, no row).

By read locks the ledger is only read: that an object is here is a hint, which is checked when the hold is claimed. It is done
far from the limit, where the order of uses matters little and nothing is evicted soon; hits are still counted, in batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlstream.cache.acquire.holds import NOTHING, Hold, Holds, HoldState
from sqlstream.cache.acquire.owner import Owner
from sqlstream.cache.acquire.reserve import TOUCH_ABOVE
from sqlstream.cache.acquire.uses import UsageLog
from sqlstream.cache.files.disk import Disk, changed_files
from sqlstream.cache.files.read_hold import ReadHold, ReadLockPool
from sqlstream.cache.ledger.ledger import Ledger, LedgerTransaction
from sqlstream.cache.model.policies import Policy, policy_in_ledger
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.model.rows import ReadyRow
from sqlstream.cache.recovery import recover
from sqlstream.errors import CacheDamagedError, CacheDiskError, CacheError
from sqlstream.process import locks


class Hits:
    """Holds what is here.

    Args:
        disk: The directory's files.
        owner: This process in the ledger.
        holdings: What it holds.
        uses: Where hits are noted.
        num_hits_a_look: Single hits between two looks at limit and policy.
    """

    def __init__(self, disk: Disk, owner: Owner, holdings: Holds, uses: UsageLog, num_hits_a_look: int) -> None:
        self._disk = disk
        self._owner = owner
        self._holdings = holdings
        self._uses = uses
        self._policy: Policy | None = None
        self._is_order_needed = False
        self._num_hits_a_look = num_hits_a_look
        self._num_left = 0

    def learn(self, policy: Policy, *, is_order_needed: bool) -> None:
        """Take over what a transaction has asked the ledger for; it holds for some hits."""
        self._policy, self._is_order_needed = policy, is_order_needed
        self._num_left = self._num_hits_a_look

    def acquire(self, refs: Sequence[ObjectRef]) -> Hold | None:
        """Return a hold on one sample whose objects are here; None: this takes a transaction."""
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
        self._uses.note(ready, 0, policy, dict.fromkeys(ready) if self._is_order_needed else {})
        self.check_files([hold], ready)
        return hold

    def check_files(self, holds: Sequence[Hold], ready: Mapping[bytes, ReadyRow]) -> None:
        """Look at each file that is said to be here, now that it is pinned; one changed behind our back is fetched again."""
        changed = changed_files(self._disk, ready.values())
        for hold in holds if changed else ():
            for key in hold.charges.keys() & changed:
                self._owner.run(lambda tx, key=key: recover.quarantine(tx, self._disk, key, self._owner.id))  # type: ignore[misc]
                hold.is_void = True


class ReadHits:
    """Makes read holds.

    Args:
        disk: The directory's files.
        ledger: What is here.
        holdings: What this process holds; its limit must be in force before it can be far from it.
        uses: Where hits are noted.
        num_hits_a_look: Hits between two looks at limit and policy.
    """

    def __init__(self, disk: Disk, ledger: Ledger, holdings: Holds, uses: UsageLog, num_hits_a_look: int) -> None:
        self._pool = ReadLockPool(disk.data, uses.take_back)
        self._ledger = ledger
        self._holdings = holdings
        self._owner = holdings.owner
        self._uses = uses
        self._policy: Policy | None = None
        self._num_hits_a_look = num_hits_a_look
        self._num_left = 0

    def acquire(self, groups: Sequence[Sequence[ObjectRef]]) -> Sequence[ReadHold] | None:
        """Return a read hold for each of `groups` (the objects of one sample each); None: this takes a transaction."""
        if not self._owner.is_registered:
            return None
        wanted = {ref.key: ref.is_stored_sample for group in groups for ref in group}
        try:
            policy = self._far_from_full(len(groups))
            if policy is None or True in wanted.values():
                return None
            ready = self._ledger.find_ready(wanted)
        except CacheError:
            return None  # a transaction mends it, or tells
        if not ready or len(ready) < len(wanted):
            return None
        self._uses.note(ready, 0, policy, {})
        return [ReadHold(group, ready, self._pool) for group in groups]

    def by_rows(self, read_hold: ReadHold) -> Hold:
        """Return a hold in use that pins by rows what a claimed read hold keeps by locks; those are given back last."""
        charges = read_hold.charges
        hold = Hold(read_hold.refs, "", charges, NOTHING, sum(charges.values()), HoldState.IN_USE)

        def pin(_: LedgerTransaction) -> None:  # the owner writes its pins at the end of it
            assert self._owner.id is not None
            if not hold.number:  # else this is the second try
                hold.owner = self._owner.id
                self._holdings.add([hold])

        with locks.uninterrupted():
            try:
                self._owner.run(pin)
            except BaseException:
                self._holdings.release(hold)
                raise
            read_hold.close()
        return hold

    def _far_from_full(self, num_hits: int) -> Policy | None:
        """Return the policy in force, if the order of uses matters neither to it nor to the room that is left."""
        self._num_left -= num_hits
        if self._num_left < 0:
            charged_bytes, limit_bytes, name = self._ledger.fullness()
            is_far = limit_bytes is None or charged_bytes <= TOUCH_ABOVE * limit_bytes
            policy = policy_in_ledger(name)
            self._policy = policy if is_far and not policy.looks_ahead else None
            self._num_left = self._num_hits_a_look
        return self._policy
