"""What an order is: a pure function from (epoch, position) to rows, of one dataset (a *stream*) or of several.

Orders are composed, never subclassed: `Shuffled` and `Blocks` order rows, `Weighted` and `Filtered` say which rows these are.
An order may learn how many rows a filter keeps, and weights may change for later positions; what it has said never changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.order.permute import MAX_SIZE, Int64Array, Permutation

MAX_REPLACEMENTS = 5
"""Draws for one failed sample; after five failures in a row the source has failed, not single samples."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """The rows of n positions, m in all: one of each position, but for packs; no array of it can be written to.

    Example:
        >>> draws = Draws.of_rows(3, np.array([7, 8]), np.array([41, 0]))
        >>> draws.starts.tolist(), draws.epoch.tolist(), draws.position.tolist(), draws.row.tolist()
        ([0, 1, 2], [3, 3], [7, 8], [41, 0])
    """

    starts: Int64Array
    """Number of the first draw of each position, and the end: [n + 1]."""
    stream: Int64Array
    """Number of the stream: [m]."""
    epoch: Int64Array
    """Epoch of that stream: [m]."""
    position: Int64Array
    """Position in the epoch of that stream; with the epoch it seeds the sample's generators: [m]."""
    row: Int64Array
    """Number of the row in that stream: [m]."""
    part: Int64Array | None = None
    """Number of the part of its row that each takes, where packs cut rows that are longer: [m]; None: all of each row."""

    def __post_init__(self) -> None:
        """Freeze the arrays."""
        for name in ("starts", "stream", "epoch", "position", "row", "part"):
            array = getattr(self, name)
            if array is not None and array.flags.writeable:
                array = array.view()  # that of the caller stays as it is
                array.setflags(write=False)
                object.__setattr__(self, name, array)

    @classmethod
    def of_rows(cls, epoch: int, positions: Int64Array, rows: Int64Array) -> Draws:
        """Return the draws of a single stream, one of each position.

        Args:
            epoch: The epoch.
            positions: The positions: [n].
            rows: The rows at these positions: [n].
        """
        own = one_each(len(rows))
        return cls(starts=own.starts, stream=own.stream, epoch=own.stream + epoch, position=positions, row=rows)

    @property
    def is_one_each(self) -> bool:
        """Every position has one draw."""
        return len(self.row) == len(self.starts) - 1

    def of_positions(self, start: int, stop: int) -> Draws:
        """Return the draws of the positions `[start, stop)`, counted from the first one here."""
        first, end = int(self.starts[start]), int(self.starts[min(stop, len(self.starts) - 1)])
        some = slice(first, end)
        return Draws(
            starts=self.starts[start : stop + 1] - first,
            stream=self.stream[some],
            epoch=self.epoch[some],
            position=self.position[some],
            row=self.row[some],
            part=None if self.part is None else self.part[some],
        )


class Order(Protocol):
    """Which rows stand at which positions of each epoch."""

    @property
    def fingerprint(self) -> str:
        """A text for all that decides the order but the number of epochs: orders with one text are the same."""

    def num_positions(self, epoch: int) -> int:
        """Return the positions of an epoch; while the last of these needs chunks to be counted, there may be fewer."""

    def rows_at(self, epoch: int, positions: Int64Array) -> Draws:
        """Return the draws of `positions` of an epoch, in their order: [n] positions.

        Raises:
            IndexError: A position is not within the epoch, or needs chunks that are not counted.
        """

    def positions_of(self, epoch: int, rows: Int64Array) -> Int64Array | None:
        """Return the positions of rows in an epoch, the inverse of `rows_at`: [n]; None where rows may come more than once."""

    def permutation(self, epoch: int) -> Permutation | None:
        """Return the permutation that turns the positions of an epoch into rows; None: it takes more than one, or none.

        Orders of many streams look up a few positions of each with all permutations together (`forward_each`).
        """

    def replacements(self, epoch: int, position: int, draw: int = 0) -> Iterator[int]:
        """Yield rows to try instead of a failed one, from the same stream, each once, at most `MAX_REPLACEMENTS`.

        Args:
            epoch: The epoch.
            position: The position.
            draw: The failed draw of that position, counted from 0.
        """

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:
        """Return the chunks, by stream, that must be counted before the rows up to `position` are known: none if they are."""


class OneEach(NamedTuple):
    """What draws of a single stream have in common, one of each position; it cannot be written to."""

    starts: Int64Array
    """Number of the first draw of each position, and the end: [n + 1]."""
    stream: Int64Array
    """Number of the stream, 0: [n]."""


@lru_cache(maxsize=16)
def one_each(num: int) -> OneEach:
    """Return what `num` such draws have in common: orders are asked for the same few numbers of positions again and again."""
    starts, stream = np.arange(num + 1), np.zeros(num, dtype=np.int64)  # [n + 1], [n]
    starts.setflags(write=False)
    stream.setflags(write=False)
    return OneEach(starts, stream)


class StreamPlaces(NamedTuple):
    """Where draws of a stream are in its epochs."""

    epoch: Int64Array
    """Epoch of each: [n]."""
    position: Int64Array
    """Position in that epoch: [n]."""


@runtime_checkable
class UnevenEpochs(Order, Protocol):
    """An order whose epochs may have different numbers of positions."""

    @property
    def has_equal_epochs(self) -> bool:
        """All epochs have as many, as long as no weights change."""

    def places_of_draws(self, draws: Int64Array) -> StreamPlaces:
        """Return where draws are, counted over all epochs: [n]."""


@runtime_checkable
class OrderOfBatches(UnevenEpochs, Protocol):
    """An order of batches."""

    @property
    def step_size(self) -> int:
        """Positions of a step."""

    @property
    def is_even(self) -> bool:
        """All batches have one size."""


def is_counted(order: Order, epoch: int) -> bool:
    """Return whether the number of positions is known; else it is found out on the way."""
    return not order.needs(epoch, order.num_positions(epoch) - 1)


def check_size(name: str, size: int) -> None:
    """Raise ConfigError if an order cannot cover so many rows."""
    check_at_least(name, size, 0)
    if size > MAX_SIZE:
        raise ConfigError(f"{name}={size} is out of range: an order covers at most 2**48 = {MAX_SIZE} rows")


def check_seed(seed: int | None) -> None:
    """Raise ConfigError if a number is no seed."""
    if seed is not None and not 0 <= seed < 1 << 64:
        raise ConfigError(f"shuffle_seed={seed} is out of range: give None, -1 for a random seed, or 0 to 2**64 - 1")


def check_positions(positions: Int64Array, num_positions: int) -> None:
    """Raise IndexError if one of `positions` is not within `[0, num_positions)`."""
    if positions.size and not 0 <= positions.min() <= positions.max() < num_positions:
        raise IndexError(f"positions {positions.min()} to {positions.max()} are not within [0, {num_positions})")


def some_others(among: range, index: int, *key: int) -> Int64Array:
    """Return up to `MAX_REPLACEMENTS` numbers of `among` without `index`, in an order that belongs to `key`."""
    num_others = len(among) - 1
    shuffle = Permutation.keyed(num_others, *key)
    others = among.start + shuffle.forward(np.arange(min(MAX_REPLACEMENTS, num_others), dtype=np.int64))
    others += others >= index
    return others
