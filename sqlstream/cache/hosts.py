"""What each host of remote storage was asked for, over all processes and runs of a cache."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from sqlstream.cache.ledger import LedgerTransaction
from sqlstream.storage.fetcher import FetchDone


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
    rows = tx.connection.execute(
        "SELECT host, requests, downloaded_bytes, retries, wait_microseconds FROM host ORDER BY downloaded_bytes DESC, host"
    ).fetchall()
    return tuple(
        HostUse(host=row[0], requests=row[1], downloaded_bytes=row[2], retries=row[3], wait_seconds=row[4] / 1e6)
        for row in rows
    )
