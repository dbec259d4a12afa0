"""What every storage backend does, and what the rest of sqlstream needs of storage.

`RemoteReader` is the outer face (the index reads through it), `Storage` the inner one: a backend, which lives
in the helper process. Both are synchronous; concurrency is threads inside the helper process.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sqlstream.errors import StorageError, TransientStorageError
from sqlstream.storage.coalesce import plan_reads
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeBytes:
    """A part of an object."""

    data: bytes
    etag: str | None
    """Version of the object that it is a part of."""


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

    def get_ranges(self, url: str, ranges: Sequence[tuple[int, int]]) -> builtins.list[bytes]:
        """Return small parts of one object, half open, in the order asked, all of one version."""
        ...


class ObjectStream(Protocol):
    """An open answer: what the object is, then its bytes."""

    @property
    def info(self) -> ObjectInfo:
        """Size (of the whole object) and etag from the answer's header, before any byte is read."""
        ...

    @property
    def start(self) -> int:
        """Offset of the first byte: as asked for, or 0 when the server ignores ranges."""
        ...

    @property
    def num_extra_requests(self) -> int:
        """Requests so far beside the one that opened it."""
        ...

    def chunks(self) -> Iterator[memoryview]:
        """Yield the object's bytes in order, from offset `start`; may be called once."""
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

    def get(self, url: str, *, start: int = 0, stop: int | None = None, etag: str | None = None) -> ObjectStream:
        """Open the object, whole or a range; its bytes are streamed.

        Args:
            url: Which object.
            start: Leave out the bytes before.
            stop: Leave out the bytes from here on (a server without ranges sends them nevertheless); None: none.
            etag: The version that it must be (If-Match); None: any.

        Raises:
            ObjectChangedError: It is another version.
        """
        ...

    def get_range(self, url: str, start: int, stop: int, *, etag: str | None = None) -> RangeBytes:
        """Return exactly the bytes `[start, stop)`, of the version `etag` if that is given; or raise."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object below `prefix` (ends in '/'), at any depth, page by page."""
        ...


def read_range(storage: Storage, url: str, start: int, stop: int, etag: str | None) -> RangeBytes:
    """Return the bytes `[start, stop)` out of `storage.get`; also from a server that ignores ranges.

    Raises:
        StorageError: The object ends before `stop`.
    """
    if start >= stop:
        return RangeBytes(data=b"", etag=etag)
    stream = storage.get(url, start=start, stop=stop, etag=etag)
    try:
        size = stream.info.size_bytes
        if size is not None and stop > size:
            where = redact(url)
            raise StorageError(f"{where}: bytes {start} to {stop} were asked for, it has {size}", url=where)
        data, offset = bytearray(), stream.start
        for chunk in stream.chunks():
            data += chunk[max(0, start - offset) : max(0, stop - offset)]
            offset += len(chunk)
            if offset >= stop:
                break
    finally:
        stream.close()
    check_length(url, received=len(data), expected=stop - start)
    return RangeBytes(data=bytes(data), etag=stream.info.etag)


def read_ranges(storage: Storage, url: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
    """Return the bytes of each range, in the order asked, all of one version; near ones come with one request.

    Raises:
        ObjectChangedError: The object changed between two requests.
    """
    plan = plan_reads(ranges)
    answers: list[bytes] = []
    etag: str | None = None
    for start, stop in plan.requests:
        answer = storage.get_range(url, start, stop, etag=etag)
        answers.append(answer.data)
        etag = etag or (answer.etag if answer.etag and not answer.etag.startswith("W/") else None)
    return plan.cut(answers)


def check_length(url: str, *, received: int, expected: int) -> None:
    """Raise if an answer held fewer or more bytes than it should."""
    if received != expected:
        where = redact(url)
        raise TransientStorageError(f"{where}: {received} bytes arrived, {expected} were promised", url=where)
