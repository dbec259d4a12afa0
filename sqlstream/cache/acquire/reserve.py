"""One transaction for a window of samples: pin what is here, reserve what is not, sample by sample, all or none."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from sqlstream.cache.acquire.downloads import Downloads, cannot_fit
from sqlstream.cache.acquire.holds import NOTHING, Hold, Holds
from sqlstream.cache.acquire.outcomes import DownloadSource, Lead
from sqlstream.cache.acquire.room import Room, claims_before, forget_limit_of_the_dead, make_room
from sqlstream.cache.acquire.shard_units import give_up_members, wholes_of
from sqlstream.cache.acquire.uses import UsageLog, UseRules
from sqlstream.cache.files.disk import Disk, Part
from sqlstream.cache.ledger.eviction import EvictionState, advance
from sqlstream.cache.ledger.ledger import LedgerTransaction
from sqlstream.cache.model.policies import policy_in_ledger
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.model.rows import Account, EntryRow, ReadyRow, Reservation
from sqlstream.cache.recovery import recover
from sqlstream.errors import CacheFullError
from sqlstream.storage.base import urls

NextUses: TypeAlias = Sequence[int | None] | None
"""After how many further uses of the cache, counted from this one, the objects of each sample are used again, if known."""


@dataclass(slots=True, kw_only=True)
class AcquireTransaction:
    """The steps that one transaction takes, and what came of them."""

    owner: str
    disk: Disk
    downloads: Downloads
    holdings: Holds
    uses: UsageLog
    source: DownloadSource
    window: Set[bytes]
    """All keys of the window: none of them is evicted for another of them."""
    parts: dict[bytes, Part]
    """Part files made ready before the write lock is taken, for the keys that were missing then."""
    must_fit: bool
    """One sample that must get through: its fair share does not bind it."""
    takes_least: bool
    """Where the guess at a size finds no room, reserve the least: it may have to be asked for again when the size comes."""
    in_line: bool
    """Leave room for those that have waited longer."""
    num_expected: int
    """Processes that are known to share the limit, also those that hold nothing yet."""
    rules: UseRules | None
    """What is known of policy and fullness, for a sample that must fit: the ledger is asked only if it is no hit."""
    next_uses: NextUses = None
    """Of each sample of the window; None: none is known."""
    holds: list[Hold] = field(default_factory=list)
    leads: list[Lead] = field(default_factory=list)
    ready: Mapping[bytes, ReadyRow] = field(default_factory=dict)
    """Those of the window that were here."""
    found: dict[bytes, EntryRow] = field(default_factory=dict)
    """Entries of the window, where it is not all hits."""
    room: Room = Room.ENOUGH
    need_bytes: int = 0
    """What the first sample that found no room needs."""
    share_bytes: int | None = None
    """This process's part of the limit among all that hold pins."""
    has_looked: bool = False
    """The ledger was asked for policy, account and owners."""
    num_sharing: int = 1
    """Processes that use this cache now, as far as known."""
    _account: Account | None = None
    _eviction: EvictionState | None = None
    _ranks: dict[bytes, int | None] = field(default_factory=dict)
    """What the policy makes of the uses so far, by key."""
    _spare_bytes: float = 0
    """What may still be reserved without asking the ledger again: under the write lock only our reservations take of it."""
    _unwritten: list[Reservation] = field(default_factory=list)
    """Reservations whose rows go into the ledger together, at the end, or before it is asked again."""

    def run(self, tx: LedgerTransaction, groups: Sequence[Sequence[ObjectRef]]) -> None:
        """Acquire the longest prefix of `groups` (the objects of one sample each) that finds room."""
        if self.rules is None or self.rules.policy.looks_ahead:
            self._look(tx)
        self.ready = tx.find_ready(self.window)
        if not self.has_looked and len(self.ready) < len(self.window):
            self._look(tx)
            self.ready = tx.find_ready(self.window)
        num_held = self._hold_hits(groups)
        if num_held < len(groups):
            self.window = self.window | wholes_of(groups)
            self.found = tx.find(self.window)
            self._spare_bytes = self._spare(tx)
            for number in range(num_held, len(groups)):
                group = self._in_one_unit(tx, groups[number])
                if group is None or not self._add(tx, group, number):
                    break
            self._write_reservations(tx)
        if self._eviction is not None and self._eviction.policy.looks_ahead:
            advance(tx, len(self._ranks))

    def _look(self, tx: LedgerTransaction) -> None:
        """Learn all that does not depend on keys."""
        outlook = tx.outlook()
        if not outlook.account.has_room(0):  # a limit was lowered while what is above it was pinned
            self.uses.write_now(tx)
            make_room(tx, self.disk, 0, owner=self.owner, keep=self.window, in_line=False)
            outlook = tx.outlook()  # the limit may have been that of the dead, who are reaped now
        self._account = outlook.account
        self._eviction = EvictionState(policy=policy_in_ledger(outlook.policy), num_uses=outlook.num_uses)
        self.num_sharing = max(self.num_expected, outlook.num_pinning_owners)
        if self._account.limit_bytes is not None:
            self.share_bytes = self._account.limit_bytes // self.num_sharing
        self.has_looked = True
        self.rules = UseRules.of(self._eviction.policy, self._account.charged_bytes, self._account.limit_bytes)

    def _hold_hits(self, groups: Sequence[Sequence[ObjectRef]]) -> int:
        """Hold the longest prefix of `groups` that is here and within the share, as one; return how many groups that are.

        The same as `_add` for each of them, at a quarter of the time: nearly all windows of a warm cache end here.
        """
        ready, owner, held_bytes = self.ready, self.owner, self.holdings.held_bytes
        held, counted = self.holdings.charges, set[bytes]()
        share_bytes = math.inf if self.must_fit or self.share_bytes is None else self.share_bytes
        holds = []
        with contextlib.suppress(KeyError):  # the first sample that is not here
            for group in groups:
                charges: dict[bytes, int] = {}
                new_bytes = 0
                for ref in group:
                    key = ref.key
                    charges[key] = ready[key][2]
                    if key not in held and key not in counted:
                        counted.add(key)
                        new_bytes += charges[key]
                held_bytes += new_bytes
                # A process that holds nothing else may have one; what it holds anyway costs nothing.
                if new_bytes and held_bytes > share_bytes and held_bytes > sum(charges.values()):
                    break
                holds.append(Hold(group, owner, charges, NOTHING, self.source, is_needed=self.must_fit))
        self.holdings.add(holds)
        self.holds += holds
        if self._eviction is not None and self._eviction.policy.looks_ahead:
            for number, hold in enumerate(holds):
                self._rank(hold.refs, number)
        return len(holds)

    def _add(self, tx: LedgerTransaction, group: Sequence[ObjectRef], number: int) -> bool:
        """Hold the objects of one sample; False, with nothing changed, when there is no room for it."""
        hold = Hold(group, self.owner, {}, NOTHING, self.source, is_needed=self.must_fit)
        refs = tuple({ref.key: ref for ref in group}.values())  # two columns may name one object
        rows = {ref.key: self._row(tx, ref) for ref in refs}
        if any(ref.is_stored_sample and not _is_ready(rows[ref.key]) for ref in refs):
            hold.is_void = True
            self._append_bare(hold)
            return True
        new = [ref for ref in refs if rows[ref.key] is None]
        hold.outstanding = frozenset([key for key, row in rows.items() if row is None or not row.is_ready])
        hold.charges = {key: row.charged_bytes for key, row in rows.items() if row is not None}
        reservation_bytes = self.downloads.sizes.reservation_bytes
        least = {ref.key: reservation_bytes(ref, is_least=True) for ref in new}
        guess = {ref.key: reservation_bytes(ref) for ref in new}
        self.need_bytes = sum(least.values())
        if new:
            together = least | {key: row.charged_bytes for key, row in rows.items() if row is not None and row.is_ready}
            exceeds_limit = self._limit is not None and sum(together.values()) > self._limit
            if exceeds_limit and forget_limit_of_the_dead(tx, self.disk, self.owner):
                self.room = Room.AGAIN
                return False
            cannot_hold = self.downloads.free_space.cannot_hold
            hold.error = self._cannot_fit(refs, together) if exceeds_limit else cannot_hold(tx, new[0].url, self.need_bytes)
        if hold.error is not None:
            self._append_bare(hold)
            return True
        for charges in (guess, least) if self.takes_least else (guess,):
            if self._has_room(tx, self.holdings.new_bytes(hold.charges), sum(charges.values())):
                break
            if self.room is Room.AGAIN:
                return False
        else:
            return False
        hold.charges |= charges
        self._rank(refs, number)
        for ref in new:
            self._reserve(ref, hold.charges[ref.key])
        self.holdings.add([hold])
        self.downloads.join(hold)
        self.holds.append(hold)
        return True

    def _in_one_unit(self, tx: LedgerTransaction, group: Sequence[ObjectRef]) -> Sequence[ObjectRef] | None:
        """Return the objects of one sample in the unit in which their shards are here; None: it takes another transaction."""
        found: list[ObjectRef] = []
        for ref in group:
            shard = ref.shard
            if shard is None or self._row(tx, ref) is not None:
                found.append(ref)
            elif ref.key != shard.key:
                found.append(whole if self._row(tx, whole := shard.whole()) is not None else ref)
            else:
                self._write_reservations(tx)
                given = give_up_members(tx, self.disk, ref.key)
                for row in given.gone:
                    self.found.pop(row.key, None)
                if given.room is Room.AGAIN:
                    self.room = Room.AGAIN
                    return None
                if given.room is Room.NONE and not ref.members:  # which of them would do is not known
                    self.room = Room.NONE
                    return None
                if given.room is Room.NONE:
                    members = [*map(shard.member, ref.members)]
                    self.found.update(tx.find([member.key for member in members]))
                    found += members
                else:
                    found.append(ref)
        return found

    @property
    def _limit(self) -> int | None:
        return self._account.limit_bytes if self._account else None

    def _row(self, tx: LedgerTransaction, ref: ObjectRef) -> EntryRow | None:
        """Return the entry of an object that is here or on its way; a dead leader's is settled first."""
        row = self.found.get(ref.key)
        if row is None or row.is_ready or ref.key in self.downloads.leads:
            return row
        self._write_reservations(tx)
        if recover.settle_filling(tx, self.disk, row):
            self._spare_bytes = 0
            self.found.pop(ref.key)
            self.found.update(tx.find([ref.key]))
        return self.found.get(ref.key)

    def _cannot_fit(self, refs: Sequence[ObjectRef], charges: Mapping[bytes, int]) -> CacheFullError:
        """Return why a sample can never fit under the limit: it fails by itself, and the others of the window go on.

        Args:
            refs: Its objects.
            charges: What those that are here count, and what the new ones count at least, by key.
        """
        assert self._limit is not None
        by_url = Counter[str]()
        for ref in refs:
            by_url[ref.url] += charges.get(ref.key, 0)
        return cannot_fit(by_url, self._limit)

    def _append_bare(self, hold: Hold) -> None:
        """Append a hold that pins nothing: its claim raises the error."""
        self.room = Room.ENOUGH
        hold.refs, hold.charges, hold.outstanding = (), {}, NOTHING
        self.holdings.add([hold])
        self.holds.append(hold)

    def _has_room(self, tx: LedgerTransaction, here_bytes: int, need_bytes: int) -> bool:
        held_bytes, share_bytes = self.holdings.held_bytes, self.share_bytes
        self.room = Room.ENOUGH
        new_bytes = here_bytes + need_bytes
        is_beyond_share = share_bytes is not None and held_bytes and new_bytes and held_bytes + new_bytes > share_bytes
        if (self._limit is not None and need_bytes > self._limit) or (is_beyond_share and not self.must_fit):
            self.room = Room.NONE
        elif need_bytes and need_bytes > self._spare_bytes:
            self._write_reservations(tx)
            self.uses.write_now(tx)
            self.room = make_room(
                tx,
                self.disk,
                need_bytes,
                owner=self.owner,
                keep=self.window,
                in_line=self.in_line,
                free_space=self.downloads.free_space,
            )
        return self.room is Room.ENOUGH

    def _spare(self, tx: LedgerTransaction) -> float:
        """Return how many bytes are free for us, whatever others wait for; 0 where each sample must ask."""
        if self._account is None or self.downloads.free_space.is_bounded:
            return 0
        claims = claims_before(tx, self.disk, self.owner) if self.in_line and self._limit is not None else 0
        return self._account.spare_bytes - claims

    def _write_reservations(self, tx: LedgerTransaction) -> None:
        if self._unwritten:
            tx.reserve(self._unwritten)
            self._unwritten = []

    def _reserve(self, ref: ObjectRef, charge: int) -> None:
        """Count an object before its first byte; its part file is locked already."""
        part = self.parts.pop(ref.key, None) or self.disk.create_part(ref.key)
        lead = Lead(ref=ref, part=part, charged_bytes=charge, source=self.source)
        self.leads.append(lead)
        self.downloads.add(lead)
        url = urls.redact(ref.url)
        reservation = Reservation(
            key=ref.key,
            url=url,
            ext=ref.ext,
            charged_bytes=charge,
            part=part.name,
            dataset=ref.dataset,
            rank=self._ranks[ref.key],
            shard=ref.shard_key,
        )
        self._unwritten.append(reservation)
        self._spare_bytes -= charge
        self.found[ref.key] = EntryRow(ref.key, "filling", None, charge, part.name, ref.ext, url)

    def _rank(self, refs: Sequence[ObjectRef], number: int) -> None:
        """Work out what the policy makes of one sample's uses, in their order."""
        assert self._eviction is not None
        next_use = None if self.next_uses is None else self.next_uses[number]
        for ref in {ref.key: ref for ref in refs}.values():
            now = self._eviction.num_uses + len(self._ranks)
            rank, known = self._eviction.policy.rank_of(None if next_use is None else now + next_use), self._ranks.get(ref.key)
            self._ranks[ref.key] = rank if known is None or rank is None else max(rank, known)  # its next sample's

    def note_uses(self) -> None:
        """Tell what was used; when the transaction is committed."""
        hits: Collection[bytes] = self.ready
        num_misses = 0
        if self.found:  # not all of the window is here, or not all of it is held
            used = {key: key in hold.outstanding for hold in self.holds for key in hold.charges}
            hits = [key for key, is_missing in used.items() if not is_missing]
            num_misses = len(used) - len(hits)
        assert self.rules is not None
        self.uses.note(hits, self.rules, num_misses, self._ranks if self.rules.policy.looks_ahead else None)


def _is_ready(row: EntryRow | None) -> bool:
    return row is not None and row.is_ready
