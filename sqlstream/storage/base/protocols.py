"""The interface of storage backends, and the one that the rest of sqlstream uses.

`RemoteReader` is the outer face (the index reads through it), `Storage` the inner one: a backend, which lives
in the helper process. Both are synchronous; concurrency is threads inside the helper process.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from sqlstream.errors import ConfigError, ObjectChangedError, StorageError, TransientStorageError
from sqlstream.storage.base.access import Access
from sqlstream.storage.base.coalesce import plan_reads
from sqlstream.storage.base.etags import BY_TIME, bare, has_own_version, is_strong, is_weak
from sqlstream.storage.base.urls import redact

RANGE_BEYOND_END = 416
"""Status of an answer to a range that begins behind the object's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a server says about one object."""

    url: str
    """The URL as the caller spelled it, credentials included: redact it before it is shown."""
    size_bytes: int | None
    """Length of the stored bytes; None when the server does not say it (chunked answers, compressed on the fly)."""
    etag: str | None
    """Version of the content as the server names it; None when it gives none, or one that names nothing (`""`, `*`)."""
    last_modified: str | None = None
    """Time of its last change in the server's own spelling: to be compared, not to be read."""
    is_private: bool = field(default=False, compare=False)
    """True: the connection led to this machine or a private network; known for http(s) only."""
    is_of_file_system: bool = field(default=False, compare=False)
    """True: `etag` is what a file system says of one sequence of bytes, and leaves the quotes of a header out."""
    coded_md5: str | None = field(default=None, compare=False)
    """MD5 of a coded body as it is sent, once it was read to its end and its ETag may be one; None: it is not coded."""

    def __post_init__(self) -> None:
        """Drop names that are the same for all versions: else they would stand for the version, before the time of change."""
        if self.etag is not None and bare(self.etag.strip()).strip() in ("", "*"):
            object.__setattr__(self, "etag", None)
        if self.last_modified is not None and not self.last_modified.strip():
            object.__setattr__(self, "last_modified", None)

    @property
    def version(self) -> str | None:
        """The name of this version: the ETag, else the time of change, spelled as the weak ETag that it is."""
        if self.etag is not None or self.last_modified is None:
            return self.etag
        return f'{BY_TIME}{self.last_modified}"'

    def has_version(self, expected: str) -> bool:
        """Return False if it is known to be another version than `expected`, which is one of `version`'s."""
        if not has_own_version(expected):
            return self.last_modified is None or expected == f'{BY_TIME}{self.last_modified}"'
        return self.etag is None or bare(self.etag) == bare(expected)

    @property
    def strong_etag(self) -> str | None:
        """The ETag, if it names one sequence of bytes (If-Match takes no other)."""
        if self.etag is None or is_weak(self.etag):
            return None
        return self.etag if self.is_of_file_system or is_strong(self.etag) else None

    def may_be(self, other: ObjectInfo) -> bool:
        """Return False if two answers are known to be of different versions of an object."""
        pairs = (self.etag, other.etag), (self.last_modified, other.last_modified), (self.size_bytes, other.size_bytes)
        return all(mine is None or theirs is None or mine == theirs for mine, theirs in pairs)

    def is_surely(self, other: ObjectInfo) -> bool:
        """Return True if two answers are known to be of one version: parts of both may be joined."""
        has_names = self.strong_etag is not None and self.size_bytes is not None
        return has_names and (self.etag, self.size_bytes) == (other.etag, other.size_bytes) and self.may_be(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeBytes:
    """A part of an object."""

    data: bytes
    info: ObjectInfo | None
    """The object that it is a part of; None for no bytes."""


class DownloadRoom(Protocol):
    """The bound of a download that grows."""

    @property
    def step_bytes(self) -> int:
        """Bytes that may be written before the next `need`."""

    def need(self, num_bytes: int) -> None:
        """Make room for so many bytes more, or raise."""


CALLS_AT_A_TIME = 16
"""Requests for versions, lists and small parts that a reader has under way; more of them wait. Arbitrary."""


class RemoteReader(Protocol):
    """Reads objects by URL; local paths and `file://` work too."""

    def with_access(self, access: Access) -> RemoteReader:
        """Return a reader with the access of a row that the user did not write."""

    def head(self, url: str) -> ObjectInfo:
        """Return size and etag of one object.

        Raises:
            ObjectNotFoundError: No object at this URL.
            StorageError: It cannot be read.
        """

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object below `prefix` (ends in '/'), at any depth; none when there is nothing."""

    def download(self, url: str, path: Path, room: DownloadRoom | None = None) -> ObjectInfo:
        """Write the whole object to the local file `path` (created or emptied), streamed, as far as `room` allows it."""

    def get_ranges(self, url: str, ranges: Sequence[tuple[int, int]], size_bytes: int | None = None) -> builtins.list[bytes]:
        """Return small parts of one object, half open, in the order asked, all of one version.

        Raises:
            ObjectChangedError: It has not the whole size `size_bytes`, if that is known.
        """


class _NoRequests:
    """A reader for who has all bytes at hand: a request would be a fault of ours."""

    def with_access(self, access: Access) -> RemoteReader:
        """Return itself."""
        del access
        return self

    def head(self, url: str) -> ObjectInfo:
        """Refuse."""
        raise AssertionError(f"{redact(url)} is asked for, and is here")

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Refuse."""
        raise AssertionError(f"{redact(prefix)} is asked for, and is here")

    def download(self, url: str, path: Path, room: DownloadRoom | None = None) -> ObjectInfo:
        """Refuse."""
        raise AssertionError(f"{redact(url)} is asked for, and not {path}, {room}")

    def get_ranges(self, url: str, ranges: Sequence[tuple[int, int]], size_bytes: int | None = None) -> builtins.list[bytes]:
        """Refuse."""
        raise AssertionError(f"{ranges} of {redact(url)} are asked for, and it is here, with {size_bytes} bytes")


NO_REQUESTS: RemoteReader = _NoRequests()
"""Refuses all requests."""


class RemoteWriter(Protocol):
    """Writes objects by URL; local paths and `file://` work too."""

    def upload(self, path: Path, url: str) -> None:
        """Store a local file as an object, whole or not at all; what is there is replaced.

        Raises:
            ConfigError: What is at this URL can only be read.
            StorageError: It cannot be written.
        """


class ObjectStream(Protocol):
    """An open answer: what the object is, then its bytes."""

    @property
    def info(self) -> ObjectInfo:
        """Size (of the whole object) and etag from the answer's header, before any byte is read."""

    @property
    def start(self) -> int:
        """Offset of the first byte: as asked for, or 0 when the server ignores ranges."""

    @property
    def num_extra_requests(self) -> int:
        """Requests so far beside the one that opened it."""

    def chunks(self) -> Iterator[memoryview]:
        """Yield the object's bytes in order, from offset `start`; may be called once."""

    def close(self) -> None:
        """Give the connection back; safe to call twice."""


class Storage(Protocol):
    """A backend. Makes one attempt an operation, raises errors of `sqlstream.errors`; `retry` decides what is tried again.

    Ranges are half open: `[start, stop)`.
    """

    def head(self, url: str) -> ObjectInfo:
        """Return size and etag of one object."""

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

    def get_range(self, url: str, start: int, stop: int, *, etag: str | None = None) -> RangeBytes:
        """Return exactly the bytes `[start, stop)`, of the version `etag` if that is given; or raise."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below `prefix` (ends in '/'), at any depth, page by page, always in the same order.

        Args:
            prefix: Where.
            after: URL of an object that an earlier listing gave: those up to it are left out.
        """


@runtime_checkable
class WritableStorage(Protocol):
    """A backend that can write, too."""

    def put(self, url: str, path: Path) -> None:
        """Store a local file as an object: readers see all of it, or what was there before."""


def writer_of(storage: Storage, url: str) -> WritableStorage:
    """Return a backend as one that writes.

    Raises:
        ConfigError: It can only read.
    """
    if not isinstance(storage, WritableStorage):
        where = redact(url)
        raise ConfigError(f"{where} can only be read: write to an object store (s3://, gs://, az://) or a directory", url=where)
    return storage


class Unpack(NamedTuple):
    """How the content of an object that is compressed as a whole is made."""

    compression: str
    """As `members/unpack.py` and `members/packed.py` name it; empty: it is not compressed, and only its hashes are compared."""
    raw_bytes: int | None = None
    """Size of the content, if an index says it."""
    hashes: tuple[tuple[str, str], ...] = ()
    """(algorithm, digest) of the object as it is stored."""
    raw_hashes: tuple[tuple[str, str], ...] = ()
    """(algorithm, digest) of the content."""

    @property
    def printed(self) -> str | None:
        """The version of what a command prints that this is made of; None: it is no command."""
        return next((digest for algorithm, digest in self.hashes if algorithm == PRINTED), None)


PRINTED = "printed"
"""The algorithm of a hash in an `Unpack` that the helper makes of what a command prints: it is the version of the object."""


class ZipRecord(NamedTuple):
    """How the content of a member of a ZIP is made of its record: local header, stored bytes, sizes behind them."""

    start: int
    """Offset of the record in the archive."""
    method: int
    """As `members/zip/member.py` names it."""
    stored_bytes: int
    raw_bytes: int
    """Size of the content."""
    crc: int
    """CRC-32 of the content."""
    name_crc: int
    """CRC-32 of the member's name in the directory."""


def check_size(url: str, size_bytes: int | None, expected_bytes: int | None) -> None:
    """Raise unless an object has the size that an index knows, as far as both are known.

    Raises:
        ObjectChangedError: It has another one.
    """
    if None not in (size_bytes, expected_bytes) and size_bytes != expected_bytes:
        raise changed(url, f"has {size_bytes} bytes, {expected_bytes} were expected")


def changed(url: str, fact: str) -> ObjectChangedError:
    """Return the error for an object that is not the one that was indexed."""
    where = redact(url)
    return ObjectChangedError(f"{where} {fact}: it changed since it was indexed; rebuild the index", url=where)


class range_of:  # noqa: N801 - reads as a statement
    """Takes an object that ends before `stop` for another one, where the index says that it is longer.

    Raises:
        ObjectChangedError: It does.
    """

    __slots__ = ("_expected_bytes", "_stop", "_url")

    def __init__(self, url: str, stop: int, expected_bytes: int | None) -> None:
        self._url, self._stop, self._expected_bytes = url, stop, expected_bytes

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        expected = self._expected_bytes
        if not isinstance(error, StorageError) or expected is None or self._stop > expected:
            return
        if error.context.get("status") == RANGE_BEYOND_END:
            raise changed(self._url, f"has fewer than {expected} bytes") from error


def check_reaches(url: str, start: int, stop: int, size_bytes: int | None) -> None:
    """Raise StorageError if an object is known to end before `stop`."""
    if size_bytes is not None and stop > size_bytes:
        where = redact(url)
        text = f"{where}: bytes {start} to {stop} were asked for, it has {size_bytes}"
        raise StorageError(text, url=where, status=RANGE_BEYOND_END)


def read_range(storage: Storage, url: str, start: int, stop: int, etag: str | None) -> RangeBytes:
    """Return the bytes `[start, stop)` out of `storage.get`; also from a server that ignores ranges.

    Raises:
        StorageError: The object ends before `stop`.
    """
    if start >= stop:
        return RangeBytes(data=b"", info=None)
    stream = storage.get(url, start=start, stop=stop, etag=etag)
    try:
        check_reaches(url, start, stop, stream.info.size_bytes)
        data, offset = bytearray(), stream.start
        for chunk in stream.chunks():
            data += chunk[max(0, start - offset) : max(0, stop - offset)]
            offset += len(chunk)
            if offset > stop:  # not at its end: a stream may look there whether the object is still the same
                break
    finally:
        stream.close()
    check_length(url, received=len(data), expected=stop - start)
    return RangeBytes(data=bytes(data), info=stream.info)


def read_ranges(
    storage: Storage, url: str, ranges: Sequence[tuple[int, int]], size_bytes: int | None = None
) -> list[memoryview]:
    """Return the bytes of each range, in the order asked, all of one version; near ones come with one request.

    Raises:
        ObjectChangedError: The object changed between two requests, or has not the size `size_bytes`, if that is known.
    """
    plan = plan_reads(ranges)
    answers: list[bytes] = []
    infos: list[ObjectInfo] = []
    """Distinct answers about the object; one may say the ETag, and another one the size."""
    for start, stop in plan.requests:
        with range_of(url, stop, size_bytes):
            answer = storage.get_range(url, start, stop, etag=infos[0].strong_etag if infos else None)
        check_size(url, answer.info.size_bytes if answer.info else None, size_bytes)
        answers.append(answer.data)
        if answer.info is None or answer.info in infos:
            continue
        if not all(info.may_be(answer.info) for info in infos):
            raise ObjectChangedError(f"{redact(url)} changed while it was read: read it again", url=redact(url))
        infos.append(answer.info)
    return plan.cut(answers)


def check_length(url: str, *, received: int, expected: int) -> None:
    """Raise if an answer held fewer or more bytes than it should."""
    if received != expected:
        where = redact(url)
        raise TransientStorageError(f"{where}: {received} bytes arrived, {expected} were promised", url=where)
