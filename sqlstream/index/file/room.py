"""Room for index files: they count against a limit of their own, and leave the disk some free bytes, while they grow.

What is downloaded to be indexed, and what is built of it, lies in one directory. A process that makes a file there asks for
room step by step; index files that no process has open go first, the longest unused before the others. Two builders may each be
one step beyond the limit: nothing is reserved.
"""

from __future__ import annotations

import builtins
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sqlstream.config import IndexOptions, parse_bytes
from sqlstream.errors import CacheFullError
from sqlstream.process import locks
from sqlstream.storage.base.access import Access
from sqlstream.storage.base.protocols import DownloadRoom, ObjectInfo, RemoteReader

_MOST_STEP_BYTES = 8 << 20
_LEAST_STEP_BYTES = 64 << 10
_SHARE = 0.1  # of the file system, where no limit is given
_KEPT_SUFFIXES = (".tmp", ".lock", "-journal", "-wal", "-shm")  # a builder's, not an index's


class IndexRoom:
    """The room in one directory of index files.

    Args:
        directory: Where they are (`<dst>/index`).
        options: `index_limit` and `index_free_bytes`.
    """

    def __init__(self, directory: Path, options: IndexOptions) -> None:
        self._directory, self._free_bytes = directory, options.index_free_bytes
        status = os.statvfs(directory)
        share = int(_SHARE * status.f_blocks * status.f_frsize)
        self._limit_bytes = share if options.index_limit == "auto" else parse_bytes(options.index_limit, "index_limit")
        self.step_bytes = _MOST_STEP_BYTES
        """How much to write before asking again."""
        self.before_refusal: Callable[[], None] | None = None
        """Is called before there is no room for a need: it gives room back that this process has."""
        if self._limit_bytes is not None:
            self.step_bytes = max(_LEAST_STEP_BYTES, min(_MOST_STEP_BYTES, self._limit_bytes // 16))

    def need(self, num_bytes: int) -> None:
        """Make room for `num_bytes` more.

        Raises:
            CacheFullError: There is none, and no index file is unused.
        """
        if not self._missing_bytes(num_bytes) or self._is_made(num_bytes):
            return
        if self.before_refusal is not None:
            self.before_refusal()
            if self._is_made(num_bytes):
                return
        used, free = self._used_bytes(), self._on_disk_free_bytes()
        raise CacheFullError(
            f"the index files in {self._directory} need {num_bytes} bytes more: they have {used} of a limit of "
            f"{self._limit_bytes}, {free} bytes of the disk are free and {self._free_bytes} must stay so, and every "
            "other index is in use. Give a larger index_limit, or remove indexes with `sqlstream cache clear --index`"
        )

    def _is_made(self, num_bytes: int) -> bool:
        """Remove unused index files until there is room; return whether there is."""
        for path in self._longest_unused_first():
            if _remove_unused(path) and not self._missing_bytes(num_bytes):
                break
        return not self._missing_bytes(num_bytes)

    def on_growth(self, path: Path) -> Callable[[], None]:
        """Return what a writer calls after each batch: it asks for room whenever the file has grown by a step."""
        allowed = 0

        def check() -> None:
            nonlocal allowed
            size = os.stat(path).st_size
            if size >= allowed:
                self.need(self.step_bytes)
                allowed = size + self.step_bytes

        return check

    def _missing_bytes(self, num_bytes: int) -> int:
        over = 0 if self._limit_bytes is None else self._used_bytes() + num_bytes - self._limit_bytes
        return max(0, over, self._free_bytes + num_bytes - self._on_disk_free_bytes() if self._free_bytes else 0)

    def _on_disk_free_bytes(self) -> int:
        status = os.statvfs(self._directory)
        return status.f_bavail * status.f_frsize

    def _used_bytes(self) -> int:
        return sum(status.st_blocks * 512 for _, status in self._files())

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        with os.scandir(self._directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        yield Path(entry.path), entry.stat(follow_symlinks=False)

    def _longest_unused_first(self) -> list[Path]:
        files = [(status.st_mtime_ns, path) for path, status in self._files() if not path.name.endswith(_KEPT_SUFFIXES)]
        return [path for _, path in sorted(files)]


def _remove_unused(path: Path) -> bool:
    """Remove an index file under its exclusive lock; False if a process has it open, or it cannot be removed."""
    with locks.uninterrupted(), contextlib.suppress(OSError):  # a descriptor that a handler left open would keep the lock
        fd = locks.open_descriptor(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            if locks.try_lock(fd):
                path.unlink(missing_ok=True)
                return True
        finally:
            locks.close_descriptor(fd)
    return False


class RoomyReader:
    """A remote reader whose downloads ask for room as they grow.

    Args:
        remote: What reads.
        room: Where downloads are written.
    """

    def __init__(self, remote: RemoteReader, room: IndexRoom) -> None:
        self._remote, self._room = remote, room

    def with_access(self, access: Access) -> RoomyReader:
        """As the reader does, with room."""
        return RoomyReader(self._remote.with_access(access), self._room)

    def head(self, url: str) -> ObjectInfo:
        """As the reader does."""
        return self._remote.head(url)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """As the reader does."""
        return self._remote.list(prefix)

    def get_ranges(self, url: str, ranges: Sequence[tuple[int, int]], size_bytes: int | None = None) -> builtins.list[bytes]:
        """As the reader does."""
        return self._remote.get_ranges(url, ranges, size_bytes)

    def download(self, url: str, path: Path, room: DownloadRoom | None = None) -> ObjectInfo:
        """Write the object to `path`, step by step.

        Raises:
            CacheFullError: There is no room for it.
        """
        return self._remote.download(url, path, room or self._room)
