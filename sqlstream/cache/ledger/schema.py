"""The ledger's schema: its version, and the migrations that make it."""

from __future__ import annotations

import logging
import sqlite3
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlalchemy

APPLICATION_ID = 0x73717374
"""'sqst' in ASCII: what `file` and other tools see in the header."""
SCHEMA_VERSION = 6
"""`PRAGMA user_version` of the newest migration in `migrations/versions`."""
SCHEMA_DIGEST = "52235f2dc2bafa7ff19178306fcf0e21"
"""`damage.schema_digest` of a ledger of that version."""
_ALEMBIC_VERSION = """
    CREATE TABLE alembic_version (
        version_num VARCHAR(32) NOT NULL,
        CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
    )
"""
"""As alembic makes it: it looks there for what is to be done."""


def migrations_directory() -> Path:
    """Return the folder of the alembic scripts: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).parents[2]
    inside = package / "migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


def create_at_head(connection: sqlite3.Connection) -> None:
    """Fill an empty file by all migrations in turn, in one transaction; call under the write lock.

    What alembic would do, without it: to import that takes longer than all the rest of a first start (m).
    """
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(_ALEMBIC_VERSION)
    for path in sorted((migrations_directory() / "versions").glob("[0-9]*.py")):
        migration = ModuleType(path.stem)
        SourceFileLoader(path.stem, str(path)).exec_module(migration)  # `runpy` would change `sys.argv` for other threads
        migration.upgrade(connection)
    connection.execute("INSERT INTO alembic_version VALUES (?)", (migration.revision,))
    connection.execute("COMMIT")


def upgrade_to_head(connection: sqlite3.Connection) -> None:
    """Run the migrations that are missing, all in one transaction; call under the write lock."""
    from alembic import command
    from alembic.config import Config

    alembic_logger = logging.getLogger("alembic")
    level = alembic_logger.level
    alembic_logger.setLevel(logging.WARNING)
    config = Config()
    config.set_main_option("script_location", str(migrations_directory()).replace("%", "%%"))
    try:
        with engine_on(connection).connect() as wrapped:
            config.attributes["connection"] = wrapped
            command.upgrade(config, "head")
    finally:
        alembic_logger.setLevel(level)


def engine_on(connection: sqlite3.Connection) -> sqlalchemy.Engine:
    """Return an engine whose one connection is `connection`, with real transactions (SQLAlchemy 2.1 docs, SQLite dialect)."""
    import sqlalchemy
    from sqlalchemy.pool import StaticPool

    engine = sqlalchemy.create_engine("sqlite+pysqlite://", creator=lambda: connection, poolclass=StaticPool)

    @sqlalchemy.event.listens_for(engine, "begin")
    def begin(wrapped: sqlalchemy.Connection) -> None:
        wrapped.exec_driver_sql("BEGIN")  # pysqlite would leave reads outside the transaction

    return engine
