"""Some entries of the directory of a ZIP archive that follow each other, as columns."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sqlstream.errors import DamagedShardError, SourceError
from sqlstream.storage.members.zip.member import ZipMethod, decoded_name, extra_fields, method_name

_ENTRY = np.dtype(
    [
        *(("signature", "<u4"), ("made_by", "<u2"), ("needed", "<u2"), ("flags", "<u2"), ("method", "<u2"), ("when", "<u4")),
        *(("crc", "<u4"), ("stored_size", "<u4"), ("size", "<u4"), ("name", "<u2"), ("extra", "<u2"), ("comment", "<u2")),
        *(("disk", "<u2"), ("internal", "<u2"), ("external", "<u4"), ("start", "<u4")),
    ]
)
ENTRY_BYTES = 46
"""Bytes of an entry before its name."""
_SIGNATURE = int.from_bytes(b"PK\1\2", "little")
_ONES16, _ONES32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED = 0x2041
"""Flags: encrypted in one of three manners."""
_LINK = 0o12
"""The kind of file in the highest bits of `external`, where Unix keeps it."""
_ZIP64 = 1
_MAYBE_UNICODE_PATH = re.compile(rb"up..\x01", re.DOTALL)
"""Where a field 0x7075 of version 1 may begin: few names have these bytes by accident, and those are looked at."""

Ints = npt.NDArray[np.int64]
"""Whole numbers."""
Bools = npt.NDArray[np.bool_]

_IS_READ = np.zeros(1 << 16, bool)
_IS_READ[list(ZipMethod)] = True


class ZipEntries:
    """Some entries.

    Args:
        data: Their bytes.
        at: Where each begins in these: [n].
        name: The archive, for messages.
        damage: Returns the error of an archive that is damaged for a reason.

    Raises:
        DamagedShardError: One has no signature.
    """

    def __init__(self, data: bytes, at: Ints, name: str, damage: Callable[[str], DamagedShardError]) -> None:
        self._data, self._at, self._archive, self._damage = data, at, name, damage
        self._view = np.ndarray((max(0, len(data) - ENTRY_BYTES + 1),), _ENTRY, data, 0, (1,))
        """An entry at each byte: of a column only the field is copied."""
        if (self.column("signature") != _SIGNATURE).any():
            raise damage("an entry of its directory has no signature")
        self.name_bytes = self.column("name")
        """Bytes of each name: [n]."""

    def __len__(self) -> int:
        return len(self._at)

    def column(self, field: str) -> npt.NDArray[Any]:
        """Return a field of all entries."""
        found: npt.NDArray[Any] = self._view[field][self._at]
        return found

    def facts(self, archive_bytes: int) -> tuple[Ints, Ints, Ints]:
        """Return where the record of each begins, by the entry, its stored bytes, and those of its content.

        Args:
            archive_bytes: Size of the archive.

        Raises:
            DamagedShardError: One cannot be in such an archive.
            SourceError: One cannot or must not be read.
        """
        size, stored, start, disk = (self.column(field).astype(np.int64) for field in ("size", "stored_size", "start", "disk"))
        is_large = (size == _ONES32) | (stored == _ONES32) | (start == _ONES32) | (disk == _ONES16)
        for row in np.flatnonzero(is_large).tolist():
            size[row], stored[row], start[row], disk[row] = self._zip64(row, archive_bytes)
        self._check(size, stored, disk)
        return start, stored, size

    def is_folder(self) -> Bools:
        """Return which of them are folders."""
        if not len(self._at):
            return np.zeros(0, bool)
        last = np.frombuffer(self._data, np.uint8)[self._at + (ENTRY_BYTES - 1) + self.name_bytes]
        found: Bools = (last == ord("/")) & (self.name_bytes > 0)
        return found

    def names(self) -> list[str]:
        """Return their names; ASCII names all at once.

        Raises:
            DamagedShardError: One has a NUL in it.
        """
        places = self._at + ENTRY_BYTES  # [n]
        ends = places + self.name_bytes  # [n]
        raw = [self._data[place:end] for place, end in zip(places.tolist(), ends.tolist(), strict=True)]
        joined = b"\0".join(raw)
        if joined.count(b"\0") >= max(1, len(raw)):
            raise self._damage("a name has a NUL in it")
        if joined.isascii():
            names = joined.decode("ascii").split("\0")[: len(raw)]
        else:
            flags = self.column("flags").tolist()
            names = [decoded_name(name, of_row, b"") for name, of_row in zip(raw, flags, strict=True)]
        maybe = [match.start() for match in _MAYBE_UNICODE_PATH.finditer(self._data)]
        for row in np.unique(np.searchsorted(self._at, maybe, "right") - 1).tolist():
            names[row] = decoded_name(raw[row], int(self._view["flags"][self._at[row]]), self._extra(row))
        return names

    def shown(self, row: int) -> str:
        """Return the name of one of them for messages."""
        start = int(self._at[row]) + ENTRY_BYTES
        raw = self._data[start : start + int(self.name_bytes[row])]
        return repr(raw[:200].decode(errors="backslashreplace"))

    def _check(self, size: Ints, stored: Ints, disk: Ints) -> None:
        """Raise if a member is one that is not read."""
        method, is_folder, cure = self.column("method"), self.is_folder(), "write the archive again without such members"
        for is_bad, reason in (
            (disk != 0, "in another part of a split archive"),
            (self.column("flags") & _ENCRYPTED != 0, "encrypted"),
            (~_IS_READ[method] & ~is_folder, "compressed with a method that is not read"),
            (self.column("external") >> 28 == _LINK, "a symbolic link"),
            (is_folder & (size != 0), "a directory with content"),
            ((method == ZipMethod.STORED) & (size != stored), "stored as it is, with two sizes"),
        ):
            if (rows := np.flatnonzero(is_bad)).size:
                row = int(rows[0])
                more = f" ({method_name(int(method[row]))})" if "method" in reason else ""
                raise SourceError(f"{self._archive}: {self.shown(row)} is {reason}{more}: {cure}")

    def _zip64(self, row: int, archive_bytes: int) -> tuple[int, int, int, int]:
        """Return sizes, offset and disk of a member; those whose field is all ones stand in an extra field, in this order."""
        entry = self._view[self._at[row]]
        field = next((data for kind, data in extra_fields(self._extra(row)) if kind == _ZIP64), b"")
        found, at = [], 0
        for key, ones in (("size", _ONES32), ("stored_size", _ONES32), ("start", _ONES32), ("disk", _ONES16)):
            value, width = int(entry[key]), 4 if key == "disk" else 8
            if value == ones:
                if at + width > len(field):
                    raise self._damage(f"{self.shown(row)} has no zip64 field for its {key}")
                value = int.from_bytes(field[at : at + width], "little")
                at += width
            found.append(value)
        size, stored, start, disk = found
        if max(stored, start) > archive_bytes or size >= 1 << 62:
            raise self._damage(f"{self.shown(row)} has {stored} bytes at byte {start}, and a size of {size}")
        return size, stored, start, disk

    def _extra(self, row: int) -> bytes:
        start = int(self._at[row]) + ENTRY_BYTES + int(self.name_bytes[row])
        return self._data[start : start + int(self._view["extra"][self._at[row]])]
