"""The order of a dataset: the row at each position of each epoch, and the worker that takes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.order.blocks import BlockLayout, shuffle_parts
from sqlstream.order.partition import Partition, Tail
from sqlstream.order.permute import MAX_SIZE, Int64Array, Permutation
from sqlstream.world import World

MAX_REPLACEMENTS = 5
"""Draws for one failed sample; after five failures in a row the source has failed, not single samples."""
# What a permutation is for is the first part of its key, so that no two purposes ever share one.
_EPOCH_ORDER, _NODE_PARTS, _REPLACEMENTS = 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A pure function from (epoch, position) to a selected row; holds no rows and no state.

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
    """Samples of a rank's batch; None: unknown (a plain DataLoader over a dataset without `batch_size=`)."""
    tail: Tail = Tail.SHORT
    """What becomes of an incomplete last step (`order/partition.py` has the reasons)."""
    num_canonical_nodes: int = 1
    """Fixed parts of the dataset, each of which stays on one node; without a seed every epoch is the same anyway."""
    blocks: BlockLayout | None = None
    """Rows of a block stay near each other: blocks are shuffled, then the rows of windows of them; None: a whole shuffle."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_at_least("num_samples", self.num_samples, 0)
        check_at_least("num_canonical_nodes", self.num_canonical_nodes, 1)
        if self.num_samples > MAX_SIZE:
            raise ConfigError(
                f"num_samples={self.num_samples} is out of range: an order covers at most 2**48 = {MAX_SIZE} rows"
            )
        if self.blocks is not None and self.blocks.num_rows != self.num_samples:
            raise ConfigError(f"the blocks hold {self.blocks.num_rows} rows, the plan {self.num_samples}: give the same")
        if self.batch_size is not None:
            check_at_least("batch_size", self.batch_size, 1)
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"shuffle_seed={self.seed} is out of range: give None, -1 for a random seed, or 0 to 2**64 - 1")

    def rows(self, epoch: int, start: int, stop: int) -> Int64Array:
        """Return the rows at positions `[start, stop)` of an epoch; O(stop - start).

        Raises:
            IndexError: The positions are not within the epoch.
        """
        if start < stop:
            self._check_bounds(start, stop - 1)
        return self._rows_at(epoch, np.arange(start, stop, dtype=np.int64))

    def rows_at(self, epoch: int, positions: Int64Array) -> Int64Array:
        """Return the rows at `positions` of an epoch, in their order.

        Raises:
            IndexError: A position is not within the epoch.
        """
        if positions.size:
            self._check_bounds(positions.min(), positions.max())
        return self._rows_at(epoch, positions)

    def positions_of(self, epoch: int, rows: Int64Array) -> Int64Array:
        """Return the positions of `rows` in an epoch: the inverse of `rows_at`, at the same cost."""
        if self.seed is None:
            return rows.astype(np.int64)
        parts = self.num_canonical_nodes
        if self.blocks is not None:
            positions = np.empty(len(rows), dtype=np.int64)
            for number, order in enumerate(shuffle_parts(self.blocks, self.seed, epoch, parts)):
                places = order.positions_of(rows)
                positions[places >= 0] = places[places >= 0] * parts + number
            return positions
        if parts == 1:
            return Permutation.keyed(self.num_samples, _EPOCH_ORDER, self.seed, epoch).inverse(rows)
        dealt = Permutation.keyed(self.num_samples, _NODE_PARTS, self.seed).inverse(rows)
        part, index = dealt % parts, dealt // parts
        shuffle = Permutation.keyed(-(-self.num_samples // parts), _EPOCH_ORDER, self.seed, epoch)
        return part + shuffle.inverse(index, tweak=part, sizes=self._part_sizes(part)) * parts

    def _check_bounds(self, first: int, last: int) -> None:
        if not 0 <= first <= last < self.num_samples:
            raise IndexError(f"positions {first} to {last} are not within [0, {self.num_samples})")

    def _rows_at(self, epoch: int, positions: Int64Array) -> Int64Array:
        if self.seed is None:
            return positions.astype(np.int64)
        if self.blocks is not None:
            return self._rows_of_blocks(self.blocks, self.seed, epoch, positions)
        if self.num_canonical_nodes == 1:
            return Permutation.keyed(self.num_samples, _EPOCH_ORDER, self.seed, epoch).forward(positions)
        # A fixed shuffle deals the rows to parts, so that no node sees one end of a sorted source only; each epoch then
        # shuffles within the parts. The tweak gives every part its own permutation: rows do not meet again in every epoch.
        parts = self.num_canonical_nodes
        index = positions // parts
        part = positions - index * parts
        shuffle = Permutation.keyed(-(-self.num_samples // parts), _EPOCH_ORDER, self.seed, epoch)
        index = shuffle.forward(index, tweak=part, sizes=self._part_sizes(part))
        return Permutation.keyed(self.num_samples, _NODE_PARTS, self.seed).forward(part + index * parts)

    def _rows_of_blocks(self, blocks: BlockLayout, seed: int, epoch: int, positions: Int64Array) -> Int64Array:
        """Return the rows at `positions` of an epoch of shuffled blocks."""
        parts = self.num_canonical_nodes
        orders = shuffle_parts(blocks, seed, epoch, parts)
        if parts == 1:
            return orders[0].rows_at(positions)
        rows, part = np.empty(len(positions), dtype=np.int64), positions % parts
        for number in np.unique(part).tolist():
            mine = part == number
            rows[mine] = orders[number].rows_at(positions[mine] // parts)
        return rows

    def replacements(self, epoch: int, position: int) -> Iterator[int]:
        """Yield rows to try instead of the one at `position`, from other positions of the epoch and of its node's part.

        Each row comes once; there are at most `MAX_REPLACEMENTS`, fewer where the epoch or the part has no other rows. With
        blocks they come from the same window: no other block is fetched for them.
        """
        parts = self.num_canonical_nodes
        part, index = position % parts, position // parts
        others_of = range(int(self._part_sizes(np.array([part]))[0]))
        if self.blocks is not None and self.seed is not None:
            others_of = shuffle_parts(self.blocks, self.seed, epoch, parts)[part].window_of(index)
        num_others = len(others_of) - 1
        shuffle = Permutation.keyed(num_others, _REPLACEMENTS, self.seed or 0, epoch, position)
        others = others_of.start + shuffle.forward(np.arange(min(MAX_REPLACEMENTS, num_others), dtype=np.int64))
        others += others >= index
        yield from self.rows_at(epoch, part + others * parts).tolist()

    def partition(self, world: World, consumed: int = 0, first_worker: int = 0) -> Partition:
        """Return the share of `world`'s worker in what an epoch has left after `consumed` samples of the whole job.

        Args:
            world: Rank and worker.
            consumed: A multiple of batch size x world size; at or beyond the epoch's end nothing is left.
            first_worker: The worker that is asked first: 0, unless one iteration of a DataLoader runs on over epochs
                (`Partition.next_worker`).

        Raises:
            StateError: `consumed` is in the middle of a step.
        """
        return Partition(
            num_positions=self.num_samples,
            batch_size=self.batch_size,
            tail=self.tail,
            num_canonical_nodes=self.num_canonical_nodes,
            world=world,
            consumed=consumed,
            first_worker=first_worker,
        )

    def num_steps(self, world: World) -> int:
        """Return the steps of an epoch, the same on every rank."""
        return self.partition(world).num_steps

    def _part_sizes(self, part: Int64Array) -> Int64Array:
        """Return the number of positions p with p mod parts = part, for each of `part`."""
        size, num_larger = divmod(self.num_samples, self.num_canonical_nodes)
        return (part < num_larger) + size
