"""Weights: row i comes in epoch e as often as its weight says, by systematic resampling. Pure, O(log n) a position.

How the stream uses it (the plan shuffles *slots* as it shuffles rows without weights; this module says which row a slot is):

    table = index.weights.open_weights(index, "1 + 3 * (score > 6)", directory)       # once per node; memory-mapped afterwards
    rows = WeightedRows(num_rows=len(index), num_positions=epoch_size, cumulative=table.cumulative())
    plan = Plan(num_samples=rows.num_positions, ...)                                  # `epoch_size=`; default len(index)
    selected = rows.rows_at(plan.seed, epoch, plan.rows_at(epoch, positions))         # positions of `Index.row_ids`
    state: table.fingerprint (and num_positions) go into it

`cumulative=None` with another `num_positions` is `epoch_size=` without weights: every row equally often.

**The rule.** Lay the weights end to end on a line of length W and walk along it with M even steps of W / M, from a start that
belongs to (seed, epoch): slot k is the row on which step k lands. So a row of weight w comes floor(M w / W) or ceil(M w / W)
times in *every* epoch. The start moves by the golden ratio from epoch to epoch, so a row that is due in half of the epochs
comes in 50 of 100, give or take one or two (50 +- 5 with independent starts).

**Exact.** Weights are integers here (`scale_weights`), and so is all arithmetic: equal weights and M = n give each row exactly
once, weights that are whole numbers (or halves, …) have exactly their share, on every machine. Rejected: alias tables and
independent draws (counts vary by sqrt), float cumulative sums (their rounding adds and loses rows at 10^8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.order.permute import MAX_SIZE, Int64Array

WEIGHTS_VERSION = 1
"""Changes whenever any row would change; it is part of every table's fingerprint."""
TOTAL_BITS = 61
"""Scaled weights add up to less than 2 to this: sums stay within int64 with room to spare."""
_GOLDEN_RATIO = 0x9E3779B97F4A7C15  # its fraction in 64 bits: steps of it around a circle are never near each other
_FAST_POSITIONS = 1 << 31  # products of two numbers below it fit into int64


class Sums(Protocol):
    """Numbers that never fall: an array of them, or what answers as one."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...
    def searchsorted(self, v: Any, /, side: Any) -> Any:
        """Return where in the order each of `v` would stand."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightedRows:
    """The row of each slot of an epoch; holds no more than the table.

    Example:
        >>> rows = WeightedRows(num_rows=3, num_positions=4, cumulative=np.array([1, 1, 4]))  # weights 1, 0, 3
        >>> rows.rows_at(seed=7, epoch=0, slots=np.arange(4)).tolist()
        [0, 2, 2, 2]
    """

    num_rows: int
    """Selected rows, at least one."""
    num_positions: int
    """Slots of an epoch."""
    cumulative: Sums | None = None
    """Sums of the scaled weights up to and with each row: [num_rows], never falling; None: all rows weigh the same."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_at_least("num_rows", self.num_rows, 1)
        check_at_least("epoch_size", self.num_positions, 1)
        if self.num_positions > MAX_SIZE:
            raise ConfigError(f"epoch_size={self.num_positions} is out of range: an order covers at most 2**48 = {MAX_SIZE}")
        if self.cumulative is not None and len(self.cumulative) != self.num_rows:
            raise ConfigError(f"{len(self.cumulative)} weights for {self.num_rows} rows: give one a row")

    @property
    def total(self) -> int:
        """Length of the line: the sum of all scaled weights."""
        return self.num_rows if self.cumulative is None else int(self.cumulative[-1])

    def rows_at(self, seed: int | None, epoch: int, slots: Int64Array) -> Int64Array:
        """Return the row of each slot, a number in [0, num_rows).

        Args:
            seed: Seed of the order; None counts as 0.
            epoch: The epoch.
            slots: Numbers in [0, num_positions), as a plan over `num_positions` samples gives them.

        Raises:
            IndexError: A slot is not within the epoch.
        """
        if slots.size and not 0 <= slots.min() <= slots.max() < self.num_positions:
            raise IndexError(f"slots {slots.min()} to {slots.max()} are not within [0, {self.num_positions})")
        points = self._points(_start(seed or 0, epoch, self.total), slots)
        if self.cumulative is None:
            return points
        rows: Int64Array = self.cumulative.searchsorted(points, side="right").astype(np.int64)
        return rows

    def slots_before(self, seed: int | None, epoch: int, sums: Int64Array) -> Int64Array:
        """Return how many slots of an epoch fall on rows up to those at which the scaled weights have such sums: [n].

        Args:
            seed: Seed of the order; None counts as 0.
            epoch: The epoch.
            sums: Sums of the scaled weights: [n].
        """
        start = _start(seed or 0, epoch, self.total)
        before = [-(-(end * self.num_positions - start) // self.total) for end in sums.tolist()]  # Python's: no overflow
        return np.clip(np.array(before, dtype=np.int64), 0, self.num_positions)

    def _points(self, start: int, slots: Int64Array) -> Int64Array:
        """Return (slot * total + start) // num_positions, without overflow."""
        whole, rest = divmod(self.total, self.num_positions)
        start_whole, start_rest = divmod(start, self.num_positions)
        if self.num_positions <= _FAST_POSITIONS:
            fraction = (slots * rest + start_rest) // self.num_positions
        else:
            fraction = ((slots.astype(object) * rest + start_rest) // self.num_positions).astype(np.int64)
        return slots * whole + start_whole + fraction


def scale_of(total: float) -> int:
    """Return the power of two by which weights that add up to `total` are multiplied before they are rounded.

    A power of two, so that equal weights stay equal and whole numbers, halves and quarters stay exact.
    """
    return TOTAL_BITS - 1 - math.frexp(total)[1]


def scale_weights(weights: NDArray[np.float64], scale: int) -> Int64Array:
    """Return `weights` as integers; a weight above 0 stays above 0.

    Args:
        weights: Finite, not negative: [n].
        scale: Scale of all weights of the table (`scale_of`).
    """
    scaled = np.rint(np.ldexp(weights, scale)).astype(np.int64)
    return np.where((scaled == 0) & (weights > 0), 1, scaled)


def _start(seed: int, epoch: int, total: int) -> int:
    """Return where on the line the walk of an epoch starts: a number in [0, total)."""
    digest = blake2b(b"sqlstream weights 1" + seed.to_bytes(16, "little", signed=True), digest_size=8).digest()
    turn = (int.from_bytes(digest, "little") + epoch * _GOLDEN_RATIO) % (1 << 64)
    return turn * total >> 64
