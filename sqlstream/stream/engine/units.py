"""Whether shards are fetched whole or by members. Pure: by index, order, limit and number of nodes, never by measured times.

Under a whole shuffle with a cache of 30 % of the data, whole shards download 140 times the dataset an epoch, and members 0.97
times (simulated); a window of shards that fits takes one request a shard in place of one a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlstream.cache.session import ChosenUnit
from sqlstream.config import ShardUnit

_LEAST_SHARE = 0.5
"""Share of a shard's bytes that a node must take in an epoch for the whole to be worth its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUse:
    """What an epoch takes of shards, as far as it is known before it begins."""

    num_bytes: int
    """Size of all shards."""
    window_bytes: int
    """Size of the shards whose rows are mixed, at most."""
    wanted_share: float
    """Share of their bytes that the selected rows and columns have, in [0, 1]."""
    num_nodes: int
    """Nodes among which the rows of each shard are dealt."""


def choose_unit(wished: ShardUnit, use: ShardUse, limit_bytes: int | None) -> ChosenUnit:
    """Return in what unit shards are fetched.

    Args:
        wished: What the user asked for.
        use: What an epoch takes of them.
        limit_bytes: Limit of the cache directory; None: there is none.

    Example:
        >>> use = ShardUse(num_bytes=10**9, window_bytes=10**8, wanted_share=1.0, num_nodes=1)
        >>> choose_unit(ShardUnit.AUTO, use, limit_bytes=3 * 10**8).unit
        <ShardUnit.WHOLE: 'whole'>
    """
    if wished is not ShardUnit.AUTO:
        return ChosenUnit(wished, f"shards={wished.value!r} was given")
    share = use.wanted_share / use.num_nodes
    if share < _LEAST_SHARE:
        return ChosenUnit(ShardUnit.MEMBERS, f"this node takes {share:.0%} of the bytes of each shard, less than half")
    if limit_bytes is None:
        return ChosenUnit(ShardUnit.WHOLE, "the cache has no limit")
    if use.num_bytes <= limit_bytes:
        return ChosenUnit(ShardUnit.WHOLE, f"all {_mib(use.num_bytes)} of them fit the limit of {_mib(limit_bytes)}")
    window = f"the shards of a window ({_mib(use.window_bytes)})"
    if 2 * use.window_bytes <= limit_bytes:
        return ChosenUnit(ShardUnit.WHOLE, f"{window} fit half of the limit of {_mib(limit_bytes)}")
    return ChosenUnit(ShardUnit.MEMBERS, f"{window} do not fit half of the limit of {_mib(limit_bytes)}")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
