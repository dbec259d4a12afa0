"""What a process holds of the cache: the objects of one sample together, from the plan to the last use of their paths.

    PREFETCHED ──claim──> IN_USE ──retain──> RETAINED ──> RELEASED
         └────────────── revoke ────────────────┴───────────^

A prefetched hold may be revoked at any time (its sample is then acquired again), a retained one when others need room; one
in use never. So no process waits for room while another one sleeps on pins that it does not use. A hold that is
dropped without a release (Ctrl-C between two steps) is released when Python forgets it.

A `Hold` pins in the ledger. A `ReadHold` pins nothing until it is claimed, and from then on by a lock of the kernel on each
file: for samples whose objects are all here, and whose paths are not handed out. Retained, it becomes one that pins in the
ledger.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import ClassVar, TypeAlias

from sqlstream.cache.acquire.owner import Owner
from sqlstream.cache.files.read_hold import ReadHold, ReadLock
from sqlstream.cache.ledger.ledger import LedgerTransaction
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.process import fork, locks

NOTHING: frozenset[bytes] = frozenset()
"""No keys: nothing is on its way."""


class HoldState(Enum):
    """How a hold is used."""

    PREFETCHED = auto()
    IN_USE = auto()
    RETAINED = auto()
    RELEASED = auto()


class _Watch(weakref.ref["Hold"]):
    """Tells what a hold pinned that Python forgets unreleased.

    What is called then is `deque.append` and no function of ours, nor is it `__del__`: Python swallows what a signal handler
    raises in those, and the pins would stay.
    """

    __slots__ = ("charges", "number", "owner")

    number: int
    owner: str
    charges: Mapping[bytes, int]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Hold:
    """Pins on the objects of one sample; some objects may still be on their way."""

    is_read_hold: ClassVar[bool] = False
    refs: Sequence[ObjectRef]
    owner: str
    """Who pinned; a forked child that inherits the value releases nothing with it."""
    charges: dict[bytes, int]
    """Which keys it pins, and what each of them counts on disk, as known when it was pinned or published."""
    outstanding: frozenset[bytes]
    """Keys that are not here yet."""
    source: object
    """What brings its objects: the cache object of this process that it belongs to; see `Holds.release_all`."""
    state: HoldState = HoldState.PREFETCHED
    is_needed: bool = False
    """Its sample is waited for now: on a full disk the samples fetched ahead give way to it, whatever its number."""
    error: Exception | None = None
    is_void: bool = False
    """An object was lost (revoked, aborted, its leader died): release the hold and acquire the sample again."""
    paths: list[str] = field(default_factory=list)
    """Where its objects are, in their order, once it is open."""
    open_files: ClassVar[Mapping[str, ReadLock]] = MappingProxyType({})
    """Files that it holds open: none."""
    number: int = 0
    """Its place among all holds of this process; 0 while it pins nothing."""

    @property
    def is_released(self) -> bool:
        """Return whether it holds nothing any more."""
        return self.state is HoldState.RELEASED

    @property
    def is_settled(self) -> bool:
        """Return whether waiting is over, one way or the other."""
        return not self.outstanding or self.error is not None or self.is_void


AnyHold: TypeAlias = Hold | ReadHold
"""What a sample's objects are held by; both are waited for, claimed, read and released in the same way."""


class Holds:
    """All holds of this process on one cache directory; guarded by the owner's `state`."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self._numbers = itertools.count(1)  # goes on in a forked child: an inherited hold is never taken for one of its own
        self.after_fork_in_child()
        fork.call_in_child(self, fork.Stage.MEMORY)
        owner.collect = self.collect

    def after_fork_in_child(self) -> None:
        """Forget the parent's holds."""
        self._prefetched: dict[int, _Watch] = {}
        self._watched: dict[int, _Watch] = {}
        """All holds that pin, by number."""
        self._dropped: deque[_Watch] = deque()
        self._retained: deque[Hold] = deque()
        self.released: deque[Hold] = deque()
        """Holds that were released and are not counted yet."""
        self.charges: dict[bytes, int] = {}
        """What each pinned key counts on disk, once however many holds share it."""
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that this process keeps from being evicted; an entry counts once, however many samples hold it."""
        self.collect()
        return self._held_bytes

    def new_bytes(self, charges: Mapping[bytes, int]) -> int:
        """Return how much of `charges` is not held yet."""
        return sum(num_bytes for key, num_bytes in charges.items() if key not in self.charges)

    def add(self, holds: Sequence[Hold]) -> None:
        """Pin the objects of holds; inside the owner's transaction."""
        keys: list[bytes] = []
        drop, prefetched, watched = self._dropped.append, self._prefetched, self._watched
        known = self.charges
        with self.owner.state:
            for hold, number in zip(holds, self._numbers, strict=False):  # they never end
                keys += hold.charges
                for key, charged_bytes in hold.charges.items():
                    if known.get(key) != charged_bytes:
                        self._held_bytes += charged_bytes - known.get(key, 0)
                        known[key] = charged_bytes
                hold.number = number
                watch = watched[number] = _Watch(hold, drop)
                watch.number, watch.owner, watch.charges = number, hold.owner, hold.charges
                if hold.state is HoldState.PREFETCHED:
                    prefetched[number] = watch
            self.owner.pin(keys)

    def collect(self) -> None:
        """Count what was released, and what was dropped without a release."""
        released, dropped = self.released, self._dropped
        if not released and not dropped:
            return
        with self.owner.state:
            keys: list[bytes] = []
            owner = self.owner.id
            while released:
                hold = released.popleft()
                # Else it was released twice, pinned by our parent, or the collector of cycles has noted it already.
                if self._watched.pop(hold.number, None) is not None and hold.owner == owner:
                    keys += hold.charges
                hold.number, hold.state = 0, HoldState.RELEASED
            while dropped:
                lost = dropped.popleft()
                self._prefetched.pop(lost.number, None)
                if self._watched.pop(lost.number, None) is lost and lost.owner == owner:
                    keys += lost.charges
            for key in self.owner.unpin(keys):
                self._held_bytes -= self.charges.pop(key)

    def arrive(self, hold: Hold, key: bytes, charged_bytes: int) -> None:
        """Note that an object of a hold is here, and correct what it counts, now that it is known."""
        with self.owner.state:
            hold.outstanding -= {key}
            if hold.number and hold.owner == self.owner.id:
                hold.charges[key] = charged_bytes
                self._held_bytes += charged_bytes - self.charges[key]
                self.charges[key] = charged_bytes

    def claim(self, hold: Hold) -> bool:
        """Begin to use a hold; False when it was revoked: its user and the background thread may both want it."""
        if hold.is_void or self._prefetched.pop(hold.number, None) is None:
            return False
        hold.state = HoldState.IN_USE
        return True

    def release(self, hold: Hold) -> None:
        """Give a hold's pins back; they reach the ledger with the next transaction. Safe to call twice.

        One in use, which no other thread may touch, is only noted: one atomic step, no lock; Ctrl-C comes before or after it.
        """
        if hold.state is HoldState.IN_USE:
            self.released.append(hold)
            return
        if self.owner.is_closed:  # it owes nothing; as Python ends, modules may be empty by the time an iterator is closed
            return
        with self.owner.state:
            if hold.state is HoldState.RELEASED or hold.owner != self.owner.id:
                return
            with contextlib.suppress(ValueError):  # not retained, or by the parent of this process
                self._retained.remove(hold)
            self._prefetched.pop(hold.number, None)
            hold.state = HoldState.RELEASED
            self.released.append(hold)
            self.collect()

    def release_all(self, source: object) -> None:
        """Give back all that belongs to one cache object, which is being closed; others of this process keep theirs."""
        with self.owner.state:
            for hold in filter(None, map(operator.call, list(self._watched.values()))):
                if hold.source is source:
                    self.release(hold)

    def split(self, hold: Hold) -> list[Hold]:
        """Return one hold in use for each object of `hold`, in its place; no pin changes."""
        with self.owner.state:
            places = {ref.key: (ref, path) for ref, path in zip(hold.refs, hold.paths, strict=True)}
            pieces = [
                Hold((ref,), hold.owner, {}, NOTHING, hold.source, HoldState.IN_USE, paths=[path])
                for ref, path in places.values()
            ]
            if hold.number:
                for piece in pieces:
                    piece.charges = {ref.key: hold.charges[ref.key] for ref in piece.refs}
                self.add(pieces)
            self.release(hold)
            return pieces

    def retain(self, hold: Hold, *, share_bytes: int | None) -> None:
        """Keep the paths of a hold valid until it is released, within `share_bytes` of the limit."""
        with self.owner.state:
            if hold.state is not HoldState.IN_USE or hold.owner != self.owner.id:
                return
            hold.state = HoldState.RETAINED
            self._retained.append(hold)
            self.trim_retained(share_bytes)

    def take_over(self, read_hold: ReadHold, source: object) -> Hold:
        """Return a hold in use that pins by rows what a claimed read hold keeps by locks; those are given back last."""
        hold = Hold(read_hold.refs, "", read_hold.charges, NOTHING, source, HoldState.IN_USE, paths=[*read_hold.paths])

        def pin(_: LedgerTransaction) -> None:  # the owner writes its pins at the end of it
            assert self.owner.id is not None
            if not hold.number:  # else this is the second try
                hold.owner = self.owner.id
                self.add([hold])

        with locks.uninterrupted():
            try:
                self.owner.run(pin)
            except BaseException:
                self.release(hold)
                raise
            read_hold.close()
        return hold

    def trim_retained(self, share_bytes: int | None) -> int:
        """Release retained holds, oldest first, until all pins of this process fit into its share; return how many."""
        with self.owner.state:
            num_released = 0
            while share_bytes is not None and self._retained and self.held_bytes > share_bytes:
                self.release(self._retained[0])
                num_released += 1
            return num_released

    def revoke_prefetched(self, at_most: int | None = None, *, spares_needed: bool = False) -> int:
        """Release holds that are not used yet, those needed last first; return how many.

        Args:
            at_most: So many of them; None: all.
            spares_needed: Leave those whose sample is waited for: acquired again, one of them has the highest number.
        """
        with self.owner.state:
            num_revoked = 0
            for number in list(reversed(self._prefetched)):
                if num_revoked == at_most:
                    break
                reference = self._prefetched.get(number)  # None: claimed a moment ago
                hold = None if reference is None else reference()
                if spares_needed and hold is not None and hold.is_needed:
                    continue
                if self._prefetched.pop(number, None) is not None and hold is not None:
                    hold.is_void = True
                    self.release(hold)
                    num_revoked += 1
            return num_revoked

    def release_oldest_retained(self) -> bool:
        """Release one retained hold; False when there is none."""
        with self.owner.state:
            if not self._retained:
                return False
            self.release(self._retained[0])
            return True

    @property
    def num_prefetched(self) -> int:
        """Holds that are not used yet."""
        return len(self._prefetched)

    @property
    def num_retained(self) -> int:
        """Holds that keep paths valid which were given away."""
        return len(self._retained)

    @property
    def num_revocable(self) -> int:
        """Holds that others could have back."""
        with self.owner.state:
            return len(self._prefetched) + len(self._retained)
