"""${message}"""

from __future__ import annotations

import sqlite3

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade(connection: sqlite3.Connection) -> None:
    """Upgrade; end with `PRAGMA user_version = ${up_revision.lstrip("0")}`."""
