"""Rows as often as they weigh: an order of slots, and the row of each slot, which changes with the weights of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from sqlstream.order.order import Draws, Order
from sqlstream.order.permute import Int64Array, Permutation
from sqlstream.order.weights import WeightedRows


class WeightsFrom(NamedTuple):
    """Weights that hold from a position of an epoch on."""

    position: int
    rows: WeightedRows | None
    """None: a slot is a row."""


class Weights(Protocol):
    """The weights of a run. They may change while it goes on, for positions that were not asked for before."""

    @property
    def fingerprint(self) -> str:
        """A text for all changes of the run."""

    def of_epoch(self, epoch: int) -> Sequence[WeightsFrom]:
        """Return the weights of an epoch, in the order of their positions; the first ones hold from position 0 on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """The rows of the slots that another order shuffles; `order/weights.py` has the rule."""

    order: Order
    """The order of the slots, a single stream."""
    weights: Weights
    """The rows of the slots."""
    seed: int | None
    """Seed of the order."""

    @property
    def fingerprint(self) -> str:
        """A text for slots and weights."""
        return f"{self.order.fingerprint}, weights {self.weights.fingerprint}"

    def num_positions(self, epoch: int) -> int:
        """Return the slots of an epoch."""
        return self.order.num_positions(epoch)

    def rows_at(self, epoch: int, positions: Int64Array) -> Draws:
        """Return the rows at `positions`, by the weights of now."""
        draws = self.order.rows_at(epoch, positions)
        weights = self.weights.of_epoch(epoch)
        if all(since.rows is None for since in weights):
            return draws
        rows = draws.row.copy()
        for since in weights:
            late = np.flatnonzero(draws.position >= since.position)
            slots = draws.row[late]
            rows[late] = slots if since.rows is None else since.rows.rows_at(self.seed, epoch, slots)
        return replace(draws, row=rows)

    def positions_of(self, epoch: int, rows: Int64Array) -> Int64Array | None:
        """Return the positions of rows; None in an epoch with weights, or with another number of positions than rows."""
        is_plain = all(since.rows is None for since in self.weights.of_epoch(epoch))
        return self.order.positions_of(epoch, rows) if is_plain else None

    def permutation(self, epoch: int) -> Permutation | None:
        """Return the permutation of the slots; None in an epoch with weights, or with another number of positions than rows."""
        is_plain = all(since.rows is None for since in self.weights.of_epoch(epoch))
        return self.order.permutation(epoch) if is_plain else None

    def replacements(self, epoch: int, position: int, draw: int = 0) -> Iterator[int]:
        """Yield rows to try instead of a failed one, by the weights that hold at its position; never that row itself."""
        failed = int(self.rows_at(epoch, np.array([position])).row[draw])
        rows = [since.rows for since in self.weights.of_epoch(epoch) if since.position <= position][-1]
        for slot in self.order.replacements(epoch, position, draw):
            row = slot if rows is None else int(rows.rows_at(self.seed, epoch, np.array([slot]))[0])
            if row != failed:  # a row may stand at several positions
                yield row

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:
        """Return what the slots need."""
        return self.order.needs(epoch, position)
