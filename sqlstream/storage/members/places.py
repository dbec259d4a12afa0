"""Where the parts of a sample lie in its shard, and that as the bytes which an index file holds. Pure."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

from sqlstream.storage.members.entries import Span

_SMALL, _LARGE = "I", "Q"
_MAX_SMALL = (1 << 32) - 1


class SlicedBytes(Protocol):
    """Bytes of which slices may be taken."""

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def __getitem__(self, where: slice, /) -> bytes:
        """Return some of them."""
        ...


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
    numbers = _numbers_of(data[:1], len(data)).unpack_from(data, 1)
    num_entries, num_parts = numbers[:2]
    first = 2 + 2 * num_entries
    width, left = divmod(len(numbers) - first, num_parts) if num_parts else (3, len(numbers) - first)
    if width < 3 or left:
        raise ValueError(f"the place of a sample has {len(numbers)} numbers for {num_entries} objects and {num_parts} parts")
    parts = [
        _part_of((numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3 : at + width]))
        for at in range(first, first + num_parts * width, width)
    ]
    return _place_of((tuple(zip(numbers[2:first:2], numbers[3:first:2], strict=True)), tuple(parts)))


# What the class of a named tuple does when it is called, without the function of Python around it: a window has many of both.
_part_of: Callable[[tuple[Any, ...]], SamplePart] = partial(tuple.__new__, SamplePart)
_place_of: Callable[[tuple[Any, ...]], Place] = partial(tuple.__new__, Place)


@lru_cache(maxsize=256)  # the samples of a dataset have few numbers of parts
def _numbers_of(kind: bytes, num_bytes: int) -> struct.Struct:
    """Return what reads the numbers of a place behind its first byte, which is their kind.

    Raises:
        ValueError: It has no such numbers.
    """
    letter = kind.decode("latin-1")
    if letter not in (_SMALL, _LARGE):
        raise ValueError(f"the place of a sample begins with {kind!r}")
    num_numbers, left = divmod(num_bytes - 1, struct.calcsize(f"<{letter}"))
    if left or num_numbers < 2:
        raise ValueError(f"the place of a sample has {num_bytes} bytes")
    return struct.Struct(f"<{num_numbers}{letter}")
