"""What goes on in a cache directory right now, seen without touching it: no lock, no owner, no write.

So a look never makes a worker wait, and it is possible while a process is stopped that has the write lock, for which all others
rightly wait. What the dead left behind is shown as it lies there, not reaped.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sqlstream.cache.files.disk import Disk
from sqlstream.cache.ledger.schema import SCHEMA_VERSION
from sqlstream.errors import CacheDamagedError, CacheDirectoryError, MigrationError
from sqlstream.process import locks

BUSY_SECONDS = 5
"""How long to wait for a process that opens or closes the ledger; both take milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerActivity:
    """A process that uses the cache."""

    id: str
    pid: int
    host: str
    name: str
    is_alive: bool
    """False: it died, and no process has needed what it held."""
    limit_bytes: int | None
    pinned_entries: int
    pinned_bytes: int
    waiting_bytes: int | None
    """Room that it waits for; None: it does not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadActivity:
    """An object on its way."""

    url: str
    pid: int | None
    """The process that downloads it; None: none any more, or the system does not tell."""
    received_bytes: int
    """Bytes that have arrived, in whole pages."""
    reserved_bytes: int
    """Bytes counted for it: its size where that is known, rounded up to whole blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheActivity:
    """One look at a cache directory. Bytes are charged bytes, but for what was received and downloaded."""

    seen_at: float
    """Seconds of a clock that only goes forth: for rates between two looks."""
    limit_bytes: int | None
    """The limit in force. None: no limit."""
    used_bytes: int
    filling_bytes: int
    entries: int
    pinned_entries: int
    pinned_bytes: int
    """Bytes of pinned entries, each counted once."""
    hits: int
    misses: int
    evictions: int
    downloaded_bytes: int
    failures: int
    owners: tuple[OwnerActivity, ...]
    downloads: tuple[DownloadActivity, ...]


def look(directory: Path) -> CacheActivity:
    """Return what goes on in a cache directory.

    Raises:
        CacheDirectoryError: There is no cache.
        MigrationError: Another version of sqlstream wrote its ledger.
        CacheDamagedError: SQLite cannot read it.
    """
    if not (directory / "FORMAT").is_file() or not (directory / "ledger.sqlite").is_file():
        raise CacheDirectoryError(f"there is no sqlstream cache at {directory}: check the path")
    for is_last in (False, True):
        try:
            with _reader(directory / "ledger.sqlite") as connection:
                return _look(connection, Disk(directory))
        except (sqlite3.DatabaseError, TypeError, ValueError) as error:  # replaced or truncated in this moment, or damaged
            if is_last:
                raise CacheDamagedError(
                    f"{directory / 'ledger.sqlite'} cannot be read ({error}): run `sqlstream cache verify --repair {directory}`"
                ) from error
    raise AssertionError("the loop returns")


@contextlib.contextmanager
def _reader(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that cannot write, on one state of the ledger.

    Without a WAL no process has the ledger open: then it is read as it lies there, for SQLite would make that file to read it.
    """
    mode = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "mode=ro&immutable=1"
    with contextlib.closing(
        sqlite3.connect(f"{path.as_uri()}?{mode}", uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    ) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version != SCHEMA_VERSION:
            raise MigrationError(
                f"{path} has schema {version}, this sqlstream shows {SCHEMA_VERSION}: "
                f"{'upgrade sqlstream' if version > SCHEMA_VERSION else '`sqlstream cache stats` upgrades it'}"
            )
        connection.execute("BEGIN")
        yield connection


def _look(connection: sqlite3.Connection, disk: Disk) -> CacheActivity:
    from sqlstream.cache.ledger import queries

    meta, totals, pinned = queries.meta(connection), queries.totals(connection), queries.pinned(connection)
    counters, owners, fillings = queries.counters(connection), queries.owners(connection), queries.fillings(connection)
    connection.execute("ROLLBACK")  # an open reader keeps the WAL from being truncated: what follows looks at files
    return CacheActivity(
        seen_at=time.monotonic(),
        limit_bytes=meta["limit_bytes"],
        used_bytes=totals["ready_bytes"],
        filling_bytes=totals["filling_bytes"],
        entries=totals["entries"],
        pinned_entries=pinned["entries"],
        pinned_bytes=pinned["bytes"],
        hits=counters["hits"],
        misses=counters["misses"],
        evictions=counters["evictions"],
        downloaded_bytes=counters["downloaded_bytes"],
        failures=counters["failures"],
        owners=tuple(_owner(disk, row) for row in sorted(owners, key=lambda row: (row["pid"], row["id"]))),
        downloads=tuple(download for row in fillings if (download := _download(disk, **row)) is not None),
    )


def _owner(disk: Disk, row: dict[str, Any]) -> OwnerActivity:
    shown = {field.name: row[field.name] for field in fields(OwnerActivity) if field.name in row}
    return OwnerActivity(**shown, is_alive=disk.owners.is_live(row["id"]))


def _download(disk: Disk, url: str, part: str, reserved_bytes: int) -> DownloadActivity | None:
    """Look at a part file; None when it was renamed or removed since: it is no download any more."""
    path = disk.root / "part" / part
    with locks.uninterrupted():  # a handler that raised between two lines would leave it open
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            received_bytes = min(_written_bytes(fd), reserved_bytes)
        finally:
            os.close(fd)
    return DownloadActivity(url=url, pid=disk.part_holder(part), received_bytes=received_bytes, reserved_bytes=reserved_bytes)


def _written_bytes(fd: int) -> int:
    """Return how much of a file was written; what was only reserved counts as a hole."""
    written = stop = 0
    with contextlib.suppress(OSError):  # ENXIO: no data beyond
        while True:
            start = os.lseek(fd, stop, os.SEEK_DATA)
            stop = os.lseek(fd, start, os.SEEK_HOLE)
            written += stop - start
    return written
