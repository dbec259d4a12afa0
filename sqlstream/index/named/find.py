"""Finds the members that rows name: each archive's table is read once, several archives side by side."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sqlstream.config import IndexOptions
from sqlstream.errors import ConfigError, SchemaError, SourceError, SqlStreamError
from sqlstream.index.file.connection import GuardedConnection
from sqlstream.index.file.index import Index
from sqlstream.index.file.room import IndexRoom
from sqlstream.index.file.workplace import Workplace, build_once
from sqlstream.index.file.writer import IndexWriter
from sqlstream.index.named.members import SCHEMA, Archive, NamedMembers, PartColumns
from sqlstream.index.named.tables import Found, Wanted, members_in
from sqlstream.index.sources.base.access import stat_file
from sqlstream.index.types import values
from sqlstream.index.types.models import FORMAT_VERSION, ROW, Column, SourceFile, fingerprint, quote
from sqlstream.index.types.origins import RowJudge
from sqlstream.progress import progress
from sqlstream.storage.base import urls
from sqlstream.storage.base.access import Origin
from sqlstream.storage.base.protocols import CALLS_AT_A_TIME, RemoteReader

logger = logging.getLogger(__name__)

_CHAINED = "chained"
"""Key in `meta` of an index file: columns to download of which some value is a chain (JSON)."""
_ANY_CHAIN = "SELECT 1 FROM rows WHERE instr({0}, '::') AND ({0} LIKE '%zip://%' OR {0} LIKE '%tar://%') LIMIT 1"
_ROWS_AT_A_TIME = 8_192
_OTHER_CHAIN = re.compile(r"[a-z][a-z0-9+.-]*::", re.IGNORECASE)
_INSERT = f"INSERT OR IGNORE INTO named_members VALUES ({', '.join('?' * 11)})"


class _NamedArchive(NamedTuple):
    """An archive, and the first value that names it."""

    kind: str
    """`zip`, `tar`, or empty: parts have places."""
    url: str
    row: int
    column: str


def chained_columns(writer: IndexWriter, names: Sequence[str]) -> dict[str, str]:
    """Return what an index file says of columns to download whose values name members, once its rows are written."""
    columns = [writer.columns[name] for name in names if name in writer.columns]
    return {_CHAINED: json.dumps(_with_chains(columns, lambda sql: writer.connection.execute(sql).fetchall()))}


def _with_chains(columns: Sequence[Column], run: Callable[[str], Sequence[object]]) -> list[str]:
    return [column.name for column in columns if run(_ANY_CHAIN.format(quote(column.physical)))]


def find_members(
    index: Index, options: IndexOptions, directory: Path, remote: RemoteReader, judge: RowJudge, *, show_progress: bool = True
) -> NamedMembers | None:
    """Return the members that the selected rows of an index name, found when no earlier run has found them.

    Args:
        index: The rows.
        options: Which columns are downloaded, and which have the places of parts.
        directory: Where index files are.
        remote: Reads what is not local.
        judge: What the rows may name.
        show_progress: Show a bar, if stderr is a terminal.

    Returns:
        The members; None: no row names one.

    Raises:
        SourceError: A row names what is no member, or an archive is damaged; `StorageError` when it cannot be read.
        ConfigError: Several columns are downloaded, of which one has parts.
    """
    parts = None
    if options.offset_column is not None and options.length_column is not None:
        parts = PartColumns(options.offset_column, options.length_column)
    columns = _columns_of(index, options, parts)
    if not columns:
        return None
    key = fingerprint(
        {
            "format": FORMAT_VERSION,
            "members of": [index.path.stem, index.fingerprint],
            "columns": [column.name for column in columns],
            "parts": parts,
            "base_url": urls.redact(index.base_url),
        }
    )
    finder = _Finder(
        *(index, columns, parts, key, directory, IndexRoom(directory, options), remote, judge), show_progress=show_progress
    )
    found = build_once(directory, key, finder.find, finder.build, show_progress=show_progress)
    found.hold()
    return found


def _columns_of(index: Index, options: IndexOptions, parts: PartColumns | None) -> list[Column]:
    """Return the columns whose values may name members."""
    wanted = [column for column in index.sql_columns if column.name in options.columns_to_download and not column.is_member]
    if parts is None:
        chained = index.meta.get(_CHAINED)
        named = _with_chains(wanted, index.stored) if chained is None else json.loads(chained)  # an earlier version's file
        return [column for column in wanted if column.name in named]
    names = [column.name for column in index.columns]
    for option, name in (("offset_column", parts.offset), ("length_column", parts.length)):
        if name not in names:
            raise SchemaError(f"{index.src} has no column {name!r}, which {option} names: it has {', '.join(map(repr, names))}")
    if len(wanted) != 1:
        raise ConfigError(
            f"offset_column={parts.offset!r} says where a part is in one object, and columns_to_download names "
            f"{len(wanted)} columns of the table: name the one that has the object's URL"
        )
    return wanted


@dataclass(slots=True)
class _Finder:
    """What finds the members of one index."""

    index: Index
    columns: Sequence[Column]
    parts: PartColumns | None
    key: str
    directory: Path
    room: IndexRoom
    remote: RemoteReader
    judge: RowJudge
    show_progress: bool

    def find(self) -> NamedMembers | None:
        """Return what an earlier run has found, if all archives are still of that version."""
        known = self._opened()
        if not known._index.is_usable():
            return None
        archives = known.archives()
        files = self._stat([_NamedArchive("", archive.url, archive.row, archive.column) for archive in archives])
        changed = [archive for archive, file in zip(archives, files, strict=True) if not archive.is_version(file)]
        if not changed:
            return known
        known.close()
        logger.info("%d of %d archives that %s names have changed", len(changed), len(archives), self.index.src)
        return None

    def build(self, place: Workplace) -> NamedMembers:
        """Find all members."""
        temporary = place.temporary()
        with (
            contextlib.closing(_NamedValues(place.temporary("named"))) as found,
            contextlib.closing(IndexWriter(temporary, "url", room=self.room)) as writer,
        ):
            archives = self._look_for_values(found)
            files = self._stat(archives)
            writer.connection.execute(SCHEMA)
            known = [
                Archive(archive.url, archive.row, archive.column, file.size_bytes or 0, file.etag, file.content)
                for archive, file in zip(archives, files, strict=True)
            ]
            writer.begin_source(SourceFile(url=self.index.src, size_bytes=None, etag=None), _ARCHIVES)
            if known:
                writer.write_values(dict(zip(Archive._fields, zip(*known, strict=True), strict=True)))
            title = f"reading the archives that {self.index.src} names"
            with progress(len(files), " archives", title, self.show_progress) as bar:
                of_archives = zip(archives, files, map(found.of, range(len(files))), strict=True)  # read as they are asked for
                for number, members in enumerate(_in_order(of_archives, lambda some: self._members(*some))):
                    writer.connection.executemany(_INSERT, ((number, *member) for member in members))
                    self.room.need(0)
                    bar.update(1)
            own = {"fingerprint": self.key, "src": f"archives that {self.index.src} names"}
            writer.finish({**own, "base_url": urls.redact(self.index.base_url), "key_column": "url"})
        place.publish(temporary, f"{self.key}.sqlite")
        return self._opened()

    def _opened(self) -> NamedMembers:
        return NamedMembers(Index(self.directory / f"{self.key}.sqlite"), [column.name for column in self.columns], self.parts)

    def _look_for_values(self, found: _NamedValues) -> list[_NamedArchive]:
        """Note the values that name members, and return their archives."""
        archives: list[_NamedArchive] = []
        numbers: dict[tuple[str, str, Origin], int] = {}
        origins, known = self.judge.origins, NamedMembers(self.index, [], self.parts)
        for row in self._rows():
            row_id = row[ROW]
            for number, column in enumerate(self.columns):
                if (text := _text(row[column.name])) is None:
                    continue
                named = self._by_place(row, text) if self.parts is not None else _by_name(row_id, text)
                if named is None:
                    continue
                kind, url, name, start, stop = named
                name_of = (kind, url, origins.of(row_id, column.name))
                if (archive := numbers.get(name_of)) is None:
                    archive = numbers[name_of] = len(archives)
                    archives.append(_NamedArchive(kind, url, row_id, column.name))
                found.add(archive, Wanted(row_id, number, name, known.written(row, text), start, stop))
        found.finish()
        return archives

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Yield the selected rows, those of their columns that matter."""
        more = [] if self.parts is None else [column for column in self.index.columns if column.name in self.parts]
        columns = [*self.columns, *more]
        decoders = [(column.name, decode) for column in columns if (decode := values.decoder(column)) is not None]
        expressions = ", ".join([ROW, *(column.expression for column in columns)])
        statement = f"SELECT {expressions} FROM rows WHERE {ROW} IN (SELECT value FROM json_each(?))"
        names = [ROW, *(column.name for column in columns)]
        for start in range(0, len(self.index), _ROWS_AT_A_TIME):
            ids = self.index.row_ids(np.arange(start, min(start + _ROWS_AT_A_TIME, len(self.index))))
            for stored in self.index.stored(statement, (json.dumps(ids.tolist()),)):
                row = dict(zip(names, stored, strict=True))
                for name, decode in decoders:
                    row[name] = None if row[name] is None else decode(row[name])
                yield row

    def _by_place(self, row: Mapping[str, Any], text: str) -> tuple[str, str, str, int, int] | None:
        """Return what a row with a place names; None: all of the object."""
        assert self.parts is not None, "values have names"
        offset, length = row[self.parts.offset], row[self.parts.length]
        if offset is None and length is None:
            return None
        if not all(type(number) is int and number >= 0 for number in (offset, length)):
            raise SourceError(
                f"row {row[ROW]} has {offset!r} in column {self.parts.offset!r} and {length!r} in column {self.parts.length!r}:"
                " both must be whole numbers of bytes, or both NULL for the whole object"
            )
        if urls.chain_of(text) is not None:
            raise SourceError(f"row {row[ROW]} names {urls.shown(text)!r}, a member, and a place in it: give one of them")
        return "", text, "", offset, offset + length

    def _stat(self, archives: Sequence[_NamedArchive]) -> list[SourceFile]:
        """Return archives with their versions."""

        def stat(archive: _NamedArchive) -> SourceFile:
            with _named_by(archive):
                url, access = self.judge.located(archive.row, archive.column, archive.url)
                file = stat_file(url, self.remote, access)
                if file.size_bytes is None:
                    raise SourceError(f"{urls.redact(url)} comes without its size, so its members cannot be found: download it")
                return file

        return list(_in_order(archives, stat))

    def _members(self, archive: _NamedArchive, file: SourceFile, wanted: Sequence[Wanted]) -> list[Found]:
        with _named_by(archive):
            return members_in(archive.kind, file, wanted, self.remote)


_FIELDS: dict[str, pa.DataType] = {
    "url": pa.string(),
    "row": pa.int64(),
    "column": pa.string(),
    "size_bytes": pa.int64(),
    "etag": pa.string(),
    "content": pa.string(),
}
_ARCHIVES = pa.schema(_FIELDS)


def _in_order(items: Iterable[Any], work: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield the results of work, which is done side by side, in the order of the items."""
    left = iter(items)
    with ThreadPoolExecutor(CALLS_AT_A_TIME, thread_name_prefix="archive") as pool:
        while some := list(islice(left, CALLS_AT_A_TIME)):
            yield from pool.map(work, some)


class _NamedValues:
    """The values that name members, in a file of their own until they are found: by archive.

    Args:
        path: Of the file.
    """

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=GuardedConnection)
        self._connection.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;")
        self._connection.execute(
            "CREATE TABLE wanted (archive INTEGER, row INTEGER, number INTEGER, name TEXT, written INTEGER, start INTEGER, "
            "stop INTEGER) STRICT"
        )
        self._connection.execute("BEGIN")
        self._added: list[tuple[int | str, ...]] = []

    def add(self, archive: int, wanted: Wanted) -> None:
        """Note a value."""
        self._added.append((archive, *wanted))
        if len(self._added) >= _ROWS_AT_A_TIME:
            self._write()

    def _write(self) -> None:
        self._connection.executemany("INSERT INTO wanted VALUES (?, ?, ?, ?, ?, ?, ?)", self._added)
        self._added.clear()

    def finish(self) -> None:
        """All are noted."""
        self._write()
        self._connection.execute("CREATE INDEX by_archive ON wanted (archive)")
        self._connection.execute("COMMIT")

    def of(self, archive: int) -> list[Wanted]:
        """Return the values that name members of an archive."""
        rows = self._connection.execute(
            "SELECT row, number, name, written, start, stop FROM wanted WHERE archive = ?", (archive,)
        )
        return list(map(Wanted._make, rows.fetchall()))

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


def _text(value: object) -> str | None:
    """Return the text of a value that may name a member; of a struct without bytes its path."""
    if isinstance(value, Mapping) and value.get("bytes") is None:
        value = value.get("path")
    return value if isinstance(value, str) else None


def _by_name(row_id: int, text: str) -> tuple[str, str, str, int, int] | None:
    """Return what a chain names; None: the text is none."""
    if (chain := urls.chain_of(text)) is None:
        return None
    if _OTHER_CHAIN.match(chain.outer) or urls.chain_of(chain.outer) is not None or not (chain.inner and chain.outer):
        raise SourceError(
            f"row {row_id} names {urls.shown(text)!r}: a member of an archive is written zip://NAME::URL or tar://NAME::URL, "
            "where URL is a file or an object, and no chain"
        )
    return chain.kind, chain.outer, chain.inner, 0, 0


@contextlib.contextmanager
def _named_by(archive: _NamedArchive) -> Iterator[None]:
    """Say which row names an archive, in errors that do not."""
    try:
        yield
    except SqlStreamError as error:
        if (text := str(error)).startswith("row "):
            raise
        raise type(error)(f"{text} (row {archive.row} names it in column {archive.column!r})", **error.context) from error
