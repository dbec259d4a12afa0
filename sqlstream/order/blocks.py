"""Block shuffle: for rows that come in shards or chunks, where a full shuffle would fetch a chunk for every row.

The blocks are shuffled, then the rows of every `window` neighbouring blocks among themselves. So an epoch walks through the
data one window after the other, needs `window` blocks at a time, and never comes back to a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.order.permute import Int64Array, Permutation

# Purposes of keys, apart from those in plan.py.
_BLOCK_ORDER, _WINDOW_ORDER = 101, 102


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder:
    """The order of one epoch; holds two numbers a block (`shuffle_blocks` makes it), computes rows on demand."""

    blocks: Int64Array
    """Blocks in the order in which they come: [num_blocks]."""
    first_rows: Int64Array
    """First row of each of `blocks`: [num_blocks]."""
    starts: Int64Array
    """Position at which each of `blocks` starts, and the end: [num_blocks + 1]."""
    window: int
    """Blocks whose rows are shuffled together."""
    permutation: Permutation
    """Shuffles the rows of a window; the window's number is the tweak."""

    def rows_at(self, positions: Int64Array) -> Int64Array:
        """Return the rows at `positions` of the epoch, in their order.

        Raises:
            IndexError: A position is not within the epoch.
        """
        if positions.size and not 0 <= positions.min() <= positions.max() < self.starts[-1]:
            raise IndexError(f"positions {positions.min()} to {positions.max()} are not within [0, {self.starts[-1]})")
        window = self._places(positions) // self.window
        window_starts = self.starts[window * self.window]
        window_stops = self.starts[np.minimum((window + 1) * self.window, len(self.blocks))]
        within = self.permutation.forward(positions - window_starts, tweak=window, sizes=window_stops - window_starts)
        shuffled = window_starts + within
        places = self._places(shuffled)
        return self.first_rows[places] + shuffled - self.starts[places]

    def blocks_of(self, start: int, stop: int) -> Int64Array:
        """Return the blocks that positions `[start, stop)` need, in order of first need: what to fetch next."""
        if start >= stop:
            return np.empty(0, dtype=np.int64)
        first, last = (self._places(np.array([start, stop - 1])) // self.window).tolist()
        wanted = slice(first * self.window, (last + 1) * self.window)
        return self.blocks[wanted][np.diff(self.starts)[wanted] > 0]

    def _places(self, positions: Int64Array) -> Int64Array:
        """Return for each position the place in `blocks` of the block that covers it; empty blocks cover none."""
        return np.searchsorted(self.starts, positions, side="right").astype(np.int64) - 1


def shuffle_blocks(bounds: Int64Array, window: int, seed: int, epoch: int) -> BlockOrder:
    """Return the order of an epoch over blocks of consecutive rows.

    Args:
        bounds: First row of each block, and the end of the last: [num_blocks + 1], never falling; blocks may be empty.
        window: Blocks whose rows are shuffled together; 1 keeps each block by itself.
        seed: Which shuffle.
        epoch: Which epoch of it.

    Raises:
        ConfigError: The bounds fall, or the window is empty.

    Example:
        >>> shuffle_blocks(np.array([0, 4, 8, 10]), window=1, seed=3, epoch=0).rows_at(np.arange(10)).tolist()
        [5, 7, 6, 4, 9, 8, 2, 1, 3, 0]
    """
    check_at_least("window", window, 1)
    sizes = np.diff(bounds)
    if np.any(sizes < 0):
        block = int(np.argmax(sizes < 0))
        raise ConfigError(f"block {block} has bounds {bounds[block]} to {bounds[block + 1]}: bounds must never fall")
    blocks = Permutation.keyed(len(sizes), _BLOCK_ORDER, seed, epoch).forward(np.arange(len(sizes)))
    starts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes[blocks])))
    window_starts = np.append(starts[:-1:window], starts[-1])
    largest = int(np.diff(window_starts).max(initial=0))
    return BlockOrder(
        blocks=blocks,
        first_rows=bounds[blocks],
        starts=starts,
        window=window,
        permutation=Permutation.keyed(largest, _WINDOW_ORDER, seed, epoch),
    )
