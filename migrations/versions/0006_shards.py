"""Members of shards: which shard each is of, and in what unit each dataset fetches shards in an epoch."""

from __future__ import annotations

import sqlite3

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

STATEMENTS = (
    "ALTER TABLE entry ADD COLUMN shard BLOB",
    "CREATE INDEX entry_by_shard ON entry (shard) WHERE shard IS NOT NULL",
    """
    CREATE TABLE shard_unit (
        dataset INTEGER NOT NULL,
        wish TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        owner TEXT NOT NULL,
        unit TEXT NOT NULL,
        reason TEXT NOT NULL,
        PRIMARY KEY (dataset, wish, epoch)
    ) STRICT, WITHOUT ROWID
    """,
    "PRAGMA user_version = 6",
)


def upgrade(connection: sqlite3.Connection) -> None:
    """Add what is new; the version numbers commit with it."""
    for statement in STATEMENTS:
        connection.execute(statement)
