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
from typing import NamedTuple, Protocol

import numpy as np

from sqlstream.config import INT64_MAX, check_at_least
from sqlstream.errors import ConfigError, StateError
from sqlstream.order.order import Draws, Order, check_positions
from sqlstream.order.permute import Int64Array
from sqlstream.order.streams.mixture import Mixture
from sqlstream.order.streams.stream_rows import StreamRows

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
        """Return turns and places of positions of an epoch, within the part of each.

        Raises:
            ConfigError: The run up to the end of this epoch has more positions than 64 bits count.
        """
        if (epoch + 1) * self.epoch_size > INT64_MAX:
            raise ConfigError(
                f"epoch={epoch} of a mixture with epoch_size={self.epoch_size} is out of range: the epochs up to its end have "
                f"more than 2**63 - 1 samples; give a smaller epoch_size, or an epoch below {INT64_MAX // self.epoch_size}"
            )
        of_part = positions if self.num_parts == 1 else positions // self.num_parts  # [n]
        of_part = epoch * (self.epoch_size // self.num_parts) + of_part  # [n]
        if self.part_turn == 1:
            return TurnPlaces(of_part, np.zeros(len(of_part), np.int64))
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
    _rows: StreamRows = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Ask the streams for their sizes."""
        object.__setattr__(self, "_rows", StreamRows(self.orders))

    @property
    def fingerprint(self) -> str:
        """A text for streams, weights and turns."""
        return (
            f"mixture {self._rows.fingerprint} of {len(self.orders)} streams, weights {self.weights.fingerprint}, {self.turns}"
        )

    def num_positions(self, epoch: int) -> int:  # noqa: ARG002 - every epoch is the same
        """Return the positions of an epoch."""
        return self.turns.epoch_size

    def rows_at(self, epoch: int, positions: Int64Array) -> Draws:
        """Return the rows at `positions`, by the weights of now."""
        check_positions(positions, self.turns.epoch_size)
        stream, draw = self.draws_at(epoch, positions)
        num_parts = self.turns.num_parts
        return self._rows.rows_of(stream, draw, positions % num_parts if num_parts > 1 else None, num_parts)

    def draws_at(self, epoch: int, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the stream of each position, and its earlier draws in the position's part: [n], [n]."""
        turn, place = self.turns.places(epoch, positions)
        since = self._since(turn)
        turns = since.mixture.at(turn - since.turn)
        draw = turns.draw if self.turns.part_turn == 1 else turns.draw * self.turns.part_turn + place  # [n]
        if any(since.before):
            draw = draw + np.array(since.before, dtype=np.int64)[turns.stream]  # [n]
        return turns.stream, draw

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
        positions = np.array([position], dtype=np.int64)  # [1]
        num_parts = self.turns.num_parts
        return self._rows.replacements(*self.draws_at(epoch, positions), draw, positions % num_parts, num_parts)

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:
        """Return the chunks that streams which learn their size need for what is drawn of them up to `position`."""
        if not self._rows.learning:
            return {}
        return self._rows.needs(self._counts_of_part(epoch, min(position + 1, self.turns.epoch_size), 0))

    def _since(self, turns: Int64Array | int) -> MixtureSince:
        """Return whose turn it is.

        Args:
            turns: The turns that are asked for.

        Raises:
            StateError: The run went on with other streams after one of them.
        """
        since = self.weights.since(self.turns)
        if since.turn and np.any(turns < since.turn):
            num_positions = since.turn * self.turns.part_turn * self.turns.num_parts
            epoch, position = divmod(num_positions, self.turns.epoch_size)
            raise StateError(
                f"the run went on with other streams at sample {position} of epoch {epoch}: what was before is not known, so "
                "set_epoch() and set_progress() can go to places from there on, or load the state again"
            )
        return since

    def _counts_of_part(self, epoch: int, position: int, part: int) -> tuple[int, ...]:
        """Return the draws of each stream before a position, in one part: [S]."""
        turns, size = self.turns, self.turns.part_turn
        of_part = epoch * (turns.epoch_size // turns.num_parts) + max(0, -(-(position - part) // turns.num_parts))
        turn, rest = divmod(of_part, size)
        since = self._since(turn)
        number = turn - since.turn
        counts = [before + size * own for before, own in zip(since.before, since.mixture.counts(number), strict=True)]
        if rest:
            counts[int(since.mixture.at(np.array([number])).stream[0])] += rest
        return tuple(counts)
