"""What a process holds of the cache: the objects of one sample together, from the plan to the last use of their paths.

    PREFETCHED ──claim──> IN_USE ──retain──> RETAINED ──> RELEASED
         └────────────── revoke ────────────────┴───────────^

A prefetched hold may be revoked at any time (its sample is then acquired again), a retained one when others need room; one
in use never. That is how nobody waits for room while somebody else sleeps on pins that he does not use. A hold that is
dropped without a release (Ctrl-C between two steps) is released when Python forgets it.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from sqlstream import locks
from sqlstream.cache.keys import ObjectRef
from sqlstream.cache.owner import Owner


class HoldState(Enum):
    """How a hold is used."""

    PREFETCHED = auto()
    IN_USE = auto()
    RETAINED = auto()
    RELEASED = auto()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Hold:
    """Pins on the objects of one sample; some objects may still be on their way."""

    refs: tuple[ObjectRef, ...]
    owner: str
    """Who pinned; a forked child that inherits the value releases nothing with it."""
    state: HoldState = HoldState.PREFETCHED
    outstanding: set[bytes] = field(default_factory=set)
    """Keys that are not here yet."""
    charges: dict[bytes, int] = field(default_factory=dict)
    """What each object counts on disk, as known when it was pinned or published."""
    error: Exception | None = None
    is_void: bool = False
    """An object was lost (revoked, aborted, its leader died): release the hold and acquire the sample again."""

    @property
    def is_settled(self) -> bool:
        """Return whether waiting is over, one way or the other."""
        return not self.outstanding or self.error is not None or self.is_void


class _Held(NamedTuple):
    """What a hold pins, for when the hold itself is gone."""

    keys: tuple[bytes, ...]
    charges: dict[bytes, int]


class Holdings:
    """All holds of this process on one cache directory; guarded by `locks.fork_guard()`."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.after_fork_in_child()
        locks.call_after_fork(self)

    def after_fork_in_child(self) -> None:
        """Forget the parent's holds."""
        self._held: dict[weakref.ref[Hold], _Held] = {}
        self._dropped: deque[weakref.ref[Hold]] = deque()
        self._retained: deque[Hold] = deque()
        self.held_bytes = 0
        """Bytes that this process keeps from being evicted; an object held by two samples counts twice."""

    def add(self, hold: Hold) -> None:
        """Pin a hold's objects; inside the owner's transaction."""
        self._owner.pin(ref.key for ref in hold.refs)
        # The callback runs wherever garbage is collected: it only notes.
        self._held[weakref.ref(hold, self._dropped.append)] = _Held(tuple(ref.key for ref in hold.refs), hold.charges)
        self.held_bytes += sum(hold.charges.values())

    def collect(self) -> None:
        """Release what was dropped without a release."""
        with locks.fork_guard():
            while self._dropped:
                self._unpin(self._dropped.popleft())

    def _unpin(self, reference: weakref.ref[Hold]) -> None:
        held = self._held.pop(reference, None)
        if held is not None:
            self.held_bytes -= sum(held.charges.values())
            self._owner.unpin(held.keys)

    def _live(self) -> list[Hold]:
        return [hold for reference in self._held if (hold := reference()) is not None]

    def set_charge(self, hold: Hold, key: bytes, charged_bytes: int) -> None:
        """Correct what an object of a hold counts, now that it is known."""
        with locks.fork_guard():
            if weakref.ref(hold) in self._held:
                self.held_bytes += charged_bytes - hold.charges.get(key, 0)
                hold.charges[key] = charged_bytes

    def claim(self, hold: Hold) -> bool:
        """Begin to use a hold; False when it was revoked."""
        with locks.fork_guard():
            if hold.state is not HoldState.PREFETCHED or hold.is_void or hold.owner != self._owner.id:
                return False
            hold.state = HoldState.IN_USE
            return True

    def release(self, hold: Hold) -> None:
        """Give a hold's pins back; they reach the ledger with the next transaction. Safe to call twice."""
        with locks.fork_guard():
            if hold.state is HoldState.RELEASED or hold.owner != self._owner.id:
                return
            if hold.state is HoldState.RETAINED:
                self._retained.remove(hold)
            hold.state = HoldState.RELEASED
            self._unpin(weakref.ref(hold))

    def split(self, hold: Hold) -> list[Hold]:
        """Return one hold in use for each object of `hold`, in its place; no pin changes."""
        with locks.fork_guard():
            pieces = [
                Hold(refs=(ref,), owner=hold.owner, state=HoldState.IN_USE, charges={ref.key: hold.charges[ref.key]})
                for ref in hold.refs
            ]
            for piece in pieces:
                self.add(piece)
            self.release(hold)
            return pieces

    def retain(self, hold: Hold, *, capacity: int, share_bytes: int | None) -> None:
        """Keep the paths of a hold valid for the next `capacity` ones, within `share_bytes` of the limit."""
        with locks.fork_guard():
            if hold.state is not HoldState.IN_USE or hold.owner != self._owner.id:
                return
            hold.state = HoldState.RETAINED
            self._retained.append(hold)
            while len(self._retained) > capacity:
                self.release(self._retained[0])
            self.trim_retained(share_bytes)

    def trim_retained(self, share_bytes: int | None) -> int:
        """Release retained holds, oldest first, until all pins of this process fit into its share; return how many."""
        with locks.fork_guard():
            num_released = 0
            while share_bytes is not None and self._retained and self.held_bytes > share_bytes:
                self.release(self._retained[0])
                num_released += 1
            return num_released

    def revoke_prefetched(self, at_most: int | None = None) -> int:
        """Release holds that are not used yet, those needed last first; return how many."""
        with locks.fork_guard():
            revoked = [hold for hold in self._live() if hold.state is HoldState.PREFETCHED][::-1][:at_most]
            for hold in revoked:
                hold.is_void = True
                self.release(hold)
            return len(revoked)

    def release_oldest_retained(self) -> bool:
        """Release one retained hold; False when there is none."""
        with locks.fork_guard():
            if not self._retained:
                return False
            self.release(self._retained[0])
            return True

    @property
    def num_revocable(self) -> int:
        """Holds that others could have back."""
        with locks.fork_guard():
            return sum(hold.state is HoldState.PREFETCHED for hold in self._live()) + len(self._retained)
