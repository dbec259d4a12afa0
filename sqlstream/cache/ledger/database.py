"""SQLite as sqlstream uses it: connections, the one write lock, fork safety, upgrades.

Promises:
- `write_transaction` is the only way to write. Order: this process's queue of threads → `gate`, then `lock` (blocking kernel
  locks; the gate is given back at once: it is a queue in which no process can overtake) → the files are still the ones that we
  opened → BEGIN IMMEDIATE → work → COMMIT → unlock. No network and no blocking lock inside. It is a section (`interrupts`).
- A read waits for this process's own transactions, never for another process. `os.fork` waits for both, since SQLite's mutexes
  must be free in the child, and for no other process either.
- SQLite's own busy handler is not used for that: it polls, and starves writers (p99 of the wait 114 times longer).
- The same lock keeps commits and checkpoints apart, which avoids SQLite's WAL-reset bug (before 3.51.3).
- A connection is never carried over a fork: the child leaks it on purpose and opens its own (and inherits `shared_locks`).
- A damaged file is renamed aside and filled anew by its owner, under the write lock and the marker REBUILD: while that file
  exists, the next process that opens the ledger starts the rebuild again. A new ledger is made under the same marker, which
  then says so: what a killed maker leaves is removed, neither called damaged nor put in the place of an earlier damaged file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sqlstream.cache.ledger import damage, schema, shared_locks
from sqlstream.cache.ledger.write_lock import WriteLock, same_file, write_durably
from sqlstream.disk_room import cure_of, free_bytes, has_room, lack_of_inodes
from sqlstream.errors import (
    CacheClosedError,
    CacheDamagedError,
    CacheDirectoryError,
    CacheDiskError,
    MigrationError,
    SqlStreamError,
)
from sqlstream.process import fork, interrupts, locks

if TYPE_CHECKING:
    import sqlalchemy

logger = logging.getLogger(__name__)

WAL_LIMIT_BYTES = 4 << 20
"""The WAL is truncated above this; it is overhead that users did not ask for."""
_SHORT_WAL_BYTES = 1 << 20
"""The same on a disk that is short of room: objects are evicted for it there. Some transactions' worth."""
_OPENING_BYTES, _OPENING_FILES = 1 << 20, 4
"""What SQLite takes as it opens a ledger (32 KiB of -shm, and the -wal), generously: with less the disk counts as full."""
_PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=NORMAL",  # the ledger is rebuildable; FULL costs four times the commits
    "trusted_schema=OFF",
    "cell_size_check=ON",
    "cache_size=-65536",  # KiB, taken page by page as they are read; SQLite's default is 2 MiB: at 10^6 entries 15 % a hit (m)
    "mmap_size=0",  # a file damaged behind our back must give an error, not SIGBUS
    "wal_autocheckpoint=1000",
)
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_CONSTRAINT_DATATYPE = 3091  # SQLITE_CONSTRAINT_DATATYPE of STRICT tables; Python has no name for it
_NO_FILE = (errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""What opening a directory, a link, a socket or a pipe says, where a file of ours belongs."""
_IMPOSSIBLE = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT_CHECK, _CONSTRAINT_DATATYPE, sqlite3.SQLITE_MISMATCH)
"""What no statement of ours meets on tables and values as we wrote them: a name that is not there, text that is no UTF-8."""
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, *_BUSY)
_MARKER = "REBUILD"
_MAKING = b"making"
"""What the marker holds once no damaged ledger is left at the path: what lies there is new, and no process has used it."""
SQLITE_VERSION = sqlite3.sqlite_version
"""Of the library that this Python is linked with."""
Refill = Callable[[sqlite3.Connection], None]


class Database:
    """The ledger's file: one connection per process, opened on first use and again after a fork.

    Args:
        path: The SQLite file; its directory holds `lock` and `gate`.
        refill: Fills an empty ledger from what else is known, after the old one was found damaged; called under the write lock.
        is_there: Returns whether the directory is a cache still: nothing is made in one that has taken its place.
        on_full: Called under the write lock when SQLite finds the disk full; frees what it can for the next transaction.
        is_short: Returns whether the disk has little room, also where its statistics do not say so.
        busy_seconds: How long to wait for a program that uses the file without our lock.

    Raises:
        MigrationError: On use, when a newer sqlstream wrote the file, or has upgraded it meanwhile (it is left untouched).
        CacheDamagedError: On use, when SQLite cannot read it; with `refill`, the next use rebuilds it.
        CacheDiskError: On use, when there is no room to write it; after `on_full`, the next use may go through.
    """

    def __init__(
        self,
        path: Path,
        *,
        refill: Refill | None = None,
        is_there: Callable[[], bool] | None = None,
        on_full: Callable[[], None] | None = None,
        is_short: Callable[[], bool] = lambda: False,
        busy_seconds: float = 30.0,
    ) -> None:
        self.path = path
        self._busy_seconds = busy_seconds
        self._name = str(path)
        self.generation = 0
        """Grows whenever the file is opened again; what was registered in an older one must be registered anew."""
        self.num_transactions = 0
        """Write transactions, for tests and tuning."""
        self._write_lock = WriteLock(path.parent, self._close_files, is_there)
        self._connection: sqlite3.Connection | None = None
        self._shared: list[int] = []
        """`shared_locks` of the connection."""
        self._inode: os.stat_result | None = None
        self._refill = refill
        self._on_full = on_full
        self._is_short = is_short
        self._damaged: os.stat_result | None = None
        self._is_ended = False
        self._using = locks.ForkLock()
        """Held by the thread that uses the connection: in a transaction from the lock to its end, in a read."""
        fork.call_in_child(self, fork.Stage.DATABASES)

    @contextlib.contextmanager
    def write_transaction(self, *, body_commits: bool = False) -> Iterator[sqlite3.Connection]:
        """Run the body as a write transaction, whose COMMIT is its own if `body_commits`; an error rolls back, Ctrl-C waits."""
        with locks.uninterrupted() as section:
            while not self._comes_in():
                section.let_through()
            try:
                with self._using:
                    if self._is_ended:  # while this thread waited
                        self._close_files()
                        raise CacheClosedError(
                            f"the cache {self.path.parent} was closed, or the dataset that reads through it: open it again"
                        )
                    yield from self._transaction(body_commits=body_commits)
            finally:
                self._write_lock.leave()

    def _comes_in(self) -> bool:
        try:
            return self._write_lock.take()
        except OSError as error:
            self._raise_named(error)

    def _transaction(self, *, body_commits: bool) -> Iterator[sqlite3.Connection]:
        try:
            if self._connection is None or not self._is_current():
                self._connect_with_room()
            connection = self._connection
            assert connection is not None
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute("PRAGMA user_version").fetchone()[0] != schema.SCHEMA_VERSION:
                raise MigrationError(
                    f"{self.path} was upgraded by a newer sqlstream while this process used it: restart this process with "
                    "that version (nothing was written)"
                )
            yield connection
            if not body_commits:
                connection.execute("COMMIT")
            if not _keep_wal_small(connection, self._name, self._is_short):
                self._reopen_later()
            self.num_transactions += 1
        except (sqlite3.DatabaseError, OSError) as error:
            is_full = self._is_of_full_disk(error)
            if is_full and self._on_full is not None:
                self._on_full()  # here, and not after a read: it removes files, under the write lock
            self._raise_named(error, is_full=is_full)
        finally:
            # The connection is asked, not a flag: SQLITE_FULL has rolled back already.
            if self._connection is not None and self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query on the last committed state; never an open cursor (it would stop checkpoints)."""
        with self._using:
            connection = self._connection
            if connection is not None and self._is_current():
                try:
                    return self._read_with(connection, sql, parameters)
                except CacheDamagedError:
                    if self._refill is None:
                        raise
        try:
            with self.write_transaction() as opened:
                return opened.execute(sql, parameters).fetchall()
        except CacheDamagedError:  # found as it was opened: the next one rebuilds it first
            if self._refill is None:
                raise
        with self.write_transaction() as opened:
            return opened.execute(sql, parameters).fetchall()

    def _read_with(self, connection: sqlite3.Connection, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        try:
            return connection.execute(sql, parameters).fetchall()
        except (sqlite3.DatabaseError, OSError) as error:
            self._raise_named(error)

    @property
    def engine(self) -> sqlalchemy.Engine:
        """A SQLAlchemy engine over this process's connection, for models, tests and tools; hot paths do without it."""
        self.read("SELECT 1")
        assert self._connection is not None
        return schema.engine_on(self._connection)

    def close(self) -> None:
        """Close connection and lock files; the next use opens them again."""
        with locks.uninterrupted():
            try:
                if self._connection is not None:
                    self._write_lock.retake()
            except BaseException as error:  # without the lock: to close the last connection checkpoints, and others may commit
                self._leak_connection()
                if isinstance(error, OSError) and not interrupts.is_of_handler(error):
                    self._raise_named(error)
                raise
            finally:
                self._close_files()
                self._write_lock.leave()

    def end(self) -> None:
        """Close for good: threads that still wait for the lock get an error, and leave no file open."""
        self._is_ended = True
        self.close()

    def abandon(self) -> None:
        """End without a wait for other processes; while one of them writes, the connection is leaked."""
        self._is_ended = True
        with self._using:
            if self._connection is not None and not self._write_lock.try_relock():
                self._leak_connection()
            self._close_files()

    def _close_files(self) -> None:
        """Close them, under the lock."""
        with self._using:
            try:
                if self._connection is not None:
                    shared_locks.close(self._shared)
                    self._connection.close()
                    self._connection = None
            finally:
                self._write_lock.close()

    def after_fork_in_child(self) -> None:
        """Leak the parent's connection (closing it corrupts) and forget its locks."""
        self._leak_connection()
        self._write_lock.forget()

    def _is_current(self) -> bool:
        return self._inode is not None and same_file(self._name, self._inode)

    def _connect_with_room(self) -> None:
        """Open what is at the path now; on a full disk once more after `on_full`: SQLite's own files need room, too."""
        try:
            self._connect()
        except (sqlite3.OperationalError, OSError):
            if self._on_full is None or has_room(self.path.parent, _OPENING_BYTES, _OPENING_FILES):
                raise
            self._reopen_later()
            self._on_full()
            self._connect()

    def _connect(self) -> None:
        """Open what is at the path now; a damaged file, and one whose rebuild was cut short, is replaced first."""
        self._leak_connection()
        marker = self.path.parent / _MARKER
        is_damaged = self._damaged is not None and same_file(self.path, self._damaged)
        if self._refill is not None and not is_damaged and _is_being_made(marker):
            logger.info("the cache ledger %s was not finished by the process that made it: making it anew", self.path)
            damage.remove(self.path)
        damage.remove_stray_journal(self.path)
        is_new = not self.path.exists()
        # A migration commits its number with its tables: at 0 the file is empty, or another program's.
        is_strange = not is_damaged and _stored_version(self.path) == 0
        if self._refill is None or not (is_damaged or is_new or is_strange or marker.exists()):
            self._connection = self._opened()
        else:
            if not is_new:
                logger.warning("the cache ledger %s is damaged: rebuilding it from the files of the cache", self.path)
                write_durably(marker)
            damage.move_aside(self.path)
            write_durably(marker, _MAKING)
            self._connection = self._opened()
            try:
                self._refill(self._connection)
                marker.unlink()
            except BaseException:
                self._reopen_later()
                raise
        self._damaged = None
        try:
            self._shared = shared_locks.share(self.path)
        except OSError:
            self._reopen_later()
            raise
        self._inode = os.stat(self.path)
        self.generation += 1

    def _opened(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=self._busy_seconds, isolation_level=None, check_same_thread=False, cached_statements=512
        )
        try:
            for pragma in _PRAGMAS:
                connection.execute(f"PRAGMA {pragma}").fetchall()
            if not connection.execute("SELECT 1 FROM sqlite_master").fetchall():
                schema.create_at_head(connection)
            elif connection.execute("PRAGMA user_version").fetchone()[0] < schema.SCHEMA_VERSION:
                schema.upgrade_to_head(connection)
            damage.check(connection, schema.SCHEMA_DIGEST)
            os.chmod(self.path, 0o600)
        except UnicodeDecodeError as error:
            connection.close()
            raise damage.damaged(str(error)) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _leak_connection(self) -> None:
        """Let go of a connection without closing it: its file was renamed or deleted, or it is the parent's."""
        if self._connection is not None:
            locks.leak(self._connection)
            self._connection, self._shared = None, []  # its locks stay: SQLite goes by what it has in memory

    def _is_of_full_disk(self, error: sqlite3.DatabaseError | OSError) -> bool:
        """Return whether SQLite found no room; to it only ENOSPC is a full disk, and only as it writes a file that is open."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
            return not has_room(self.path.parent, _OPENING_BYTES, _OPENING_FILES)
        return code == sqlite3.SQLITE_FULL

    def _raise_named(self, error: sqlite3.DatabaseError | OSError, *, is_full: bool = False) -> NoReturn:
        """Raise what `error` means for a user, and leave the database fit for the next use."""
        if isinstance(error, SqlStreamError):
            raise error
        lack = lack_of_inodes(self.path.parent)
        if isinstance(error, OSError):
            if error.errno in _NO_FILE and error.filename is not None:
                raise CacheDiskError(
                    f"{os.fspath(error.filename)} is no file ({error.strerror}), and sqlstream never makes another thing "
                    "there: remove it, and the next use makes it anew"
                ) from error
            raise CacheDiskError(f"cannot work in {self.path.parent} ({error}{lack}): {cure_of(error)}") from error
        full_code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        code = full_code & 0xFF
        is_impossible = full_code in _IMPOSSIBLE and not isinstance(error, sqlite3.ProgrammingError)
        if code in _DAMAGE or is_impossible or damage.has_another_format(self.path):
            self._note_damage()
            raise CacheDamagedError(
                f"{self.path} is damaged ({error}): the next use rebuilds it from the cached files, or run "
                f"`sqlstream cache verify --repair {self.path.parent}`"
            ) from error
        if code in _DISK:
            if code != sqlite3.SQLITE_FULL:
                self._reopen_later()
            cure = "free space on that disk, or look at its health and its rights"
            if code in _BUSY:
                cure = "another program has it locked, with SQLite's own locks: find out which, and end it"
            facts = {"errno": errno.ENOSPC} if is_full else {}
            raise CacheDiskError(f"cannot use {self.path} ({error}{lack}): {cure}", **facts) from error
        raise error

    def _note_damage(self) -> None:
        """Remember the damaged file by its inode: another process may rebuild it before us."""
        with contextlib.suppress(FileNotFoundError):
            self._damaged = os.stat(self.path)
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.rollback()  # for as long as the file is at its path, others want its locks
        self._leak_connection()

    def _reopen_later(self) -> None:
        """Give up a connection that failed: its files may have been deleted under it."""
        if self._connection is not None:
            shared_locks.close(self._shared)
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


def _is_being_made(marker: Path) -> bool:
    return marker.is_file() and marker.read_bytes() == _MAKING


def _stored_version(path: Path) -> int | None:
    """Look read-only: a file of a newer version must stay as it is, to its last byte; None when there is no file."""
    if path.is_symlink():
        raise CacheDirectoryError(f"{path} is a symbolic link, which we never make: give another directory")
    if not path.exists():
        return None
    if not (path.is_file() or path.is_dir()):  # a pipe: SQLite would wait for its other end
        return 0
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        version = damage.stored_version(connection, known=schema.SCHEMA_VERSION)
    if version > schema.SCHEMA_VERSION:
        raise MigrationError(
            f"{path} has schema {version}, this sqlstream knows up to {schema.SCHEMA_VERSION}: "
            "upgrade sqlstream, or use another directory (the file was left untouched; if no later version has ever been "
            "here, it is damaged: remove it, and it is made anew from the cached files)"
        )
    return version


def _keep_wal_small(connection: sqlite3.Connection, name: str, is_short: Callable[[], bool]) -> bool:
    """Truncate a large WAL; False when it was deleted under us: what is in it goes into the database, which is opened anew."""
    try:
        size_bytes = os.stat(name + "-wal").st_size
        if size_bytes > WAL_LIMIT_BYTES:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        elif size_bytes > _SHORT_WAL_BYTES and (free_bytes(name) < size_bytes or is_short()):
            with contextlib.suppress(sqlite3.OperationalError):  # no room for that either; what is committed is so
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except FileNotFoundError:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return False
    return True
