"""The pins of an owner stand in its row, joined: one page written a window of samples, where a row for each took a dozen.

`pin` shows them as rows still. It cuts pieces of 4096 bytes first: SQLite reads all of a long BLOB for each part of it.
"""

from __future__ import annotations

import sqlite3

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# With rowids: a row of the other kind spills to a page of its own beyond 1000 bytes.
OWNER = """
CREATE TABLE owner (
    id TEXT NOT NULL PRIMARY KEY,
    pid INTEGER NOT NULL,
    host TEXT NOT NULL,
    started_at INTEGER NOT NULL,
    name TEXT NOT NULL,
    limit_bytes INTEGER,
    waiting_tick INTEGER,
    waiting_bytes INTEGER,
    policy TEXT,
    pins BLOB NOT NULL DEFAULT x'' CHECK (length(pins) % 16 = 0)
) STRICT
"""
COLUMNS = "id, pid, host, started_at, name, limit_bytes, waiting_tick, waiting_bytes, policy"
PIN = """
CREATE VIEW pin (key, owner) AS
WITH RECURSIVE
    piece (keys, owner, start) AS (
        SELECT substr(pins, 1, 4096), id, 1 FROM owner WHERE length(pins) > 0
        UNION ALL
        SELECT substr((SELECT pins FROM owner WHERE id = piece.owner), start + 4096, 4096), owner, start + 4096
        FROM piece WHERE length(keys) = 4096
    ),
    place (start) AS (SELECT 1 UNION ALL SELECT start + 16 FROM place WHERE start < 4081)
SELECT substr(keys, place.start, 16), owner FROM piece CROSS JOIN place ON place.start < length(keys)
"""


def upgrade(connection: sqlite3.Connection) -> None:
    """Move the rows of `pin` into the owners; the version numbers commit with it."""
    pins: dict[str, bytes] = {}
    for owner, key in connection.execute("SELECT owner, key FROM pin").fetchall():
        pins[owner] = pins.get(owner, b"") + key
    connection.execute("ALTER TABLE owner RENAME TO old_owner")
    connection.execute(OWNER)
    connection.execute(f"INSERT INTO owner ({COLUMNS}) SELECT {COLUMNS} FROM old_owner")
    for owner, keys in pins.items():
        connection.execute("UPDATE owner SET pins = ? WHERE id = ?", (keys, owner))
    connection.execute("DROP TABLE old_owner")
    connection.execute("DROP TABLE pin")
    connection.execute(PIN)
    connection.execute("PRAGMA user_version = 4")
