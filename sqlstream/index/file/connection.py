"""Connections to an index file, which never changes, and the one error of a damaged one."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote as quote_url

from sqlstream.errors import IndexDatabaseError
from sqlstream.index.file.intact import check_plain
from sqlstream.index.types.models import Column

DAMAGE = (sqlite3.DatabaseError, UnicodeError)
"""How SQLite says that a file is damaged; the latter of a name that is no UTF-8."""
IN_PLACE = "in_place"
"""Key in `meta` of the names of columns whose values stay in the source's files (JSON)."""
_SCAN_CACHE_KIB = 8192  # pages that a scan, or a sort of user SQL, keeps


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection that can only read, and takes the file as never changing.

    It is read, not mapped: mapped pages count as the process's memory (110 MiB after 2·10^4 random rows of 10^6 (m), all of the
    file in the end), a disk error would kill it by SIGBUS, and random rows take 0.7 to 1 µs longer only (m).
    """
    check_plain(path)
    address = f"file:{quote_url(str(path.absolute()))}?mode=ro&immutable=1"
    with damage_named(path):
        connection = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False, cached_statements=64)
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
