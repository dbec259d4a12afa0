"""The order of a lazy index with a filter: how many rows a chunk keeps is known once it has been read.

Chunks are shuffled, then the kept rows of a window of chunks. So a position needs the counts of its window and of the windows
before it only: the order is the same whether all counts are known from an earlier run, or become known on the way. Until they
are known, an epoch counts as long as the index; its end is found when it is reached, at the same position by all ranks.

Rows are numbered here by chunk: number k of a chunk is its first row's id + k, for its k-th kept row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sqlstream.order.blocks import BlockOrder, shuffle_blocks
from sqlstream.order.order import Draws, check_seed
from sqlstream.order.permute import Int64Array

_REPLACEMENTS = 201
"""Purpose of a permutation; another number than those of the other orders."""


class Chunks(Protocol):
    """Chunks, and how many of their rows a filter keeps."""

    @property
    def bounds(self) -> Int64Array:
        """First row of each chunk, and the end: [num_chunks + 1]."""

    def sizes(self) -> Int64Array:
        """Return how many rows of each chunk are kept, -1 where it is not known yet: [num_chunks]."""

    def at_epoch(self, epoch: int) -> None:
        """Take the epoch that is asked for next: a chunk that cannot be read is left out of one alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """The rows of chunks that a filter keeps, in shuffled windows of chunks."""

    chunks: Chunks
    """How many rows each chunk keeps."""
    window: int
    """Chunks whose rows are shuffled together."""
    seed: int | None
    """Which shuffle; None: as written."""
    _orders: dict[int, tuple[bytes, BlockOrder]] = field(default_factory=dict, init=False, compare=False, repr=False)
    """The orders of this epoch and of the next one, each with the counts of which it is made."""

    def __post_init__(self) -> None:
        """Check the seed."""
        check_seed(self.seed)

    @property
    def fingerprint(self) -> str:
        """A text for the order; counts of chunks change nothing in it."""
        return f"filtered chunks of {int(self.chunks.bounds[-1])} rows, window {self.window}, seed {self.seed}"

    def num_positions(self, epoch: int) -> int:
        """Return the rows that are kept; while they are not counted, all rows."""
        _, order = self._orders.get(epoch, (b"", None))
        if order is not None and order.is_whole:
            return order.num_positions
        self.chunks.at_epoch(epoch)
        sizes = self.chunks.sizes()
        return int(self.chunks.bounds[-1]) if (sizes < 0).any() else int(sizes.sum())

    def rows_at(self, epoch: int, positions: Int64Array) -> Draws:
        """Return the rows at `positions`."""
        return Draws.of_rows(epoch, positions, self._order(epoch).rows_at(positions))

    def positions_of(self, epoch: int, rows: Int64Array) -> None:  # noqa: ARG002 - a later epoch need not be known
        """Return None: an order that becomes known on the way has no inverse."""
        return

    def permutation(self, epoch: int) -> None:  # noqa: ARG002 - windows have one each
        """Return None: chunks are shuffled, then the rows of their windows."""
        return

    def replacements(self, epoch: int, position: int, draw: int = 0) -> Iterator[int]:  # noqa: ARG002 - a position has one
        """Yield rows to try instead of the one at `position`, from its window; if that has too few, from the one before."""
        order = self._order(epoch)
        others = order.others(position, _REPLACEMENTS, self.seed or 0, epoch, position, is_all_known=False)  # [n]
        yield from order.rows_at(others).tolist()

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:
        """Return the chunks of the first window that is not counted, if `position` lies behind what is."""
        order = self._order(epoch)
        return {} if order.is_whole or position < order.num_positions else {0: order.next_blocks}

    def _order(self, epoch: int) -> BlockOrder:
        """Return the order of an epoch, as far as it is known now."""
        counts, order = self._orders.get(epoch, (b"", None))
        if order is not None and order.is_whole:
            return order
        self.chunks.at_epoch(epoch)
        sizes = self.chunks.sizes()
        now = sizes.tobytes()  # before the order is made: others count meanwhile, and its counts must not be newer than it
        if order is None or now != counts:
            order = shuffle_blocks(self.chunks.bounds, self.window, self.seed, epoch, sizes)
            while len(self._orders) > 1 and epoch not in self._orders:
                self._orders.pop(next(iter(self._orders)), None)
            self._orders[epoch] = now, order
        return order
