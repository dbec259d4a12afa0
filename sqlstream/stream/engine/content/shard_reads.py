"""What is known of a shard, and how the parts of its samples are read: from its own file, or from objects of the cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sqlstream.cache.session import ObjectParts
from sqlstream.config import ShardUnit
from sqlstream.errors import CacheError, SourceChangedError
from sqlstream.index.build.shards import Shard
from sqlstream.index.sources.base.access import is_version
from sqlstream.index.sources.shards.layout import ReadPart
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import Unpack
from sqlstream.storage.members.entries import Span
from sqlstream.storage.members.places import SamplePart

WHOLE: Span = (0, 1 << 62)
"""All bytes of a shard."""


_LATE_BYTES = 128 << 10
"""From here on C's allocator gets memory for a copy from the system, and each page of it is a fault: 887 us for a copy of a MiB
that was read in 35 (m). Below, a second system call costs as much as the copy."""


class OpenShard:
    """A file that is open as long as it is used.

    Args:
        path: The file.
    """

    def __init__(self, path: str | Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe in its place is never waited for

    def __del__(self) -> None:
        if (descriptor := getattr(self, "descriptor", None)) is not None:
            os.close(descriptor)


class Located(NamedTuple):
    """A file, and which bytes of a shard it has."""

    span: Span
    descriptor: int


class ReadableShard:
    """What the samples of a shard have in common.

    Args:
        number: Its number in the source.
        shard: It.
        unpack: How its content is made of it; None: it is the content.
        parts: Names its members, if it is remote, or unpacked into the cache.
    """

    def __init__(self, number: int, shard: Shard, unpack: Unpack | None, parts: ObjectParts | None) -> None:
        self.number, self.unpack, self.parts = number, unpack, parts
        self.file, self.layout = shard
        self.name = urls.redact(shard.file.url)
        self.packed = () if unpack is None or parts is None else (parts.unpacked(unpack),)
        self.unit: ShardUnit | None = None
        """In what unit the cache has it in this epoch, where that is another than was wished."""


class LateBytes:
    """The bytes of a large part, read as they are asked for: none that is not wanted, and none that is copied from the rest.

    Args:
        read: (offset, number of bytes) → bytes of the part.
        size: Bytes of the part.
    """

    __slots__ = ("_read", "_size")

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read, self._size = read, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, where: slice) -> bytes:
        start, stop, _ = where.indices(self._size)
        return self._read(start, stop - start) if stop > start else b""


def read_part(name: str, part: SamplePart, objects: Sequence[Located], shard: ReadableShard) -> ReadPart:
    """Return a part with its bytes.

    Raises:
        SourceChangedError: The shard ends before them; of `LateBytes`, as they are read.
        SourceError: Its table does not say where they are.
    """
    if shard.unpack is not None:
        part = shard.layout.locate(part, partial(_read_at, objects[0].descriptor), shard.name)
    _, start, size, _ = part
    if not size:
        return ReadPart(name, b"", part)
    end = start + size
    (first, stop), descriptor = objects[0]
    if start < first or stop < end:
        (first, _), descriptor = next(some for some in objects if some.span[0] <= start and end <= some.span[1])
    read = partial(_read_some, shard, name, end, descriptor, start - first)
    is_late = size >= _LATE_BYTES and shard.layout.are_values_slices
    return ReadPart(name, LateBytes(read, size) if is_late else read(0, size), part)


def _read_some(shard: ReadableShard, name: str, end: int, descriptor: int, at: int, offset: int, size: int) -> bytes:
    """Return bytes of a part, which begins at `at` of a file and ends at `end` of its shard.

    Raises:
        SourceChangedError: The file ends before them.
    """
    data = _read_at(descriptor, at + offset, size)
    if len(data) < size:
        where = f"{name!r} of a row" if name else "a row"
        raise SourceChangedError(
            f"{shard.name} ends before byte {end}, where {where} was when it was indexed: open the dataset again"
        )
    return data


def _read_at(descriptor: int, offset: int, size: int) -> bytes:
    """Return bytes of an open file, fewer at its end only."""
    data = os.pread(descriptor, size, offset)
    if len(data) < size:  # a system call reads 2 GiB at most
        pieces, rest = [data], size - len(data)
        while rest and (data := os.pread(descriptor, rest, offset + size - rest)):
            pieces.append(data)
            rest -= len(data)
        data = b"".join(pieces)
    return data


def check_unchanged(file: SourceFile, status: os.stat_result) -> None:
    """Raise SourceChangedError if a local shard is not what was indexed."""
    if not is_version(file, status):
        raise SourceChangedError(f"{file.url} changed since it was indexed: open the dataset again")


def lost_copy(path: str, name: str, how: str) -> CacheError:
    """Return the error of a file of the cache that another program removed or cut between its acquisition and its use.

    Args:
        path: The file.
        name: What it holds.
        how: What was done to it.
    """
    return CacheError(
        f"{path}, which holds {name} or a part of it, was {how} by another program while it was in use: leave the files of a "
        "cache alone (`sqlstream cache clear` removes what is not in use); open the dataset again, and it is fetched anew",
        url=name,
    )
