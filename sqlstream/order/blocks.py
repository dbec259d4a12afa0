"""Block shuffle: for rows that come in shards or chunks, where a full shuffle would fetch a chunk for every row.

The blocks are shuffled, then the rows of every `window` neighbouring blocks among themselves. So an epoch walks through the
data one window after the other, needs `window` blocks at a time, and needs each block in one window only.

Blocks may hold fewer rows than they have numbers for (a filter keeps some of them), and their number may not be known yet: then
the order is known up to the first window with such a block, and does not change when the rest becomes known.

With canonical nodes each part of the positions has blocks of its own, dealt once for all epochs; at most one block fewer than
there are parts is cut in two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.order.order import MAX_REPLACEMENTS, Draws, check_positions, check_seed, some_others
from sqlstream.order.permute import Int64Array, Permutation
from sqlstream.order.shuffled import REPLACEMENTS

# Purposes of keys, apart from those in shuffled.py.
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
        if len(self.bounds) - 1 > MAX_BLOCKS:
            raise ConfigError(f"{len(self.bounds) - 1} blocks are more than 2**24 = {MAX_BLOCKS}: make larger ones")
        _sizes_of(self.bounds)

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
        """A text for bounds and window: layouts with another text have another order."""
        return _fingerprint(self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockOrder:
    """The order of one epoch; holds two numbers a block (`shuffle_blocks` makes it), computes rows on demand."""

    seed: int | None
    """Seed of the shuffle; None: as written."""
    epoch: int
    """The epoch."""
    blocks: Int64Array
    """All blocks in the order in which they come: [num_blocks]."""
    first_rows: Int64Array
    """First row of each block that is known, in that order: [num_known]."""
    starts: Int64Array
    """Position at which each of these starts, and the end: [num_known + 1]."""
    window: int
    """Blocks whose rows are shuffled together."""
    part: int = 0
    """The part of the positions that it orders, where each node keeps its own blocks."""

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
            IndexError: A position is not within the known part of the epoch.
        """
        check_positions(positions, self.num_positions)
        shuffled = positions.astype(np.int64)
        if self.seed is not None:
            windows = self._places(positions) // self.window
            for window in np.unique(windows).tolist():
                inside = windows == window
                start, stop = self._bounds(window)
                shuffle = Permutation.keyed(stop - start, _WINDOW_ORDER, self.seed, self.epoch, window, self.part)
                shuffled[inside] = start + shuffle.forward(shuffled[inside] - start)
        places = self._places(shuffled)
        return self.first_rows[places] + shuffled - self.starts[places]

    def positions_of(self, rows: Int64Array) -> Int64Array:
        """Return the positions of `rows`, -1 for rows that are not in the known part of the epoch."""
        first_rows, places = _by_row(self)
        if not len(places):
            return np.full(len(rows), -1, dtype=np.int64)
        nearest = np.searchsorted(first_rows, rows, side="right") - 1
        place = places[np.maximum(nearest, 0)]
        shuffled = self.starts[place] + rows - self.first_rows[place]
        is_here = (nearest >= 0) & (shuffled < self.starts[place + 1])
        positions = np.where(is_here, shuffled, -1)
        if self.seed is not None:
            windows = place // self.window
            for window in np.unique(windows[is_here]).tolist():
                inside = is_here & (windows == window)
                start, stop = self._bounds(window)
                shuffle = Permutation.keyed(stop - start, _WINDOW_ORDER, self.seed, self.epoch, window, self.part)
                positions[inside] = start + shuffle.inverse(positions[inside] - start)
        return positions

    def window_of(self, position: int) -> range:
        """Return the positions of the window that a position is in."""
        return range(*self._bounds(int(self._places(np.array([position]))[0]) // self.window))

    def others(self, position: int, *key: int, is_all_known: bool) -> Int64Array:
        """Return up to `MAX_REPLACEMENTS` other positions, in an order that belongs to `key`: [n].

        They are of the window of `position`; where that is too small (of one short block, for instance), further ones are of
        the window before it, or, of the first window, of the one behind it.

        Args:
            position: The position.
            key: What the order of the others depends on.
            is_all_known: Every process knows the window behind the first one; False: it may be counted later.
        """
        window = self.window_of(position)
        others = some_others(window, position, *key)  # [m]
        if len(others) == MAX_REPLACEMENTS or not (window.start or is_all_known) or len(window) == self.num_positions:
            return others
        near = self.window_of(window.start - 1 if window.start else window.stop)
        further = some_others(range(near.start, near.stop + 1), near.stop, *key)  # [k]; all of that window
        return np.concatenate((others, further))[:MAX_REPLACEMENTS]

    def _bounds(self, window: int) -> tuple[int, int]:
        last = min((window + 1) * self.window, len(self.first_rows))
        return int(self.starts[window * self.window]), int(self.starts[last])

    def _places(self, positions: Int64Array) -> Int64Array:
        """Return for each position the place in `blocks` of the block that covers it; empty blocks cover none."""
        return np.searchsorted(self.starts, positions, side="right").astype(np.int64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Each row once an epoch, in shuffled windows of blocks.

    Example:
        >>> order = Blocks(layout=BlockLayout.of_size(4, num_rows=10, window=1), seed=3)
        >>> order.rows_at(0, np.arange(10)).row.tolist()
        [6, 5, 7, 4, 2, 3, 1, 0, 9, 8]
    """

    layout: BlockLayout
    seed: int
    """Which shuffle."""
    num_canonical_nodes: int = 1
    """Fixed parts of the dataset, each of which stays on one node: part c has the positions p with p mod parts = c."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_at_least("num_canonical_nodes", self.num_canonical_nodes, 1)
        check_seed(self.seed)

    @property
    def fingerprint(self) -> str:
        """A text for the order."""
        return f"{self.layout.fingerprint}, seed {self.seed}, {self.num_canonical_nodes} parts"

    def num_positions(self, epoch: int) -> int:  # noqa: ARG002 - every epoch is the same
        """Return the positions of an epoch."""
        return self.layout.num_rows

    def rows_at(self, epoch: int, positions: Int64Array) -> Draws:
        """Return the rows at `positions`."""
        check_positions(positions, self.layout.num_rows)
        parts, orders = self.num_canonical_nodes, self._orders(epoch)
        if parts == 1:
            return Draws.of_rows(epoch, positions, orders[0].rows_at(positions))
        rows, part = np.empty(len(positions), dtype=np.int64), positions % parts
        for number in np.unique(part).tolist():
            mine = part == number
            rows[mine] = orders[number].rows_at(positions[mine] // parts)
        return Draws.of_rows(epoch, positions, rows)

    def positions_of(self, epoch: int, rows: Int64Array) -> Int64Array:
        """Return the positions of rows."""
        positions = np.empty(len(rows), dtype=np.int64)
        for number, order in enumerate(self._orders(epoch)):
            places = order.positions_of(rows)
            positions[places >= 0] = places[places >= 0] * self.num_canonical_nodes + number
        return positions

    def permutation(self, epoch: int) -> None:  # noqa: ARG002 - blocks have one each
        """Return None: blocks are shuffled, then the rows of their windows."""
        return

    def replacements(self, epoch: int, position: int, draw: int = 0) -> Iterator[int]:  # noqa: ARG002 - a position has one
        """Yield rows to try instead of the one at `position`, from its window, if it has enough: no other block is fetched."""
        index, part = divmod(position, self.num_canonical_nodes)
        order = self._orders(epoch)[part]
        others = order.others(index, REPLACEMENTS, self.seed, epoch, position, is_all_known=True)  # [n]
        yield from order.rows_at(others).tolist()

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:  # noqa: ARG002 - all is known
        """Return no chunks."""
        return {}

    def _orders(self, epoch: int) -> tuple[BlockOrder, ...]:
        return shuffle_parts(self.layout, self.seed, epoch, self.num_canonical_nodes)


def shuffle_blocks(
    bounds: Int64Array, window: int, seed: int | None, epoch: int, sizes: Int64Array | None = None
) -> BlockOrder:
    """Return the order of an epoch over blocks of consecutive rows.

    Args:
        bounds: First row of each block, and the end of the last: [num_blocks + 1], never falling; blocks may be empty.
        window: Blocks whose rows are shuffled together; 1 keeps each block by itself.
        seed: Seed of the shuffle; None: as written.
        epoch: The epoch.
        sizes: Number of rows of each block that take part, its first ones; -1: not known yet: [num_blocks]. None: all.

    Raises:
        ConfigError: The bounds fall, or the window is empty.

    Example:
        >>> shuffle_blocks(np.array([0, 4, 8, 10]), window=1, seed=3, epoch=0).rows_at(np.arange(10)).tolist()
        [6, 5, 7, 4, 2, 3, 1, 0, 9, 8]
    """
    check_at_least("window", window, 1)
    all_sizes = _sizes_of(bounds)
    return _shuffled(bounds[:-1], all_sizes if sizes is None else sizes, window, seed, epoch)


@lru_cache(maxsize=2)  # of this epoch and of the next one, for which it forecasts
def _by_row(order: BlockOrder) -> tuple[Int64Array, Int64Array]:
    """Return the blocks that have rows in the order of their rows: first rows, and places in the epoch: [n] each."""
    places = np.flatnonzero(np.diff(order.starts))
    places = places[np.argsort(order.first_rows[places])]
    return order.first_rows[places], places


@lru_cache(maxsize=2)  # of this epoch and of the next one, which is prepared at its end
def shuffle_parts(layout: BlockLayout, seed: int, epoch: int, num_parts: int) -> tuple[BlockOrder, ...]:
    """Return the order of each part of an epoch: part c orders the positions p with p mod num_parts = c, counted from 0."""
    first_rows, sizes = layout.bounds[:-1], np.diff(layout.bounds)
    if num_parts == 1:
        return (_shuffled(first_rows, sizes, layout.window, seed, epoch),)
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
        orders.append(_shuffled(piece_rows, piece_sizes[kept], layout.window, seed, epoch, part))
    return tuple(orders)


def _shuffled(
    first_rows: Int64Array, sizes: Int64Array, window: int, seed: int | None, epoch: int, part: int = 0
) -> BlockOrder:
    blocks = np.arange(len(sizes), dtype=np.int64)
    if seed is not None:
        blocks = Permutation.keyed(len(sizes), _BLOCK_ORDER, seed, epoch, part).forward(blocks)
    in_order = sizes[blocks]
    unknown = np.flatnonzero(in_order < 0)
    num_known = int(unknown[0]) // window * window if unknown.size else len(blocks)
    return BlockOrder(
        seed=seed,
        epoch=epoch,
        blocks=blocks,
        first_rows=first_rows[blocks[:num_known]],
        starts=np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(in_order[:num_known]))),
        window=window,
        part=part,
    )


def _sizes_of(bounds: Int64Array) -> Int64Array:
    sizes: Int64Array = np.diff(bounds)
    if np.any(sizes < 0):
        block = int(np.argmax(sizes < 0))
        raise ConfigError(f"block {block} has bounds {bounds[block]} to {bounds[block + 1]}: bounds must never fall")
    return sizes


@lru_cache(maxsize=8)
def _fingerprint(layout: BlockLayout) -> str:
    digest = blake2b(np.ascontiguousarray(layout.bounds, dtype="<i8").tobytes(), digest_size=8).hexdigest()
    return f"{len(layout.bounds) - 1} blocks {digest}, window {layout.window}"
