"""What failed: downloads that no retry mended, and samples that could not be made."""

from __future__ import annotations

from dataclasses import dataclass

from sqlstream.cache.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """One way in which one thing fails."""

    what: str
    """The object's URL, without credentials; for a sample whose objects are here, the dataset and its row."""
    error: str
    count: int
    last_at: int
    """Seconds since 1970."""


def failures(ledger: Ledger) -> list[FailureRecord]:
    """Return what failed since the cache was made, the most frequent first."""
    with ledger.transaction() as tx:
        rows = tx.connection.execute(
            "SELECT url, error, count, last_at FROM failure ORDER BY count DESC, last_at DESC, url"
        ).fetchall()
    return [FailureRecord(what=row[0], error=row[1], count=row[2], last_at=row[3]) for row in rows]
