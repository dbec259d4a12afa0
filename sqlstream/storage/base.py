"""What every storage backend does, and what the rest of sqlstream needs of storage.

`RemoteReader` is the outer face (the index reads through it), `Storage` the inner one: a backend, which lives
in the helper process. Both are synchronous; concurrency is threads inside the helper process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sqlstream.errors import StorageError, TransientStorageError
from sqlstream.storage.urls import redact


class UnsupportedAnswerError(StorageError):
    """This backend cannot read the server's answer; another one may (see `retry.with_retries`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a server says about one object."""

    url: str
    """As the caller spelled it, credentials included: redact before it is shown."""
    size_bytes: int | None
    """Length of the stored bytes; None when the server does not say it (chunked answers, compressed on the fly)."""
    etag: str | None
    """Version of the content as the server names it; None when it gives none."""


class RemoteReader(Protocol):
    """Reads objects by URL; local paths and `file://` work too."""

    def head(self, url: str) -> ObjectInfo:
        """Return size and etag of one object.

        Raises:
            ObjectNotFoundError: No object at this URL.
            StorageError: It cannot be read.
        """
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object below `prefix` (ends in '/'), at any depth; none when there is nothing."""
        ...

    def download(self, url: str, path: Path) -> ObjectInfo:
        """Write the whole object to the local file `path` (created or emptied), streamed; return what it is."""
        ...


class ObjectStream(Protocol):
    """An open answer: what the object is, then its bytes."""

    @property
    def info(self) -> ObjectInfo:
        """Size and etag from the answer's header, before any byte is read."""
        ...

    def chunks(self) -> Iterator[memoryview]:
        """Yield the object's bytes in order, from offset 0; may be called once."""
        ...

    def close(self) -> None:
        """Give the connection back; safe to call twice."""
        ...


class Storage(Protocol):
    """A backend. Makes one attempt an operation, raises errors of `sqlstream.errors`; `retry` decides what is tried again.

    Ranges are half open: `[start, stop)`.
    """

    def head(self, url: str) -> ObjectInfo:
        """Return size and etag of one object."""
        ...

    def get(self, url: str) -> ObjectStream:
        """Open the whole object; its bytes are streamed."""
        ...

    def get_range(self, url: str, start: int, stop: int) -> bytes:
        """Return exactly the bytes `[start, stop)`, or raise."""
        ...

    def get_ranges(self, url: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each `(start, stop)`, in the order asked."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object below `prefix` (ends in '/'), at any depth, page by page."""
        ...


def check_length(url: str, *, received: int, expected: int) -> None:
    """Raise if an answer held fewer or more bytes than it should."""
    if received != expected:
        where = redact(url)
        raise TransientStorageError(f"{where}: {received} bytes arrived, {expected} were promised", url=where)
