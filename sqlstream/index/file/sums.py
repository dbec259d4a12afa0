"""Finds numbers in a large file of sums that never fall, with little of it in memory."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np

from sqlstream.index.file.npy import load_npy, unreadable
from sqlstream.order.permute import Int64Array
from sqlstream.process import locks

NUM_KEYS = 1 << 17
"""Sums that are kept, evenly spread: 1 MiB. What lies between two of them is read: 600 bytes of the file of 10^7 rows."""


class SumsFile:
    """The sums of a .npy file of int64, as `numpy.searchsorted` takes them.

    It is read, not mapped: mapped pages count as each worker's memory (80 MB at 10^7 rows), and to unmap them after use costs
    several times the search, as they are soon touched again (m).

    Args:
        path: The file; it is kept open.
        num_keys: Most sums that are kept in memory.

    Raises:
        IndexDatabaseError: It cannot be read.
    """

    def __init__(self, path: Path, num_keys: int = NUM_KEYS) -> None:
        self._path = path
        mapped = load_npy(path)  # [n]
        with locks.uninterrupted():  # a handler that raised between two lines would leave it open
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._fd).atexit = False
        self._num = len(mapped)
        self._start = int(mapped.offset)
        self._stride = max(1, -(-self._num // num_keys))
        self._keys: Int64Array = np.array(mapped[self._stride - 1 :: self._stride])  # [keys]
        self._last = int(mapped[-1])

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> int:
        """Return the last sum, which is the total."""
        if index != -1:
            raise IndexError(f"only the last sum of {self._path} is at hand, not {index}")
        return self._last

    def at(self, places: Int64Array) -> Int64Array:
        """Return the sums at some places: [n]."""
        sums: Int64Array = np.array(load_npy(self._path)[places])  # [n]
        return sums

    def searchsorted(self, points: Int64Array, side: str = "right") -> Int64Array:
        """Return how many of the sums are at most each point: [n]."""
        if side != "right":
            raise ValueError(f"side={side!r}: sums are searched from the right")
        blocks: Int64Array = np.searchsorted(self._keys, points, side="right")  # [n]
        if self._stride == 1:
            return blocks
        starts: Int64Array = np.minimum(blocks * self._stride, self._num - self._stride)  # [n]
        fd, num_bytes, pread = self._fd, 8 * self._stride, os.pread
        read = b"".join([pread(fd, num_bytes, at) for at in (self._start + 8 * starts).tolist()])
        if len(read) != num_bytes * len(starts):
            raise unreadable(self._path, "it ends too early")
        sums = np.frombuffer(read, "<i8").reshape(len(starts), self._stride)  # [n, stride]
        found: Int64Array = starts + (sums <= points[:, None]).sum(axis=1)  # [n]
        return found


class BucketSumsFile:
    """The sums of the weights of the rows of buckets, found in a file with little of it in memory.

    Args:
        path: The file.
        sizes: Rows of each bucket.
    """

    def __init__(self, path: Path, sizes: tuple[int, ...]) -> None:
        self._file = SumsFile(path)
        stops = np.cumsum(np.array(sizes, dtype=np.int64))  # [B]
        self._before: dict[int, int] = {0: 0}
        """Weight of the rows before the start of each bucket, and before the end of the last."""
        self._before |= zip(stops.tolist(), self._file.at(stops - 1).tolist(), strict=True)

    def total(self, start: int, stop: int) -> int:
        """Return the weight of the rows `[start, stop)` of the table, which are those of a bucket."""
        return self._before[stop] - self._before[start]

    def places(self, start: int, points: Int64Array) -> Int64Array:
        """Return the places of the rows, counted from `start`, at points of a line that begins there: [n]."""
        found: Int64Array = self._file.searchsorted(points + self._before[start]) - start  # [n]
        return found
