"""Reads an index: rows by id, positions of a filter. Nothing of it is held in memory but what SQLite caches."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from operator import attrgetter, itemgetter, methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from sqlstream.errors import IndexDatabaseError
from sqlstream.index.file.connection import DAMAGE, IN_PLACE, OwnedConnection, connect, damage_named, damaged, read_columns
from sqlstream.index.file.intact import check_plain, is_there
from sqlstream.index.file.npy import load_npy, unload, unreadable
from sqlstream.index.file.selection import positions_path, selection_files
from sqlstream.index.types import values
from sqlstream.index.types.content import ColumnType, Content, named_query
from sqlstream.index.types.models import APPLICATION_ID, ROW, Column, Decode, SelectionInfo, ruled
from sqlstream.index.types.origins import JoinedColumns, Origins, Provenance
from sqlstream.process import fork, locks
from sqlstream.storage.base import urls

if TYPE_CHECKING:
    from sqlstream.index.named.members import NamedMembers

logger = logging.getLogger(__name__)

NAMED = ("fingerprint", "src", "base_url", "key_column", "key_problem")
"""In `meta` of every index that a run opens."""
_LISTED = "SELECT row, objects FROM listed WHERE row IN (SELECT value FROM json_each(?))"
_CACHE_KIB = 2048  # pages that a reader of rows keeps: random rows take as long with 512 as with 16384 (m)
_ID_OF = itemgetter(-1)
_OPEN_OF = attrgetter("_open")
_CONNECTION_OF = attrgetter("connection")
_MAX_NAMES = 20  # of columns in a summary; arbitrary: it is read by a person
BESIDE = ("provenance", "named_members", "engine")
"""Attributes that an index gets after it is made; copies of it have them."""
MAX_MAPPED_BYTES = 8 << 20
"""Those of 10^6 rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """The file open, and what it says of itself."""

    connection: sqlite3.Connection
    meta: dict[str, Any]
    num_rows: int
    columns: tuple[Column, ...]
    names: tuple[str, ...]
    decoders: tuple[tuple[str, Decode], ...]
    """(name, decode) of the columns whose stored values are not the values themselves."""
    select: str
    """The statement for rows, each with its id at the end, up to the list of ids."""
    max_ids: int
    """How many ids one statement takes."""
    listed: str | None
    """The statement for what listings said of rows; None: the file has none of it."""


class Index:
    """An immutable index file, and the positions of a filter on it when there is one.

    Pickles as paths; opens on first use, again after a fork. Safe to use from several threads.

    Args:
        path: The SQLite file.
        selection: The filter whose positions lie beside it; None selects every row in its order.
        base_url: Where relative paths start, when it holds credentials (the file has it without).
        max_mapped_bytes: Positions that a process may keep mapped.
    """

    _SELECT: ClassVar[str] = "{rows} WHERE row IN"
    """Finds stored rows, up to the list of ids: the values of all columns, then what else is to be known, last the id."""

    def __init__(
        self,
        path: Path,
        *,
        selection: SelectionInfo | None = None,
        base_url: str | None = None,
        max_mapped_bytes: int = MAX_MAPPED_BYTES,
    ) -> None:
        self.path = path
        self.selection = selection
        self._base_url = base_url
        self._max_mapped_bytes = max_mapped_bytes
        self.provenance: Provenance | None = None  # who wrote its tables; None: what their URLs in the file tell
        self.named_members: NamedMembers | None = None  # members of archives that its rows name; None: none are known
        self.engine = "sqlite" if selection is None else selection.engine  # of users' SQL on its rows, such as weights
        self._lock = locks.ForkLock()
        """Held while SQLite is used: a thread that forks waits for it, since SQLite's mutexes must be free in the child."""
        self._open: _Open | None = None
        self._mapped: np.ndarray | None = None
        self._in_use: list[int] = []
        """Descriptors that keep `sqlstream cache clear --index` from removing our files."""
        weakref.finalize(self, locks.close_descriptors, self._in_use)
        fork.call_in_child(self, fork.Stage.DATABASES)

    def __getstate__(self) -> dict[str, Any]:
        names = ("path", "selection", "_base_url", *BESIDE)
        return {name.lstrip("_"): getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        beside = {name: state.pop(name) for name in BESIDE}
        type(self).__init__(self, state.pop("path"), **state)
        vars(self).update(beside)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.summary})"

    @property
    def summary(self) -> str:
        """Rows, source and columns in words, as far as the file is open: nothing is read."""
        opened = self._open
        if opened is None:
            return f"{self.path}, which is not open"
        names = ", ".join(opened.names[:_MAX_NAMES]) + (", …" if len(opened.names) > _MAX_NAMES else "")
        return f"{self._summary_of_rows(opened.num_rows)} of {opened.meta['src']}; columns {names}"

    def _summary_of_rows(self, num_rows: int) -> str:
        return f"{num_rows} rows" if self.selection is None else f"{self.selection.num_selected} of {num_rows} rows"

    def __len__(self) -> int:
        return self.num_rows if self.selection is None else self.selection.num_selected

    @property
    def known_length(self) -> int | None:
        """Selected rows; None while a lazy index does not know."""
        return len(self)

    @property
    def fingerprint(self) -> str:
        """Names source, version, columns and filter: other data have another one, and the same data do at another place."""
        return ruled(self.path.stem, self._opened().meta) if self.selection is None else self.selection.fingerprint

    @property
    def queried(self) -> str:
        """Names the rows and what runs SQL on them, for tables that are made of its results."""
        has_engine = self.selection is not None or self.engine == "sqlite"  # a selection is named with its own
        return self.fingerprint if has_engine else f"{self.fingerprint} {self.engine}"

    @property
    def content(self) -> Content | None:
        """What it holds, and which rows are selected, wherever the source lies; None: an earlier version built the file."""
        opened, chosen = self._opened(), self.selection
        if (digest := opened.meta.get("content")) is None:
            return None
        query = opened.meta.get("query") if chosen is None else chosen.query  # a file of its own holds what a query computed
        return Content(
            columns=tuple(ColumnType(column.name, column.type) for column in opened.columns),
            num_rows=opened.num_rows,
            values=f"{IN_PLACE} {digest}" if any(column.is_in_place for column in opened.columns) else str(digest),
            query=named_query(query),
            engine=None if chosen is None else chosen.engine,
            max_size=None if chosen is None else chosen.max_size,
        )

    @property
    def src(self) -> str:
        """The source, without credentials."""
        return str(self._opened().meta["src"])

    @property
    def key_column(self) -> str | None:
        """The column that names samples; None: the number of the row does."""
        return self.wanted_key if self.key_problem is None else None

    @property
    def wanted_key(self) -> str:
        """The column that names samples if each selected row has a value of its own there."""
        return str(self._opened().meta["key_column"])

    @property
    def key_problem(self) -> str | None:
        """Why that column cannot name the selected rows; None: it can."""
        problem = self._opened().meta["key_problem"]
        if problem is None or self.selection is None:
            return None if problem is None else str(problem)
        return self.selection.key_problem

    @property
    def num_rows(self) -> int:
        """Rows in the file, selected or not."""
        return self._opened().num_rows

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of a row, in the source's order."""
        return self._opened().columns

    @property
    def sql_columns(self) -> tuple[Column, ...]:
        """Those of them that SQL sees: content that stays in its files is none of them."""
        return tuple(column for column in self._opened().columns if not column.is_in_place)

    @property
    def base_url(self) -> str:
        """Where relative paths in rows start."""
        return self._base_url or str(self._opened().meta["base_url"])

    def origins(self) -> Origins:
        """Return who wrote which rows."""
        statement = "SELECT url, first_row FROM sources ORDER BY position"
        joined = JoinedColumns.of(self._opened().meta)
        return Origins(lambda: self.stored(statement), self.provenance, self.src, joined)

    @property
    def meta(self) -> dict[str, Any]:
        """All that the file says of itself."""
        return dict(self._opened().meta)

    @property
    def positions_path(self) -> Path | None:
        """The file of selected row ids, when there is a filter."""
        return None if self.selection is None else positions_path(self.path.parent, self.selection.fingerprint)

    def row_ids(self, positions: np.ndarray) -> np.ndarray:
        """Return the row ids at selected positions, as int64.

        Args:
            positions: Integers in [0, len(self)).  # [n], as the result

        Raises:
            IndexError: A position is out of range.
        """
        wanted = np.asarray(positions, np.int64)  # [n]
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"positions {wanted.min()}…{wanted.max()} are not all in [0, {len(self)})")
        if self.selection is None:
            return wanted
        mapped = self._positions()
        found = np.asarray(mapped[wanted], np.int64)  # [n]
        if found.size and not (found.min() >= 0 and found.max() < self.num_rows):
            assert self.positions_path is not None
            raise unreadable(self.positions_path, f"it holds row {found.max()}, and the index has {self.num_rows} rows")
        if mapped.nbytes > self._max_mapped_bytes:
            unload(mapped)
        return found

    def rows(self, row_ids: Sequence[int]) -> list[dict[str, object]]:
        """Return the rows with these ids, in the order asked; an id may come several times.

        Raises:
            IndexError: No row has this id.
        """
        ids = list(map(int, row_ids))
        return self._rows(ids, *self._records(ids))

    def _rows(self, ids: Sequence[int], opened: _Open, records: Mapping[int, tuple[Any, ...]]) -> list[dict[str, object]]:
        """Return the rows of stored ones, in the order asked; see `rows`."""
        names = opened.names
        try:  # a dict each, also for a row asked for twice: samples must not share a list that one of them changes
            rows: list[dict[str, object]] = [*map(dict, map(zip, repeat(names), map(records.__getitem__, ids)))]
        except KeyError as missing:
            if 0 <= missing.args[0] < self.num_rows:
                raise damaged(self.path, f"row {missing} is missing") from None
            raise IndexError(f"{self.path} has no row {missing}: its rows are 0 to {self.num_rows - 1}") from None
        try:
            for name, decode in opened.decoders:
                for row in rows:
                    if row[name] is not None:
                        row[name] = decode(row[name])
        except (ValueError, TypeError, ArithmeticError, LookupError) as error:
            raise damaged(self.path, f"column {name!r} holds what it never does: {error}") from error
        return rows

    def stored_rows(self, row_ids: Sequence[int]) -> list[tuple[Any, ...]]:
        """Return the `sql_columns` of rows as the file has them, in the order asked; see `arrow.arrays_of`.

        Raises:
            KeyError: No row has one of these ids.
        """
        opened, records = self._records(row_ids)
        if not any(is_left := [column.is_in_place for column in opened.columns]):
            return [records[row_id][: len(is_left)] for row_id in row_ids]
        is_here = [not is_in_place for is_in_place in is_left]
        return [tuple(compress(records[row_id], is_here)) for row_id in row_ids]

    def stored(self, statement: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return what a statement finds in the file: in tables beside the rows."""
        return self._fetched(statement, parameters)

    @property
    def has_listing(self) -> bool:
        """The file has what a listing said of the objects of rows."""
        return self._opened().listed is not None

    def listed(self, row_ids: Sequence[int]) -> dict[int, str]:
        """Return what a listing said of the objects of rows (JSON, see `DirectoryTable.listed`), as far as the file has it."""
        sql = self._opened().listed
        return {} if sql is None else dict(self._fetched(sql, (json.dumps(list(map(int, row_ids))),)))

    def resolve(self, value: str) -> str:
        """Return the URL of a downloaded column's value: a relative path starts at the place of the index's source."""
        return urls.join(self.base_url, value)

    def is_usable(self) -> bool:
        """Return False when there is no such file, or its checksum says that it is damaged: it is to be built again.

        Raises:
            IndexDatabaseError: The file is none of ours, or is damaged so that its checksum cannot tell.
        """
        if not is_there(self.path):
            return False
        if not set(self._opened().meta).issuperset(NAMED):
            raise damaged(self.path, f"it does not say its {', '.join(NAMED)}")
        if self._opened().meta["fingerprint"] != self.path.stem:
            self.close()
            logger.warning("the index file %s is another index under this name: building it again", self.path)
            return False
        os.utime(self.path)  # last used, for those who clear old indexes
        return True

    def whole(self) -> Index:
        """Return the index of all rows of the file, selected or not."""
        index = Index(self.path, base_url=self._base_url)
        index.provenance = self.provenance
        return index

    def hold(self, *others: Path) -> None:
        """Open now: from here on no process removes the files, nor `others`, until `close`."""
        with self._lock:
            self._opened()
            self._mark_in_use(others)

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            if self._open is not None:
                self._open.connection.close()
            self._open = self._mapped = None
            locks.close_descriptors(self._in_use)
        if self.named_members is not None:
            self.named_members.close()

    def after_fork_in_child(self) -> None:
        """Leak the parent's connection; open an own one on the next use."""
        if self._open is not None:
            locks.leak(self._open.connection)
        self._open = None
        self._in_use.clear()  # closed by the fork

    def _opened(self) -> _Open:
        if (opened := self._open) is not None:
            return opened
        with self._lock:
            if self._open is None:
                paths = (
                    [self.path] if self.selection is None else [self.path, *selection_files(self.path.parent, self.selection)]
                )
                with locks.uninterrupted():  # a handler's OSError in the middle would say that the file is damaged
                    try:
                        self._mark_in_use(paths)
                        self._open = _open(self.path, self._SELECT)
                    except BaseException:
                        locks.close_descriptors(self._in_use)
                        raise
            return self._open

    def _mark_in_use(self, paths: Sequence[Path]) -> None:
        for path in paths:
            check_plain(path)
        with locks.uninterrupted():  # a descriptor that a handler left open would keep the file for ever
            self._in_use += [fd for path in paths if (fd := locks.open_shared(path)) is not None]

    def _records(self, ids: Sequence[int]) -> tuple[_Open, dict[int, tuple[Any, ...]]]:
        """Return the open file, and what `_SELECT` finds by id; ids without a row are left out."""
        found: dict[int, tuple[Any, ...]] = {}
        opened = self._opened()
        for start in range(0, len(ids), opened.max_ids):
            some = ids[start : start + opened.max_ids]
            records = self._fetched(f"{opened.select} ({', '.join('?' * len(some))})", some)
            found.update(zip(map(_ID_OF, records), records, strict=True))
        return opened, found

    def _fetched(self, statement: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
        """Return what a statement finds; where another thread closes the file, it is opened again.

        Raises:
            IndexDatabaseError: The file is damaged.
        """
        fetched: list[list[tuple[Any, ...]]] = []
        while not fetched:
            self._opened()
            connections = map(_CONNECTION_OF, filter(None, map(_OPEN_OF, (self,))))  # of the file that is open in the lock
            cursors = map(methodcaller("execute", statement, parameters), connections)
            try:
                fetched = self._lock.take_all(map(sqlite3.Cursor.fetchall, cursors))
            except DAMAGE as error:  # `damage_named`, without its calls: for each sample that is asked for by row
                raise damaged(self.path, error) from error
        return fetched[0]

    def _positions(self) -> np.ndarray:
        if self._mapped is None:
            assert self.positions_path is not None
            self._mapped = load_npy(self.positions_path, len(self))
        return self._mapped


def _open(path: Path, statement: str) -> _Open:
    connection = connect(path, OwnedConnection)
    try:
        with damage_named(path):
            connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
            application_id = connection.execute("PRAGMA application_id").fetchone()[0]
            if application_id != APPLICATION_ID:
                raise IndexDatabaseError(f"{path} is no sqlstream index: remove it, the next run builds it again")
            return _described(connection, statement)
    except (ValueError, TypeError, LookupError, AttributeError, OSError, pa.ArrowException) as error:
        connection.close()
        raise damaged(path, f"it says of itself what makes no sense: {error!r}") from error
    except BaseException:
        connection.close()
        raise


def _described(connection: sqlite3.Connection, statement: str) -> _Open:
    """Return what the file says of itself; see `Index._SELECT`."""
    meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    columns = read_columns(connection)
    selected = ", ".join([*(column.expression for column in columns), ROW])
    return _Open(
        connection=connection,
        meta=meta,
        num_rows=int(meta["num_rows"]),
        columns=columns,
        names=tuple(column.name for column in columns),
        decoders=tuple((c.name, decode) for c in columns if (decode := values.decoder(c)) is not None),
        select=statement.format(rows=f"SELECT {selected} FROM rows"),
        max_ids=connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER),
        listed=_LISTED if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'listed'").fetchone() else None,
    )
