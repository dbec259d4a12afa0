"""The members of one archive that rows name, by the archive's own table."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from sqlstream.errors import SourceError
from sqlstream.index.sources.base.access import named_errors
from sqlstream.index.sources.base.byte_source import RemoteBytes
from sqlstream.index.sources.shards.reading import opened
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader
from sqlstream.storage.members import tar
from sqlstream.storage.members.source import ByteRange
from sqlstream.storage.members.unpack import MAGIC_BYTES, compression_of
from sqlstream.storage.members.zip.directory import read_directory

Found = tuple[int | None, ...]
"""Row, number of the column, checksum of the value, start and stop, and of a record of a ZIP what `ZipRecord` has more."""
_ENTRY_BYTES = 46 + 28
"""Of an entry in the directory of a ZIP, without its name: header, and the extra fields of Info-ZIP."""
_END_BYTES = 66 << 10
"""What `read_directory` asks for first: an end record with the longest comment."""
_LARGEST_TAIL = 8 << 20
_NO_RECORD = (None,) * 5


class Wanted(NamedTuple):
    """A value that names a member."""

    row: int
    number: int
    """Of its column."""
    name: str
    """Of the member; empty of a part by its place."""
    written: int
    start: int
    stop: int
    """Its place; 0 of a member by its name."""


def members_in(kind: str, file: SourceFile, wanted: Sequence[Wanted], remote: RemoteReader) -> list[Found]:
    """Return the members of an archive that rows name.

    Args:
        kind: `zip`, `tar`, or empty: parts have places.
        file: The archive.
        wanted: What rows name.
        remote: Reads what is not local.

    Raises:
        SourceError: It has no such member, or is damaged; `StorageError` when it cannot be read.
    """
    if kind == "zip":
        return list(_of_zip(file, wanted, remote))
    return list(_of_tar(file, wanted, remote) if kind == "tar" else _of_places(file, wanted))


def _of_zip(file: SourceFile, wanted: Sequence[Wanted], remote: RemoteReader) -> Iterator[Found]:
    name, num_bytes = urls.redact(file.url), sum(_ENTRY_BYTES + len(some.name) for some in wanted)
    with named_errors(file.url), opened(file, remote) as source:
        tail = _END_BYTES + num_bytes
        reading = _Tail(RemoteBytes(file, remote), tail) if urls.is_remote(file.url) else source
        members = _Members(wanted, read_directory(reading, name))
    for some in wanted:
        member = members.find(some, name)
        facts = (member.method, member.stored_size, member.size, member.crc, zlib.crc32(member.name.encode()))
        yield (some.row, some.number, some.written, member.start, member.stop, *facts)


def _of_tar(file: SourceFile, wanted: Sequence[Wanted], remote: RemoteReader) -> Iterator[Found]:
    name = urls.redact(file.url)
    with named_errors(file.url), opened(file, remote) as source:
        if compression_of(source.read_at(0, MAGIC_BYTES)) is not None:
            raise SourceError(
                f"{name} is compressed as a whole, and its members cannot be read one by one: give it as src, or decompress it"
            )
        members = _Members(wanted, tar.read_members(source, name))
    for some in wanted:
        member = members.find(some, name)
        yield (some.row, some.number, some.written, member.offset, member.offset + member.size, *_NO_RECORD)


class _Tail:
    """A remote file that is read at its end: what comes before the first bytes that are asked for is kept.

    Args:
        source: The file.
        num_bytes: What the first read brings, from the end of the file.
    """

    def __init__(self, source: ByteRange, num_bytes: int) -> None:
        self._source, self.size_bytes = source, source.size_bytes
        self._start = max(0, source.size_bytes - min(num_bytes, _LARGEST_TAIL))
        self._tail: bytes | None = None

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Return a part of it."""
        if offset < self._start:
            return self._source.read_at(offset, num_bytes)
        if self._tail is None:
            self._tail = self._source.read_at(self._start, self.size_bytes - self._start)
        return self._tail[offset - self._start :][:num_bytes]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Member = TypeVar("_Member", bound=_Named)


class _Members(Generic[_Member]):
    """The members of an archive that rows name; of several with one name the last.

    Args:
        wanted: What rows name.
        members: All members.
    """

    def __init__(self, wanted: Iterable[Wanted], members: Iterable[_Member]) -> None:
        names = {name for some in wanted for name in _spellings(some.name)}
        self._found: dict[str, _Member] = {}
        self._num_members = 0
        for member in members:
            self._num_members += 1
            if member.name in names:
                self._found[member.name] = member

    def find(self, wanted: Wanted, name: str) -> _Member:
        """Return the member that a row names.

        Raises:
            SourceError: There is none.
        """
        for spelling in _spellings(wanted.name):
            if (member := self._found.get(spelling)) is not None:
                return member
        hint = ", in which * and ? are no wildcards" if set("*?") & set(wanted.name) else ""
        raise SourceError(
            f"row {wanted.row} names {wanted.name!r} in {name}, which has {self._num_members} files and none of that "
            f"name{hint}: mend the row, or leave it out with where"
        )


def _spellings(name: str) -> tuple[str, ...]:
    """Return how an archive may have the name of a member."""
    return (name, f"./{name}") if not name.startswith("/") else (name, name.lstrip("/"), f"./{name.lstrip('/')}")


def _of_places(file: SourceFile, wanted: Iterable[Wanted]) -> Iterator[Found]:
    for some in wanted:
        if some.stop > (file.size_bytes or 0):
            raise SourceError(
                f"row {some.row} names bytes {some.start} to {some.stop} of {urls.redact(file.url)}, which has "
                f"{file.size_bytes}: mend the row, or leave it out with where"
            )
        yield (some.row, some.number, some.written, some.start, some.stop, *_NO_RECORD)
