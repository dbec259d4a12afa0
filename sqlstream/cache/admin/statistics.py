"""What `sqlstream cache stats` shows: one consistent view of the ledger as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from sqlstream.cache.files.disk import Disk
from sqlstream.cache.ledger.damage import typed
from sqlstream.cache.ledger.ledger import Ledger
from sqlstream.cache.ledger.reports import HostUse, hosts
from sqlstream.cache.model.refs import KEY_BYTES, STORED_SAMPLE_EXTENSION
from sqlstream.cache.model.rows import NO_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetUse:
    """What one dataset has in the cache."""

    name: str
    src: str
    entries: int
    bytes: int
    last_used: int
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerUse:
    """A living process that uses the cache."""

    id: str
    pid: int
    host: str
    name: str
    started_at: int
    limit_bytes: int | None
    pinned_entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """The account of a cache directory. Bytes are charged bytes: sizes rounded up to whole blocks."""

    limit_bytes: int | None
    """The limit in force: the smallest that living users gave, else the last one. None: no limit."""
    eviction_policy: str
    """Who goes first when room is needed."""
    used_bytes: int
    """Whole objects in data/."""
    filling_bytes: int
    """Reserved for objects on their way."""
    overhead_bytes: int
    """Ledger, WAL and ballast: bounded, and not under the limit."""
    index_bytes: int
    """Index files: not under the limit."""
    entries: int
    """Objects whole or on their way."""
    pinned_entries: int
    stored_samples: int
    """Of the entries, samples that a `CacheTransform` stored."""
    stored_sample_bytes: int
    bypassed_objects: int
    """Objects that were read past the cache because it failed (`on_cache_error="bypass"`)."""
    unstored_samples: int
    """How often a sample found no room to be stored."""
    hits: int
    misses: int
    quarantined: int = 0
    """Files that were not what came, by size or by checksum, and were removed."""
    evictions: int
    evicted_bytes: int
    requests: int
    downloaded_bytes: int
    retries: int
    failures: int
    wait_seconds: float
    """Time that downloads took, added up over all of them."""
    datasets: tuple[DatasetUse, ...]
    owners: tuple[OwnerUse, ...]
    hosts: tuple[HostUse, ...]
    """What each host of remote storage was asked for."""


def collect(ledger: Ledger, disk: Disk) -> CacheStatistics:
    """Return the statistics of one moment."""
    with ledger.transaction() as tx:
        query = tx.connection.execute
        account = tx.account()
        (policy,) = query("SELECT policy FROM meta").fetchone()
        stats: dict[str, int] = dict(typed(query("SELECT name, value FROM stat"), str, int))
        pinned_entries = query("SELECT count(*) FROM entry WHERE key IN (SELECT key FROM pin)").fetchone()[0]
        stored_samples, stored_sample_bytes = query(
            "SELECT count(*), coalesce(sum(charged_bytes), 0) FROM entry WHERE ext = ?", (STORED_SAMPLE_EXTENSION,)
        ).fetchone()
        datasets = query(
            "SELECT d.name, d.src, count(e.key), coalesce(sum(e.charged_bytes), 0), d.last_used FROM dataset d "
            "LEFT JOIN entry e ON e.dataset = d.id GROUP BY d.id ORDER BY d.name"
        ).fetchall()
        typed(datasets, str, str, int, int, int)
        owners = query(
            "SELECT id, pid, host, name, started_at, nullif(limit_bytes, ?), length(pins) / ? FROM owner "
            "ORDER BY started_at, id",
            (NO_LIMIT, KEY_BYTES),
        ).fetchall()
        typed(owners, str, int, str, str, int, int | None, int)
        used_hosts = hosts(tx)
    living = [row for row in owners if disk.owner_is_live(row[0])]
    return CacheStatistics(
        limit_bytes=account.limit_bytes,
        eviction_policy=policy,
        used_bytes=account.ready_bytes,
        filling_bytes=account.filling_bytes,
        overhead_bytes=disk.overhead_bytes(),
        index_bytes=sum(path.stat().st_size for path in disk.index_files()),
        entries=account.entries,
        pinned_entries=pinned_entries,
        stored_samples=stored_samples,
        stored_sample_bytes=stored_sample_bytes,
        bypassed_objects=stats.get("bypassed", 0),
        unstored_samples=stats.get("unstored", 0),
        hits=stats.get("hits", 0),
        misses=stats.get("misses", 0),
        quarantined=stats.get("quarantined", 0),
        evictions=stats.get("evictions", 0),
        evicted_bytes=stats.get("evicted_bytes", 0),
        requests=stats.get("requests", 0),
        downloaded_bytes=stats.get("downloaded_bytes", 0),
        retries=stats.get("retries", 0),
        failures=stats.get("failures", 0),
        wait_seconds=stats.get("wait_microseconds", 0) / 1e6,
        datasets=tuple(DatasetUse(name=row[0], src=row[1], entries=row[2], bytes=row[3], last_used=row[4]) for row in datasets),
        owners=tuple(
            OwnerUse(
                id=row[0],
                pid=row[1],
                host=row[2],
                name=row[3],
                started_at=row[4],
                limit_bytes=row[5],
                pinned_entries=row[6],
            )
            for row in living
        ),
        hosts=used_hosts,
    )
