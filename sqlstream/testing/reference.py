"""The cache's account as one would keep it if nothing ever failed and no two processes raced: dicts and sums, obviously right.

It does not choose whom to evict (policies are data, and several are right); it says what may be evicted, what must fit, and
what is there afterwards. A model test drives a real cache and this one side by side and compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class ReferenceEntry:
    """An object that counts."""

    charged_bytes: int
    leader: str | None = None
    """The owner that downloads it; None: it is whole."""


class ReferenceLedger:
    """Entries, pins and limits of owners; every operation asserts that it is allowed.

    Example:
        ledger = ReferenceLedger()
        ledger.join("worker 0", limit_bytes=8192)
        ledger.reserve("worker 0", "a", 4096)
        ledger.publish("a", 4096)
        assert not ledger.fits({"a": 4096, "b": 8192})
    """

    def __init__(self) -> None:
        self.entries: dict[str, ReferenceEntry] = {}
        self.limits: dict[str, int | None] = {}
        """Limits of the living owners, by name, in bytes."""
        self._limit_at_rest: int | None = None
        self._pins: dict[tuple[str, str], int] = {}

    # -- what is so ---------------------------------------------------------------------------------------------------

    @property
    def charged_bytes(self) -> int:
        """Bytes that count against the limit."""
        return sum(entry.charged_bytes for entry in self.entries.values())

    @property
    def limit_bytes(self) -> int | None:
        """The smallest limit of the living owners; without any, that of the owner that left last."""
        limits = self.limits.values() if self.limits else [self._limit_at_rest]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def is_above_limit(self) -> bool:
        """True: more counts than the limit allows, which was lowered while that was pinned or on its way."""
        return self.limit_bytes is not None and self.charged_bytes > self.limit_bytes

    @property
    def ready(self) -> dict[str, int]:
        """Charges of the whole objects, in bytes."""
        return {key: entry.charged_bytes for key, entry in self.entries.items() if entry.leader is None}

    @property
    def filling(self) -> dict[str, str]:
        """Leaders of the objects that are on their way."""
        return {key: entry.leader for key, entry in self.entries.items() if entry.leader is not None}

    def pinned(self, owner: str | None = None) -> set[str]:
        """Return the keys that an owner pins, or any owner."""
        return {key for (pinner, key) in self._pins if owner in (None, pinner)}

    def evictable(self) -> set[str]:
        """Return what may go: whole, and pinned by no owner."""
        return self.ready.keys() - self.pinned()

    def fits(self, charges: Mapping[str, int]) -> bool:
        """Return whether these objects can be here together, if everything goes that may; what is here needs no room."""
        if charges.keys() <= self.entries.keys():
            return True  # also above a limit that was lowered
        stays = {key: entry.charged_bytes for key, entry in self.entries.items() if key not in self.evictable()}
        limit = self.limit_bytes
        return limit is None or sum({**charges, **stays}.values()) <= limit

    # -- what happens -------------------------------------------------------------------------------------------------

    def join(self, owner: str, limit_bytes: int | None) -> None:
        """An owner comes, or changes its limit."""
        self.limits[owner] = limit_bytes

    def leave(self, owner: str) -> None:
        """An owner goes, in order or by a kill: nothing of it is left but its limit, until another owner comes."""
        self._limit_at_rest = self.limits.pop(owner)
        self._pins = {pin: count for pin, count in self._pins.items() if pin[0] != owner}
        for key in [key for key, leader in self.filling.items() if leader == owner]:
            del self.entries[key]

    def reserve(self, owner: str, key: str, charged_bytes: int) -> None:
        """Count an object before its first byte; its leader pins it."""
        assert key not in self.entries, f"{key} counts already"
        limit = self.limit_bytes
        assert limit is None or self.charged_bytes + charged_bytes <= limit, f"no room for {key}"
        self.entries[key] = ReferenceEntry(charged_bytes=charged_bytes, leader=owner)
        self.pin(owner, [key])

    def publish(self, key: str, charged_bytes: int) -> None:
        """An object is whole."""
        entry = self.entries[key]
        assert entry.leader is not None, f"{key} is whole already"
        assert charged_bytes <= entry.charged_bytes, f"{key} took more than was counted"
        self.entries[key] = ReferenceEntry(charged_bytes=charged_bytes)

    def abandon(self, key: str) -> None:
        """A download is given up; pins that wait for it stay until their owners give them back."""
        assert self.entries[key].leader is not None, f"{key} is whole"
        del self.entries[key]

    def pin(self, owner: str, keys: Iterable[str]) -> None:
        """Keep objects."""
        assert owner in self.limits, f"{owner} is not alive"
        for key in keys:
            self._pins[owner, key] = self._pins.get((owner, key), 0) + 1

    def unpin(self, owner: str, keys: Iterable[str]) -> None:
        """Give objects back, one pin each."""
        for key in keys:
            self._pins[owner, key] -= 1
            if not self._pins[owner, key]:
                del self._pins[owner, key]

    def evict(self, keys: Iterable[str]) -> None:
        """Take objects away, for room, on request, or because their files were changed."""
        for key in keys:
            assert key in self.evictable(), f"{key} is pinned, or on its way"
            del self.entries[key]
