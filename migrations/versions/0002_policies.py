"""Eviction policies, storage counts per host, and where in the data a failure was met.

Every column is added behind the others, with a default: rows of version 1 stay valid as they are. `entry.rank` stays NULL
under `lru` and `fifo`, so that their index (rank, tick) orders as (tick) did.
"""

from __future__ import annotations

import sqlite3

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

STATEMENTS = (
    "ALTER TABLE failure ADD COLUMN row INTEGER",
    "ALTER TABLE failure ADD COLUMN step INTEGER",
    """
    CREATE TABLE host (
        host TEXT NOT NULL PRIMARY KEY,
        requests INTEGER NOT NULL,
        downloaded_bytes INTEGER NOT NULL,
        retries INTEGER NOT NULL,
        wait_microseconds INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID
    """,
    "ALTER TABLE entry ADD COLUMN rank INTEGER",
    "DROP INDEX entry_by_tick",
    "CREATE INDEX entry_by_rank ON entry (rank, tick) WHERE state = 'ready'",
    "ALTER TABLE touch ADD COLUMN hints BLOB",
    "ALTER TABLE owner ADD COLUMN policy TEXT",
    "ALTER TABLE meta ADD COLUMN policy TEXT NOT NULL DEFAULT 'lru'",
    "ALTER TABLE meta ADD COLUMN uses INTEGER NOT NULL DEFAULT 0",
    "PRAGMA user_version = 2",
)


def upgrade(connection: sqlite3.Connection) -> None:
    """Add what is new; the version numbers commit with it."""
    for statement in STATEMENTS:
        connection.execute(statement)
