"""Orders beyond rows of one dataset: mixtures whose weights never change, simple packs, and chunks that are counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sqlstream.order import Draws, Int64Array, Mixed, Mixture, MixtureSince, Order, ScheduleType, TurnLayout
from sqlstream.order.order import check_positions

NUM_ROWS = 60
"""Rows of the orders that tests compare."""


@dataclass
class Counted:
    """Chunks of ten rows; how many are kept becomes known when a test says so."""

    kept: Int64Array

    @property
    def bounds(self) -> Int64Array:
        return np.arange(0, NUM_ROWS + 1, 10)

    def sizes(self) -> Int64Array:
        return self.kept

    def at_epoch(self, epoch: int) -> None:
        pass


@dataclass(frozen=True)
class FixedWeights:
    """Weights of streams that never change."""

    mixture: Mixture

    @property
    def fingerprint(self) -> str:
        return self.mixture.fingerprint

    def since(self, turns: TurnLayout) -> MixtureSince:
        return MixtureSince(0, (0,) * self.mixture.num_streams, self.mixture)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Fixed packs: position q holds the rows at positions 2 q and 2 q + 1 of another order; a last odd row is left out."""

    order: Order

    @property
    def fingerprint(self) -> str:
        return f"pairs of {self.order.fingerprint}"

    def num_positions(self, epoch: int) -> int:
        return self.order.num_positions(epoch) // 2

    def rows_at(self, epoch: int, positions: Int64Array) -> Draws:
        check_positions(positions, self.num_positions(epoch))
        draws = self.order.rows_at(epoch, np.stack((2 * positions, 2 * positions + 1), axis=1).reshape(-1))
        return replace(draws, starts=np.arange(len(positions) + 1) * 2)

    def positions_of(self, epoch: int, rows: Int64Array) -> Int64Array | None:
        found = self.order.positions_of(epoch, rows)
        return None if found is None else found // 2

    def permutation(self, epoch: int) -> None:
        """A position has several rows."""

    def replacements(self, epoch: int, position: int, draw: int = 0) -> Iterator[int]:
        return self.order.replacements(epoch, 2 * position + draw)

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:
        return self.order.needs(epoch, 2 * position + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uneven:
    """Epochs that differ in length, as those of buckets do: the last positions of another order are left out."""

    order: Order

    @property
    def fingerprint(self) -> str:
        return f"uneven epochs of {self.order.fingerprint}"

    def num_positions(self, epoch: int) -> int:
        return self.order.num_positions(epoch) - epoch * 5 % 17

    def rows_at(self, epoch: int, positions: Int64Array) -> Draws:
        check_positions(positions, self.num_positions(epoch))
        return self.order.rows_at(epoch, positions)

    def positions_of(self, epoch: int, rows: Int64Array) -> None:
        """Some rows have none."""

    def permutation(self, epoch: int) -> None:
        """A position has several rows."""

    def replacements(self, epoch: int, position: int, draw: int = 0) -> Iterator[int]:
        return self.order.replacements(epoch, position, draw)

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:
        return self.order.needs(epoch, position)


def mixed(orders: Sequence[Order], weights: Sequence[int], size: int, turn_size: int = 1, num_parts: int = 1) -> Mixed:
    """Return a mixture of orders, evenly spread."""
    mixture = Mixture(
        num_streams=len(orders), changes=((0, tuple(weights)),), schedule=ScheduleType.PROPORTIONAL, seed=0
    )  # fmt: skip
    turns = TurnLayout(epoch_size=size, turn_size=turn_size, num_parts=num_parts)
    return Mixed(orders=tuple(orders), weights=FixedWeights(mixture), turns=turns)
