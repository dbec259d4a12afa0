"""Connections to an index file, which never changes, and the one error of a damaged one."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote as quote_url

from sqlstream.errors import IndexDatabaseError
from sqlstream.index.file.intact import check_plain
from sqlstream.index.types.models import Column
from sqlstream.process import fork

DAMAGE = (sqlite3.DatabaseError, UnicodeError)
"""How SQLite says that a file is damaged; the latter of a name that is no UTF-8."""
IN_PLACE = "in_place"
"""Key in `meta` of the names of columns whose values stay in the source's files (JSON)."""
_SCAN_CACHE_KIB = 8192  # pages that a scan, or a sort of user SQL, keeps


_ROWS_A_CALL = 10_000
"""Rows that one call inserts, at most, of those that come one by one. Arbitrary."""


class _SqliteCalls:
    """The lock that a thread holds inside SQLite; a fork waits for it, since SQLite's mutexes must be free in the child.

    It is the innermost lock: its holder asks for no other. No section is entered for it: Ctrl-C ends a statement.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        fork.enclose(self, fork.Stage.CALLS)

    def before_fork(self) -> None:
        """Wait until no other thread has it."""
        self.lock.acquire()

    def after_fork(self, *, is_child: bool) -> None:
        """Give it back."""
        del is_child  # the same in both
        self.lock.release()


def _guarded(method: Callable[..., Any]) -> Any:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        with self.calls.lock:
            return method(self, *args, **options)

    return call


class _GuardedCursor(sqlite3.Cursor):
    """A cursor of a `GuardedConnection`."""

    def __init__(self, connection: GuardedConnection) -> None:
        self.calls = connection.calls
        super().__init__(connection)

    execute = _guarded(sqlite3.Cursor.execute)
    executescript = _guarded(sqlite3.Cursor.executescript)
    fetchone = _guarded(sqlite3.Cursor.fetchone)
    fetchmany = _guarded(sqlite3.Cursor.fetchmany)
    fetchall = _guarded(sqlite3.Cursor.fetchall)
    close = _guarded(sqlite3.Cursor.close)
    __next__ = _guarded(sqlite3.Cursor.__next__)

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> Any:
        """See `sqlite3.Cursor.executemany`; what gives the rows may ask for locks, so it runs outside of SQLite."""
        rows = iter(parameters)
        while some := list(islice(rows, _ROWS_A_CALL)):
            with self.calls.lock:
                super().executemany(sql, some)
        return self

    def __del__(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # its connection is closed
            self.close()


class OwnedConnection(sqlite3.Connection):
    """A connection whose user has a lock of its own for all calls; a fork waits where it is dropped without `close`, too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.calls = _SqliteCalls()
        with self.calls.lock:
            super().__init__(*args, **options)

    close = _guarded(sqlite3.Connection.close)

    def __del__(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # dropped by another thread than its own: Python closes it
            self.close()


class GuardedConnection(OwnedConnection):
    """A connection of one thread, whose every call a fork by another one waits for: files that grow, and scans."""

    def cursor(self, factory: Any = _GuardedCursor) -> Any:
        """Return a cursor whose calls a fork waits for."""
        return super().cursor(factory)

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> Any:
        """See `_GuardedCursor.executemany`."""
        return self.cursor().executemany(sql, parameters)

    def execute(self, sql: str, parameters: Any = (), /) -> Any:
        """See `sqlite3.Connection.execute`, which makes a cursor of its own."""
        return self.cursor().execute(sql, parameters)

    def executescript(self, sql_script: str, /) -> Any:
        """See `sqlite3.Connection.executescript`, likewise."""
        return self.cursor().executescript(sql_script)

    create_function = _guarded(sqlite3.Connection.create_function)
    set_authorizer = _guarded(sqlite3.Connection.set_authorizer)
    set_progress_handler = _guarded(sqlite3.Connection.set_progress_handler)
    commit = _guarded(sqlite3.Connection.commit)
    rollback = _guarded(sqlite3.Connection.rollback)


def connect(path: Path, factory: type[OwnedConnection] = GuardedConnection) -> sqlite3.Connection:
    """Return a connection that can only read, and takes the file as never changing.

    It is read, not mapped: mapped pages count as the process's memory (110 MiB after 2·10^4 random rows of 10^6 (m), all of the
    file in the end), a disk error would kill it by SIGBUS, and random rows take 0.7 to 1 µs longer only (m).
    """
    check_plain(path)
    address = f"file:{quote_url(os.fsencode(path.absolute()))}?mode=ro&immutable=1"
    with damage_named(path):
        connection = sqlite3.connect(
            address, uri=True, isolation_level=None, check_same_thread=False, cached_statements=64, factory=factory
        )
        for pragma in ("query_only=ON", "trusted_schema=OFF", f"cache_size=-{_SCAN_CACHE_KIB}", "mmap_size=0"):
            connection.execute(f"PRAGMA {pragma}")
    return connection


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Give a connection to an index file for a moment.

    Raises:
        IndexDatabaseError: The file is damaged, or none of ours.
    """
    with damage_named(path), contextlib.closing(connect(path)) as connection:
        yield connection


def read_columns(connection: sqlite3.Connection) -> tuple[Column, ...]:
    """Return the columns that the file lists."""
    left = connection.execute(f"SELECT value FROM meta WHERE key = '{IN_PLACE}'").fetchone()
    in_place = frozenset[str](json.loads(left[0])) if left else frozenset[str]()
    records = connection.execute(
        "SELECT position, name, physical, arrow_field, type, declared, has_nan FROM columns ORDER BY position"
    )
    return tuple(
        Column(position=p, name=n, physical=ph, arrow_field=f, type=t, declared=d, has_nan=bool(nan), is_in_place=n in in_place)
        for p, n, ph, f, t, d, nan in records
    )


@contextlib.contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into one that names the file and the cure."""
    try:
        yield
    except DAMAGE as error:
        raise damaged(path, error) from error


def damaged(path: Path, reason: object) -> IndexDatabaseError:
    """Return the error of an index file that is not as it was written."""
    return IndexDatabaseError(f"the index file {path} cannot be read ({reason}): remove it, the next run builds it again")


def size_of(path: Path) -> int:
    """Return the bytes of an index file.

    Raises:
        IndexDatabaseError: It is gone, or cannot be looked at.
    """
    try:
        return path.stat().st_size
    except OSError as error:
        raise damaged(path, error) from error
