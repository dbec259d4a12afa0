"""Where the directory of a ZIP archive lies, by the records at its end. Pure."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from sqlstream.errors import DamagedShardError, SourceError

_END = struct.Struct("<4s4H2IH")
"""Signature, this disk, the directory's, entries here, entries, bytes and offset of the directory, bytes of the comment."""
_END64 = struct.Struct("<4s12x2I4Q")
"""Signature, disks and entries as above, bytes and offset of the directory."""
_LOCATOR = struct.Struct("<4s4xQI")
"""Signature, offset of the zip64 end record, number of disks."""
TAIL_BYTES = _END.size + 0xFFFF + _LOCATOR.size + _END64.size
"""An end record, the longest comment, and what zip64 has before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryPlace:
    """Where a directory lies."""

    start: int
    stop: int
    shift: int
    """What offsets in it lack, where something stands before the archive."""
    num_entries: int
    is_zip64: bool


def find_directory(tail: bytes, tail_start: int, name: str) -> DirectoryPlace:
    """Return the place of the directory, by the end record that reaches to the end, or else by the last that fits.

    Args:
        tail: The end of the archive, at least `TAIL_BYTES` where it has so many.
        tail_start: Where that begins.
        name: The URL of the archive for messages, without credentials.

    Raises:
        DamagedShardError: No end record fits.
        SourceError: It is one of the parts of a split archive.
    """
    places = [match.start() for match in re.finditer(b"PK\5\6", tail)][::-1]
    places = [place for place in places if place + _END.size <= len(tail)]
    exact = [place for place in places if place + _END.size + _END.unpack_from(tail, place)[7] == len(tail)]
    for place in (*exact, *places):
        if found := _directory_before(tail, tail_start, place):
            return found
    if exact and any(_END.unpack_from(tail, exact[0])[1:3]):
        raise SourceError(f"{name} is one of the parts of a split archive: join them with zip -s 0")
    raise damage(name, tail_start + len(tail), "it has no end record that fits; it is cut off, or no ZIP archive")


def _directory_before(tail: bytes, tail_start: int, place: int) -> DirectoryPlace | None:
    """Return the directory that the end record at this place of the tail names, if there can be one."""
    _, *disks, here, count, size, offset, _ = _END.unpack_from(tail, place)
    stop, is_zip64, num_disks = place, False, 1
    if place >= _LOCATOR.size and tail.startswith(b"PK\6\7", place - _LOCATOR.size):
        _, end64, num_disks = _LOCATOR.unpack_from(tail, place - _LOCATOR.size)
        stop = place - _LOCATOR.size - _END64.size
        if stop < 0 or not tail.startswith(b"PK\6\6", stop):
            stop = end64 - tail_start  # it has fields of its own behind it
        if not 0 <= stop <= place - _LOCATOR.size - _END64.size or not tail.startswith(b"PK\6\6", stop):
            return None
        _, *disks, here, count, size, offset = _END64.unpack_from(tail, stop)
        is_zip64 = True
    stop += tail_start
    start = stop - size
    is_there = start < tail_start or not size or tail.startswith(b"PK\1\2", start - tail_start)
    if any(disks) or here != count or num_disks > 1 or start < offset or not is_there:
        return None
    return DirectoryPlace(start=start, stop=stop, shift=start - offset, num_entries=count, is_zip64=is_zip64)


def damage(name: str, size_bytes: int, reason: str) -> DamagedShardError:
    """Return the error of a damaged archive.

    Args:
        name: Its URL for messages, without credentials.
        size_bytes: Its size.
        reason: What is wrong.
    """
    return DamagedShardError(
        f"{name} is damaged: {reason}. Write the archive again, or leave it out of src", size_bytes=size_bytes
    )
