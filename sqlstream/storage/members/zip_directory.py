"""The members of a ZIP archive, by the directory at its end.

What `zipfile` reads is read as it reads it, and so is what it does not find (a signature in the comment, zstd). Members that no
range of the archive holds (encrypted, split, symbolic links) are errors, and those that were made to deceive (overlapping ones,
names that differ between directory and local header, sizes that no archive of that size can hold).
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sqlstream.errors import DamagedShardError, SourceError
from sqlstream.storage.members.source import ByteRange
from sqlstream.storage.members.zip import LOCAL_BYTES, ZipMember, ZipMethod, decoded_name, extra_fields, method_name

_END = struct.Struct("<4s4H2IH")
"""Signature, this disk, the directory's, entries here, entries, bytes and offset of the directory, bytes of the comment."""
_END64 = struct.Struct("<4s12x2I4Q")
"""Signature, disks and entries as above, bytes and offset of the directory."""
_LOCATOR = struct.Struct("<4s4xQI")
"""Signature, offset of the zip64 end record, number of disks."""
_LENGTHS = struct.Struct("<3H")
_ENTRY = np.dtype(
    [
        *(("signature", "<u4"), ("made_by", "<u2"), ("needed", "<u2"), ("flags", "<u2"), ("method", "<u2"), ("when", "<u4")),
        *(("crc", "<u4"), ("stored_size", "<u4"), ("size", "<u4"), ("name", "<u2"), ("extra", "<u2"), ("comment", "<u2")),
        *(("disk", "<u2"), ("internal", "<u2"), ("external", "<u4"), ("start", "<u4")),
    ]
)
_LENGTHS_AT, _ENTRY_BYTES = 28, 46
_TAIL_BYTES = _END.size + 0xFFFF + _LOCATOR.size + _END64.size
"""An end record, the longest comment, and what zip64 has before it."""
_LARGEST_EXTRA = 0xFFFF + 24
"""Most bytes of a record beside header, name and stored bytes: extra fields, and sizes behind the content."""
_ONES16, _ONES32 = 0xFFFF, 0xFFFFFFFF
_SIGNATURE = int.from_bytes(b"PK\1\2", "little")
_ENCRYPTED = 0x2041
"""Flags: encrypted in one of three manners."""
_LINK = 0o12
"""The kind of file in the highest bits of `external`, where Unix keeps it."""
_ZIP64 = 1
_MAYBE_UNICODE_PATH = re.compile(rb"up..\x01", re.DOTALL)
"""Where a field 0x7075 of version 1 may begin: few names have these bytes by accident, and those are looked at."""
_DEFLATE_RATIO = 1032
"""The most bytes that deflate makes of one."""
_LEAST_LIMIT = 1 << 30
"""Arbitrary: an archive may hold so much, however small it is."""

_ROWS = 1 << 14
"""Arbitrary: members that are made at a time."""
_NEW_MEMBER = partial(tuple.__new__, ZipMember)  # without the checks of a call, which take as long as the rest

_Ints = npt.NDArray[np.int64]
"""Whole numbers; those of members have the bytes that they need."""
_Bools = npt.NDArray[np.bool_]

_IS_READ = np.zeros(1 << 16, bool)
_IS_READ[list(ZipMethod)] = True


def read_directory(source: ByteRange, name: str, *, largest_bytes: int | None = None) -> ZipMembers:
    """Read and check a directory, and return its files in its order; of several with one name the last.

    One read brings the end of the archive, and a second one the directory, where that lies before. Where something stands
    before the first member, 4 bytes are read more.

    Args:
        source: The archive.
        name: The URL of the archive for messages, without credentials.
        largest_bytes: Most bytes of all content; None: as many as deflate can make of the archive, at least 1 GiB.

    Raises:
        DamagedShardError: There is no directory, or it is damaged.
        SourceError: A member is one that cannot or must not be read.
    """
    limit = max(_LEAST_LIMIT, _DEFLATE_RATIO * source.size_bytes) if largest_bytes is None else largest_bytes
    directory = _Directory(source, name)
    columns = directory.columns(limit)
    return ZipMembers(directory, columns, directory.is_file())


class ZipColumns(NamedTuple):
    """What a directory says of some files beside their names, as columns; the fields are those of `ZipMember`: [files] each."""

    start: _Ints
    stop: _Ints
    method: _Ints
    stored_size: _Ints
    size: _Ints
    crc: _Ints


class ZipMembers:
    """The files of an archive, made as they are taken, and anew each time: a list of a million takes ten times the memory.

    Args:
        directory: Of the archive.
        columns: What it says of each entry, behind the name.
        is_file: Which entries are members.
    """

    def __init__(self, directory: _Directory, columns: list[_Ints], is_file: _Bools) -> None:
        self._directory, self._columns, self._is_file = directory, columns, is_file

    def __iter__(self) -> Iterator[ZipMember]:
        """Yield them."""
        for start in range(0, len(self._is_file), _ROWS):
            some = np.flatnonzero(self._is_file[start : start + _ROWS]) + start  # [files]
            names = self._directory.names(start, start + _ROWS)
            facts = (column[some].tolist() for column in self._columns)
            yield from map(_NEW_MEMBER, zip((names[row - start] for row in some.tolist()), *facts, strict=True))

    def names(self) -> Iterator[tuple[int, str]]:
        """Yield the entry of each of them, by its number in the directory, and its name."""
        for start in range(0, len(self._is_file), _ROWS):
            names = self._directory.names(start, start + _ROWS)
            for row in np.flatnonzero(self._is_file[start : start + _ROWS]).tolist():
                yield start + row, names[row]

    def columns(self, entries: npt.NDArray[Any]) -> ZipColumns:
        """Return what is said of some entries."""
        return ZipColumns(*(column[entries] for column in self._columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a directory lies."""

    start: int
    stop: int
    shift: int
    """What offsets in it lack, where something stands before the archive."""
    num_entries: int
    is_zip64: bool


class _Directory:
    """The directory of one archive.

    Args:
        source: The archive.
        name: For messages.
    """

    def __init__(self, source: ByteRange, name: str) -> None:
        self._source = source
        self._name = name
        self._size = source.size_bytes
        self._tail_start = max(0, self._size - _TAIL_BYTES)
        self._tail = self._read(self._tail_start, self._size)
        self._place = place = self._find()
        self._data = self._tail[max(0, place.start - self._tail_start) : place.stop - self._tail_start]
        if place.start < self._tail_start:
            self._data = self._read(place.start, min(self._tail_start, place.stop)) + self._data
        self._at = self._offsets()  # [members], in the directory
        self._view = np.ndarray((max(0, len(self._data) - _ENTRY_BYTES + 1),), _ENTRY, self._data, 0, (1,))
        """An entry at each byte of the directory: of a column only the field is copied."""
        if (self._column("signature") != _SIGNATURE).any():
            raise self._damage("an entry of its directory has no signature")
        self._name_bytes = self._column("name")
        maybe = [match.start() for match in _MAYBE_UNICODE_PATH.finditer(self._data)]
        self._maybe_unicode = np.unique(np.searchsorted(self._at, maybe, "right") - 1)
        """Rows that may have a Unicode path."""

    def _column(self, field: str) -> npt.NDArray[Any]:
        """Return a field of all entries."""
        found: npt.NDArray[Any] = self._view[field][self._at]
        return found

    def columns(self, largest_bytes: int) -> list[_Ints]:
        """Return the facts of all entries as `ZipMember` has them behind the name."""
        size, stored, start, disk = (self._column(field).astype(np.int64) for field in ("size", "stored_size", "start", "disk"))
        is_large = (size == _ONES32) | (stored == _ONES32) | (start == _ONES32) | (disk == _ONES16)
        for row in np.flatnonzero(is_large).tolist():
            size[row], stored[row], start[row], disk[row] = self._zip64(row)
        start += self._place.shift
        method = self._column("method")
        self._check(method, size, stored, disk)
        stop = self._stops(start, stored + self._name_bytes + LOCAL_BYTES)
        if (total := size.sum(dtype=np.float64)) > largest_bytes:
            raise SourceError(
                f"{self._name} would hold {total:.0f} bytes in {self._size}, and {largest_bytes} are allowed: it is a bomb, or "
                "damaged"
            )
        return [_narrow(start), _narrow(stop), method, _narrow(stored), _narrow(size), self._column("crc")]

    def is_file(self) -> _Bools:
        """Return which rows are files, of several with one name the last."""
        found = ~self._is_folder()
        hashes = np.empty(len(found), np.int64)  # [rows]
        for start in range(0, len(found), _ROWS):
            hashes[start : start + _ROWS] = list(map(hash, self.names(start, start + _ROWS)))
        ordered = np.sort(hashes)  # [rows]
        if (twice := ordered[1:][ordered[1:] == ordered[:-1]]).size:
            last: dict[str, int] = {}
            for row in np.flatnonzero(np.isin(hashes, twice)).tolist():
                (name,) = self.names(row, row + 1)
                if name in last:
                    found[last[name]] = False
                last[name] = row
        return found

    def names(self, start: int, stop: int) -> list[str]:
        """Return the names of some rows; of ASCII names all at once."""
        places = self._at[start:stop] + _ENTRY_BYTES  # [rows]
        ends = places + self._name_bytes[start:stop]  # [rows]
        raw = [self._data[place:end] for place, end in zip(places.tolist(), ends.tolist(), strict=True)]
        joined = b"\0".join(raw)
        if joined.count(b"\0") >= max(1, len(raw)):
            raise self._damage("a name has a NUL in it")
        if joined.isascii():
            names = joined.decode("ascii").split("\0")[: len(raw)]
        else:
            flags = self._view["flags"][self._at[start:stop]].tolist()
            names = [decoded_name(name, of_row, b"") for name, of_row in zip(raw, flags, strict=True)]
        odd = self._maybe_unicode
        for row in odd[(odd >= start) & (odd < stop)].tolist():
            names[row - start] = decoded_name(raw[row - start], int(self._view["flags"][self._at[row]]), self._extra(row))
        return names

    def _is_folder(self) -> _Bools:
        if not len(self._at):
            return np.zeros(0, bool)
        last = np.frombuffer(self._data, np.uint8)[self._at + (_ENTRY_BYTES - 1) + self._name_bytes]
        found: _Bools = (last == ord("/")) & (self._name_bytes > 0)
        return found

    def _find(self) -> _Place:
        """Return the place of the directory, by the end record that reaches to the end, or else by the last that fits."""
        places = [match.start() for match in re.finditer(b"PK\5\6", self._tail)][::-1]
        places = [place for place in places if place + _END.size <= len(self._tail)]
        exact = [place for place in places if place + _END.size + self._end(place)[7] == len(self._tail)]
        for place in (*exact, *places):
            if found := self._directory_before(place):
                return found
        if exact and any(self._end(exact[0])[1:3]):
            raise SourceError(f"{self._name} is one of the parts of a split archive: join them with zip -s 0")
        raise self._damage("it has no end record that fits; it is cut off, or no ZIP archive")

    def _end(self, place: int) -> tuple[int, ...]:
        return tuple(_END.unpack_from(self._tail, place))

    def _directory_before(self, place: int) -> _Place | None:
        """Return the directory that the end record at this place of the tail names, if there can be one."""
        _, *disks, here, count, size, offset, _ = self._end(place)
        stop, is_zip64, num_disks = place, False, 1
        if place >= _LOCATOR.size and self._tail.startswith(b"PK\6\7", place - _LOCATOR.size):
            _, end64, num_disks = _LOCATOR.unpack_from(self._tail, place - _LOCATOR.size)
            stop = place - _LOCATOR.size - _END64.size
            if stop < 0 or not self._tail.startswith(b"PK\6\6", stop):
                stop = end64 - self._tail_start  # it has fields of its own behind it
            if not 0 <= stop <= place - _LOCATOR.size - _END64.size or not self._tail.startswith(b"PK\6\6", stop):
                return None
            _, *disks, here, count, size, offset = _END64.unpack_from(self._tail, stop)
            is_zip64 = True
        stop += self._tail_start
        start = stop - size
        is_there = start < self._tail_start or not size or self._tail.startswith(b"PK\1\2", start - self._tail_start)
        if any(disks) or here != count or num_disks > 1 or start < offset or not is_there:
            return None
        return _Place(start=start, stop=stop, shift=start - offset, num_entries=count, is_zip64=is_zip64)

    def _offsets(self) -> _Ints:
        """Return where each entry begins in the directory."""
        lengths, data, at, found = _LENGTHS.unpack_from, self._data, 0, array("q")
        try:
            while at < len(data):
                found.append(at)
                name, extra, comment = lengths(data, at + _LENGTHS_AT)
                at += _ENTRY_BYTES + name + extra + comment
        except struct.error:
            at = -1
        expected = self._place.num_entries
        is_count = len(found) == expected or (not self._place.is_zip64 and len(found) & _ONES16 == expected)
        if at != len(data) or not is_count:
            raise self._damage(f"its directory has {len(found)} entries in {len(data)} bytes, the end record says {expected}")
        return np.frombuffer(found, np.int64) if found else np.zeros(0, np.int64)  # [members]

    def _check(self, method: _Ints, size: _Ints, stored: _Ints, disk: _Ints) -> None:
        """Raise if a member is one that is not read."""
        is_folder, cure = self._is_folder(), "write the archive again without such members"
        for is_bad, reason in (
            (disk != 0, "in another part of a split archive"),
            (self._column("flags") & _ENCRYPTED != 0, "encrypted"),
            (~_IS_READ[method] & ~is_folder, "compressed with a method that is not read"),
            (self._column("external") >> 28 == _LINK, "a symbolic link"),
            (is_folder & (size != 0), "a directory with content"),
            ((method == ZipMethod.STORED) & (size != stored), "stored as it is, with two sizes"),
        ):
            if (rows := np.flatnonzero(is_bad)).size:
                row = int(rows[0])
                more = f" ({method_name(int(method[row]))})" if "method" in reason else ""
                raise SourceError(f"{self._name}: {self._shown(row)} is {reason}{more}: {cure}")

    def _stops(self, start: _Ints, num_bytes: _Ints) -> _Ints:
        """Return where the record of each member ends at the latest: at the next header, or at the directory.

        Args:
            start: Offsets of local headers.
            num_bytes: What each has at least: header, name, stored bytes.
        """
        if (start[1:] >= start[:-1]).all():  # nearly always: it takes a fifth of the memory
            first, stop = int(start[0]) if len(start) else self._place.start, np.append(start[1:], self._place.start)
        else:
            order = np.argsort(start, kind="stable")
            first, stop = int(start[order[0]]), np.empty_like(start)
            stop[order] = np.append(start[order[1:]], self._place.start)
        if (rows := np.flatnonzero(stop - start < num_bytes)).size:
            row = int(rows[0])
            raise self._damage(f"{self._shown(row)} at byte {start[row]} overlaps what follows at byte {stop[row]}")
        if first and (self._tail if self._tail_start == 0 else self._read(0, 4)).startswith(b"PK\3\4"):
            raise self._damage(
                f"it begins with a member, and the directory lists none before byte {first}; it is cut off, or two archives "
                "are joined"
            )
        latest: _Ints = np.minimum(stop, start + num_bytes + _LARGEST_EXTRA)
        return latest

    def _zip64(self, row: int) -> tuple[int, int, int, int]:
        """Return sizes, offset and disk of a member; those whose field is all ones stand in an extra field, in this order."""
        entry = self._view[self._at[row]]
        field = next((data for kind, data in extra_fields(self._extra(row)) if kind == _ZIP64), b"")
        found, at = [], 0
        for key, ones in (("size", _ONES32), ("stored_size", _ONES32), ("start", _ONES32), ("disk", _ONES16)):
            value, width = int(entry[key]), 4 if key == "disk" else 8
            if value == ones:
                if at + width > len(field):
                    raise self._damage(f"{self._shown(row)} has no zip64 field for its {key}")
                value = int.from_bytes(field[at : at + width], "little")
                at += width
            found.append(value)
        size, stored, start, disk = found
        if max(stored, start) > self._size or size >= 1 << 62:
            raise self._damage(f"{self._shown(row)} has {stored} bytes at byte {start}, and a size of {size}")
        return size, stored, start, disk

    def _extra(self, row: int) -> bytes:
        start = int(self._at[row]) + _ENTRY_BYTES + int(self._name_bytes[row])
        return self._data[start : start + int(self._view["extra"][self._at[row]])]

    def _read(self, start: int, stop: int) -> bytes:
        data = self._source.read_at(start, stop - start)
        if len(data) != stop - start:
            raise self._damage(f"it ends at byte {start + len(data)}, and its size was {self._size}")
        return data

    def _shown(self, row: int) -> str:
        start = int(self._at[row]) + _ENTRY_BYTES
        raw = self._data[start : start + int(self._name_bytes[row])]
        return repr(raw[:200].decode(errors="backslashreplace"))

    def _damage(self, reason: str) -> DamagedShardError:
        return DamagedShardError(
            f"{self._name} is damaged: {reason}. Write the archive again, or leave it out of src",
            size_bytes=self._size,
        )


def _narrow(column: _Ints) -> _Ints:
    """Return a column in half of the bytes, if its numbers have so few."""
    return column.astype(np.uint32) if not len(column) or column.max() <= _ONES32 else column
