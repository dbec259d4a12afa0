"""What a process holds of the cache: the objects of one sample together, from the plan to the last use of their paths.

    PREFETCHED ──claim──> IN_USE ──retain──> RETAINED ──> RELEASED
         └────────────── revoke ────────────────┴───────────^

A prefetched hold may be revoked at any time (its sample is then acquired again), a retained one when others need room; one
in use never. That is how nobody waits for room while somebody else sleeps on pins that he does not use. A hold that is
dropped without a release (Ctrl-C between two steps) is released when Python forgets it.

A `Hold` pins in the ledger. A `LightHold` pins nothing until it is claimed, and from then on by a lock of the kernel on each
file: for samples whose objects are all here, and whose paths nobody gets. Retained, it becomes one that pins in the ledger.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, NamedTuple, TypeAlias

from sqlstream import locks
from sqlstream.cache.keys import ObjectRef
from sqlstream.cache.light_hold import LightHold
from sqlstream.cache.owner import Owner
from sqlstream.storage.fetcher import Fetcher

NOTHING: frozenset[bytes] = frozenset()
"""No keys: nothing is on its way."""


class HoldState(Enum):
    """How a hold is used."""

    PREFETCHED = auto()
    IN_USE = auto()
    RETAINED = auto()
    RELEASED = auto()


_PREFETCHED, _IN_USE, _RETAINED, _RELEASED = HoldState  # to ask the class takes 0.07 us, and a hit asks four times


class Dropped(NamedTuple):
    """What a hold pinned that nobody released."""

    number: int
    owner: str
    charges: Mapping[bytes, int]
    num_bytes: int


@dataclass(slots=True, eq=False)
class PrivateFile:
    """An object outside of the cache, which failed; it goes with the hold on it."""

    name: str
    path: str
    fd: int
    """Open until the object is here."""
    pid: int
    is_retained: bool = False
    """A sample that left has its path: a worker that ends leaves the file to the trainer, which removes the directory."""

    def remove(self) -> None:
        """Unlink it; a forked child has no say."""
        if os.getpid() == self.pid:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def __del__(self) -> None:
        if not self.is_retained:
            self.remove()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Hold:
    """Pins on the objects of one sample; some objects may still be on their way."""

    is_light: ClassVar[bool] = False
    refs: Sequence[ObjectRef]
    owner: str
    """Who pinned; a forked child that inherits the value releases nothing with it."""
    charges: dict[bytes, int]
    """Which keys it pins, and what each of them counts on disk, as known when it was pinned or published."""
    outstanding: frozenset[bytes]
    """Keys that are not here yet."""
    num_bytes: int = 0
    """What it counts on disk: the sum of `charges`."""
    state: HoldState = _PREFETCHED
    error: Exception | None = None
    is_void: bool = False
    """An object was lost (revoked, aborted, its leader died): release the hold and acquire the sample again."""
    files: dict[bytes, PrivateFile] | None = None
    """Where its objects are, by key, when the cache could not take them."""
    fetcher: Fetcher | None = None
    """What brings its objects if the cache fails them; None: nothing, the error is raised."""
    number: int = 0
    """Its place among all holds of this process; 0 while it pins nothing."""
    dropped: deque[Dropped] | None = None
    """Where it is noted when Python forgets it unreleased. This runs wherever garbage is collected, so it only notes."""

    def __del__(self) -> None:
        if self.number and self.dropped is not None:
            self.dropped.append(Dropped(self.number, self.owner, self.charges, self.num_bytes))

    @property
    def is_settled(self) -> bool:
        """Return whether waiting is over, one way or the other."""
        return not self.outstanding or self.error is not None or self.is_void


AnyHold: TypeAlias = Hold | LightHold
"""What a sample's objects are held by; both are waited for, claimed, read and released in the same way."""


class Holdings:
    """All holds of this process on one cache directory; guarded by `locks.fork_guard()`."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self._numbers = itertools.count(1)  # goes on in a forked child: an inherited hold is never taken for one of its own
        self.after_fork_in_child()
        locks.call_after_fork(self)
        owner.collect = self.collect

    def after_fork_in_child(self) -> None:
        """Forget the parent's holds."""
        self._prefetched: dict[int, weakref.ref[Hold]] = {}
        self._dropped: deque[Dropped] = deque()
        self._retained: deque[Hold] = deque()
        self.released: deque[Hold] = deque()
        """Holds that were released and are not counted yet."""
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that this process keeps from being evicted; an object held by two samples counts twice."""
        self.collect()
        return self._held_bytes

    def add(self, holds: Sequence[Hold]) -> None:
        """Pin the objects of holds; inside the owner's transaction."""
        keys: list[bytes] = []
        held_bytes, dropped, prefetched = 0, self._dropped, self._prefetched
        for hold, number in zip(holds, self._numbers, strict=False):  # they never end
            keys += hold.charges
            held_bytes += hold.num_bytes
            hold.number = number
            hold.dropped = dropped
            if hold.state is _PREFETCHED:
                prefetched[number] = weakref.ref(hold)
        self._held_bytes += held_bytes
        self.owner.pin(keys)

    def collect(self) -> None:
        """Count what was released, and what was dropped without a release."""
        released, dropped = self.released, self._dropped
        if not released and not dropped:
            return
        with locks.fork_guard():
            keys: list[bytes] = []
            held_bytes = 0
            owner = self.owner.id
            while released:
                hold = released.popleft()
                if hold.number and hold.owner == owner:  # else it was released twice, or pinned by our parent
                    keys += hold.charges
                    held_bytes += hold.num_bytes
                hold.number, hold.state = 0, _RELEASED
            while dropped:
                lost = dropped.popleft()
                self._prefetched.pop(lost.number, None)
                if lost.owner == owner:
                    keys += lost.charges
                    held_bytes += lost.num_bytes
            self._held_bytes -= held_bytes
            self.owner.unpin(keys)

    def arrive(self, hold: Hold, key: bytes, charged_bytes: int) -> None:
        """Note that an object of a hold is here, and correct what it counts, now that it is known."""
        with locks.fork_guard():
            hold.outstanding -= {key}
            if hold.number and hold.owner == self.owner.id:
                growth = charged_bytes - hold.charges.get(key, 0)
                self._held_bytes += growth
                hold.num_bytes += growth
                hold.charges[key] = charged_bytes

    def claim(self, hold: AnyHold) -> bool:
        """Begin to use a hold; False when it was revoked. Who takes its number away first, its user or the keeper, has it.

        Of a light one, False says that its sample must be acquired again, and not lightly.
        """
        if isinstance(hold, LightHold):
            return hold.claim()
        if hold.is_void or (self._prefetched.pop(hold.number, None) is None and hold.files is None):
            return False
        hold.state = _IN_USE
        return True

    def release(self, hold: AnyHold) -> None:
        """Give a hold's pins back; they reach the ledger with the next transaction. Safe to call twice.

        One in use, which nobody else may touch, is only noted: one atomic step, no lock, and Ctrl-C comes before or after it.
        """
        if isinstance(hold, LightHold):
            hold.close()
            return
        if hold.state is _IN_USE and hold.files is None:
            self.released.append(hold)
            return
        if self.owner.is_closed:  # it owes nothing; as Python ends, modules may be empty by the time an iterator is closed
            return
        with locks.fork_guard():
            if hold.state is _RELEASED or (hold.owner != self.owner.id and hold.files is None):
                return
            if hold.files is not None:
                for file in hold.files.values():
                    file.remove()
                hold.files = None
            with contextlib.suppress(ValueError):  # not retained, or by the parent of this process
                self._retained.remove(hold)
            self._prefetched.pop(hold.number, None)
            hold.state = _RELEASED
            self.released.append(hold)
            self.collect()

    def split(self, hold: Hold) -> list[Hold]:
        """Return one hold in use for each object of `hold`, in its place; no pin changes."""
        with locks.fork_guard():
            pieces = [Hold((ref,), hold.owner, {}, NOTHING, state=_IN_USE) for ref in hold.refs]
            if hold.files is not None:
                for piece in pieces:
                    piece.files = {ref.key: hold.files[ref.key] for ref in piece.refs}
                hold.files = None
            if hold.number:
                for piece in pieces:
                    piece.charges = {ref.key: hold.charges[ref.key] for ref in piece.refs}
                    piece.num_bytes = sum(piece.charges.values())
                self.add(pieces)
            self.release(hold)
            return pieces

    def retain(self, hold: Hold, *, capacity: int, share_bytes: int | None) -> None:
        """Keep the paths of a hold valid for the next `capacity` ones, within `share_bytes` of the limit."""
        with locks.fork_guard():
            if hold.state is not _IN_USE or (hold.owner != self.owner.id and hold.files is None):
                return
            hold.state = _RETAINED
            for file in (hold.files or {}).values():
                file.is_retained = True
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
            num_revoked = 0
            for number in list(reversed(self._prefetched)):
                if num_revoked == at_most:
                    break
                reference = self._prefetched.pop(number, None)  # None: claimed a moment ago
                hold = None if reference is None else reference()
                if hold is not None:
                    hold.is_void = True
                    self.release(hold)
                    num_revoked += 1
            return num_revoked

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
            return len(self._prefetched) + len(self._retained)
