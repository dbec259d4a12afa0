"""When objects are used again, by the order of the next epoch: the cache's policy `belady` evicts by it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

import numpy as np

from sqlstream.cache.session import Policy
from sqlstream.order import Blocks, Int64Array, Weighted
from sqlstream.stream.engine.slots import PlannedSample
from sqlstream.stream.run.shares import EpochShare

logger = logging.getLogger(__name__)


def is_wanted(policy: Policy, share: EpochShare) -> bool:
    """Return whether the policy needs forecasts and the order has them; warn if it has none."""
    if policy.looks_ahead and share.order.positions_of(share.epoch + 1, np.empty(0, dtype=np.int64)) is None:
        logger.warning(
            "the cache evicts by %s, but with weights, epoch_size, a filtered lazy index or a mixture it is not known when "
            "rows come again: it evicts what was not used for longest",
            policy.name,
        )
        return False
    return policy.looks_ahead


def foresee(slots: Sequence[PlannedSample]) -> None:
    """Note in planned slots after how many further uses of the cache their objects are used again."""
    for share, planned in groupby(slots, key=lambda slot: slot.share):
        together = list(planned)
        if share is None:
            continue
        positions = np.array([slot.share_position for slot in together], dtype=np.int64)
        distances = next_uses(share, positions)
        if (
            any(slot.has_shared_content for slot in together)
            and (of_blocks := next_uses_of_blocks(share, positions)) is not None
        ):
            is_shared = np.array([slot.has_shared_content for slot in together])
            distances = of_blocks if distances is None else np.where(is_shared, of_blocks, distances)  # [n]
        for slot, distance in zip(together, [] if distances is None else distances.tolist(), strict=False):
            slot.next_use = distance * max(1, len(slot.refs))


def next_uses(share: EpochShare, positions: Int64Array) -> Int64Array | None:
    """Return after how many further samples of this node the rows at `positions` come again: [n].

    That is in the next epoch; a row that this node does not take then counts as two epochs away.

    Returns:
        None where the order has no inverse.
    """
    order, epoch = share.order, share.epoch
    again = order.positions_of(epoch + 1, order.rows_at(epoch, positions).row)
    if again is None:
        return None
    partition, num_positions = share.steps.partition(epoch + 1, share.partition.world), order.num_positions(epoch)
    distances = num_positions - positions + again
    distances[~partition.is_on_node(again)] = num_positions + partition.num_positions
    counted: Int64Array = np.maximum(distances // partition.world.num_nodes, 1)
    return counted


def next_uses_of_blocks(share: EpochShare, positions: Int64Array) -> Int64Array | None:
    """Return after how many further samples of this node one of the block of each row comes, behind all of `positions`: [n].

    An object that holds a whole block (a shard, a row group) is used by each of its samples: by that of a sample in the next
    epoch it would go first, and come again for the rest of its block.

    Returns:
        None where the order has no blocks.
    """
    order = share.order.order if isinstance(share.order, Weighted) else share.order
    if not isinstance(order, Blocks):
        return None
    epoch, bounds, num_positions = share.epoch, order.layout.bounds, order.num_positions(share.epoch)
    world = share.partition.world
    parts = [share.steps.partition(later, world) for later in (epoch, epoch + 1)]
    blocks = np.searchsorted(bounds, order.rows_at(epoch, positions).row, side="right") - 1  # [n]
    found = np.empty(len(positions), dtype=np.int64)  # [n]
    for block in np.unique(blocks).tolist():
        known = (_positions_of_block(order, later, int(bounds[block]), int(bounds[block + 1])) for later in (epoch, epoch + 1))
        this, again = (some[part.is_on_node(some)] for some, part in zip(known, parts, strict=True))  # [m] each
        this = this[np.searchsorted(this, positions.max(), side="right") :]  # [m]
        end = num_positions + (int(again[0]) if len(again) else parts[1].num_positions)
        found[blocks == block] = int(this[0]) if len(this) else end
    counted: Int64Array = np.maximum((found - positions) // world.num_nodes, 1)
    return counted


@lru_cache(maxsize=512)  # of the blocks of some windows, in this epoch and the next: 800 KB with 200 rows each
def _positions_of_block(order: Blocks, epoch: int, first_row: int, stop: int) -> Int64Array:
    """Return the positions of the rows of a block in an epoch, from the first on: [stop - first_row]."""
    return np.sort(order.positions_of(epoch, np.arange(first_row, stop)))
