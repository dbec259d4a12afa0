"""Order and steps of a dataset without weights in one value, for scripts that look at an order without a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from sqlstream.errors import ConfigError
from sqlstream.order.blocks import BlockLayout, Blocks
from sqlstream.order.order import Order
from sqlstream.order.partition import Partition, Tail
from sqlstream.order.permute import Int64Array
from sqlstream.order.shuffled import Shuffled
from sqlstream.order.steps import Steps
from sqlstream.world import World


def shuffled(num_rows: int, seed: int | None, num_canonical_nodes: int = 1, blocks: BlockLayout | None = None) -> Order:
    """Return the order of all rows of a dataset, each once an epoch.

    Args:
        num_rows: Rows, numbered from 0.
        seed: Which shuffle; None: rows as written, with blocks, too.
        num_canonical_nodes: Fixed parts of the dataset, each of which stays on one node.
        blocks: Blocks are shuffled, then the rows of windows of them; None: a whole shuffle.

    Raises:
        ConfigError: A number is out of range.
    """
    if blocks is None or seed is None:
        return Shuffled(num_rows=num_rows, seed=seed, num_canonical_nodes=num_canonical_nodes)
    return Blocks(layout=blocks, seed=seed, num_canonical_nodes=num_canonical_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Order and steps.

    Example:
        >>> plan = Plan(num_samples=10, seed=42, batch_size=4)
        >>> plan.rows(0, 0, 10).tolist(), plan.rows(1, 0, 10).tolist()
        ([8, 6, 7, 9, 0, 1, 3, 2, 5, 4], [8, 3, 4, 9, 5, 7, 1, 2, 0, 6])
        >>> [positions.tolist() for positions in plan.partition(World(), consumed=4).blocks()]
        [[4, 5, 6, 7, 8, 9]]
    """

    num_samples: int
    """Selected rows, numbered from 0."""
    seed: int | None
    """Which shuffle; None: rows as written, in every epoch."""
    batch_size: int | None
    """Samples of a rank's batch; None: unknown."""
    tail: Tail = Tail.SHORT
    """What becomes of an incomplete last step."""
    num_canonical_nodes: int = 1
    """Fixed parts of the dataset, each of which stays on one node; without a seed every epoch is the same anyway."""
    blocks: BlockLayout | None = None
    """Rows of a block stay near each other: blocks are shuffled, then the rows of windows of them; None: a whole shuffle."""
    order: Order = field(init=False, repr=False)
    steps: Steps = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Compose them, which checks ranges."""
        parts = self.num_canonical_nodes
        order = shuffled(self.num_samples, self.seed, parts, self.blocks)
        if self.blocks is not None and self.blocks.num_rows != self.num_samples:
            raise ConfigError(f"the blocks hold {self.blocks.num_rows} rows, the plan {self.num_samples}: give the same")
        steps = Steps(order=order, batch_size=self.batch_size, tail=self.tail, num_canonical_nodes=parts)
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "steps", steps)

    def rows(self, epoch: int, start: int, stop: int) -> Int64Array:
        """Return the rows at positions `[start, stop)` of an epoch; O(stop - start).

        Raises:
            IndexError: The positions are not within the epoch.
        """
        return self.order.rows_at(epoch, np.arange(start, stop, dtype=np.int64)).row

    def replacements(self, epoch: int, position: int) -> Iterator[int]:
        """Yield rows to try instead of the one at `position` (`Order.replacements`)."""
        return self.order.replacements(epoch, position)

    def partition(self, world: World, consumed: int = 0, first_worker: int = 0) -> Partition:
        """Return the share of `world`'s worker in what an epoch has left (`Steps.partition`)."""
        return self.steps.partition(0, world, consumed, first_worker)
