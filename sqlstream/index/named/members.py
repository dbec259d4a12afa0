"""Which bytes the values of rows are that name members of archives, in a file of their own beside the index of the rows.

It is an index file, too, whose rows are the archives with their versions: it is locked, checked and removed like all of them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlstream.errors import SourceChangedError
from sqlstream.index.file.connection import damaged
from sqlstream.index.file.index import Index
from sqlstream.index.sources.base.access import indexed_file
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base.protocols import ZipRecord

SCHEMA = """
CREATE TABLE named_members (archive INTEGER NOT NULL, row INTEGER NOT NULL, number INTEGER NOT NULL, written INTEGER NOT NULL,
    start INTEGER NOT NULL, stop INTEGER NOT NULL, method INTEGER, stored_bytes INTEGER, raw_bytes INTEGER, crc INTEGER,
    name_crc INTEGER, PRIMARY KEY (row, number)) STRICT, WITHOUT ROWID
"""
_FOUND = "SELECT * FROM named_members WHERE row IN (SELECT value FROM json_each(?))"


class PartColumns(NamedTuple):
    """Columns with the place of a part in the object that a row names (`offset_column`, `length_column`)."""

    offset: str
    length: str


class NamedMember(NamedTuple):
    """The bytes that a value of a row names."""

    archive: int
    """Number of its archive."""
    written: int
    """`NamedMembers.written` of what the row says."""
    span: tuple[int, int]
    """Bytes of the archive, half open."""
    record: ZipRecord | None
    """What makes its content of them; None: they are it."""


class Archive(NamedTuple):
    """An archive that rows name, in the version whose table was read."""

    url: str
    """As the first row that names it has it: credentials included, relative to the source."""
    row: int
    """That row."""
    column: str
    """Its column."""
    size_bytes: int
    etag: str | None
    content: str
    """As in `SourceFile`."""

    def is_version(self, file: SourceFile) -> bool:
        """Return whether a file is this version."""
        return (self.size_bytes, self.etag, self.content) == (file.size_bytes, file.etag, file.content)


class NamedMembers:
    """The members that the rows of one index name. Picklable; several threads may share it.

    Args:
        index: The file: archives as rows, and the table of members.
        columns: Columns of the rows, by the number that the table has of them.
        parts: Columns with the places of parts; None: values name members by themselves.
    """

    def __init__(self, index: Index, columns: Sequence[str], parts: PartColumns | None) -> None:
        self._index, self.columns, self.parts = index, tuple(columns), parts

    def __reduce__(self) -> tuple[type[NamedMembers], tuple[Index, tuple[str, ...], PartColumns | None]]:
        return (NamedMembers, (self._index, self.columns, self.parts))

    def of(self, row_ids: Sequence[int]) -> dict[int, dict[str, NamedMember]]:
        """Return what rows name, by row and column."""
        found: dict[int, dict[str, NamedMember]] = {}
        stored = self._index.stored(_FOUND, (json.dumps(list(map(int, row_ids))),))
        for archive, row, number, written, start, stop, *facts in stored:
            record = None if facts[0] is None else ZipRecord(start, *facts)
            found.setdefault(row, {})[self.columns[number]] = NamedMember(archive, written, (start, stop), record)
        return found

    def written(self, row: Mapping[str, object], text: str) -> int:
        """Return a checksum of what a row says of a member; of another text it is another member."""
        parts = self.parts
        more = "" if parts is None else f"\0{row.get(parts.offset)}\0{row.get(parts.length)}"
        return zlib.crc32((text + more).encode("utf-8", "surrogatepass"))

    def archive(self, number: int) -> Archive:
        """Return an archive by its number."""
        return self.archives(number, number + 1)[0]

    def archives(self, start: int = 0, stop: int | None = None) -> list[Archive]:
        """Return archives, in the order of their numbers."""
        rows = self._index.rows(range(start, self._index.num_rows if stop is None else stop))
        try:
            return [Archive(**{name: row[name] for name in Archive._fields}) for row in rows]  # type: ignore[arg-type]  # as written
        except KeyError as error:
            raise damaged(self._index.path, f"it does not say {error} of archives") from error

    def check_unchanged(self, archive: Archive, path: str) -> None:
        """Compare a local archive with the index.

        Raises:
            SourceChangedError: It is another version.
        """
        if not archive.is_version(indexed_file(path)):
            raise SourceChangedError(f"{path} changed since its members were found: open the dataset again")

    def hold(self) -> None:
        """Keep other processes from removing the file, until `close`."""
        self._index.hold()

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        self._index.close()
