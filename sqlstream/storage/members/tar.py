"""The members of a TAR archive, by its headers alone.

Old V7, ustar, pax and GNU archives are read as Python's `tarfile` reads them, with the same offsets, but for what it passes
over in silence: a damaged header, an archive that ends early, a second archive behind the end blocks are errors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple
from zlib import adler32

from sqlstream.errors import DamagedShardError, SourceError
from sqlstream.storage.members.source import ByteRange

_LOG = logging.getLogger(__name__)

READ_AHEAD_BYTES = 8192
"""What a read takes from a header on: the headers of small neighbours, and small text members, come with it. 512 bytes double
the requests of a sample with one large member; 64 KiB only cost bytes."""

_BLOCK = 512
END_BYTES = 2 * _BLOCK
"""End blocks of an archive, at least."""
_PADDING = 10240
"""Writers fill the last record with zeros up to a multiple of this: so much of an end is read with the last headers."""
_TAIL_STEP = 1 << 20
"""Arbitrary: bytes of one read where the end blocks are far from the end of the file."""
_LARGEST_RECORDS = 1 << 20
"""Most bytes of one extended header, as Go's archive/tar has it; names and attributes are far smaller."""
_MAX_DIGITS = 20
"""Of a number in a pax record: 64 bits have so many."""

_FILES = b"0\x007"
_NO_DATA = b"123456\0"
"""Links, devices, directories, FIFOs (and NUL, that of old directories): nothing follows their header, whatever its size field
says."""
_PAX, _PAX_SOLARIS, _PAX_GLOBAL, _LONG_NAME, _LONG_LINK, _SPARSE = b"xXgLKS"
_EXTENDED = b"xXgLK"
_NUL = 0


class TarMember(NamedTuple):
    """A regular file in an archive."""

    name: str
    """As written, with bytes that are not UTF-8 escaped (`\\xe9.txt`), since no SQLite text holds them."""
    start: int
    """Offset of its first header, extended ones included."""
    offset: int
    """Offset of its content."""
    size: int
    """Bytes of its content."""


def read_members(source: ByteRange, name: str, *, read_ahead_bytes: int = READ_AHEAD_BYTES) -> Iterator[TarMember]:
    """Yield the regular files of an archive, in its order.

    Links, directories, devices and volume labels are passed over. An archive that ends where a header could be, without end
    blocks, is logged: it may have been cut off just there.

    Args:
        source: The archive, not compressed.
        name: The URL of the archive for messages, without credentials.
        read_ahead_bytes: Bytes of one read. Members that are larger cost a read each.

    Raises:
        DamagedShardError: A header is damaged, the archive ends early, or another one follows its end. The members before it
            have been yielded, and are good.
        SourceError: A member is sparse.
    """
    return _Walk(source, name, max(read_ahead_bytes, _BLOCK)).members()


@dataclass(slots=True)
class _Pending:
    """What extended headers say of the member behind them; the first of two that disagree holds, as in `tarfile`."""

    start: int
    name: str | None = None
    size: int | None = None
    is_sparse: bool = False


class _Walk:
    """One pass over the headers.

    Args:
        source: The archive.
        name: For messages.
        read_ahead: Bytes of one read.
    """

    def __init__(self, source: ByteRange, name: str, read_ahead: int) -> None:
        self._source = source
        self._size = source.size_bytes
        self._name = name
        self._read_ahead = read_ahead
        self._start, self._data = 0, b""  # the last read
        self._last: TarMember | None = None

    def members(self) -> Iterator[TarMember]:
        """Yield the files."""
        if not self._size:
            raise self._damage(0, "it has no bytes")
        start, data = self._start, self._data
        place, pending = 0, None
        while place < self._size:
            at = place - start
            if at + _BLOCK > len(data):
                self._read(place, _BLOCK, "a header")
                start, data, at = self._start, self._data, 0
            if not is_sound(data, at):
                self._check_end(place)
                break
            kind, size, offset = data[at + 156], number(data[at + 124 : at + 136]), place + _BLOCK
            if size < 0:
                raise self._damage(place, f"its size is {data[at + 124 : at + 136]!r}")
            if kind in _EXTENDED:
                pending = self._extend(pending, kind, place, size)
                start, data = self._start, self._data
                place = offset + (size + 511 & -512)
                continue
            end = data.find(b"\0", at, at + 100)
            raw = data[at : at + 100 if end < 0 else end]
            is_file = kind in _FILES and (kind != _NUL or raw[-1:] != b"/")
            if data[at + 345] and kind != _SPARSE:
                raw = data[at + 345 : at + 500].partition(b"\0")[0] + b"/" + raw
            member = TarMember(decoded(raw), place, offset, size)
            if pending is not None or kind == _SPARSE:
                member = self._resolved(member, kind, pending)
                pending, size = None, member.size
            place = offset + (size + 511 & -512) if is_file or kind not in _NO_DATA else offset
            if place > self._size:
                reason = f"{shown(member.name)} would end at byte {place}, and the archive at {self._size}"
                raise self._damage(member.start, reason, follows=member.name)
            if is_file:
                self._last = member
                yield member
        else:
            _LOG.warning("%s ends at byte %d without end blocks: its writer left them out, or it is cut off", self._name, place)
        if pending is not None:
            raise self._damage(pending.start, "no member follows an extended header")

    def _read(self, place: int, num_bytes: int, what: str) -> None:
        """Bring so many bytes from a place on, and what a read takes beyond; an end that is near comes whole."""
        rest = self._size - place
        if num_bytes > rest:
            raise self._damage(place, f"{what} would end at byte {place + num_bytes}, and the archive at {self._size}")
        wanted = max(num_bytes, self._read_ahead)
        wanted = rest if rest <= wanted + _PADDING else wanted
        self._start, self._data = place, self._bytes(place, wanted)

    def _bytes(self, place: int, num_bytes: int) -> bytes:
        data = self._source.read_at(place, num_bytes)
        if len(data) != num_bytes:
            raise self._damage(place + len(data), f"it ends there, and its size was {self._size}")
        return data

    def _extend(self, pending: _Pending | None, kind: int, place: int, size: int) -> _Pending | None:
        """Return what is known of the next member with one more extended header."""
        if size > _LARGEST_RECORDS:
            raise self._damage(place, f"an extended header of {size} bytes, more than {_LARGEST_RECORDS}")
        offset = place + _BLOCK
        if offset + (size + 511 & -512) > self._start + len(self._data):
            self._read(offset, size + 511 & -512, "an extended header")
        at = offset - self._start
        data = self._data[at : at + size]
        if kind == _PAX_GLOBAL:
            records = self._records(data, place)
            if changing := [key for key in records if key in ("path", "size") or key.startswith("GNU.sparse.")]:
                raise self._damage(place, f"a global header sets {', '.join(changing)} of all members")
            return pending
        found = _Pending(place) if pending is None else pending
        if kind == _LONG_NAME and found.name is None:
            found.name = decoded(data.partition(b"\0")[0])
        elif kind in (_PAX, _PAX_SOLARIS):
            self._apply(found, self._records(data, place), place)
        return found

    def _apply(self, pending: _Pending, records: dict[str, bytes], place: int) -> None:
        path, size = records.get("GNU.sparse.name", records.get("path", b"")), records.get("size", b"")
        if b"\0" in path:
            raise self._damage(place, "a name with a NUL in it")
        if path and pending.name is None:
            pending.name = decoded(path.rstrip(b"/"))
        if size and not (size.isdigit() and len(size) <= _MAX_DIGITS):
            raise self._damage(place, f"its size is {size[:_BLOCK]!r}")
        if size and pending.size is None:
            pending.size = int(size)
        pending.is_sparse = pending.is_sparse or any(key.startswith("GNU.sparse.") for key in records)

    def _records(self, data: bytes, place: int) -> dict[str, bytes]:
        """Return the records of a pax header: a length that counts itself, a space, `key=value`, the end of the line."""
        found, at = {}, 0
        while at < len(data):
            space = data.find(b" ", at, at + _MAX_DIGITS)
            digits = data[at:space] if space > 0 else b""
            stop = at + int(digits) if digits.isdigit() else 0
            key, equals, value = data[space + 1 : stop - 1].partition(b"=")
            if stop <= space + 1 or stop > len(data) or data[stop - 1] != 0x0A or not equals:
                raise self._damage(place, f"a pax record begins with {data[at : at + 20]!r}")
            found[decoded(key)] = value
            at = stop
        return found

    def _resolved(self, member: TarMember, kind: int, pending: _Pending | None) -> TarMember:
        """Return a member as the extended headers before it have it."""
        found = pending or _Pending(member.start)
        name, size = member.name if found.name is None else found.name, member.size if found.size is None else found.size
        if kind == _SPARSE or found.is_sparse:
            raise SourceError(
                f"{self._name} has the sparse file {shown(name)} at byte {found.start}, whose stored bytes are not its "
                "content: write the archive without --sparse",
                offset=found.start,
            )
        return TarMember(name, found.start, member.offset, size)

    def _check_end(self, place: int) -> None:
        """Raise if there are no end blocks at a place, or members follow them; garbage is passed over, as in `tarfile`."""
        block = self._data[place - self._start :][:_BLOCK]
        if block.strip(b"\0"):
            raise self._damage(place, self._reason(block))
        first = -1
        for offset, data in self._tail(place):
            if first < 0 and (rest := data.lstrip(b"\0")):
                first = offset + len(data) - len(rest)
                if first < place + END_BYTES:
                    raise self._damage(place, "a block of zeros is followed by data")
                if first + _BLOCK <= self._size and is_sound(self._bytes(first, _BLOCK), 0):
                    raise self._concatenated(place, first)
            if first >= 0:
                for at in range(0, len(data) - _BLOCK + 1, _BLOCK):
                    if is_sound(data, at):
                        raise self._concatenated(place, offset + at)

    def _tail(self, place: int) -> Iterator[tuple[int, bytes]]:
        """Yield whole blocks from a place on: those that are here, then the others."""
        here = self._data[place - self._start :]
        stop = place + len(here) // _BLOCK * _BLOCK if place + len(here) < self._size else self._size
        yield place, here[: stop - place]
        while stop < self._size:
            num_bytes = min(_TAIL_STEP, self._size - stop)
            yield stop, self._bytes(stop, num_bytes)
            stop += num_bytes

    def _concatenated(self, place: int, second: int) -> DamagedShardError:
        reason = f"another archive follows the end blocks, at byte {second} (concatenated archives)"
        return self._damage(place, reason, follows="")

    def _reason(self, block: bytes) -> str:
        if self._last is None and not block.startswith(b"\0") and block[257:262] != b"ustar":
            return f"no TAR header: it begins with {block[:8]!r}"
        return "its checksum is wrong"

    def _damage(self, place: int, reason: str, *, follows: str | None = None) -> DamagedShardError:
        last = "there is no good member before it"
        if self._last is not None:
            last = f"the last good member is {shown(self._last.name)}"
        return DamagedShardError(
            f"{self._name} is damaged at byte {place}: {reason}; {last}. Write the shard again, or leave it out of src",
            offset=place,
            follows=follows,
        )


def is_sound(data: bytes, at: int) -> bool:
    """Return True if the 512 bytes at an offset are a header whose checksum holds.

    The low half of an Adler-32 is a sum of bytes, modulo 65521, plus one: pieces that are too short to pass the modulus are
    summed in C.
    """
    total = (
        (adler32(data[at : at + 148]) & 0xFFFF)
        + (adler32(data[at + 156 : at + 404]) & 0xFFFF)
        + (adler32(data[at + 404 : at + 512]) & 0xFFFF)
        + 253  # the field itself counts as 8 spaces; each of the 3 sums is one too large
    )
    field = data[at + 148 : at + 156]
    if field == b"%06o\0 " % total:
        return True
    written = number(field)
    if written == total:
        return written != 256  # of a block of zeros whose field was written
    rest = data[at : at + 148] + data[at + 156 : at + 512]
    return written >= 0 and written == total - 256 * sum(byte > 127 for byte in rest)  # old writers summed signed bytes


def number(field: bytes) -> int:
    """Return a number of a header: octal text, or base 256 where its first bit is set; -1: it is neither, or negative."""
    digits = field[:-1]
    if not (digits.isdigit() and field[-1] in b"\0 "):  # nearly always it is
        if field[0] & 0x80:
            return -1 if field[0] == 0xFF else int.from_bytes(field, "big") & (1 << 8 * len(field) - 1) - 1
        digits = field.partition(b"\0")[0].strip(b" ") or b"0"
        if not digits.isdigit():
            return -1
    try:
        return int(digits, 8)
    except ValueError:
        return -1


def decoded(raw: bytes) -> str:
    """Return a name as text, with bytes that are not UTF-8 escaped."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode(errors="backslashreplace")


def shown(name: str) -> str:
    """Return a name for messages, cut where it is long."""
    return repr(name if len(name) <= 200 else f"{name[:200]}…")
