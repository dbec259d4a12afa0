"""Samples whose objects are all here, far from the limit, whose paths nobody gets: no transaction, no row, no door.

The ledger is only read: that an object is here is a hint, to be checked when the hold is claimed (`LightHold`). Far from the
limit nobody's order of use matters, and nothing is evicted soon; hits are still counted, in batches.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlstream import locks
from sqlstream.cache.bypass import Bypass
from sqlstream.cache.disk import Disk
from sqlstream.cache.holds import NOTHING, AnyHold, Hold, Holdings, HoldState
from sqlstream.cache.keys import ObjectRef
from sqlstream.cache.ledger import Ledger, LedgerTransaction
from sqlstream.cache.light_hold import LightHold, Shelf
from sqlstream.cache.passage import TOUCH_ABOVE
from sqlstream.cache.policy import POLICIES, Policy
from sqlstream.cache.uses import Uses
from sqlstream.errors import CacheError
from sqlstream.storage.fetcher import Fetcher

HITS_A_LOOK = 64
"""Hits between two looks at limit and policy: a window, or many single ones."""


class Lights:
    """Makes light holds.

    Args:
        disk: The directory's files.
        ledger: What is here.
        holdings: What this process holds; its limit must be in force before it can be far from it.
        bypass: The way around a cache that fails.
        uses: Where hits are noted.
    """

    def __init__(self, disk: Disk, ledger: Ledger, holdings: Holdings, bypass: Bypass, uses: Uses) -> None:
        self._shelf = Shelf(disk.data, uses.take_back)
        self._ledger = ledger
        self._holdings = holdings
        self._owner = holdings.owner
        self._bypass = bypass
        self._uses = uses
        self._policy: Policy | None = None
        self._num_left = 0

    def acquire(self, groups: Sequence[Sequence[ObjectRef]], fetcher: Fetcher) -> Sequence[LightHold] | None:
        """Return a light hold for each of `groups` (the objects of one sample each); None: this takes a transaction."""
        if not self._owner.is_registered or (self._bypass.allows(fetcher) and self._bypass.is_cache_left_alone):
            return None
        wanted = {ref.key: ref.must_be_here for group in groups for ref in group}
        try:
            policy = self._far_from_full(len(groups))
            if policy is None or True in wanted.values():
                return None
            ready = self._ledger.find_ready(wanted)
        except CacheError:
            return None  # a transaction mends it, or tells, or goes around it
        if not ready or len(ready) < len(wanted):
            return None
        with locks.fork_guard():
            self._uses.note(len(ready), 0, policy, {})
        return [LightHold(group, ready, self._shelf) for group in groups]

    def by_rows(self, light: LightHold) -> AnyHold:
        """Return a hold in use that pins by rows what a claimed light hold keeps by locks; those are given back last.

        Of a cache that fails and is bypassed, the light one: its locks keep the paths for as long as the caller has it.
        """
        charges = light.charges
        hold = Hold(light.refs, "", charges, NOTHING, sum(charges.values()), HoldState.IN_USE)

        def pin(_: LedgerTransaction) -> None:  # the owner writes its pins at the end of it
            assert self._owner.id is not None
            if not hold.number:  # else this is the second try
                hold.owner = self._owner.id
                self._holdings.add([hold])

        with locks.uninterrupted():
            try:
                self._owner.run(pin)
            except BaseException as error:
                self._holdings.release(hold)
                if not (self._bypass.is_allowed and isinstance(error, CacheError)):
                    raise
                self._bypass.note(error)
                return light
            light.close()
        return hold

    def _far_from_full(self, num_hits: int) -> Policy | None:
        """Return the policy in force, if the order of uses matters neither to it nor to the room that is left."""
        self._num_left -= num_hits
        if self._num_left < 0:
            charged_bytes, limit_bytes, name = self._ledger.fullness()
            is_far = limit_bytes is None or charged_bytes <= TOUCH_ABOVE * limit_bytes
            self._policy = POLICIES[name] if is_far and not POLICIES[name].looks_ahead else None
            self._num_left = HITS_A_LOOK
        return self._policy
