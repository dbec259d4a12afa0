"""Which rows of a lazy index its filter keeps, as far as it has been run: counts by chunk, and one bit a row, on disk.

All processes of the node map the same file. Who filters a chunk writes its bits, then its count with their checksum: what is
torn by a power cut, or damaged before a process opens the file, counts as not known. Two who filter the same chunk write
the same.
"""

from __future__ import annotations

import logging
import zlib
from pathlib import Path

import numpy as np

from sqlstream.errors import IndexDatabaseError
from sqlstream.index.file.intact import CHECKED_BYTES, check_plain
from sqlstream.order.permute import Int64Array

logger = logging.getLogger(__name__)

_COUNT_SHIFT = 32


class KeptRows:
    """The file of one filter.

    Args:
        path: Where it is; made if absent (`create`).
        num_rows: Rows of each chunk: [num_chunks].
    """

    def __init__(self, path: Path, num_rows: Int64Array) -> None:
        self.path = path
        self._num_rows = num_rows
        starts = np.cumsum(-(-num_rows // 8)) + 8 * len(num_rows)
        self._stops = starts.tolist()
        self._map: np.memmap | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the path: another process maps the file itself."""
        return (KeptRows, (self.path, self._num_rows))

    @staticmethod
    def size_bytes(num_rows: Int64Array) -> int:
        """Return the size of the file for chunks of `num_rows`."""
        return int(8 * len(num_rows) + (-(-num_rows // 8)).sum())

    def counts(self) -> Int64Array:
        """Return how many rows of each chunk are kept, -1 where it is not known yet: [num_chunks]."""
        return (self._words() >> _COUNT_SHIFT).astype(np.int64) - 1

    def offsets(self, chunk: int) -> Int64Array | None:
        """Return the kept rows of a chunk, counted from its first; None when they are not known: [n]."""
        if not self._is_intact(chunk):
            return None
        bits = np.unpackbits(self._bits(chunk), count=int(self._num_rows[chunk]), bitorder="little")  # [rows of the chunk]
        return np.flatnonzero(bits).astype(np.int64)

    def write(self, chunk: int, offsets: Int64Array) -> None:
        """Note which rows of a chunk are kept."""
        is_kept = np.zeros(int(self._num_rows[chunk]), np.uint8)  # [rows of the chunk]
        is_kept[offsets] = 1
        bits = np.packbits(is_kept, bitorder="little")
        self._bits(chunk)[:] = bits
        self._words()[chunk] = np.uint64((len(offsets) + 1) << _COUNT_SHIFT | zlib.crc32(bits.tobytes()))

    def _mapped(self) -> np.memmap:
        if self._map is None:
            check_plain(self.path)
            num_bytes = self.size_bytes(self._num_rows)
            if self.path.stat().st_size < num_bytes:
                raise IndexDatabaseError(f"{self.path} has another length than its index says: remove it, it is made again")
            self._map = np.memmap(self.path, np.uint8, "r+", shape=(num_bytes,))
            if self._map.size <= CHECKED_BYTES:
                self._forget_damaged()
        return self._map

    def _forget_damaged(self) -> None:
        """Forget what is not as it was written: orders go by the counts, and never ask for the bits."""
        for chunk in np.flatnonzero(self._words()).tolist():
            if not self._is_intact(chunk):
                logger.warning("%s is damaged: what it says of chunk %d is found out again", self.path, chunk)
                self._words()[chunk] = 0

    def _is_intact(self, chunk: int) -> bool:
        """Return whether a chunk is filtered, and its count and bits are as they were written."""
        count, checksum = divmod(int(self._words()[chunk]), 1 << _COUNT_SHIFT)
        bits = self._bits(chunk).tobytes()
        return count > 0 and zlib.crc32(bits) == checksum and int.from_bytes(bits, "little").bit_count() + 1 == count

    def _words(self) -> np.ndarray:
        return self._mapped()[: 8 * len(self._num_rows)].view("<u8")

    def _bits(self, chunk: int) -> np.ndarray:
        stop = self._stops[chunk]
        return self._mapped()[stop - -(-int(self._num_rows[chunk]) // 8) : stop]
