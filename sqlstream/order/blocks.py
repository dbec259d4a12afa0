"""Block shuffle: for rows that come in shards or chunks, where a full shuffle would fetch a chunk for every row.

The blocks are shuffled, then the rows of every `window` neighbouring blocks among themselves. So an epoch walks through the
data one window after the other, needs `window` blocks at a time, and never comes back to a block.

Blocks may hold fewer rows than they have numbers for (a filter keeps some of them), and how many may not be known yet: the
order then is known up to the first window with such a block, and does not change when the rest becomes known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.order.permute import Int64Array, Permutation

# Purposes of keys, apart from those in plan.py.
_BLOCK_ORDER, _WINDOW_ORDER = 101, 102


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockOrder:
    """The order of one epoch; holds two numbers a block (`shuffle_blocks` makes it), computes rows on demand."""

    seed: int | None
    """Which shuffle; None: as written."""
    epoch: int
    """Which epoch of it."""
    blocks: Int64Array
    """All blocks in the order in which they come: [num_blocks]."""
    first_rows: Int64Array
    """First row of each block whose place is known, in that order: [num_known]."""
    starts: Int64Array
    """Position at which each of these starts, and the end: [num_known + 1]."""
    window: int
    """Blocks whose rows are shuffled together."""

    @property
    def num_positions(self) -> int:
        """Positions that are known."""
        return int(self.starts[-1])

    @property
    def is_whole(self) -> bool:
        """All of the epoch is known."""
        return len(self.first_rows) == len(self.blocks)

    @property
    def next_blocks(self) -> Int64Array:
        """The blocks of the first window that is not known: [n]."""
        return self.blocks[len(self.first_rows) :][: self.window]

    def rows_at(self, positions: Int64Array) -> Int64Array:
        """Return the rows at `positions` of the epoch, in their order.

        Raises:
            IndexError: A position is not within what is known of the epoch.
        """
        if positions.size and not 0 <= positions.min() <= positions.max() < self.starts[-1]:
            raise IndexError(f"positions {positions.min()} to {positions.max()} are not within [0, {self.starts[-1]})")
        shuffled = positions.astype(np.int64)
        if self.seed is not None:
            windows = self._places(positions) // self.window
            for window in np.unique(windows).tolist():
                inside = windows == window
                start, stop = self._bounds(window)
                shuffle = Permutation.keyed(stop - start, _WINDOW_ORDER, self.seed, self.epoch, window)
                shuffled[inside] = start + shuffle.forward(shuffled[inside] - start)
        places = self._places(shuffled)
        return self.first_rows[places] + shuffled - self.starts[places]

    def window_of(self, position: int) -> range:
        """Return the positions of the window that a position is in."""
        return range(*self._bounds(int(self._places(np.array([position]))[0]) // self.window))

    def blocks_of(self, start: int, stop: int) -> Int64Array:
        """Return the blocks that positions `[start, stop)` need, in order of first need: what to fetch next."""
        if start >= stop:
            return np.empty(0, dtype=np.int64)
        first, last = (self._places(np.array([start, stop - 1])) // self.window).tolist()
        wanted = slice(first * self.window, min((last + 1) * self.window, len(self.first_rows)))
        return self.blocks[wanted][np.diff(self.starts)[wanted] > 0]

    def _bounds(self, window: int) -> tuple[int, int]:
        last = min((window + 1) * self.window, len(self.first_rows))
        return int(self.starts[window * self.window]), int(self.starts[last])

    def _places(self, positions: Int64Array) -> Int64Array:
        """Return for each position the place in `blocks` of the block that covers it; empty blocks cover none."""
        return np.searchsorted(self.starts, positions, side="right").astype(np.int64) - 1


def shuffle_blocks(
    bounds: Int64Array, window: int, seed: int | None, epoch: int, sizes: Int64Array | None = None
) -> BlockOrder:
    """Return the order of an epoch over blocks of consecutive rows.

    Args:
        bounds: First row of each block, and the end of the last: [num_blocks + 1], never falling; blocks may be empty.
        window: Blocks whose rows are shuffled together; 1 keeps each block by itself.
        seed: Which shuffle; None: as written.
        epoch: Which epoch of it.
        sizes: How many rows of each block take part, its first ones; -1 where that is not known: [num_blocks]. None: all.

    Raises:
        ConfigError: The bounds fall, or the window is empty.

    Example:
        >>> shuffle_blocks(np.array([0, 4, 8, 10]), window=1, seed=3, epoch=0).rows_at(np.arange(10)).tolist()
        [7, 5, 6, 4, 9, 8, 3, 1, 2, 0]
    """
    check_at_least("window", window, 1)
    all_sizes = np.diff(bounds)
    if np.any(all_sizes < 0):
        block = int(np.argmax(all_sizes < 0))
        raise ConfigError(f"block {block} has bounds {bounds[block]} to {bounds[block + 1]}: bounds must never fall")
    blocks = np.arange(len(all_sizes), dtype=np.int64)
    if seed is not None:
        blocks = Permutation.keyed(len(all_sizes), _BLOCK_ORDER, seed, epoch).forward(blocks)
    in_order = (all_sizes if sizes is None else sizes)[blocks]
    unknown = np.flatnonzero(in_order < 0)
    num_known = int(unknown[0]) // window * window if unknown.size else len(blocks)
    return BlockOrder(
        seed=seed,
        epoch=epoch,
        blocks=blocks,
        first_rows=bounds[blocks[:num_known]],
        starts=np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(in_order[:num_known]))),
        window=window,
    )
