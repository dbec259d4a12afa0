"""Where the parts of a sample lie in its shard, and that as the bytes which an index file holds. Pure."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from sqlstream.storage.members.entries import Span

_SMALL, _LARGE = "I", "Q"
_MAX_SMALL = (1 << 32) - 1


class SamplePart(NamedTuple):
    """A part of a sample."""

    column: int
    """Position of its column in the index."""
    offset: int
    """First byte in the shard."""
    size: int
    """Bytes in the shard."""
    facts: tuple[int, ...] = ()
    """What else its format needs to read it."""


class Place(NamedTuple):
    """Where a sample lies."""

    entries: tuple[Span, ...]
    """Bytes of the shard that hold its parts, each an object of the cache (`entries.cut`)."""
    parts: tuple[SamplePart, ...]
    """Those that it has. All have as many facts."""


def pack(entries: Sequence[Span], parts: Sequence[SamplePart]) -> bytes:
    """Return the bytes of a place: numbers of 4 bytes, of 8 in shards beyond 4 GiB; a first byte says which."""
    numbers = [len(entries), len(parts)]
    for start, stop in entries:
        numbers += (start, stop)
    for column, offset, size, facts in parts:
        numbers += (column, offset, size, *facts)
    kind = _SMALL if max(numbers) <= _MAX_SMALL else _LARGE
    packed = array(kind, numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return kind.encode() + packed.tobytes()


def unpack(data: bytes) -> Place:
    """Return the place whose bytes `pack` gave.

    Raises:
        ValueError: They are none.

    Example:
        >>> unpack(pack([(512, 1536)], [SamplePart(3, 512, 88)]))
        Place(entries=((512, 1536),), parts=(SamplePart(column=3, offset=512, size=88, facts=()),))
    """
    kind = data[:1].decode("latin-1")
    if kind not in (_SMALL, _LARGE):
        raise ValueError(f"the place of a sample begins with {data[:1]!r}")
    numbers = array(kind)
    numbers.frombytes(data[1:])
    if sys.byteorder == "big":
        numbers.byteswap()
    num_entries, num_parts, *rest = numbers
    first = 2 * num_entries
    width, left = divmod(len(rest) - first, num_parts) if num_parts else (3, len(rest) - first)
    if width < 3 or left:
        raise ValueError(f"the place of a sample has {len(rest)} numbers for {num_entries} objects and {num_parts} parts")
    entries = tuple(zip(rest[:first:2], rest[1:first:2], strict=True))
    starts = range(first, first + num_parts * width, width)
    return Place(
        entries, tuple(SamplePart(rest[at], rest[at + 1], rest[at + 2], tuple(rest[at + 3 : at + width])) for at in starts)
    )
