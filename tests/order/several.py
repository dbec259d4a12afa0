"""Two orders beyond rows of one dataset, as simple as they can be: so `Order` has a second user before the features come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sqlstream.order import Draws, Int64Array, Order
from sqlstream.order.order import check_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Rows of several streams by a pattern that repeats; each stream goes on over its own epochs.

    Draw d of a stream is position d mod n of its epoch d // n, as it is when the stream is alone.
    """

    orders: tuple[Order, ...]
    pattern: tuple[int, ...]
    """The stream of each position, from the start again at its end; each stream occurs."""
    size: int
    """Positions of an epoch."""

    @property
    def fingerprint(self) -> str:
        return f"{[order.fingerprint for order in self.orders]} by {self.pattern}"

    def num_positions(self, epoch: int) -> int:
        return self.size

    def rows_at(self, epoch: int, positions: Int64Array) -> Draws:
        check_positions(positions, self.size)
        streams, draws = self._draws(epoch, positions)
        epochs, own, rows = (np.zeros(len(positions), dtype=np.int64) for _ in range(3))
        for stream, order in enumerate(self.orders):
            mine = streams == stream
            epochs[mine], own[mine] = np.divmod(draws[mine], self._size_of(stream))
            for later in np.unique(epochs[mine]).tolist():
                here = mine & (epochs == later)
                rows[here] = order.rows_at(later, own[here]).row
        starts = np.arange(len(positions) + 1)
        return Draws(starts=starts, stream=streams, epoch=epochs, position=own, row=rows)

    def positions_of(self, epoch: int, rows: Int64Array) -> None:
        """A number is a row of each stream."""

    def replacements(self, epoch: int, position: int, draw: int = 0) -> Iterator[int]:
        draws = self.rows_at(epoch, np.array([position]))
        order = self.orders[int(draws.stream[draw])]
        return order.replacements(int(draws.epoch[draw]), int(draws.position[draw]))

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:
        """Counted up to the draw of each stream that is the last one up to `position`."""
        needed: dict[int, Int64Array] = {}
        last = np.arange(max(0, position + 1 - len(self.pattern)), position + 1)
        streams, draws = self._draws(epoch, last)
        for stream, order in enumerate(self.orders):
            for draw in draws[streams == stream].tolist():
                for chunks in order.needs(*divmod(draw, self._size_of(stream))).values():
                    needed[stream] = chunks
        return needed

    def _draws(self, epoch: int, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Stream of each position, and how many draws of it come before: [n] each."""
        pattern = np.array(self.pattern)
        rounds, places = np.divmod(epoch * self.size + positions, len(pattern))
        before = np.array([np.count_nonzero(pattern[:place] == pattern[place]) for place in range(len(pattern))])
        a_round = np.bincount(pattern)
        return pattern[places], rounds * a_round[pattern[places]] + before[places]

    def _size_of(self, stream: int) -> int:
        return self.orders[stream].num_positions(0)


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

    def replacements(self, epoch: int, position: int, draw: int = 0) -> Iterator[int]:
        return self.order.replacements(epoch, position, draw)

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:
        return self.order.needs(epoch, position)


def mixed(orders: Sequence[Order], pattern: Sequence[int], size: int) -> Mixed:
    """Return a mixture."""
    return Mixed(orders=tuple(orders), pattern=tuple(pattern), size=size)
