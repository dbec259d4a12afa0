"""What packs are made of: rows, and parts of those that are longer than a pack, by length and by canonical node."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sqlstream.config import OnLong
from sqlstream.errors import ConfigError
from sqlstream.order.permute import Int64Array


class Units(NamedTuple):
    """What an epoch packs, in segments: one part of all rows of one length."""

    lengths: Int64Array
    """The distinct lengths of units, rising: [U]."""
    counts: Int64Array
    """Units of each: [U]."""
    starts: Int64Array
    """First unit of each length: [U]."""
    segment_stops: Int64Array
    """Units of all segments up to and with each: [S]."""
    segment_slots: Int64Array
    """First slot of each segment's rows; without weights a slot is a place in the table: [S]."""
    segment_sizes: Int64Array
    """Rows of each segment: [S]."""
    segment_parts: Int64Array
    """Number of the part of its rows: [S]."""
    whole: Int64Array
    """Units of each length that are the first part of their row, which come first: [U]."""


class UnitsOfPart(NamedTuple):
    """The units of a canonical node's part, by length."""

    firsts: Int64Array
    """First unit of each length: [U]."""
    counts: Int64Array
    """Units of each: [U]."""


def units_of(lengths: Int64Array, counts: Int64Array, capacity: int, on_long: OnLong) -> Units:
    """Return what is packed of so many rows of each length.

    Args:
        lengths: The distinct lengths, rising: [L].
        counts: Rows of each: [L].
        capacity: Values of a pack at most.
        on_long: What becomes of longer rows.

    Raises:
        ConfigError: No row fits a pack.

    Example:
        >>> units = units_of(np.array([3, 10]), np.array([2, 1]), 4, OnLong.SPLIT)
        >>> dict(zip(units.lengths.tolist(), units.counts.tolist(), strict=True))
        {2: 1, 3: 2, 4: 2}
    """
    is_long = lengths > capacity  # [L]
    num_parts = np.ones_like(lengths)  # [L]
    if on_long is OnLong.DROP:
        num_parts[is_long] = 0
    elif on_long is OnLong.SPLIT:
        num_parts = -(-lengths // capacity)  # [L]
    source = np.repeat(np.arange(len(lengths)), num_parts)  # [S]; number of the rows' length
    part = ranges(np.zeros_like(num_parts), num_parts)  # [S]
    length = np.minimum(lengths[source] - part * capacity, capacity)  # [S]
    in_turn = np.lexsort((source, part, length))  # [S]
    source, part, length = source[in_turn], part[in_turn], length[in_turn]  # [S], [S], [S]
    if not len(source):
        raise ConfigError(
            f"no row fits a pack of {capacity}: the shortest has {int(lengths[0]) if len(lengths) else 0}. Give a larger "
            "capacity, or on_long='truncate' or 'split'"
        )
    distinct, first = np.unique(length, return_index=True)  # [U], [U]
    sizes = counts[source]  # [S]
    per_length = np.add.reduceat(sizes, first)  # [U]
    return Units(
        lengths=distinct,
        counts=per_length,
        starts=sums_before(np.cumsum(per_length)),
        segment_stops=np.cumsum(sizes),
        segment_slots=(np.cumsum(counts) - counts)[source],
        segment_sizes=sizes,
        segment_parts=part,
        whole=np.add.reduceat(np.where(part == 0, sizes, 0), first),
    )


def units_of_part(units: Units, part: int, num_parts: int) -> UnitsOfPart:
    """Return those of all units that belong to a part: each whose number is `part` more than a multiple of `num_parts`."""
    if num_parts == 1:
        return UnitsOfPart(units.starts, units.counts)
    firsts = units.starts + (part - units.starts) % num_parts  # [U]
    return UnitsOfPart(firsts, np.maximum(0, -((firsts - units.starts - units.counts) // num_parts)))


def sums_before(stops: Int64Array) -> Int64Array:
    """Return the sums before each, of sums up to and with each: [n]."""
    return np.concatenate((np.zeros(1, dtype=np.int64), stops[:-1]))


def ranges(starts: Int64Array, sizes: Int64Array) -> Int64Array:
    """Return the numbers from each start on, as many as its size, one range after the other: [sum of sizes]."""
    stops = np.cumsum(sizes)  # [n]
    total = int(stops[-1]) if len(stops) else 0
    return np.repeat(starts - (stops - sizes), sizes) + np.arange(total)
