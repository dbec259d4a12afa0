"""The bytes of a shard while its table is read: a local file stays open, a remote one comes in as few requests as it takes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from sqlstream.index.sources.base.access import named_errors
from sqlstream.index.sources.base.byte_source import RemoteBytes
from sqlstream.index.sources.shards.layout import ShardFiles
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader

AHEAD_BYTES = 8 << 10
"""Read with what is asked for, where the next header is far away: it brings small members, and their headers."""
BLOCK_BYTES = 8 << 20
"""Read at once where headers are near each other: half of the largest request that ranges are merged to."""
NEAR_BYTES = 1 << 20
"""Headers nearer than this are read with all that lies between: a request costs as long as so many bytes, 20 ms at 50 MB/s."""
_FIRST_STEPS = 8
"""Steps from header to header that are seen before whole blocks are read. Arbitrary."""


class LocalShard:
    """A local file, open."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size_bytes = os.fstat(self._descriptor).st_size

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Return a part of it."""
        return os.pread(self._descriptor, num_bytes, offset)

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)


class AheadBytes:
    """A remote file that is read from front to back, here and there a header: what comes with one is kept.

    Args:
        source: The file.
        bring: Returns the whole of it, on this disk, or None: called once, as soon as headers turn out to be near each other.
            None: it comes by ranges.
    """

    def __init__(self, source: RemoteBytes, bring: Callable[[], LocalShard | None] | None = None) -> None:
        self._source, self._bring = source, bring
        self._whole: LocalShard | None = None
        self.size_bytes = source.size_bytes
        self._start, self._block = 0, b""
        self._num_reads = 0

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Return a part of it."""
        if self._whole is not None:
            return self._whole.read_at(offset, num_bytes)
        start = offset - self._start
        self._num_reads += 1
        if not 0 <= start <= start + num_bytes <= len(self._block):
            is_near = self._num_reads > _FIRST_STEPS and offset / self._num_reads < NEAR_BYTES
            if self._bring is not None and (is_near or self.size_bytes <= BLOCK_BYTES):  # a block would have all of it
                bring, self._bring = self._bring, None
                if (whole := bring()) is not None:
                    self._whole, self._block = whole, b""
                    return whole.read_at(offset, num_bytes)
            ahead = BLOCK_BYTES if is_near else AHEAD_BYTES
            self._start, self._block = offset, self._source.read_at(offset, max(num_bytes, ahead))
            start = 0
        return self._block[start : start + num_bytes]


def other_size(file: SourceFile, num_bytes: int | None) -> str | None:
    """Return what is wrong with a shard that has another size than its index says; None: nothing, or nothing says it."""
    if None in (file.size_bytes, num_bytes) or file.size_bytes == num_bytes:
        return None
    name = urls.redact(file.url)
    return f"{name} has {file.size_bytes} bytes, and its index says {num_bytes}: one of them is of another version"


@contextlib.contextmanager
def opened(file: SourceFile, remote: RemoteReader, files: ShardFiles | None = None) -> Iterator[LocalShard | AheadBytes]:
    """Give the bytes of a shard.

    Args:
        file: The shard.
        remote: Reads what is not local.
        files: Brings a remote one whole where its headers are near each other: reading them reads it all; None: nothing does.
    """
    with named_errors(file.url), contextlib.ExitStack() as stack:

        def bring() -> LocalShard | None:
            path = None if files is None else stack.enter_context(files.held(file, None))
            return None if path is None else stack.enter_context(contextlib.closing(LocalShard(path)))

        if urls.is_remote(file.url):
            yield AheadBytes(RemoteBytes(file, remote), None if files is None else bring)
        else:
            yield stack.enter_context(contextlib.closing(LocalShard(Path(file.url))))
