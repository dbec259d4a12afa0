"""Objects that are all here: looked up by the last committed state of the ledger, with the rules for noting uses.

A hit takes one of two ways: by read locks on the files (no transaction, no row, at every fill of the cache), or by rows, in an
`AcquireTransaction`. For both the rules are known for some hits at a time, and both compare each file with its row.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence, Set

from sqlstream.cache.acquire.background import BackgroundThread
from sqlstream.cache.acquire.holds import Hold
from sqlstream.cache.acquire.owner import Owner
from sqlstream.cache.acquire.uses import UsageLog, UseRules
from sqlstream.cache.files.disk import Disk, changed_files
from sqlstream.cache.files.read_hold import KeptLocks, Noted, ReadHold, ReadLocks
from sqlstream.cache.ledger.ledger import Ledger
from sqlstream.cache.model.policies import policy_in_ledger
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.model.rows import ReadyRow
from sqlstream.cache.recovery import recover
from sqlstream.errors import CacheError
from sqlstream.process import fork

_KEY_OF = operator.attrgetter("key")
MAX_REMEMBERED = 1 << 15
"""Rows that single accesses remember: 10 MiB. Arbitrary."""


class Lookup:
    """Finds what is here, and knows policy and fullness.

    Args:
        ledger: What is here.
        owner: This process in the ledger; its limit must be in force before anything is held without a row.
        uses: Where hits are noted.
        background: The thread that writes them.
        data: The folder of files.
        kept: Shards that stay open.
        num_hits_a_look: Hits between two looks at limit and policy.
    """

    def __init__(
        self,
        ledger: Ledger,
        owner: Owner,
        uses: UsageLog,
        background: BackgroundThread,
        data: str,
        kept: KeptLocks,
        num_hits_a_look: int,
    ) -> None:
        self._ledger = ledger
        self._owner = owner
        self.uses = uses
        self._background = background
        self._read_locks = ReadLocks(data, self._was_missed, kept)
        self._num_hits_a_look = num_hits_a_look
        self.forget()
        self._remembered: dict[bytes, ReadyRow] = {}
        self.expects_misses = True
        """The last transaction met objects that were not here."""
        fork.call_in_child(self, fork.Stage.MEMORY)

    def forget(self) -> None:
        """This process is registered no more: what was learned holds for no hit."""
        self._rules: UseRules | None = None
        self._num_left = 0

    def after_fork_in_child(self) -> None:
        """A child registers by itself."""
        self.forget()

    def learn(self, rules: UseRules) -> None:
        """Take over what a transaction has asked the ledger for; it holds for some hits."""
        self._rules, self._num_left = rules, self._num_hits_a_look

    def known(self, num_hits: int) -> UseRules | None:
        """Return the rules for so many hits; None: they must be asked for."""
        self._num_left -= num_hits
        return self._rules if self._num_left >= 0 else None

    def read(self, groups: Sequence[Sequence[ObjectRef]]) -> list[ReadHold] | None:
        """Return read holds on samples whose objects are all here; None: this takes a transaction.

        The caller only reads the files between claim and release, and hands no path out.
        """
        if self.expects_misses and len(groups) > 1:
            return None
        ready = self._find({ref.key: ref.is_stored_sample for group in groups for ref in group}, len(groups))
        if ready is None:
            return None
        locks = self._read_locks
        return [ReadHold(group, (*map(ready.__getitem__, map(_KEY_OF, group)),), locks, ready) for group in groups]

    def read_one(self, group: Sequence[ObjectRef]) -> ReadHold | None:
        """Return a read hold on one sample; what the ledger said of its objects before is asked once.

        That they are here is a hint in any case: claimed, each file is compared with its row.
        """
        rows = [*map(self._remembered.get, map(_KEY_OF, group))]
        rules = self._rules
        if None in rows or rules is None or rules.policy.looks_ahead or self._num_left <= 0:
            holds = self.read([group])
            if holds is None:
                return None
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered.update(zip(map(_KEY_OF, group), holds[0].rows, strict=True))
            return holds[0]
        self._num_left -= 1
        noted = dict.fromkeys(map(_KEY_OF, group))
        self._note(noted, rules)
        return ReadHold(group, rows, self._read_locks, noted)  # type: ignore[arg-type]  # None is not in them

    def _find(self, wanted: Mapping[bytes, bool], num_samples: int) -> dict[bytes, ReadyRow] | None:
        """Return the rows of objects, whose uses are noted; None: this takes a transaction.

        Args:
            wanted: The objects, by key, and whether each is a stored sample.
            num_samples: How many samples they belong to.
        """
        if not self._owner.is_registered:
            return None
        try:
            rules = self.known(num_samples)
            if rules is None:
                charged_bytes, limit_bytes, name = self._ledger.fullness()
                rules = UseRules.of(policy_in_ledger(name), charged_bytes, limit_bytes)
                self.learn(rules)
            if rules.policy.looks_ahead or True in wanted.values():
                return None  # ranks by the clock of the ledger; a sample that is not stored after all
            ready = self._ledger.find_ready(wanted)
        except CacheError:
            return None  # a transaction mends it, or tells
        if not ready or len(ready) < len(wanted):
            return None
        self._note(ready, rules)
        return ready

    def _note(self, keys: Collection[bytes], rules: UseRules) -> None:
        self.uses.note(keys, rules)
        if not self._background.is_woken:
            self._background.wake()

    def _was_missed(self, refs: Sequence[ObjectRef], noted: Noted) -> None:
        keys = {*map(_KEY_OF, refs)}
        self.uses.take_back(len(keys & noted.keys()))
        for key in keys:
            noted.pop(key, None)  # another hold on it, of the same window, takes nothing back
            self._remembered.pop(key, None)

    def missing(self, keys: Set[bytes]) -> Set[bytes]:
        """Return those of `keys` that have no row in the last committed state."""
        return keys - self._ledger.find(keys).keys()


def check_files(disk: Disk, owner: Owner, holds: Sequence[Hold], ready: Mapping[bytes, ReadyRow]) -> None:
    """Look at each file that is said to be here, now that it is pinned; one changed behind our back is fetched again."""
    changed = changed_files(disk, ready.values())
    for hold in holds if changed else ():
        for key in hold.charges.keys() & changed:
            owner.run(lambda tx, key=key: recover.quarantine(tx, disk, key, owner.id))  # type: ignore[misc]  # default of a lambda
            hold.is_void = True
