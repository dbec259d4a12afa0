"""Block shuffle: for rows that come in shards or chunks, where a full shuffle would fetch a chunk for every row.

The blocks are shuffled, then the rows of every `window` neighbouring blocks among themselves. So an epoch walks through the
data one window after the other, needs `window` blocks at a time, and never comes back to a block.

How a plan uses it, `Plan(blocks=BlockLayout(...))`: `plan.rows_at(epoch, positions)` gives rows as ever, and
`plan.blocks_at(epoch, positions)` the blocks that these rows lie in, in the order of their first need: what to fetch next.

With canonical nodes each part of the positions has blocks of its own, dealt once for all epochs; at most one block fewer than
there are parts is cut in two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.order.permute import Int64Array, Permutation

# Purposes of keys, apart from those in plan.py.
_BLOCK_ORDER, _WINDOW_ORDER, _BLOCK_PARTS = 101, 102, 103
MAX_BLOCKS = 1 << 24
"""An epoch holds three numbers a block: 400 MB at this many, and then blocks have too few rows to be worth it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockLayout:
    """Where blocks of consecutive rows begin and end, and how many of them are shuffled together.

    Example:
        >>> BlockLayout.of_size(4, num_rows=10, window=2).bounds.tolist()
        [0, 4, 8, 10]
    """

    bounds: Int64Array
    """First row of each block, and the end of the last: [num_blocks + 1], never falling; blocks may be empty."""
    window: int
    """Blocks whose rows are shuffled together; 1 keeps each block by itself."""

    def __post_init__(self) -> None:
        """Check bounds and window."""
        check_at_least("window", self.window, 1)
        sizes = np.diff(self.bounds)
        if len(sizes) > MAX_BLOCKS:
            raise ConfigError(f"{len(sizes)} blocks are more than 2**24 = {MAX_BLOCKS}: make larger ones")
        if np.any(sizes < 0):
            block = int(np.argmax(sizes < 0))
            raise ConfigError(
                f"block {block} has bounds {self.bounds[block]} to {self.bounds[block + 1]}: bounds must never fall"
            )

    @classmethod
    def of_size(cls, block_size: int, *, num_rows: int, window: int) -> BlockLayout:
        """Return blocks of `block_size` rows each, but for the last one."""
        check_at_least("block_size", block_size, 1)
        num_blocks = -(-num_rows // block_size)
        if num_blocks > MAX_BLOCKS:
            raise ConfigError(
                f"block_size={block_size} makes {num_blocks} blocks of {num_rows} rows, more than 2**24: make larger ones"
            )
        return cls(bounds=np.minimum(np.arange(num_blocks + 1) * block_size, num_rows), window=window)

    @property
    def num_rows(self) -> int:
        """Rows of all blocks."""
        return int(self.bounds[-1])

    @property
    def fingerprint(self) -> str:
        """Names bounds and window: another one is another order."""
        return _fingerprint(self)

    def blocks_of(self, rows: Int64Array) -> Int64Array:
        """Return the blocks that hold `rows`, each once, in the order of their first row: [n]."""
        blocks = np.searchsorted(self.bounds, rows, side="right").astype(np.int64) - 1
        return blocks[np.sort(np.unique(blocks, return_index=True)[1])]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockOrder:
    """The order of one part of one epoch (`shuffle_blocks` makes it); computes rows on demand."""

    first_rows: Int64Array
    """First row of each block, in the order in which the blocks come: [num_blocks]."""
    starts: Int64Array
    """Position at which each of these blocks starts, and the end: [num_blocks + 1]."""
    window: int
    """Blocks whose rows are shuffled together."""
    permutation: Permutation
    """Shuffles the rows of a window; the window's number is the tweak."""

    def rows_at(self, positions: Int64Array) -> Int64Array:
        """Return the rows at `positions`, in their order; the caller keeps them in range."""
        window = self._places(positions) // self.window
        window_starts, window_stops = self._span(window)
        within = self.permutation.forward(positions - window_starts, tweak=window, sizes=window_stops - window_starts)
        shuffled = window_starts + within
        places = self._places(shuffled)
        return self.first_rows[places] + shuffled - self.starts[places]

    def window_of(self, position: int) -> range:
        """Return the positions whose rows are shuffled with that of `position`."""
        window_start, window_stop = self._span(self._places(np.array([position], dtype=np.int64)) // self.window)
        return range(int(window_start[0]), int(window_stop[0]))

    def _span(self, window: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the positions at which windows start and stop."""
        num_blocks = len(self.first_rows)
        return self.starts[window * self.window], self.starts[np.minimum((window + 1) * self.window, num_blocks)]

    def _places(self, positions: Int64Array) -> Int64Array:
        """Return for each position the place of the block that covers it; empty blocks cover none."""
        return np.searchsorted(self.starts, positions, side="right").astype(np.int64) - 1


@lru_cache(maxsize=2)  # of this epoch and of the next one, which is prepared at its end
def shuffle_blocks(layout: BlockLayout, seed: int, epoch: int, num_parts: int = 1) -> tuple[BlockOrder, ...]:
    """Return the order of each part of an epoch: part c orders the positions p with p mod num_parts = c, counted from 0.

    Example:
        >>> layout = BlockLayout(bounds=np.array([0, 4, 8, 10]), window=1)
        >>> shuffle_blocks(layout, seed=3, epoch=0)[0].rows_at(np.arange(10)).tolist()
        [5, 7, 6, 4, 9, 8, 2, 1, 3, 0]
    """
    first_rows, sizes = layout.bounds[:-1], np.diff(layout.bounds)
    if num_parts == 1:
        return (_shuffled(first_rows, sizes, layout.window, (seed, epoch)),)
    dealt = Permutation.keyed(len(sizes), _BLOCK_PARTS, seed).forward(np.arange(len(sizes)))
    first_rows, starts = first_rows[dealt], np.concatenate(([0], np.cumsum(sizes[dealt])))
    size, num_larger = divmod(layout.num_rows, num_parts)
    orders, part_stop = [], 0
    for part in range(num_parts):
        part_start, part_stop = part_stop, part_stop + size + (part < num_larger)
        begin = np.clip(starts[:-1], part_start, part_stop)
        piece_sizes = np.clip(starts[1:], part_start, part_stop) - begin
        kept = np.flatnonzero(piece_sizes)
        piece_rows = first_rows[kept] + begin[kept] - starts[kept]
        orders.append(_shuffled(piece_rows, piece_sizes[kept], layout.window, (seed, epoch, part)))
    return tuple(orders)


def _shuffled(first_rows: Int64Array, sizes: Int64Array, window: int, key: tuple[int, ...]) -> BlockOrder:
    places = Permutation.keyed(len(sizes), _BLOCK_ORDER, *key).forward(np.arange(len(sizes)))
    starts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes[places])))
    window_starts = np.append(starts[:-1:window], starts[-1])
    largest = int(np.diff(window_starts).max(initial=0))
    return BlockOrder(
        first_rows=first_rows[places],
        starts=starts,
        window=window,
        permutation=Permutation.keyed(largest, _WINDOW_ORDER, *key),
    )


@lru_cache(maxsize=8)
def _fingerprint(layout: BlockLayout) -> str:
    digest = blake2b(np.ascontiguousarray(layout.bounds, dtype="<i8").tobytes(), digest_size=8).hexdigest()
    return f"{len(layout.bounds) - 1} blocks {digest}, window {layout.window}"
