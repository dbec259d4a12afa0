"""SQLite as sqlstream uses it: connections, the one door for writes, fork safety, upgrades.

Promises:
- `write_transaction` is the only way to write. Order: process mutex → `gate`, then `lock` (blocking kernel locks;
  the gate is given back at once: it is a queue in which nobody can overtake) → the files are still the ones that we
  opened → BEGIN IMMEDIATE → work → COMMIT → unlock. No network and no blocking lock inside.
- SQLite's own busy handler is not used for that: it polls, and starves writers (p99 of the wait 114 times longer).
- The same lock keeps commits and checkpoints apart, which avoids SQLite's WAL-reset bug (before 3.51.3).
- A connection is never carried over a fork: the child leaks it on purpose and opens its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlstream import locks
from sqlstream.errors import CacheDamagedError, CacheDirectoryError, MigrationError

if TYPE_CHECKING:
    import sqlalchemy

logger = logging.getLogger(__name__)

APPLICATION_ID = 0x73717374
"""'sqst' in ASCII: what `file` and other tools see in the header."""
SCHEMA_VERSION = 1
"""`PRAGMA user_version` of the newest migration in `migrations/versions`."""
WAL_LIMIT_BYTES = 4 << 20
"""The WAL is truncated above this; it is overhead that users did not ask for."""
_PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=NORMAL",  # the ledger is rebuildable; FULL costs four times the commits
    "trusted_schema=OFF",
    "cell_size_check=ON",
    "mmap_size=0",  # a file damaged behind our back must give an error, not SIGBUS
    "wal_autocheckpoint=1000",
)
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def migrations_directory() -> Path:
    """Return the folder of the alembic scripts: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).parent
    inside = package / "migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


class Door:
    """The outer lock of one directory: `lock`, and `gate` as the queue before it.

    flock alone is unfair (4 processes in a tight loop: longest wait 175 ms; with the gate 12 ms).
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock: int | None = None
        self._gate: int | None = None

    def enter(self) -> None:
        """Wait for the door; call under `locks.fork_guard()`."""
        if self._lock is None or self._gate is None:
            self._gate = self._open("gate")
            self._lock = self._open("lock")
        locks.lock_blocking(self._gate)
        try:
            locks.lock_blocking(self._lock)
        finally:
            locks.unlock(self._gate)

    def leave(self) -> None:
        """Give the door back; harmless when it was not entered."""
        if self._lock is not None:
            locks.unlock(self._lock)

    def is_current(self) -> bool:
        """Return False when the lock file was replaced (`rm -rf` and a new cache at the same path)."""
        return self._lock is not None and same_file(self._directory / "lock", os.fstat(self._lock))

    def close(self) -> None:
        """Close both files."""
        for fd in (self._lock, self._gate):
            if fd is not None:
                locks.close_descriptor(fd)
        self._lock = self._gate = None

    def forget(self) -> None:
        """Drop descriptors that belong to the parent process; `locks` has closed them."""
        self._lock = self._gate = None

    def _open(self, name: str) -> int:
        return locks.open_descriptor(self._directory / name, os.O_RDWR | os.O_CREAT)


class Database:
    """The ledger's file: one connection per process, opened on first use and again after a fork.

    Args:
        path: The SQLite file; its directory holds `lock` and `gate`.

    Raises:
        MigrationError: On use, when the file was written by a newer sqlstream (it is left untouched).
        CacheDamagedError: On use, when SQLite cannot read it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        """Grows whenever the file is opened again; what was registered in an older one must be registered anew."""
        self._door = Door(path.parent)
        self._connection: sqlite3.Connection | None = None
        self._inode: os.stat_result | None = None
        locks.call_after_fork(self)

    @contextlib.contextmanager
    def write_transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the body as one write transaction behind the door; an exception rolls it back."""
        with locks.fork_guard():
            try:
                connection = self._enter()
                with _damage_named(self.path):
                    connection.execute("BEGIN IMMEDIATE")
                    yield connection
                    connection.execute("COMMIT")
                    self._keep_wal_small(connection)
            finally:
                # The connection is asked, not a flag: SQLITE_FULL has rolled back already, a signal may come anywhere.
                if self._connection is not None and self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                self._door.leave()

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query on the last committed state; never an open cursor (it would stop checkpoints)."""
        with locks.fork_guard():
            connection = self._connection
            if connection is None or not self._is_current():
                with self.write_transaction() as opened:
                    return opened.execute(sql, parameters).fetchall()
            with _damage_named(self.path):
                return connection.execute(sql, parameters).fetchall()

    @property
    def engine(self) -> sqlalchemy.Engine:
        """A SQLAlchemy engine over this process's connection, for models, tests and tools; hot paths do without it."""
        with locks.fork_guard():
            self.read("SELECT 1")
            assert self._connection is not None
            return _engine_on(self._connection)

    def close(self) -> None:
        """Close connection and lock files; the next use opens them again."""
        with locks.fork_guard():
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._door.close()

    def after_fork_in_child(self) -> None:
        """Leak the parent's connection (closing it corrupts) and forget its locks."""
        if self._connection is not None:
            locks.leak(self._connection)
        self._connection = None
        self._door.forget()

    def _is_current(self) -> bool:
        return self._inode is not None and same_file(self.path, self._inode)

    def _enter(self) -> sqlite3.Connection:
        """Take the door and return a connection to the files that are at the path now."""
        for _ in range(10):  # someone replaces the directory again and again: not our case to win
            if not self.path.parent.is_dir():
                raise CacheDirectoryError(f"the cache directory {self.path.parent} is gone: create the dataset or cache anew")
            self._door.enter()
            if self._door.is_current():
                if self._connection is None or not self._is_current():
                    self._connect()
                assert self._connection is not None
                return self._connection
            self.close()
        raise CacheDirectoryError(f"{self.path.parent} is being replaced all the time: stop what deletes it")

    def _connect(self) -> None:
        if self._connection is not None:
            locks.leak(self._connection)  # of a file that was renamed or deleted under us: closing it could touch the new -wal
        connection = sqlite3.connect(
            self.path, timeout=30, isolation_level=None, check_same_thread=False, cached_statements=512
        )
        with _damage_named(self.path):
            self._check_version(connection)
            for pragma in _PRAGMAS:
                connection.execute(f"PRAGMA {pragma}").fetchall()
            if connection.execute("PRAGMA user_version").fetchone()[0] < SCHEMA_VERSION:
                upgrade_to_head(connection)
        os.chmod(self.path, 0o600)
        self._connection, self._inode = connection, os.stat(self.path)
        self.generation += 1

    def _check_version(self, connection: sqlite3.Connection) -> None:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            connection.close()
            raise MigrationError(
                f"{self.path} has schema {version}, this sqlstream knows up to {SCHEMA_VERSION}: "
                "upgrade sqlstream, or use another directory (the file was left untouched)"
            )

    def _keep_wal_small(self, connection: sqlite3.Connection) -> None:
        with contextlib.suppress(FileNotFoundError):
            if os.stat(f"{self.path}-wal").st_size > WAL_LIMIT_BYTES:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def upgrade_to_head(connection: sqlite3.Connection) -> None:
    """Run the migrations that are missing, all in one transaction; call behind the door."""
    from alembic import command
    from alembic.config import Config

    alembic_logger = logging.getLogger("alembic")
    level = alembic_logger.level
    alembic_logger.setLevel(logging.WARNING)
    config = Config()
    config.set_main_option("script_location", str(migrations_directory()).replace("%", "%%"))
    try:
        with _engine_on(connection).connect() as wrapped:
            config.attributes["connection"] = wrapped
            command.upgrade(config, "head")
    finally:
        alembic_logger.setLevel(level)


def same_file(path: Path, status: os.stat_result) -> bool:
    """Return True if `path` is still the file that `status` was taken from."""
    try:
        now = os.stat(path)
    except FileNotFoundError:
        return False
    return (now.st_dev, now.st_ino) == (status.st_dev, status.st_ino)


def _engine_on(connection: sqlite3.Connection) -> sqlalchemy.Engine:
    """Return an engine whose one connection is `connection`, with real transactions (SQLAlchemy 2.1 docs, SQLite dialect)."""
    import sqlalchemy
    from sqlalchemy.pool import StaticPool

    engine = sqlalchemy.create_engine("sqlite+pysqlite://", creator=lambda: connection, poolclass=StaticPool)

    @sqlalchemy.event.listens_for(engine, "begin")
    def begin(wrapped: sqlalchemy.Connection) -> None:
        wrapped.exec_driver_sql("BEGIN")  # pysqlite would leave reads outside the transaction

    return engine


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", None)
        if code is not None and code & 0xFF in _DAMAGE:
            raise CacheDamagedError(
                f"{path} is damaged ({error}): stop its users, run `sqlstream cache verify --repair {path.parent}`"
            ) from error
        raise
