"""Shards that are compressed as a whole: how, by their first bytes, and what they hold."""

from __future__ import annotations

import bz2
import io
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any, Protocol

from sqlstream.errors import DamagedShardError, SourceError

MAGIC_BYTES = 16
"""So many first bytes tell the compression."""

_MAGIC = re.compile(
    rb"(?P<gzip>\x1f\x8b\x08)"
    rb"|(?P<zstd>\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)"  # a frame, or one to skip
    rb"|(?P<xz>\xfd7zXZ\x00)"
    rb"|(?P<bzip2>BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90))",  # with what follows: names of members begin with BZh, too
    re.DOTALL,
)
_PIECE = 1 << 20
"""Bytes of a piece at most: what is held, however much a few compressed bytes make."""

_XZ_MEMORY = 1 << 30
"""Most memory for a stream of xz: `xz -9` needs 65 MiB, and a forged header asks for 4 GiB."""


class Compression(StrEnum):
    """How a whole file is compressed."""

    GZIP = "gzip"
    ZSTD = "zstd"
    XZ = "xz"
    BZIP2 = "bzip2"


def compression_of(first_bytes: bytes) -> Compression | None:
    """Return how a file is compressed, by its first `MAGIC_BYTES` bytes and never by its name; None: it is not."""
    match = _MAGIC.match(first_bytes)
    return Compression(match.lastgroup) if match and match.lastgroup else None


def decompress(chunks: Iterable[bytes], compression: Compression, name: str, max_bytes: int | None = None) -> Iterator[bytes]:
    """Yield the content of a compressed file, in pieces of at most 1 MiB.

    Streams that follow each other are one content (pigz, bgzip; the frames of seekable zstd), and zeros behind the last are
    padding. What is yielded before an error is no content: the file is damaged.

    Args:
        chunks: The file, in order.
        compression: How it is compressed.
        name: Its URL for messages, without credentials.
        max_bytes: Most bytes of the content.

    Raises:
        DamagedShardError: The file is damaged, or ends early.
        SourceError: It holds more than `max_bytes`.
    """
    num_bytes = 0
    for piece in (_zstd if compression == Compression.ZSTD else _streams)(chunks, compression, name):
        num_bytes += len(piece)
        if max_bytes is not None and num_bytes > max_bytes:
            raise SourceError(
                f"{name} holds more than {max_bytes} bytes, compressed with {compression}: it is a bomb, or damaged"
            )
        yield piece


class _Decompressor(Protocol):
    """What Python's modules for bzip2 and xz have."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Gzip:
    """A gzip stream, read as Python reads bzip2 and xz."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        found = self._stream.decompress(self._stream.unconsumed_tail + data, max_length)
        self.needs_input = len(found) < max_length
        return found


def _new(compression: Compression) -> _Decompressor:
    if compression == Compression.GZIP:
        return _Gzip()
    return bz2.BZ2Decompressor() if compression == Compression.BZIP2 else lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY)


def _streams(chunks: Iterable[bytes], compression: Compression, name: str) -> Iterator[bytes]:
    stream = _new(compression)
    for chunk in chunks:
        data = chunk
        while data or not (stream.eof or stream.needs_input):
            if stream.eof:
                data = data.lstrip(b"\0")
                if not data:
                    break
                stream = _new(compression)
            try:
                piece = stream.decompress(data, _PIECE)
            except (zlib.error, OSError, EOFError, lzma.LZMAError, ValueError) as error:
                raise _damaged(name, compression, str(error)) from error
            data = stream.unused_data if stream.eof else b""
            if piece:
                yield piece
    if not stream.eof:
        raise _damaged(name, compression, "it ends early")


def _zstd(chunks: Iterable[bytes], compression: Compression, name: str) -> Iterator[bytes]:
    import pyarrow as pa

    source = _Chunks(chunks)
    with pa.PythonFile(source, "r") as file, pa.CompressedInputStream(file, "zstd") as stream:
        while True:
            try:
                piece: bytes = stream.read(_PIECE)
            except (OSError, pa.ArrowException) as error:
                if source.failure is not None:
                    raise source.failure from None
                raise _damaged(name, compression, str(error)) from error
            if not piece:
                break
            yield piece
    if not source.num_bytes:
        raise _damaged(name, compression, "it ends early")


class _Chunks(io.RawIOBase):
    """Chunks as a file that is read once."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = b""
        self.num_bytes = 0
        self.failure: BaseException | None = None
        """What the chunks raised: Arrow makes an error of its own of it."""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> Any:
        try:
            while not self._rest:
                self._rest = next(self._chunks)
        except StopIteration:
            return b""
        except BaseException as error:
            self.failure = error
            raise
        found, self._rest = (self._rest, b"") if size < 0 else (self._rest[:size], self._rest[size:])
        self.num_bytes += len(found)
        return found


def _damaged(name: str, compression: Compression, reason: str) -> DamagedShardError:
    return DamagedShardError(f"{name} is damaged: as {compression}, {reason}. Write the shard again, or leave it out of src")
