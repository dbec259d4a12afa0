"""What is found out about the chunks of a lazy index as they are read: a count and some bytes for each, in one growing file.

All processes of the node share the file. Four numbers a chunk are at its start, and mapped; bytes are appended behind them. Who
reads a chunk appends its bytes, then writes where they are with their checksum, its count last: what is torn by a power cut, or
damaged before a process opens the file, counts as not known. Two who read the same chunk find the same; the bytes of one of
them are then never looked at. A table of SQLite was rejected: it is written by many processes, and a descriptor that one of
them closes frees the locks of the others.
"""

from __future__ import annotations

import logging
import os
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sqlstream.errors import IndexDatabaseError
from sqlstream.index.file.intact import CHECKED_BYTES, check_plain
from sqlstream.order.permute import Int64Array
from sqlstream.process import locks

logger = logging.getLogger(__name__)

_NUMBERS = 4
_OFFSET, _SIZE, _CHECKSUM, _COUNT = range(_NUMBERS)
"""The numbers of a chunk: where its bytes are, how many, their checksum, its count + 1 (0: nothing is known)."""


class Found(NamedTuple):
    """What is known of a chunk."""

    num_rows: int
    data: bytes


class FoundChunks:
    """The file of one kind of finding.

    Args:
        path: Where it is.
        num_chunks: How many chunks there are.
    """

    def __init__(self, path: Path, num_chunks: int) -> None:
        self.path = path
        self._num_chunks = num_chunks
        self._map: np.memmap | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the path: another process maps the file itself."""
        return (FoundChunks, (self.path, self._num_chunks))

    @staticmethod
    def size_bytes(num_chunks: int) -> int:
        """Return the size of a file that knows nothing."""
        return 8 * _NUMBERS * num_chunks

    def counts(self) -> Int64Array:
        """Return the count of each chunk, -1 where it is not known yet: [num_chunks]."""
        return self._numbers()[:, _COUNT].astype(np.int64) - 1

    def is_found(self, chunk: int) -> bool:
        """Return whether something is known of a chunk."""
        return bool(self._numbers()[chunk, _COUNT])

    def find(self, chunk: int) -> Found | None:
        """Return what is known of a chunk; None: nothing."""
        if not (count := int(self._numbers()[chunk, _COUNT])):  # before the others: it is written last
            return None
        offset, size, checksum = map(int, self._numbers()[chunk, :_COUNT])
        with locks.uninterrupted():
            fd = locks.open_descriptor(self.path, os.O_RDONLY)
            try:
                is_within = offset + size <= os.fstat(fd).st_size  # else damaged numbers would be asked of the kernel
                data = os.pread(fd, size, offset) if is_within else b""
            finally:
                locks.close_descriptor(fd)
        return Found(count - 1, data) if is_within and checksum == _checksum(offset, count, data) else None

    def forget(self, chunk: int) -> None:
        """Note that nothing is known of a chunk: what was is damaged."""
        self._numbers()[chunk, _COUNT] = 0

    def write(self, chunk: int, found: Found) -> None:
        """Note what is known of a chunk.

        Raises:
            OSError: The disk is full.
        """
        with locks.uninterrupted():
            fd = locks.open_descriptor(self.path, os.O_WRONLY | os.O_APPEND)
            try:
                num_written = os.write(fd, found.data)  # the kernel appends it behind what others append
                offset = os.lseek(fd, 0, os.SEEK_CUR) - num_written
            finally:
                locks.close_descriptor(fd)
        if num_written < len(found.data):
            raise OSError(f"{self.path} could not be written: {num_written} of {len(found.data)} bytes are there")
        numbers, count = self._numbers()[chunk], found.num_rows + 1
        numbers[_COUNT] = 0
        numbers[:_COUNT] = (offset, len(found.data), _checksum(offset, count, found.data))
        numbers[_COUNT] = count

    def _numbers(self) -> np.ndarray:
        if self._map is None:
            check_plain(self.path)
            if self.path.stat().st_size < self.size_bytes(self._num_chunks):
                raise IndexDatabaseError(f"{self.path} has another length than its index says: remove it, it is made again")
            self._map = np.memmap(self.path, "<u8", "r+", shape=(self._num_chunks, _NUMBERS))  # [num_chunks, 4]
            self._forget_damaged()
        return self._map

    def _forget_damaged(self) -> None:
        """Forget what is not as it was written, up to `CHECKED_BYTES`: orders go by the counts, and never ask for the bytes."""
        assert self._map is not None
        if self.path.stat().st_size > CHECKED_BYTES:
            return
        content = self.path.read_bytes()
        for chunk in np.flatnonzero(self._map[:, _COUNT]).tolist():
            offset, size, checksum, count = map(int, self._map[chunk])
            if checksum == _checksum(offset, count, content[offset : offset + size]):
                continue
            if self.is_found(chunk) and self.find(chunk) is None:  # it was not written only now
                logger.warning("%s is damaged: what it says of chunk %d is found out again", self.path, chunk)
                self.forget(chunk)


class FoundRows:
    """Which rows of each chunk a filter keeps, where nothing says how many rows a chunk has: as `KeptRows`, in a growing file.

    Args:
        path: Where it is.
        num_chunks: How many chunks there are.
    """

    def __init__(self, path: Path, num_chunks: int) -> None:
        self._found = FoundChunks(path, num_chunks)

    def counts(self) -> Int64Array:
        """Return how many rows of each chunk are kept, -1 where it is not known yet: [num_chunks]."""
        return self._found.counts()

    def offsets(self, chunk: int) -> Int64Array | None:
        """Return the kept rows of a chunk, counted from its first; None when they are not known: [n]."""
        found = self._found.find(chunk)
        if found is None:
            return None
        bits = np.unpackbits(np.frombuffer(found.data, np.uint8), bitorder="little")  # [rows of the chunk, and up to 7 zeros]
        return np.flatnonzero(bits).astype(np.int64)

    def write(self, chunk: int, offsets: Int64Array) -> None:
        """Note which rows of a chunk are kept."""
        is_kept = np.zeros(int(offsets.max()) + 1 if len(offsets) else 0, np.uint8)  # [rows up to the last one kept]
        is_kept[offsets] = 1
        self._found.write(chunk, Found(len(offsets), np.packbits(is_kept, bitorder="little").tobytes()))


def _checksum(offset: int, count: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(b"%d %d" % (offset, count)))
