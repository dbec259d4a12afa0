"""Watching a cache directory from outside: what is really on the disk, without asking the ledger."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType


class DiskWatch:
    """Adds up the files under data/ and part/ again and again, and keeps the highest sum.

    A walk takes time, and files change while it lasts: two that were never there together must not both be in a sum, nor
    the length that one had before it shrank and the length to which another one grew in its room. So only two walks that
    find the same files count, and each file with the smaller of its two lengths: a part only grows until it is published,
    and then it shrinks once. That sum is no more than what was there, and charged, at the moment between the walks.

    Args:
        directory: The cache directory; it may come into being later.
        interval_seconds: Pause between two looks; 5 ms sees a download of one small file.
    """

    def __init__(self, directory: str | os.PathLike[str], interval_seconds: float = 0.005) -> None:
        self.highest_bytes = 0
        """Highest sum seen so far."""
        self.num_looks = 0
        """Sums that counted."""
        self._directory = Path(directory)
        self._interval_seconds = interval_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk-watch", daemon=True)

    def __enter__(self) -> DiskWatch:
        """Start looking."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop looking, after one more look."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(self._interval_seconds)
            before, after = cached_files(self._directory), cached_files(self._directory)
            if (num_bytes := bytes_together(before, after)) is not None:
                self.num_looks += 1
                self.highest_bytes = max(self.highest_bytes, num_bytes)


def bytes_together(before: Mapping[int, int], after: Mapping[int, int]) -> int | None:
    """Return how many bytes were there at the moment between two walks, at least; None when they found other files.

    Args:
        before: The size of each file by inode, of one walk.
        after: The same, of the walk that followed.
    """
    if before.keys() != after.keys():
        return None
    return sum(min(before[inode], size) for inode, size in after.items())


def cached_files(directory: Path) -> dict[int, int]:
    """Return the size of each file under data/ and part/, by inode: a file that is renamed meanwhile is still one file."""
    sizes: dict[int, int] = {}
    for top in ("part", "data"):
        for folder, _, names in os.walk(directory / top):
            for name in names:
                try:
                    status = os.lstat(os.path.join(folder, name))
                except FileNotFoundError:
                    continue  # evicted or renamed since the folder was listed
                sizes[status.st_ino] = status.st_size
    return sizes
