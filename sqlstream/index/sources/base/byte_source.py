"""Bytes by range: what table formats and chunks are read from, wherever they lie."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from sqlstream.errors import SourceError
from sqlstream.index.sources.base.access import reader_for
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader

Span = tuple[int, int]
"""Bytes of a file, half open."""


class ByteSource(Protocol):
    """The bytes of one file."""

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        ...

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Return the bytes from `offset` on; fewer than `num_bytes` at the end of the file only."""
        ...

    def open(self, *, is_mapped: bool = False) -> pa.NativeFile:
        """Return all of them as a file for Arrow; mapped into memory if that is asked for and possible."""
        ...


class LocalBytes:
    """A file of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self._path.stat().st_size

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Return a part of it."""
        with open(self._path, "rb") as file:
            file.seek(offset)
            return file.read(num_bytes)

    def open(self, *, is_mapped: bool = False) -> pa.NativeFile:
        """Open it, without Python between Arrow and the disk."""
        return pa.memory_map(str(self._path)) if is_mapped else pa.OSFile(str(self._path), "r")


def known_size(file: SourceFile) -> int:
    """Return the bytes of a remote file of which parts are to be read.

    Raises:
        SourceError: The server does not say it.
    """
    if file.size_bytes is None:
        raise SourceError(
            f"{urls.redact(file.url)}: the server does not say its length, without which no part of it can be read: have it "
            "sent with a Content-Length (not in chunks, nor compressed on the way), or read a copy"
        )
    return file.size_bytes


class RemoteBytes:
    """A remote file, of one version; each read is a request.

    Args:
        file: It.
        remote: Reads it.

    Raises:
        SourceError: Its size is not known.
    """

    def __init__(self, file: SourceFile, remote: RemoteReader) -> None:
        self.size_bytes = known_size(file)
        self._url = file.url
        self._reader = reader_for(remote, file.access)

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Return a part of it."""
        stop = min(offset + num_bytes, self.size_bytes)
        return self._reader.get_ranges(self._url, [(offset, stop)], self.size_bytes)[0] if offset < stop else b""

    def read_spans(self, spans: Sequence[Span]) -> list[bytes]:
        """Return small parts of it; near ones come with one request."""
        return self._reader.get_ranges(self._url, spans, self.size_bytes) if spans else []

    def open(self, *, is_mapped: bool = False) -> pa.NativeFile:  # noqa: ARG002 - nothing of it is here
        """Open it."""
        return pa.PythonFile(ByteFile(self), "r")


class Pieces:
    """A file of which only some pieces are here, each in memory or a file of its own; what lies between cannot be read.

    Args:
        spans: The pieces.
        files: The bytes of each, or a file with them.
        size_bytes: Size of the whole file.
    """

    def __init__(self, spans: Sequence[Span], files: Sequence[Path | bytes], size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._pieces = [(span, _opened(data)) for span, data in zip(spans, files, strict=True)]

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes of one piece."""
        for (start, stop), file in self._pieces:
            if start <= offset < stop:
                file.seek(offset - start)
                return bytes(file.read(min(num_bytes, stop - offset)))
        if offset >= self.size_bytes:
            return b""
        raise OSError(f"bytes from {offset} on are not among the fetched {[span for span, _ in self._pieces]}")

    def open(self, *, is_mapped: bool = False) -> pa.NativeFile:  # noqa: ARG002 - the pieces are mapped
        """Open it."""
        return pa.PythonFile(ByteFile(self), "r")

    def close(self) -> None:
        """Close the pieces."""
        for _, file in self._pieces:
            file.close()


class ByteFile(io.RawIOBase):
    """A byte source as a Python file."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._position = 0

    def readable(self) -> bool:
        """It can."""
        return True

    def seekable(self) -> bool:
        """It can."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place of the file."""
        self._position = offset + (0, self._position, self._source.size_bytes)[whence]
        return self._position

    def tell(self) -> int:
        """Return the place."""
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        """Return bytes from the place on, and go behind them."""
        data = self._source.read_at(self._position, size if size >= 0 else self._source.size_bytes - self._position)
        self._position += len(data)
        return data


def _opened(data: Path | bytes) -> pa.NativeFile:
    return pa.memory_map(str(data)) if isinstance(data, Path) else pa.BufferReader(data)


def bytes_of(file: SourceFile, remote: RemoteReader) -> LocalBytes | RemoteBytes:
    """Return the bytes of a file, local or remote."""
    return RemoteBytes(file, remote) if urls.is_remote(file.url) else LocalBytes(Path(file.url))
