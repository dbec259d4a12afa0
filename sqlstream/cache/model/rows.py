"""Values that go into the ledger and come out of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

NO_LIMIT = (1 << 63) - 1
"""How the ledger writes that no limit was given as a limit: the largest number, so that `min` finds what is in force."""
READY, FILLING = "ready", "filling"


ReadyRow: TypeAlias = tuple[bytes, int, int, str]
"""Key, size, charged bytes and extension of a whole object, as SQLite gives them: on this path microseconds count."""


class EntryRow(NamedTuple):
    """One row of `entry`, as far as the protocol needs it."""

    key: bytes
    state: str
    size_bytes: int | None
    charged_bytes: int
    part: str | None
    ext: str
    url: str

    @property
    def is_ready(self) -> bool:
        """Return whether the object is whole."""
        return self.state == READY


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Room taken for an object before its bytes arrive."""

    key: bytes
    url: str
    ext: str
    charged_bytes: int
    part: str
    dataset: int | None = None
    rank: int | None = None
    """What the eviction policy makes of this first use; it stays when the object is ready."""
    shard: bytes | None = None
    """Key of the shard that it is a member of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """An object that is whole in data/."""

    key: bytes
    url: str
    ext: str
    size_bytes: int
    charged_bytes: int
    etag: str | None = None
    dataset: int | None = None
    crc32: int | None = None
    """Of its bytes, where a user of the process that brings it asks for checksums."""
    shard: bytes | None = None
    """Key of the shard that it is a member of."""
    came_at: int | None = None
    """When it came, in seconds since 1970; None: now."""


class Account(NamedTuple):
    """What counts against the limit, and the limit."""

    ready_bytes: int
    filling_bytes: int
    entries: int
    limit_bytes: int | None

    @property
    def charged_bytes(self) -> int:
        """Bytes that count: ready and on their way."""
        return self.ready_bytes + self.filling_bytes

    @property
    def spare_bytes(self) -> float:
        """Return how many bytes more keep the limit: below 0 where it is passed, infinite without one."""
        return math.inf if self.limit_bytes is None else self.limit_bytes - self.charged_bytes

    def has_room(self, need_bytes: int) -> bool:
        """Return whether `need_bytes` more keep the limit."""
        return need_bytes <= self.spare_bytes


class LedgerSummary(NamedTuple):
    """What a window of samples must know before it is acquired."""

    account: Account
    num_pinning_owners: int
    """How many processes hold pins: they share the limit."""
    policy: str
    """The eviction policy in force."""
    num_uses: int
    """Its clock."""
