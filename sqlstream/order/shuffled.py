"""All rows of a dataset, in another order in every epoch; holds no rows and no state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from sqlstream.config import check_at_least
from sqlstream.order.order import Draws, check_positions, check_seed, check_size, some_others
from sqlstream.order.permute import Int64Array, Permutation

# What a permutation is for is the first part of its key, so that no two purposes ever share one.
_EPOCH_ORDER, _NODE_PARTS, REPLACEMENTS = 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffled:
    """Each row once an epoch, shuffled over the whole dataset.

    Example:
        >>> order = Shuffled(num_rows=10, seed=42)
        >>> [order.rows_at(epoch, np.arange(10)).row.tolist() for epoch in (0, 1)]
        [[8, 6, 7, 9, 0, 1, 3, 2, 5, 4], [8, 3, 4, 9, 5, 7, 1, 2, 0, 6]]
    """

    num_rows: int
    """Rows, numbered from 0."""
    seed: int | None
    """Which shuffle; None: rows as written, in every epoch."""
    num_canonical_nodes: int = 1
    """Fixed parts of the dataset, each of which stays on one node: part c has the positions p with p mod parts = c."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_size("num_samples", self.num_rows)
        check_at_least("num_canonical_nodes", self.num_canonical_nodes, 1)
        check_seed(self.seed)

    @property
    def fingerprint(self) -> str:
        """A text for the order."""
        return f"{self.num_rows} rows, seed {self.seed}, {self.num_canonical_nodes} parts"

    def num_positions(self, epoch: int) -> int:  # noqa: ARG002 - every epoch is the same
        """Return the positions of an epoch."""
        return self.num_rows

    def rows_at(self, epoch: int, positions: Int64Array) -> Draws:
        """Return the rows at `positions`: O(n)."""
        check_positions(positions, self.num_rows)
        return Draws.of_rows(epoch, positions, self._rows_at(epoch, positions))

    def positions_of(self, epoch: int, rows: Int64Array) -> Int64Array:
        """Return the positions of rows, at the cost of `rows_at`."""
        if self.seed is None:
            return rows.astype(np.int64)
        parts = self.num_canonical_nodes
        if parts == 1:
            return Permutation.keyed(self.num_rows, _EPOCH_ORDER, self.seed, epoch).inverse(rows)
        dealt = Permutation.keyed(self.num_rows, _NODE_PARTS, self.seed).inverse(rows)
        part, index = dealt % parts, dealt // parts
        shuffle = Permutation.keyed(-(-self.num_rows // parts), _EPOCH_ORDER, self.seed, epoch)
        return part + shuffle.inverse(index, tweak=part, sizes=self._part_sizes(part)) * parts

    def permutation(self, epoch: int) -> Permutation | None:
        """Return the shuffle of an epoch; None: rows come as written, or by parts."""
        if self.seed is None or self.num_canonical_nodes > 1:
            return None
        return Permutation.keyed(self.num_rows, _EPOCH_ORDER, self.seed, epoch)

    def replacements(self, epoch: int, position: int, draw: int = 0) -> Iterator[int]:  # noqa: ARG002 - a position has one
        """Yield rows to try instead of the one at `position`, from its node's part."""
        parts = self.num_canonical_nodes
        part, index = position % parts, position // parts
        among = range(int(self._part_sizes(np.array([part]))[0]))
        others = some_others(among, index, REPLACEMENTS, self.seed or 0, epoch, position)
        yield from self._rows_at(epoch, part + others * parts).tolist()

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:  # noqa: ARG002 - all is known
        """Return no chunks."""
        return {}

    def _rows_at(self, epoch: int, positions: Int64Array) -> Int64Array:
        if self.seed is None:
            return positions.astype(np.int64)
        if (permutation := self.permutation(epoch)) is not None:
            return permutation.forward(positions)
        # A fixed shuffle deals the rows to parts, so that no node sees one end of a sorted source only; each epoch then
        # shuffles within the parts. The tweak gives every part its own permutation: rows do not meet again in every epoch.
        parts = self.num_canonical_nodes
        index = positions // parts
        part = positions - index * parts
        shuffle = Permutation.keyed(-(-self.num_rows // parts), _EPOCH_ORDER, self.seed, epoch)
        index = shuffle.forward(index, tweak=part, sizes=self._part_sizes(part))
        return Permutation.keyed(self.num_rows, _NODE_PARTS, self.seed).forward(part + index * parts)

    def _part_sizes(self, part: Int64Array) -> Int64Array:
        """Return the number of positions p with p mod parts = part, for each of `part`."""
        size, num_larger = divmod(self.num_rows, self.num_canonical_nodes)
        return (part < num_larger) + size
