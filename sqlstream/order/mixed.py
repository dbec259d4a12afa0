"""Several datasets as one order: whose turn a position is, and which row that stream gives then.

    position p of epoch e ─ TurnLayout → turn, place in it ─ Mixture → stream, draw of it ─ that stream's order → row

Draw d of a stream is position d mod n of its own epoch d // n, with n the positions of that epoch: a stream goes on over its
epochs by itself, never drops and never pads, and gives what it gives alone. An epoch of the mixture begins with the draws that
follow the last ones of the epoch before.

With several canonical nodes, part c of the positions (p mod C = c) has turns of its own, which take the draws of part c of each
stream; so rows stay on their nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.order.mixture import Mixture
from sqlstream.order.order import Draws, Order, check_positions, is_counted
from sqlstream.order.permute import Int64Array, Permutation, forward_each

ENDLESS = 1 << 40
"""Positions of the epoch of a mixture without end: more than a run takes, few enough for 200 iterations that begin anew."""


class TurnPlaces(NamedTuple):
    """Positions of a run: its turns, counted from its start, and places in those."""

    turn: Int64Array
    """Turn of each position: [n]."""
    place: Int64Array
    """Place in that turn: [n]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLayout:
    """How the positions of a run make turns, in each of which one stream gives all rows."""

    epoch_size: int
    """Positions of an epoch."""
    turn_size: int = 1
    """Positions of a turn: 1; those of a global batch; those of a rank's batch."""
    num_parts: int = 1
    """Canonical nodes, each of which has turns of its own."""

    def __post_init__(self) -> None:
        """Check that whole turns make an epoch."""
        check_at_least("epoch_size", self.epoch_size, 1)
        for name, size in (("turn", self.turn_size), ("num_canonical_nodes", self.num_parts)):
            if self.epoch_size % size:
                down, up = self.epoch_size // size * size, -(-self.epoch_size // size) * size
                raise ConfigError(
                    f"epoch_size={self.epoch_size} is no multiple of {size} ({name} of the mixture): give {down or up} or {up}"
                )
        if self.turn_size > 1 and self.turn_size % self.num_parts:
            raise ConfigError(
                f"num_canonical_nodes={self.num_parts} does not divide the {self.turn_size} samples of a turn: give a batch "
                "size that it divides, or unit='sample'"
            )

    @property
    def part_turn(self) -> int:
        """Positions of a turn in one part."""
        return max(1, self.turn_size // self.num_parts)

    def places(self, epoch: int, positions: Int64Array) -> TurnPlaces:
        """Return turns and places of positions of an epoch, within the part of each."""
        of_part = epoch * (self.epoch_size // self.num_parts) + positions // self.num_parts  # [n]
        return TurnPlaces(*np.divmod(of_part, self.part_turn))

    def turn_of(self, epoch: int, position: int) -> int:
        """Return the first turn that begins at, or after, a position of an epoch."""
        of_part = epoch * (self.epoch_size // self.num_parts) - (-position // self.num_parts)
        return -(-of_part // self.part_turn)


class MixtureSince(NamedTuple):
    """A mixture that holds from a turn of the run on, after draws that other weights, or other streams, have led to."""

    turn: int
    """The turn of the run that is the mixture's first."""
    before: tuple[int, ...]
    """Draws of each stream before it, in each part."""
    mixture: Mixture


class StreamWeights(Protocol):
    """The weights of streams in a run. They may change while it goes on, for positions that were not asked for before."""

    @property
    def fingerprint(self) -> str:
        """A text for all changes of the run."""

    def since(self, turns: TurnLayout) -> MixtureSince:
        """Return whose turn it is, by the weights of now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Rows of several streams, by weights."""

    orders: tuple[Order, ...]
    """The order of each stream."""
    weights: StreamWeights
    turns: TurnLayout
    _learning: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Streams that learn on the way how many rows they have."""
    _sizes: Int64Array = field(init=False, repr=False, compare=False)
    """Positions of an epoch of each stream; of those that learn: at most: [S]."""
    _of_orders: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Ask the streams for their sizes."""
        learning = tuple(stream for stream, order in enumerate(self.orders) if not is_counted(order, 0))
        object.__setattr__(self, "_learning", learning)
        object.__setattr__(self, "_sizes", np.array([order.num_positions(0) for order in self.orders], dtype=np.int64))
        texts = "\n".join(order.fingerprint for order in self.orders)
        object.__setattr__(self, "_of_orders", blake2b(texts.encode(), digest_size=8).hexdigest())

    @property
    def fingerprint(self) -> str:
        """A text for streams, weights and turns."""
        return f"mixture {self._of_orders} of {len(self.orders)} streams, weights {self.weights.fingerprint}, {self.turns}"

    def num_positions(self, epoch: int) -> int:  # noqa: ARG002 - every epoch is the same
        """Return the positions of an epoch."""
        return self.turns.epoch_size

    def rows_at(self, epoch: int, positions: Int64Array) -> Draws:
        """Return the rows at `positions`, by the weights of now."""
        check_positions(positions, self.turns.epoch_size)
        stream, draw = self.draws_at(epoch, positions)
        own_epoch, own_position = self._places_of(stream, draw, positions % self.turns.num_parts)
        row = self._rows_of(stream, own_epoch, own_position)  # [n]
        starts = np.arange(len(positions) + 1)  # [n + 1]
        return Draws(starts=starts, stream=stream, epoch=own_epoch, position=own_position, row=row)

    def draws_at(self, epoch: int, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the stream of each position, and its earlier draws in the position's part: [n], [n]."""
        turn, place = self.turns.places(epoch, positions)
        since = self.weights.since(self.turns)
        turns = since.mixture.at(turn - since.turn)
        before = np.array(since.before, dtype=np.int64)  # [S]
        return turns.stream, before[turns.stream] + turns.draw * self.turns.part_turn + place

    def counts(self, epoch: int, position: int) -> tuple[int, ...]:
        """Return how many draws of each stream the run has before a position, in all parts together: [S]."""
        parts = [self._counts_of_part(epoch, position, part) for part in range(self.turns.num_parts)]
        return tuple(map(sum, zip(*parts, strict=True)))

    def positions_of(self, epoch: int, rows: Int64Array) -> None:  # noqa: ARG002 - a number is a row of each stream
        """Return None: streams come round at times of their own."""
        return

    def permutation(self, epoch: int) -> None:  # noqa: ARG002 - each stream has one
        """Return None: each stream has its own."""
        return

    def replacements(self, epoch: int, position: int, draw: int = 0) -> Iterator[int]:
        """Yield rows to try instead of a failed one, as its stream has them."""
        draws = self.rows_at(epoch, np.array([position], dtype=np.int64))
        order = self.orders[int(draws.stream[draw])]
        return order.replacements(int(draws.epoch[draw]), int(draws.position[draw]))

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:
        """Return the chunks that streams which learn their size need for what is drawn of them up to `position`."""
        if not self._learning:
            return {}
        needed: dict[int, Int64Array] = {}
        counts = self._counts_of_part(epoch, min(position + 1, self.turns.epoch_size), 0)
        for stream in self._learning:
            order = self.orders[stream]
            if counts[stream] and not is_counted(order, 0):
                last = min(counts[stream], order.num_positions(0)) - 1  # beyond its end: count all of it
                for chunks in order.needs(0, last).values():
                    needed[stream] = chunks
        return needed

    def _counts_of_part(self, epoch: int, position: int, part: int) -> tuple[int, ...]:
        """Return the draws of each stream before a position, in one part: [S]."""
        turns, size = self.turns, self.turns.part_turn
        of_part = epoch * (turns.epoch_size // turns.num_parts) + max(0, -(-(position - part) // turns.num_parts))
        turn, rest = divmod(of_part, size)
        since = self.weights.since(turns)
        number = turn - since.turn
        counts = [before + size * own for before, own in zip(since.before, since.mixture.counts(number), strict=True)]
        if rest:
            counts[int(since.mixture.at(np.array([number])).stream[0])] += rest
        return tuple(counts)

    def _rows_of(self, stream: Int64Array, own_epoch: Int64Array, own_position: Int64Array) -> Int64Array:
        """Return the rows at positions of streams: [n]; those that a single permutation gives all together."""
        row = np.empty_like(own_position)  # [n]
        in_turn = np.lexsort((own_epoch, stream))  # [n]
        is_other = np.diff(stream[in_turn], prepend=-1) != 0  # [n]
        is_other |= np.diff(own_epoch[in_turn], prepend=-1) != 0
        bounds = [*np.flatnonzero(is_other).tolist(), len(in_turn)]
        permutations: list[Permutation] = []
        permuted: list[Int64Array] = []
        for start, stop in pairwise(bounds):
            here = in_turn[start:stop]  # [m]
            order, epoch = self.orders[int(stream[here[0]])], int(own_epoch[here[0]])
            permutation = order.permutation(epoch) if len(bounds) > 2 else None
            if permutation is None:
                row[here] = order.rows_at(epoch, own_position[here]).row
            else:
                permutations.append(permutation)
                permuted.append(here)
        if permutations:
            together = np.concatenate(permuted)  # [m]
            which = np.repeat(np.arange(len(permuted)), [len(here) for here in permuted])  # [m]
            row[together] = forward_each(permutations, which, own_position[together])
        return row

    def _places_of(self, stream: Int64Array, draw: Int64Array, part: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return epoch and position of draws in their streams: [n], [n].

        Raises:
            IndexError: A stream has not counted so many rows.
        """
        parts = self.turns.num_parts
        sizes = (self._sizes[stream] - part + parts - 1) // parts  # [n]
        for learning in self._learning:
            here = stream == learning  # [n]
            if here.any() and is_counted(self.orders[learning], 0):
                sizes[here] = self.orders[learning].num_positions(0)
            elif (draw[here] >= sizes[here]).any():
                raise IndexError(f"stream {learning} has not counted its rows")
        own_epoch, index = np.divmod(draw, sizes)  # [n]
        return own_epoch, index * parts + part
