"""Eviction policies, as data: what a use of an object writes into its entry.

Every policy evicts in the order of (rank, tick), lowest first, NULL before all numbers: so one index serves all of them, and an
entry is written as often as under `lru`. `tick` is the logical time of the last use that was noted; `rank` is the policy's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlstream.config import check_word
from sqlstream.errors import CacheDamagedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One way to choose who goes first."""

    name: str
    on_use: str | None
    """SQL assignments of a use, with parameters for its tick and, where the policy looks ahead, for the rank of the next use
    (0: not known); None: uses are not even noted."""
    first_rank: int | None = None
    """Rank of an object that has just come."""
    stale_above: str | None = None
    """SQL expression: higher ranks mean nothing (any more), and are forgotten; None: all mean something."""
    looks_ahead: bool = False
    """Ranks are negative times of the next use, as the reader foretells it; the clock counts uses of the whole cache."""

    def rank_of(self, next_use: int | None) -> int | None:
        """Return the rank of an object that is used now and then at `next_use` (None: not known)."""
        if not self.looks_ahead:
            return self.first_rank
        return None if next_use is None else -next_use


_NONE_IS_KNOWN = "-9223372036854775808"
_PASSED_LONG_AGO = "min(0, (SELECT entries FROM totals) - (SELECT uses FROM meta))"
"""A forecast that passed by as many uses as the cache has entries: its process has stopped, or reads far slower."""
POLICIES = {
    policy.name: policy
    for policy in (
        Policy(name="lru", on_use="tick = ?", stale_above=_NONE_IS_KNOWN),
        Policy(name="fifo", on_use=None, stale_above=_NONE_IS_KNOWN),
        Policy(name="lfu", on_use="tick = ?, rank = max(coalesce(rank, 0), 0) + 1", first_rank=1),
        Policy(
            name="belady",
            on_use="tick = ?, rank = coalesce(nullif(?, 0), rank)",
            stale_above=_PASSED_LONG_AGO,
            looks_ahead=True,
        ),
    )
}
"""All policies by name: least recently used, first in first out, least frequently used, needed latest."""


def policy_named(name: str) -> Policy:
    """Return a policy.

    Raises:
        ConfigError: There is none of this name.
    """
    check_word("eviction_policy", name, POLICIES)
    return POLICIES[name]


def policy_in_ledger(name: str) -> Policy:
    """Return the policy that a ledger names.

    Raises:
        CacheDamagedError: There is none of this name: the ledger was changed behind our back.
    """
    if name not in POLICIES:
        raise CacheDamagedError(
            f"the cache ledger names an eviction policy {name!r}, which is none: open it with eviction_policy="
        )
    return POLICIES[name]
