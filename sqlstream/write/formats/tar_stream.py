"""Writes the bytes of tar archives, without a clock: the same members give the same bytes.

Headers are USTAR, as WebDataset writes them, with names in UTF-8. A name that USTAR does not hold (more than 100 bytes, and no
slash that divides it into 155 and 100) and a size from 8 GiB on have a pax header before them, as Python's `tarfile` writes it.
Headers are made by hand: `tarfile` takes four times as long for one.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sqlstream.errors import EncodeError

_BLOCK = 512
_RECORD = 10240
"""The file is filled with zeros up to a multiple of this."""
_MOST_OCTAL = 8**11
_ZEROS = bytes(_RECORD)


class Sink(Protocol):
    """A binary file that is written in order."""

    def write(self, data: bytes, /) -> object:
        """Take the next bytes."""


class Placed(NamedTuple):
    """Where a member is in its archive."""

    start: int
    """Offset of its first header."""
    offset: int
    """Offset of its content."""
    size: int


class TarStream:
    """Writes one archive.

    Args:
        file: Takes the bytes. It is not closed.
        mode: Rights of the members.
        mtime: Their time of change, in seconds since 1970.
        user: Name of their owner.
        group: Name of their group.

    Example:
        >>> import io, tarfile
        >>> file = io.BytesIO()
        >>> stream = TarStream(file)
        >>> stream.add("a/1.txt", b"text")
        Placed(start=0, offset=512, size=4)
        >>> stream.close()
        >>> tarfile.open(fileobj=io.BytesIO(file.getvalue())).getnames()
        ['a/1.txt']
    """

    def __init__(self, file: Sink, *, mode: int = 0o444, mtime: int = 0, user: str = "bigdata", group: str = "bigdata") -> None:
        self._file = file
        self.num_bytes = 0
        """Bytes written."""
        self._rights = b"%07o\0" % mode + b"0000000\0" * 2
        self._time = b"%011o\0" % mtime
        self._owner = b"ustar\x0000" + user.encode()[:31].ljust(32, b"\0") + group.encode()[:31].ljust(32, b"\0") + bytes(16)

    def add(self, name: str, data: bytes) -> Placed:
        """Write a member.

        Raises:
            EncodeError: Its name cannot be written.
        """
        start = self.num_bytes
        size = len(data)
        header = self._headers(name, size)
        self._file.write(header)
        self._file.write(data)
        if rest := -size % _BLOCK:
            self._file.write(_ZEROS[:rest])
        self.num_bytes = start + len(header) + size + rest
        return Placed(start, start + len(header), size)

    def close(self) -> None:
        """Write the end of the archive; no member follows it."""
        end = 2 * _BLOCK + -(self.num_bytes + 2 * _BLOCK) % _RECORD
        self._file.write(_ZEROS[:end] if end <= _RECORD else bytes(end))
        self.num_bytes += end

    def _headers(self, name: str, size: int) -> bytes:
        """Return the header of a member, with a pax header before it where one is needed."""
        try:
            encoded = name.encode()
        except UnicodeEncodeError as error:
            raise EncodeError(f"the name {name!r} is no Unicode text: rename the key") from error
        if not encoded or b"\0" in encoded:
            raise EncodeError(f"the name {name!r} is empty or holds a zero byte: rename the key")
        prefix, last = _divide(encoded)
        if last is not None and size < _MOST_OCTAL:
            return self._header(prefix, last, size, b"0")
        records = b"" if last is not None else _pax_record(b"path", encoded)
        if size >= _MOST_OCTAL:
            records += _pax_record(b"size", b"%d" % size)
        extended = self._header(b"", b"././@PaxHeader", len(records), b"x") + records + bytes(-len(records) % _BLOCK)
        return extended + self._header(b"", encoded[:100] if last is None else last, size if size < _MOST_OCTAL else 0, b"0")

    def _header(self, prefix: bytes, name: bytes, size: int, kind: bytes) -> bytes:
        head = name.ljust(100, b"\0") + self._rights + b"%011o\0" % size + self._time
        tail = kind + bytes(100) + self._owner + prefix.ljust(155, b"\0") + bytes(12)
        total = sum(head) + sum(tail) + 8 * 0x20
        return head + b"%06o\0 " % total + tail


def _divide(name: bytes) -> tuple[bytes, bytes | None]:
    """Return a name as prefix and rest; no rest: USTAR does not hold it."""
    if len(name) <= 100:
        return b"", name
    slash = name.rfind(b"/", 0, 156)
    if slash > 0 and 0 < len(name) - slash - 1 <= 100:
        return name[:slash], name[slash + 1 :]
    return b"", None


def _pax_record(key: bytes, value: bytes) -> bytes:
    """Return a record, whose length counts its own digits."""
    rest = len(key) + len(value) + 3
    size = rest + len(str(rest))
    size = rest + len(str(size))
    return b"%d %s=%s\n" % (size, key, value)
