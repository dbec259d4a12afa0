"""The cache ledger: entries, owners, pins, touches, totals kept by triggers, counters."""

from __future__ import annotations

import sqlite3

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = (
    """
    CREATE TABLE entry (
        key BLOB NOT NULL PRIMARY KEY CHECK (length(key) = 16),
        url TEXT NOT NULL,
        size INTEGER,
        charged_bytes INTEGER NOT NULL CHECK (charged_bytes >= 0),
        state TEXT NOT NULL CHECK (state IN ('filling', 'ready')),
        tick INTEGER NOT NULL,
        part TEXT,
        ext TEXT NOT NULL,
        dataset INTEGER,
        etag TEXT,
        created_at INTEGER NOT NULL,
        CHECK ((state = 'filling') = (part IS NOT NULL)),
        CHECK (state = 'filling' OR size IS NOT NULL)
    ) STRICT, WITHOUT ROWID
    """,
    "CREATE INDEX entry_by_tick ON entry (tick) WHERE state = 'ready'",
    "CREATE INDEX entry_filling ON entry (part) WHERE state = 'filling'",
    """
    CREATE TABLE owner (
        id TEXT NOT NULL PRIMARY KEY,
        pid INTEGER NOT NULL,
        host TEXT NOT NULL,
        started_at INTEGER NOT NULL,
        name TEXT NOT NULL,
        limit_bytes INTEGER,
        waiting_tick INTEGER,
        waiting_bytes INTEGER
    ) STRICT, WITHOUT ROWID
    """,
    """
    CREATE TABLE pin (
        key BLOB NOT NULL,
        owner TEXT NOT NULL,
        count INTEGER NOT NULL,
        PRIMARY KEY (key, owner)
    ) STRICT, WITHOUT ROWID
    """,
    "CREATE INDEX pin_by_owner ON pin (owner)",
    "CREATE TABLE touch (seq INTEGER NOT NULL PRIMARY KEY, keys BLOB NOT NULL) STRICT",
    """
    CREATE TABLE totals (
        one INTEGER NOT NULL PRIMARY KEY CHECK (one = 1),
        entries INTEGER NOT NULL,
        ready_bytes INTEGER NOT NULL CHECK (ready_bytes >= 0),
        filling_bytes INTEGER NOT NULL CHECK (filling_bytes >= 0)
    ) STRICT
    """,
    "CREATE TABLE stat (name TEXT NOT NULL PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID",
    """
    CREATE TABLE failure (
        url TEXT NOT NULL,
        error TEXT NOT NULL,
        count INTEGER NOT NULL,
        last_at INTEGER NOT NULL,
        PRIMARY KEY (url, error)
    ) STRICT, WITHOUT ROWID
    """,
    """
    CREATE TABLE dataset (
        id INTEGER NOT NULL PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        src TEXT NOT NULL,
        fingerprint TEXT NOT NULL,
        last_used INTEGER NOT NULL
    ) STRICT
    """,
    """
    CREATE TABLE meta (
        one INTEGER NOT NULL PRIMARY KEY CHECK (one = 1),
        uuid TEXT NOT NULL,
        limit_bytes INTEGER,
        tick INTEGER NOT NULL,
        boot_id TEXT NOT NULL
    ) STRICT
    """,
    "INSERT INTO totals VALUES (1, 0, 0, 0)",
    "INSERT INTO meta VALUES (1, lower(hex(randomblob(16))), NULL, 0, '')",
)
# INSERT OR REPLACE on `entry` is forbidden everywhere: it fires no delete trigger.
TRIGGERS = (
    """
    CREATE TRIGGER entry_added AFTER INSERT ON entry BEGIN
        UPDATE totals SET entries = entries + 1,
            ready_bytes = ready_bytes + iif(NEW.state = 'ready', NEW.charged_bytes, 0),
            filling_bytes = filling_bytes + iif(NEW.state = 'filling', NEW.charged_bytes, 0);
    END
    """,
    """
    CREATE TRIGGER entry_removed AFTER DELETE ON entry BEGIN
        UPDATE totals SET entries = entries - 1,
            ready_bytes = ready_bytes - iif(OLD.state = 'ready', OLD.charged_bytes, 0),
            filling_bytes = filling_bytes - iif(OLD.state = 'filling', OLD.charged_bytes, 0);
    END
    """,
    """
    CREATE TRIGGER entry_charged AFTER UPDATE OF state, charged_bytes ON entry BEGIN
        UPDATE totals SET
            ready_bytes = ready_bytes + iif(NEW.state = 'ready', NEW.charged_bytes, 0)
                - iif(OLD.state = 'ready', OLD.charged_bytes, 0),
            filling_bytes = filling_bytes + iif(NEW.state = 'filling', NEW.charged_bytes, 0)
                - iif(OLD.state = 'filling', OLD.charged_bytes, 0);
    END
    """,
)


STATEMENTS = (*TABLES, *TRIGGERS, "PRAGMA application_id = 0x73717374", "PRAGMA user_version = 1")


def upgrade(connection: sqlite3.Connection) -> None:
    """Create everything; the version numbers commit with it."""
    for statement in STATEMENTS:
        connection.execute(statement)
