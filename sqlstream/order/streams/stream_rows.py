"""From draws of streams to rows: which epoch of its stream a draw is in, at which position, and which row that order gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sqlstream.order.order import Draws, Order, UnevenEpochs, is_counted, one_each
from sqlstream.order.permute import Int64Array, Permutation, forward_each
from sqlstream.order.streams.epoch_networks import EpochNetworks


class _Packs(NamedTuple):
    """Positions of a stream whose order says more of them than a row each."""

    here: Int64Array
    """Which of the positions that were asked for: [k]."""
    draws: Draws


@dataclass(frozen=True, slots=True)
class StreamRows:
    """The rows of several streams, each of which goes on over its own epochs.

    Draw d of a stream is position d mod n of its epoch d // n, with n the positions of that epoch.
    """

    orders: tuple[Order, ...]
    """The order of each stream."""
    learning: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Streams that learn on the way how many rows they have, and those that have learned that they have none."""
    uneven: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Streams whose epochs may have different numbers of positions."""
    fingerprint: str = field(init=False, repr=False, compare=False)
    """A text for all orders."""
    _sizes: Int64Array = field(init=False, repr=False, compare=False)
    """Positions of an epoch of each stream; of those that learn: at most: [S]."""
    _networks: EpochNetworks = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Ask the streams for their sizes."""
        learning = tuple(
            stream for stream, order in enumerate(self.orders) if not is_counted(order, 0) or not order.num_positions(0)
        )
        object.__setattr__(self, "learning", learning)
        uneven = tuple(stream for stream, order in enumerate(self.orders) if isinstance(order, UnevenEpochs))
        object.__setattr__(self, "uneven", uneven)
        object.__setattr__(self, "_sizes", np.array([order.num_positions(0) for order in self.orders], dtype=np.int64))
        object.__setattr__(self, "_networks", EpochNetworks(self.orders))
        texts = "\n".join(order.fingerprint for order in self.orders)
        object.__setattr__(self, "fingerprint", blake2b(texts.encode(), digest_size=8).hexdigest())

    def rows_of(self, stream: Int64Array, draw: Int64Array, part: Int64Array | None = None, num_parts: int = 1) -> Draws:
        """Return the rows of draws.

        Args:
            stream: Stream of each: [n].
            draw: Its number in the stream, or in the part of it: [n].
            part: Part of the stream that it is of, where there are several: [n].
            num_parts: Parts of each stream.

        Raises:
            IndexError: A stream has not counted so many rows.
        """
        own_epoch, own_position = self._places_of(stream, draw, part, num_parts)
        row, packs = self._rows_at(stream, own_epoch, own_position)  # [n]
        draws = Draws(starts=one_each(len(draw)).starts, stream=stream, epoch=own_epoch, position=own_position, row=row)
        return _with_packs(draws, packs) if packs else draws

    def _rows_at(self, stream: Int64Array, own_epoch: Int64Array, own_position: Int64Array) -> tuple[Int64Array, list[_Packs]]:
        """Return the rows at positions of streams: [n], those that a single permutation gives all together.

        And draws of orders that say themselves what seeds their rows, or take several for a position: packs, and batches by
        bucket. The rows at their positions are not set.
        """
        packs: list[_Packs] = []
        if (together := self._networks.rows_at(stream, own_epoch, own_position)) is not None:
            return together, packs
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
                found = order.rows_at(epoch, own_position[here])
                if found.is_one_each and np.array_equal(found.position, own_position[here]) and (found.epoch == epoch).all():
                    row[here] = found.row
                else:  # what seeds the rows is what their own order says
                    packs.append(_Packs(here, found))
            else:
                permutations.append(permutation)
                permuted.append(here)
        if permutations:
            together = np.concatenate(permuted)  # [m]
            which = np.repeat(np.arange(len(permuted)), [len(here) for here in permuted])  # [m]
            row[together] = forward_each(permutations, which, own_position[together])
        return row, packs

    def replacements(
        self, stream: Int64Array, draw: Int64Array, number: int, part: Int64Array | None = None, num_parts: int = 1
    ) -> Iterator[int]:
        """Yield rows to try instead of a failed one, as its stream has them.

        Args:
            stream: The stream: [1].
            draw: The draw of it that failed: [1].
            number: Which of its rows, where it is a pack.
            part: Part of the stream: [1].
            num_parts: Parts of each stream.
        """
        own_epoch, own_position = self._places_of(stream, draw, part, num_parts)
        return self.orders[int(stream[0])].replacements(int(own_epoch[0]), int(own_position[0]), number)

    def needs(self, counts: Sequence[int]) -> Mapping[int, Int64Array]:
        """Return the chunks that streams which learn their size need for so many draws of each.

        A stream that is drawn and has no row is among them, without a chunk: its row source says so.
        """
        needed: dict[int, Int64Array] = {}
        for stream in self.learning:
            order = self.orders[stream]
            if counts[stream] and not order.num_positions(0):
                needed[stream] = np.empty(0, np.int64)  # [0]
            elif counts[stream] and not is_counted(order, 0):
                last = min(counts[stream], order.num_positions(0)) - 1  # beyond its end: count all of it
                for chunks in order.needs(0, last).values():
                    needed[stream] = chunks
        return needed

    def _places_of(
        self, stream: Int64Array, draw: Int64Array, part: Int64Array | None, num_parts: int
    ) -> tuple[Int64Array, Int64Array]:
        """Return epoch and position of draws in their streams: [n], [n]."""
        sizes = self._sizes[stream]  # [n]
        if part is not None:
            sizes = (sizes - part + num_parts - 1) // num_parts
        for learning in self.learning:
            here = stream == learning  # [n]
            if here.any() and is_counted(self.orders[learning], 0):
                sizes[here] = self.orders[learning].num_positions(0)
            elif (draw[here] >= sizes[here]).any():
                raise IndexError(f"stream {learning} has not counted its rows")
        own_epoch, own_position = np.divmod(draw, sizes)  # [n]
        if part is not None:
            own_position = own_position * num_parts + part  # [n]
        for number in self.uneven if num_parts == 1 else ():  # those that have parts have equal epochs
            here = stream == number  # [n]
            order = self.orders[number]
            assert isinstance(order, UnevenEpochs), "found so"
            own_epoch[here], own_position[here] = order.places_of_draws(draw[here])
        return own_epoch, own_position


def _with_packs(draws: Draws, packs: Sequence[_Packs]) -> Draws:
    """Return draws of one row each with those of packs in their place."""
    sizes = np.ones(len(draws.row), dtype=np.int64)  # [n]
    for here, found in packs:
        sizes[here] = np.diff(found.starts)
    starts = np.concatenate(([0], np.cumsum(sizes)))  # [n + 1]
    of_position = np.repeat(np.arange(len(sizes)), sizes)  # [m]
    epoch, position, row = draws.epoch[of_position], draws.position[of_position], draws.row[of_position]  # [m], [m], [m]
    part = np.zeros_like(row)  # [m]
    for here, found in packs:
        own = np.diff(found.starts)  # [k]
        at = np.repeat(starts[here] - found.starts[:-1], own) + np.arange(len(found.row))  # [draws of the stream]
        epoch[at], position[at], row[at] = found.epoch, found.position, found.row
        if found.part is not None:
            part[at] = found.part
    is_cut = any(found.part is not None for _, found in packs)
    return Draws(
        starts=starts,
        stream=draws.stream[of_position],
        epoch=epoch,
        position=position,
        row=row,
        part=part if is_cut else None,
    )
