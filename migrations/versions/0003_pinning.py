"""Whether an owner pins anything stands in its row: an index of all pins by owner cost every pin and release a page more."""

from __future__ import annotations

import sqlite3

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

STATEMENTS = (
    "ALTER TABLE owner ADD COLUMN is_pinning INTEGER NOT NULL DEFAULT 0",
    "UPDATE owner SET is_pinning = EXISTS (SELECT 1 FROM pin WHERE pin.owner = owner.id)",
    "DROP INDEX pin_by_owner",
    "PRAGMA user_version = 3",
)


def upgrade(connection: sqlite3.Connection) -> None:
    """Move what the index was for into the owners; the version numbers commit with it."""
    for statement in STATEMENTS:
        connection.execute(statement)
