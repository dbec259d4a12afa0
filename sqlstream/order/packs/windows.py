"""Packs of rows whose lengths are known once they are made: a position is a window of rows, which are packed among themselves.

    position q ─ rows at the positions [q W, (q + 1) W) of another order ─ made, measured ─ best fit decreasing → packs

Which rows share a window, and which of these share a pack, is a function of (seed, epoch, q) as long as rows are made alike. So
the position stays one number, and a window that is broken off is made again, without the packs that were delivered. How many
packs an epoch has is not known before.

With C canonical nodes, position q takes the next window of part q mod C of the other order.

Rejected: a buffer of rows that goes on from window to window. It fills packs a little better, and all of it would be state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sqlstream.config import OnLong, check_at_least
from sqlstream.order.order import Draws, Order, check_positions
from sqlstream.order.packs.packed import Packed
from sqlstream.order.packs.units import ranges
from sqlstream.order.permute import Int64Array, Permutation

_PACKS_OF_WINDOW = 215
"""Purpose of a permutation; another number than those of the other orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Rows of another order, so many at each position."""

    order: Order
    """The rows, one at each position."""
    size: int
    """Rows of a window; the last one of an epoch, or of a part of it, has what is left."""
    num_parts: int = 1
    """Canonical nodes."""

    def __post_init__(self) -> None:
        """Check the size."""
        check_at_least("rows of a window", self.size, 1)

    @property
    def fingerprint(self) -> str:
        """A text for rows and windows."""
        return f"windows of {self.size}, {self.num_parts} parts, of {self.order.fingerprint}"

    def num_positions(self, epoch: int) -> int:
        """Return the windows of an epoch; while rows are counted, at most so many."""
        num_rows = self.order.num_positions(epoch)
        return int((-(-self._rows_of_parts(num_rows, np.arange(self.num_parts)) // self.size)).sum())

    def rows_at(self, epoch: int, positions: Int64Array) -> Draws:
        """Return the rows of windows."""
        check_positions(positions, self.num_positions(epoch))
        places, sizes = self._places(epoch, positions)
        draws = self.order.rows_at(epoch, places)
        return replace(draws, starts=np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes))))

    def positions_of(self, epoch: int, rows: Int64Array) -> None:  # noqa: ARG002 - the same for all
        """Return None: a row shares its position with others."""
        return

    def permutation(self, epoch: int) -> None:  # noqa: ARG002 - the same for all
        """Return None: a position has several rows."""
        return

    def replacements(self, epoch: int, position: int, draw: int = 0) -> Iterator[int]:
        """Yield rows to try instead of a failed one, as the other order has them."""
        places, _ = self._places(epoch, np.array([position], dtype=np.int64))
        return self.order.replacements(epoch, int(places[draw]))

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:
        """Return the chunks that must be counted before the last row of a window is known."""
        index, part = divmod(position, self.num_parts)
        last = ((index + 1) * self.size - 1) * self.num_parts + part
        return self.order.needs(epoch, min(last, self.order.num_positions(epoch) - 1))

    def _places(self, epoch: int, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the positions of the other order in windows, one after the other, and how many each has: [m], [n]."""
        index, part = np.divmod(positions, self.num_parts)
        first = index * self.size  # [n]
        sizes = np.minimum(self.size, self._rows_of_parts(self.order.num_positions(epoch), part) - first)  # [n]
        return ranges(first, sizes) * self.num_parts + np.repeat(part, sizes), sizes

    def _rows_of_parts(self, num_rows: int, part: Int64Array) -> Int64Array:
        """Return the rows of parts: [n]."""
        return (num_rows - part + self.num_parts - 1) // self.num_parts


class PartOfWindow(NamedTuple):
    """What a pack takes of a window."""

    row: int
    """Number of the row in the window."""
    part: int
    """Number of the part of a row that is longer than a pack."""


class _RowsOfWindow(NamedTuple):
    """The rows of a window, by length."""

    lengths: Int64Array
    """The distinct lengths, rising: [L]."""
    counts: Int64Array
    """Rows of each: [L]."""
    in_turn: Int64Array
    """The rows, sorted by length: [W]."""
    digest: str = "window"

    def rows_at(self, places: Int64Array) -> Int64Array:
        """Return the rows at places of the table: [n]."""
        return self.in_turn[places]


def pack_window(
    lengths: Sequence[int], capacity: int, max_rows: int | None, on_long: OnLong, key: tuple[int, ...] | None
) -> list[list[PartOfWindow]]:
    """Return the packs of a window.

    Args:
        lengths: How long each row is, at least 1.
        capacity: Values of a pack at most.
        max_rows: Rows of a pack at most; None: as many as fit.
        on_long: What becomes of longer rows.
        key: What the order of the packs depends on; None: they come in that of their first rows.

    Raises:
        ConfigError: A row is longer than a pack, and that is an error.

    Example:
        >>> packs = pack_window([5, 3, 9, 2], 8, None, OnLong.DROP, None)
        >>> [[row for row, _ in pack] for pack in packs]
        [[0, 1], [3]]
    """
    all_lengths = np.array(lengths, dtype=np.int64)  # [W]
    rows = np.arange(len(all_lengths))  # [W]
    if on_long is OnLong.DROP:
        rows = np.flatnonzero(all_lengths <= capacity)  # [W]
    if not len(rows):
        return []
    in_turn = rows[np.argsort(all_lengths[rows], kind="stable")]  # [W]
    distinct, counts = np.unique(all_lengths[rows], return_counts=True)  # [L], [L]
    table = _RowsOfWindow(distinct, counts.astype(np.int64), in_turn)
    order = Packed(rows=table, capacity=capacity, max_rows=max_rows, on_long=on_long, seed=None)
    draws = order.rows_at(0, np.arange(order.num_positions(0)))
    parts = [0] * len(draws.row) if draws.part is None else draws.part.tolist()
    taken = list(map(PartOfWindow, draws.row.tolist(), parts))
    packs = sorted(sorted(taken[start:stop]) for start, stop in pairwise(draws.starts.tolist()))
    if key is None:
        return packs
    turn = Permutation.keyed(len(packs), _PACKS_OF_WINDOW, *key).forward(np.arange(len(packs)))  # [packs]
    return [packs[number] for number in turn.tolist()]
