"""What failed: downloads that no retry mended, and samples that could not be made."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from sqlstream.cache.ledger import Ledger, LedgerTransaction

MAX_ERROR_CHARACTERS = 500
"""Of an error that the ledger keeps: some decoders quote what they could not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure, to be written down."""

    url: str
    """The object's URL, without credentials; for a sample whose objects are here, the dataset and its row."""
    error: str
    row: int | None = None
    """Of the index; None: not known here."""
    step: int | None = None
    """Global step that met it; None: not known here."""
    count: int = 1
    """0: the download has counted it already, only row and step are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """One way in which one thing fails."""

    url: str
    """The object's URL, without credentials; for a sample whose objects are here, the dataset and its row."""
    error: str
    row: int | None
    """Row of the index that met it last; None: whoever asked for the object named none (`Cache.pinned`)."""
    step: int | None
    """Global step that met it last."""
    count: int
    last_at: int
    """Seconds since 1970."""


def record_failures(tx: LedgerTransaction, failed: Iterable[Failure]) -> None:
    """Count failures under their URL and error; a row or step that is not known leaves the last known one."""
    now = int(time.time())
    tx.connection.executemany(
        "INSERT INTO failure (url, error, count, last_at, row, step) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (url, error) DO UPDATE SET count = count + excluded.count, last_at = excluded.last_at, "
        "row = coalesce(excluded.row, row), step = coalesce(excluded.step, step)",
        [(f.url, f.error[:MAX_ERROR_CHARACTERS], f.count, now, f.row, f.step) for f in failed],
    )


def failures(ledger: Ledger) -> list[FailureRecord]:
    """Return what failed since the cache was made, the most frequent first."""
    with ledger.transaction() as tx:
        rows = tx.connection.execute(
            "SELECT url, error, row, step, count, last_at FROM failure WHERE count > 0 "
            "ORDER BY count DESC, last_at DESC, url, error"
        ).fetchall()
    return [FailureRecord(url=r[0], error=r[1], row=r[2], step=r[3], count=r[4], last_at=r[5]) for r in rows]
