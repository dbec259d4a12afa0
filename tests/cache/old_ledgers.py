"""Ledgers as earlier versions wrote them."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from alembic import command
from alembic.config import Config

from sqlstream.cache.ledger import schema


def migrate(path: Path, revision: str) -> None:
    """Make the ledger at `path`, new or old, one of `revision`, with nothing but the migrations up to it."""
    config = Config()
    config.set_main_option("script_location", str(schema.migrations_directory()))
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    with schema.engine_on(connection).connect() as wrapped:
        config.attributes["connection"] = wrapped
        command.upgrade(config, revision)
    connection.close()


def as_version_1(directory: Path) -> None:
    """Make the ledger of a cache at rest what the code of version 1 would have left."""
    as_version(directory, 1)


def as_version(directory: Path, number: int) -> None:
    """Make the ledger of a cache at rest what the code of a version would have left: its tables, its columns, the same rows.

    At rest there is no pin: what was a table of its own once is a view by now.
    """
    present, old = directory / "ledger.sqlite", directory / "old.sqlite"
    migrate(old, f"{number:04d}")
    with contextlib.closing(sqlite3.connect(old, isolation_level=None)) as connection:
        connection.execute("ATTACH ? AS present", (str(present),))
        tables = [row[1] for row in connection.execute("PRAGMA main.table_list").fetchall() if row[0] == "main"]
        known = {row[0] for row in connection.execute("SELECT name FROM present.sqlite_master WHERE type = 'table'").fetchall()}
        tables = sorted(name for name in tables if name in known and not name.startswith(("sqlite_", "alembic_")))
        assert tables.index("entry") < tables.index("totals")  # its triggers write there
        for table in tables:
            columns = ", ".join(_columns(connection, "main", table) & _columns(connection, "present", table))
            connection.execute(f"DELETE FROM {table}")
            connection.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM present.{table}")
        connection.execute("DETACH present")
        assert connection.execute("PRAGMA user_version").fetchone() == (number,)
    for suffix in ("-wal", "-shm"):
        Path(f"{present}{suffix}").unlink(missing_ok=True)
    os.replace(old, present)


def _columns(connection: sqlite3.Connection, schema: str, table: str) -> set[str]:
    return {row[1] for row in connection.execute(f"PRAGMA {schema}.table_info({table})").fetchall()}


def version(path: Path) -> int:
    """The schema version of a ledger, as any program reads it."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])
