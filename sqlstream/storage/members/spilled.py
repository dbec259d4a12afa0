"""Columns that come value by value: some values in memory, all before them in a file without a name.

The table of a shard with millions of parts takes as much memory so as one with thousands.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sqlstream.errors import CacheDiskError

SPILL_VALUES = 1 << 15
"""Values of a column that stay in memory, and of a scan that are read at a time: 256 KiB. Arbitrary."""


class _File:
    """A file without a name, which goes with the last use of it.

    Args:
        folder: Where it takes its room.

    Raises:
        CacheDiskError: The folder takes none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._descriptor, name = tempfile.mkstemp(dir=folder)
            os.unlink(name)
        except OSError as error:
            raise self._error(error) from error

    def __del__(self) -> None:
        if (descriptor := getattr(self, "_descriptor", None)) is not None:
            os.close(descriptor)

    def append(self, data: memoryview) -> None:
        """Write at its end."""
        try:
            with data, data.cast("B") as left:
                num_written = 0
                while num_written < len(left):
                    num_written += os.write(self._descriptor, left[num_written:])
        except OSError as error:
            raise self._error(error) from error

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return bytes that were written."""
        data = os.pread(self._descriptor, num_bytes, start)
        assert len(data) == num_bytes, "it has no name, and is read by its writer alone"
        return data

    def _error(self, error: OSError) -> CacheDiskError:
        text = f"cannot write the table of a shard below {self._folder} ({error.strerror}): free space on that disk"
        return CacheDiskError(text, errno=error.errno)


class Spilled:
    """Whole numbers.

    Args:
        kind: How `array` keeps them.
        folder: Where the file is; None: all stay in memory.
    """

    def __init__(self, kind: str, folder: Path | None = None) -> None:
        self._folder = folder
        self._file: _File | None = None
        self._num_spilled = 0
        self._dtype = np.dtype(kind)
        self.last = array(kind)
        """The values that came last: they are appended here, and leave by `spill`."""

    def spill(self) -> None:
        """Write what came last into the file, if it is much."""
        if self._folder is None or len(self.last) < SPILL_VALUES:
            return
        self._file = self._file or _File(self._folder)
        self._file.append(memoryview(self.last))
        self._num_spilled += len(self.last)
        del self.last[:]

    def __len__(self) -> int:
        return self._num_spilled + len(self.last)

    def __getitem__(self, at: slice) -> npt.NDArray[Any]:
        """Return values that follow each other."""
        start, stop, step = at.indices(len(self))
        assert step == 1, "values are taken in their order"
        found = np.empty(max(0, stop - start), self._dtype)  # [n]
        num_spilled = max(0, min(stop, self._num_spilled) - start)
        if num_spilled:
            assert self._file is not None
            data = self._file.read(start * found.itemsize, num_spilled * found.itemsize)
            found[:num_spilled] = np.frombuffer(data, self._dtype)
        if num_spilled < len(found):
            first = start + num_spilled - self._num_spilled
            found[num_spilled:] = self.last[first : first + len(found) - num_spilled]
        return found

    def blocks(self) -> Iterator[npt.NDArray[Any]]:
        """Yield all values, some at a time."""
        for start in range(0, len(self), SPILL_VALUES):
            yield self[start : start + SPILL_VALUES]


class SpilledBytes:
    """Bytes that are appended.

    Args:
        folder: Where the file is; None: all stay in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._file: _File | None = None
        self._num_spilled = 0
        self.last = bytearray()
        """What came last: it is appended here, and leaves by `spill`."""

    def spill(self) -> None:
        """Write what came last into the file, if it is much."""
        if self._folder is None or len(self.last) < 8 * SPILL_VALUES:
            return
        self._file = self._file or _File(self._folder)
        self._file.append(memoryview(self.last))
        self._num_spilled += len(self.last)
        self.last.clear()

    def __len__(self) -> int:
        return self._num_spilled + len(self.last)

    def read(self, start: int, stop: int) -> bytes:
        """Return some of them."""
        num_spilled = max(0, min(stop, self._num_spilled) - start)
        data = b""
        if num_spilled:
            assert self._file is not None
            data = self._file.read(start, num_spilled)
        first = start + num_spilled - self._num_spilled
        return data + bytes(self.last[first : stop - self._num_spilled]) if start + num_spilled < stop else data


def are_unique(hashes: Spilled, at_a_time: int = 1 << 18) -> bool:
    """Return whether all of some hashes of 64 bits differ: those of each part of their range are compared together.

    Args:
        hashes: Them.
        at_a_time: About as many are held in memory.
    """
    num_passes = max(1, -(-len(hashes) // at_a_time))
    width = -(-(1 << 64) // num_passes)
    for number in range(num_passes):
        low = number * width - (1 << 63)
        high = min(low + width, 1 << 63) - 1
        found = [block[(block >= low) & (block <= high)] for block in hashes.blocks()]
        some = np.sort(np.concatenate(found)) if found else np.zeros(0)  # [hashes of this part]
        if (some[1:] == some[:-1]).any():
            return False
    return True
