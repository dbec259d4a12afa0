"""Gives every run the same disk: no inodes of files just deleted before it, and the data in the page cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

READ_BYTES = 1 << 22
SECONDS_UNTIL_REUSED = 65
"""ext4 without a journal uses an inode again a minute after it was deleted."""


class Works:
    """Directories that runs write into; they stay until the end of their round.

    ext4 without a journal does not use the inodes of files deleted in the last minute, and each new file searches past all of
    them: the second of two cold runs took three times the first one's system time, whosever files were deleted in between. To
    spread the directories over the disk (`chattr +T`) helped most runs, not all.

    Args:
        place: Where they are made.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._deleted_at = -float(SECONDS_UNTIL_REUSED)

    def make(self) -> Path:
        """Make one, when what earlier runs wrote is on the disk."""
        os.sync()
        self._place.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self._place))

    def delete(self) -> None:
        """Delete all of them, those of a benchmark that was interrupted included."""
        if self._place.exists():
            shutil.rmtree(self._place, ignore_errors=True)
            self._deleted_at = time.monotonic()

    def settle(self) -> None:
        """Wait until nothing that was deleted stands in the way of new files."""
        time.sleep(max(0.0, self._deleted_at + SECONDS_UNTIL_REUSED - time.monotonic()))


def read_all(place: Path, *, but: tuple[str, ...]) -> int:
    """Read the files of the data once, and return how many bytes.

    A machine that was idle, or busy with other files, may have put them out of memory.

    Args:
        place: The data.
        but: Folders whose names begin with one of these are left out.
    """
    num_bytes = 0
    for folder, folders, files in os.walk(place):
        folders[:] = [name for name in folders if not name.startswith(but)]
        for name in files:
            with contextlib.suppress(OSError), open(os.path.join(folder, name), "rb") as file:
                while chunk := file.read(READ_BYTES):
                    num_bytes += len(chunk)
    return num_bytes
