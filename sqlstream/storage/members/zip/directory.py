"""The members of a ZIP archive, by the directory at its end.

What `zipfile` reads is read as it reads it, and so is what it does not find (a signature in the comment, zstd). Members that no
range of the archive holds (encrypted, split, symbolic links) are errors, and those that were made to deceive (overlapping ones,
names that differ between directory and local header, sizes that no archive of that size can hold).

A directory is read in blocks, and what is kept of an entry is in files where there is much of it (`spilled`): an archive of
millions of members takes as much memory as one of thousands.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial
from itertools import compress
from pathlib import Path

import numpy as np

from sqlstream.errors import DamagedShardError, SourceError
from sqlstream.storage.members.source import ByteRange
from sqlstream.storage.members.spilled import Spilled, SpilledBytes, are_unique
from sqlstream.storage.members.zip.end import TAIL_BYTES, damage, find_directory
from sqlstream.storage.members.zip.entries import ENTRY_BYTES, Bools, Ints, ZipEntries
from sqlstream.storage.members.zip.member import LOCAL_BYTES, ZipMember

_LENGTHS = struct.Struct("<3H")
_LENGTHS_AT = 28
_ONES16 = 0xFFFF
_LARGEST_ENTRY_BYTES = ENTRY_BYTES + 3 * _ONES16
_LARGEST_EXTRA = _ONES16 + 24
"""Most bytes of a record beside header, name and stored bytes: extra fields, and sizes behind the content."""
_DEFLATE_RATIO = 1032
"""The most bytes that deflate makes of one."""
_LEAST_LIMIT = 1 << 30
"""Arbitrary: an archive may hold so much, however small it is."""
_READ_BYTES = 8 << 20
"""Of a directory, read at a time: that of 100 000 members comes with one request."""
_ROWS = 1 << 12
"""Arbitrary: entries that are looked at, and members that are made, at a time."""
_NEW_MEMBER = partial(tuple.__new__, ZipMember)  # without the checks of a call, which take as long as the rest


def read_directory(source: ByteRange, name: str, *, largest_bytes: int | None = None, folder: Path | None = None) -> ZipMembers:
    """Read and check a directory, and return its files in its order; of several with one name the last.

    One read brings the end of the archive, and a second one the directory, where that lies before; one of more than 8 MiB comes
    by several. Where something stands before the first member, 4 bytes are read more.

    Args:
        source: The archive.
        name: The URL of the archive for messages, without credentials.
        largest_bytes: Most bytes of all content; None: as many as deflate can make of the archive, at least 1 GiB.
        folder: Where what memory should not hold is written; None: it holds all.

    Raises:
        DamagedShardError: There is no directory, or it is damaged.
        SourceError: A member is one that cannot or must not be read.
    """
    limit = max(_LEAST_LIMIT, _DEFLATE_RATIO * source.size_bytes) if largest_bytes is None else largest_bytes
    return ZipMembers(_Directory(source, name, folder), limit)


class ZipMembers:
    """The files of an archive, made as they are taken, and anew each time: a list of a million takes ten times the memory.

    Args:
        directory: Of the archive.
        largest_bytes: Most bytes of all content.
    """

    def __init__(self, directory: _Directory, largest_bytes: int) -> None:
        self._directory = directory
        self._starts, self._stored, self._sizes = (Spilled("q", directory.folder) for _ in range(3))
        self._stops: Ints | None = None
        """Where records end at the latest, of an archive whose members are in another order than its entries: [entries]."""
        self._read_facts(largest_bytes)
        self._replaced = self._find_replaced()

    def __iter__(self) -> Iterator[ZipMember]:
        """Yield them."""
        for first, entries in self._directory.blocks():
            some = slice(first, first + len(entries))
            stored, name_bytes = self._stored[some], entries.name_bytes
            starts, stops = self._starts[some], self._stops_of(some)
            stops = np.minimum(stops, starts + stored + name_bytes + (LOCAL_BYTES + _LARGEST_EXTRA))  # [entries]
            columns = (starts, stops, entries.column("method"), stored, self._sizes[some], entries.column("crc"))
            members = map(_NEW_MEMBER, zip(entries.names(), *(column.tolist() for column in columns), strict=True))
            yield from compress(members, self._is_file(first, entries).tolist())

    def names(self) -> Iterator[str]:
        """Yield their names."""
        for first, entries in self._directory.blocks():
            yield from compress(entries.names(), self._is_file(first, entries).tolist())

    def _read_facts(self, largest_bytes: int) -> None:
        """Read and check what is said of all entries beside their names."""
        directory, total, last, is_in_order = self._directory, 0.0, 0, True
        for _, entries in directory.blocks():
            starts, stored, sizes = entries.facts(directory.archive_bytes)
            starts += directory.place.shift
            is_in_order = is_in_order and starts[0] >= last and bool((starts[1:] >= starts[:-1]).all())
            last = int(starts[-1])
            for column, values in ((self._starts, starts), (self._stored, stored), (self._sizes, sizes)):
                column.last.frombytes(values.tobytes())
                column.spill()
            total += float(sizes.sum(dtype=np.float64))
        if is_in_order:  # nearly always: it takes no memory
            first = int(self._starts[0:1][0]) if len(self._starts) else directory.place.start
        else:
            starts = self._starts[:]  # [entries]
            order = np.argsort(starts, kind="stable")
            self._stops = np.empty_like(starts)  # [entries]
            self._stops[order] = np.append(starts[order[1:]], directory.place.start)
            first = int(starts[order[0]])
        self._check_overlaps()
        if first and directory.begins_with_member():
            raise directory.damage(
                f"it begins with a member, and the directory lists none before byte {first}; it is cut off, or two archives "
                "are joined"
            )
        if total > largest_bytes:
            raise SourceError(
                f"{directory.name} would hold {total:.0f} bytes in {directory.archive_bytes}, and {largest_bytes} are allowed: "
                "it is a bomb, or damaged"
            )

    def _check_overlaps(self) -> None:
        """Raise if a record does not end before the next one."""
        for first, entries in self._directory.blocks():
            some = slice(first, first + len(entries))
            starts, stops = self._starts[some], self._stops_of(some)
            if (rows := np.flatnonzero(stops - starts < self._stored[some] + entries.name_bytes + LOCAL_BYTES)).size:
                row = int(rows[0])
                raise self._directory.damage(
                    f"{entries.shown(row)} at byte {starts[row]} overlaps what follows at byte {stops[row]}"
                )

    def _stops_of(self, some: slice) -> Ints:
        """Return where the records of some entries end at the latest: at the next header, or at the directory."""
        if self._stops is not None:
            return self._stops[some]
        starts = self._starts[some.start + 1 : some.stop + 1]  # [entries], without the very last
        return np.append(starts, self._directory.place.start) if some.stop >= len(self._starts) else starts

    def _find_replaced(self) -> frozenset[int]:
        """Return the entries of files that another one of the same name follows."""
        hashes = Spilled("q", self._directory.folder)
        for _, entries in self._directory.blocks():
            hashes.last.extend(map(hash, compress(entries.names(), (~entries.is_folder()).tolist())))
            hashes.spill()
        if are_unique(hashes):
            return frozenset()
        ordered = np.sort(hashes[:])  # [files]
        twice = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
        last, replaced = dict[str, int](), set[int]()
        for first, entries in self._directory.blocks():
            files = np.flatnonzero(~entries.is_folder()).tolist()
            names = entries.names()
            for row in files:
                if hash(names[row]) in twice:
                    replaced.update([last[names[row]]] if names[row] in last else [])
                    last[names[row]] = first + row
        return frozenset(replaced)

    def _is_file(self, first: int, entries: ZipEntries) -> Bools:
        """Return which of some entries are members."""
        found = ~entries.is_folder()
        if self._replaced:
            found[[row for row in range(len(entries)) if first + row in self._replaced]] = False
        return found


class _Directory:
    """The bytes of the directory of one archive.

    Args:
        source: The archive.
        name: For messages.
        folder: Where they are written if they are many; None: they stay in memory.
    """

    def __init__(self, source: ByteRange, name: str, folder: Path | None) -> None:
        self._source, self.name, self.folder = source, name, folder
        self.archive_bytes = source.size_bytes
        """Size of the archive."""
        self._tail_start = max(0, self.archive_bytes - TAIL_BYTES)
        self._tail = self._read(self._tail_start, self.archive_bytes)
        self.place = place = find_directory(self._tail, self._tail_start, name)
        """Where it lies."""
        self._data = SpilledBytes(folder)
        for start in range(place.start, min(self._tail_start, place.stop), _READ_BYTES):
            self._data.last += self._read(start, min(start + _READ_BYTES, self._tail_start, place.stop))
            self._data.spill()
        self._data.last += self._tail[max(0, place.start - self._tail_start) : place.stop - self._tail_start]
        self._at = self._offsets()

    def blocks(self) -> Iterator[tuple[int, ZipEntries]]:
        """Yield the number of the first of some entries, and them."""
        for first in range(0, len(self._at) - 1, _ROWS):
            at = self._at[first : first + _ROWS + 1]  # [entries + 1]
            data = self._data.read(int(at[0]), int(at[-1]))
            yield first, ZipEntries(data, at[:-1] - at[0], self.name, self.damage)

    def begins_with_member(self) -> bool:
        """Return whether the archive begins with the header of a member."""
        return (self._tail if self._tail_start == 0 else self._read(0, 4)).startswith(b"PK\3\4")

    def damage(self, reason: str) -> DamagedShardError:
        """Return the error of a damaged archive."""
        return damage(self.name, self.archive_bytes, reason)

    def _offsets(self) -> Spilled:
        """Return where each entry begins in the directory, and where the last one ends."""
        lengths, found, num_bytes = _LENGTHS.unpack_from, Spilled("q", self.folder), len(self._data)
        append, begin, at = found.last.append, 0, 0
        while begin + at < num_bytes:
            begin, at = begin + at, 0
            data = self._data.read(begin, min(num_bytes, begin + _READ_BYTES))
            enough = len(data) - (_LARGEST_ENTRY_BYTES if begin + len(data) < num_bytes else 0)
            try:
                while at < enough:
                    append(begin + at)
                    name, extra, comment = lengths(data, at + _LENGTHS_AT)
                    at += ENTRY_BYTES + name + extra + comment
            except struct.error:
                at = num_bytes + 1  # beyond the end
            found.spill()
        count, expected = len(found), self.place.num_entries
        is_count = count == expected or (not self.place.is_zip64 and count & _ONES16 == expected)
        if begin + at != num_bytes or not is_count:
            raise self.damage(f"its directory has {count} entries in {num_bytes} bytes, the end record says {expected}")
        append(num_bytes)
        return found

    def _read(self, start: int, stop: int) -> bytes:
        data = self._source.read_at(start, stop - start)
        if len(data) != stop - start:
            raise self.damage(f"it ends at byte {start + len(data)}, and its size was {self.archive_bytes}")
        return data
