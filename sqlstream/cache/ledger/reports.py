"""Reports in the ledger: what failed, and what each host of remote storage was asked for, over all processes and runs."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from sqlstream.cache.ledger.ledger import Ledger, LedgerTransaction, as_utf8
from sqlstream.storage.base.urls import redact, redact_text
from sqlstream.storage.fetcher import FetchDone

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
    """Row of the index that met it last; None: no row was named (`Cache.pinned`)."""
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
        [
            (as_utf8(redact(f.url)), as_utf8(redact_text(f.error)[:MAX_ERROR_CHARACTERS]), f.count, now, f.row, f.step)
            for f in failed
        ],
    )


def failures(ledger: Ledger) -> list[FailureRecord]:
    """Return what failed since the cache was made, the most frequent first."""
    from sqlstream.cache.ledger import queries

    with ledger.transaction() as tx:
        return [FailureRecord(**row) for row in queries.failures(tx.connection)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """Counters of one host; failed downloads count, too."""

    host: str
    """`scheme://authority`, without credentials."""
    requests: int
    downloaded_bytes: int
    """Over the network, those of failed tries included."""
    retries: int
    wait_seconds: float
    """Waited between tries, added up over downloads side by side."""


def record_hosts(tx: LedgerTransaction, downloads: Iterable[FetchDone]) -> None:
    """Add ended downloads to the counters of their hosts; a row for each host, however many downloads."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for done in downloads:
        if done.host:
            sums[done.host].update(
                requests=done.num_requests,
                downloaded_bytes=done.downloaded_bytes,
                retries=done.num_retries,
                wait_microseconds=int(1e6 * done.pause_seconds),
            )
    tx.connection.executemany(
        "INSERT INTO host (host, requests, downloaded_bytes, retries, wait_microseconds) "
        "VALUES (:host, :requests, :downloaded_bytes, :retries, :wait_microseconds) "
        "ON CONFLICT (host) DO UPDATE SET requests = requests + excluded.requests, "
        "downloaded_bytes = downloaded_bytes + excluded.downloaded_bytes, retries = retries + excluded.retries, "
        "wait_microseconds = wait_microseconds + excluded.wait_microseconds",
        [{"host": host, **counters} for host, counters in sums.items()],
    )


def hosts(tx: LedgerTransaction) -> tuple[HostUse, ...]:
    """Return the counters, the host that sent most first."""
    from sqlstream.cache.ledger import queries

    rows = queries.hosts(tx.connection)
    return tuple(HostUse(wait_seconds=row.pop("wait_microseconds") / 1e6, **row) for row in rows)
