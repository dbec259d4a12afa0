"""Checksums, last uses and the allocation unit; no limit is a limit that was given.

A limit of `NULL` meant both "none" and "nothing said". From here on `NULL` says nothing, and no limit is the largest number:
`min` then gives what is in force. A ledger that has entries and no limit keeps having none; an empty one takes a first limit
as it is opened. When an entry was last used was not written down: the upgrade counts as a use of all that are here.
"""

from __future__ import annotations

import sqlite3
import time

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

STATEMENTS = (
    "ALTER TABLE entry ADD COLUMN crc32 INTEGER",
    "CREATE TABLE used (seq INTEGER NOT NULL PRIMARY KEY, at INTEGER NOT NULL, keys BLOB NOT NULL) STRICT",
    "ALTER TABLE meta ADD COLUMN unit_bytes INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE meta ADD COLUMN filesystem TEXT NOT NULL DEFAULT ''",
    "UPDATE meta SET limit_bytes = coalesce((SELECT min(limit_bytes) FROM owner), limit_bytes)",
    """
    UPDATE meta SET limit_bytes = 9223372036854775807
    WHERE limit_bytes IS NULL AND (SELECT entries FROM totals) > 0
    """,
    "PRAGMA user_version = 5",
)


def upgrade(connection: sqlite3.Connection) -> None:
    """Add what is new; the version numbers commit with it."""
    for statement in STATEMENTS:
        connection.execute(statement)
    if keys := b"".join(row[0] for row in connection.execute("SELECT key FROM entry").fetchall()):
        connection.execute("INSERT INTO used (seq, at, keys) VALUES (0, ?, ?)", (int(time.time()), keys))
