"""Whether a ledger's file is what we wrote: what SQLite itself does not notice, or names as something else.

A flipped bit is damage, which `database` mends: what cannot be ours is raised as SQLite raises a corrupt file.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Any

logger = logging.getLogger(__name__)

_WAL_MARK = (18, b"\x02\x02")
"""Where the header of a database says that its journal is a WAL, and how (sqlite.org/fileformat2.html, 1.3)."""
PLAUSIBLE_STEPS = 1000
"""Versions so far above ours may exist one day; a number beyond is a flipped bit unless the tables say the same."""
_SINGLE_ROWS = """
SELECT (SELECT count(*) FROM meta WHERE one = 1 AND tick >= 0 AND uses >= 0 AND typeof(tick + uses) = 'integer'
        AND typeof(uuid) = 'text' AND uuid NOT GLOB '*[^0-9a-f]*' AND typeof(boot_id) = 'text' AND boot_id NOT GLOB '*[^ -~]*'
        AND typeof(policy) = 'text' AND policy NOT GLOB '*[^a-z]*'),
       (SELECT count(*) FROM totals WHERE one = 1 AND entries >= 0 AND ready_bytes >= 0 AND filling_bytes >= 0
        AND typeof(entries + ready_bytes + filling_bytes) = 'integer'),
       (SELECT count(*) FROM meta) + (SELECT count(*) FROM totals)
"""


def damaged(text: str) -> sqlite3.DatabaseError:
    """Return the error for a ledger that cannot be what we wrote, as SQLite would raise it."""
    error = sqlite3.DatabaseError(text)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def met_by_own_statement(error: sqlite3.IntegrityError) -> sqlite3.DatabaseError:
    """Return the error for a constraint that is broken in a transaction whose statements are all the ledger's own.

    They insert a key after they have seen, in the same transaction, that it is absent: "UNIQUE constraint failed" then says
    that a page is not as it was written. `database` cannot know this of the statements of any body.
    """
    return damaged(str(error))


def typed(rows: Iterable[tuple[Any, ...]], *types: type | UnionType) -> list[tuple[Any, ...]]:
    """Return rows whose values have these types. SQLite does not check it as it reads: a row of zeros is a row of NULLs.

    Raises:
        sqlite3.DatabaseError: A value has another type.
    """
    checked = list(rows)
    for row in checked:
        if not all(map(isinstance, row, types)):
            raise damaged(f"a row of it is not as it was written: {row!r}")
    return checked


def has_another_format(path: Path) -> bool:
    """Return whether the header names a way of writing that SQLite does not have: it then takes the file as read-only."""
    offset, mark = _WAL_MARK
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(offset)
        return any(number > max(mark) for number in file.read(len(mark)))
    return False


def remove_stray_journal(path: Path) -> None:
    """Remove a rollback journal beside a ledger that has a WAL: SQLite would write its pages into the ledger.

    Only while a new ledger goes into WAL mode is there a journal of ours; what it would take back is the header's first page.
    """
    offset, mark = _WAL_MARK
    journal = path.with_name(f"{path.name}-journal")
    if not journal.exists() or not path.is_file():
        return
    with open(path, "rb") as file:
        file.seek(offset)
        is_wal = file.read(len(mark)) == mark
    if is_wal:
        logger.warning("removing %s, which is none of ours: the ledger has a WAL", journal)
        journal.unlink()


def remove(path: Path) -> None:
    """Remove a ledger that no process has used yet."""
    for suffix in ("-journal", "-wal", "-shm", ""):
        path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)


def move_aside(path: Path) -> None:
    """Rename a damaged ledger, its -wal before it: a database must never meet the -wal of another one."""
    path.with_name(f"{path.name}-journal").unlink(missing_ok=True)
    for suffix in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{path}.bad{suffix}")


def stored_version(connection: sqlite3.Connection, *, known: int) -> int:
    """Return the schema version of a ledger.

    Args:
        connection: To it.
        known: Our newest version.

    Raises:
        sqlite3.DatabaseError: Header and tables contradict each other.
    """
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version in (0, known):
        return version
    try:
        recorded = [int(row[0]) for row in connection.execute("SELECT version_num FROM alembic_version").fetchall()]
    except (sqlite3.OperationalError, ValueError):  # a later version may record it in another way
        recorded = []
    if recorded != [version] and not known < version <= known + PLAUSIBLE_STEPS:
        raise damaged(f"its header says schema {version}, its tables {recorded}")
    return version


def schema_digest(connection: sqlite3.Connection) -> str:
    """Return a digest of the tables, indexes, views and triggers of a ledger, blanks apart."""
    rows = connection.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite^_%' ESCAPE '^' ORDER BY type, name"
    ).fetchall()
    words = ["".join(str(word).split()) for row in rows for word in row]
    return hashlib.blake2b("\0".join(words).encode(), digest_size=16).hexdigest()


def check(connection: sqlite3.Connection, digest: str) -> None:
    """Raise sqlite3.DatabaseError unless the schema is that of `digest`, and the single rows are there."""
    found = schema_digest(connection)
    if found != digest:
        raise damaged("its schema is not the one of its version")
    if connection.execute(_SINGLE_ROWS).fetchone() != (1, 1, 2):
        raise damaged("its single rows are not as they were written")
