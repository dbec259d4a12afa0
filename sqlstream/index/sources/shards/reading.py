"""The bytes of a shard while its table is read: a local file stays open, a remote one comes in as few requests as it takes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

from sqlstream.index.sources.base.access import local_copy, named_errors
from sqlstream.index.sources.base.byte_source import RemoteBytes, Span
from sqlstream.index.sources.shards.layout import Scratch, ShardFiles, Walks
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.checksum import new_digest
from sqlstream.storage.base.protocols import CALLS_AT_A_TIME, PRINTED, RemoteReader, Unpack
from sqlstream.storage.members.unpack import MAGIC_BYTES, compression_of
from sqlstream.storage.members.unpacked import unpacked

AHEAD_BYTES = 8 << 10
"""Read with what is asked for, where the next header is far away: it brings small members, and their headers."""
BLOCK_BYTES = 8 << 20
"""Read at once where headers are near each other: half of the largest request that ranges are merged to."""
NEAR_BYTES = 1 << 20
"""Headers nearer than this are read with all that lies between: a request costs as long as so many bytes, 20 ms at 50 MB/s."""
_START_SHARE = 32
"""With a header near the start comes one part in so many of the shard, or half of `NEAR_BYTES` if that is less: as a rule it
shows whether all are near each other, without a request for each of the first steps. Arbitrary."""
_SPANS_AT_A_TIME = 256
"""Parts of a shard that one call asks for. Arbitrary."""
_CALLS_OF_A_SHARD = CALLS_AT_A_TIME // 2
"""Such calls under way for one shard."""
_PIECE_BYTES = 1 << 20
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

    def read_beside(self, offset: int, num_bytes: int) -> bytes:
        """Return a part of it."""
        return self.read_at(offset, num_bytes)

    def read_spans(self, spans: Sequence[Span]) -> list[bytes]:
        """Return parts of it."""
        return [self.read_at(start, stop - start) for start, stop in spans]

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)


class AheadBytes:
    """A remote file that is read from front to back, here and there a header: what comes with one is kept.

    Args:
        source: The file.
        bring: Returns the whole of it, on this disk, or None: called once, as soon as headers turn out to be near each other.
            None: it comes by ranges.
        walks: What others of its source have shown: a walk takes a request for each of its first steps otherwise.
    """

    def __init__(
        self, source: RemoteBytes, bring: Callable[[], LocalShard | None] | None = None, walks: Walks | None = None
    ) -> None:
        self._source, self._bring, self._walks = source, bring, walks or Walks()
        self._whole: LocalShard | None = None
        self.size_bytes = source.size_bytes
        self._start_bytes = min(NEAR_BYTES // 2, self.size_bytes // _START_SHARE)
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
            if is_near:
                self._walks.are_near = True
            may_be_near = self._walks.are_near
            if self._bring is not None and (may_be_near or self.size_bytes <= BLOCK_BYTES):  # a block would have all of it
                bring, self._bring = self._bring, None
                if (whole := bring()) is not None:
                    self._whole, self._block = whole, b""
                    return whole.read_at(offset, num_bytes)
            is_first = self._num_reads == 1  # of one that is not like the others, no more than this comes for nothing
            ahead = BLOCK_BYTES if is_near or (may_be_near and is_first) else AHEAD_BYTES
            if 0 < offset < self._start_bytes:
                ahead = max(ahead, self._start_bytes)
            self._start, self._block = offset, self._source.read_at(offset, max(num_bytes, ahead))
            start = 0
        return self._block[start : start + num_bytes]

    def read_beside(self, offset: int, num_bytes: int) -> bytes:
        """Return a part of it that is wanted beside the headers: it is no step from one to the next."""
        self._num_reads -= 1
        return self.read_at(offset, num_bytes)

    def read_spans(self, spans: Sequence[Span]) -> list[bytes]:
        """Return parts of it, near ones by one request."""
        if self._whole is not None:
            return self._whole.read_spans(spans)
        some = [spans[start : start + _SPANS_AT_A_TIME] for start in range(0, len(spans), _SPANS_AT_A_TIME)]
        if len(some) < 2:
            return self._source.read_spans(spans)
        with ThreadPoolExecutor(_CALLS_OF_A_SHARD, thread_name_prefix="members") as pool:
            return list(chain.from_iterable(pool.map(self._source.read_spans, some)))


def other_size(file: SourceFile, num_bytes: int | None) -> str | None:
    """Return what is wrong with a shard that has another size than its index says; None: nothing, or nothing says it."""
    if None in (file.size_bytes, num_bytes) or file.size_bytes == num_bytes:
        return None
    name = urls.redact(file.url)
    return f"{name} has {file.size_bytes} bytes, and its index says {num_bytes}: one of them is of another version"


ShardBytes = LocalShard | AheadBytes
"""The bytes of a shard while it is indexed."""


@contextlib.contextmanager
def opened(
    file: SourceFile,
    remote: RemoteReader,
    files: ShardFiles | None = None,
    here: Path | None = None,
    walks: Walks | None = None,
) -> Iterator[ShardBytes]:
    """Give the bytes of a shard.

    Args:
        file: The shard.
        remote: Reads what is not local.
        files: Brings a remote one whole where its headers are near each other: reading them reads it all; None: nothing does.
        here: It, or what it holds, on this disk; None: it is read where it lies.
        walks: Along the headers of others of its source.
    """
    with named_errors(file.url), contextlib.ExitStack() as stack:

        def bring() -> LocalShard | None:
            path = None if files is None else stack.enter_context(files.held(file, None))
            return None if path is None else stack.enter_context(contextlib.closing(LocalShard(path)))

        if here is not None:
            yield stack.enter_context(contextlib.closing(LocalShard(here)))
        elif urls.is_remote(file.url):
            yield AheadBytes(RemoteBytes(file, remote), None if files is None else bring, walks)
        else:
            yield stack.enter_context(contextlib.closing(LocalShard(Path(file.url))))


@contextlib.contextmanager
def printed(file: SourceFile, remote: RemoteReader, scratch: Scratch) -> Iterator[tuple[LocalShard, Unpack]]:
    """Give the content of what a command prints, unpacked, and how it is made of it: with its hash, which is its version.

    Args:
        file: The command.
        remote: Runs it.
        scratch: Where the output is written, if it does not stay.
    """
    with contextlib.ExitStack() as stack:
        path = scratch.here
        if path is None and scratch.files is not None:
            with named_errors(file.url):
                path = stack.enter_context(scratch.files.held(file, Unpack("")))
        if path is None:
            path = stack.enter_context(local_copy(file, scratch.path("shard"), remote))
        content, digest = stack.enter_context(contextlib.closing(LocalShard(path))), new_digest()
        for start in range(0, content.size_bytes, _PIECE_BYTES):
            digest.update(content.read_at(start, _PIECE_BYTES))
        hashes = ((PRINTED, digest.hexdigest()),)
        if (compression := compression_of(content.read_at(0, MAGIC_BYTES))) is None:
            yield content, Unpack("", content.size_bytes, hashes)
            return
        unpack = Unpack(compression, None, hashes)
        yield stack.enter_context(_unpacked(path, Unpack(compression), urls.redact(file.url), scratch)), unpack


@contextlib.contextmanager
def unpacked_content(file: SourceFile, unpack: Unpack, remote: RemoteReader, scratch: Scratch) -> Iterator[LocalShard]:
    """Give the content of a shard that is compressed as a whole: where it stays for those who read it next, or for this time.

    Args:
        file: The shard.
        unpack: How it is unpacked.
        remote: Reads what is not local.
        scratch: Where the content is written, if it does not stay.
    """
    with contextlib.ExitStack() as stack:
        path, stored = None, scratch.here
        if stored is None and scratch.files is not None and urls.is_remote(file.url):
            with named_errors(file.url):
                path = stack.enter_context(scratch.files.held(file, unpack))
        if path is not None:
            yield stack.enter_context(contextlib.closing(LocalShard(path)))
            return
        if stored is None:
            stored = stack.enter_context(local_copy(file, scratch.path("shard"), remote))
        yield stack.enter_context(_unpacked(stored, unpack, urls.redact(file.url), scratch))


@contextlib.contextmanager
def _unpacked(path: Path, unpack: Unpack, name: str, scratch: Scratch) -> Iterator[LocalShard]:
    """Give the content of a compressed file, which is removed afterwards.

    Raises:
        CacheFullError: It has no room among the index files: it is a bomb, or `index_limit` is small.
    """
    temporary = scratch.path("content")
    make_room = scratch.on_growth(temporary)
    try:
        with open(path, "rb") as file, open(temporary, "xb") as content:
            for piece in unpacked(iter(partial(file.read, _PIECE_BYTES), b""), unpack, name):
                make_room()
                content.write(piece)
                content.flush()
        with contextlib.closing(LocalShard(temporary)) as source:
            yield source
    finally:
        temporary.unlink(missing_ok=True)
