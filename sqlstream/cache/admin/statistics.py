"""What `sqlstream cache stats` shows: one consistent view of the ledger as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sqlstream.cache.files.disk import Disk
from sqlstream.cache.ledger.ledger import Ledger
from sqlstream.cache.ledger.reports import HostUse, hosts


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
class ShardUnitUse:
    """In what unit a dataset fetches its shards in an epoch."""

    dataset: str
    epoch: int
    unit: str
    reason: str


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
    """Objects that were here when they were asked for, each counted once for all samples that are planned together."""
    misses: int
    """Objects that were not here then. A stream asks for those of 64 samples and more before it gives the first one: so
    many are counted after one sample."""
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
    shard_units: tuple[ShardUnitUse, ...] = ()
    owners: tuple[OwnerUse, ...]
    hosts: tuple[HostUse, ...]
    """What each host of remote storage was asked for."""


def collect(ledger: Ledger, disk: Disk) -> CacheStatistics:
    """Return the statistics of one moment."""
    from sqlstream.cache.ledger import queries

    with ledger.transaction() as tx:
        connection = tx.connection
        meta, totals = queries.meta(connection), queries.totals(connection)
        counters, pinned, stored = queries.counters(connection), queries.pinned(connection), queries.stored_samples(connection)
        units = queries.shard_units(connection)
        datasets, owners, used_hosts = queries.datasets(connection), queries.owners(connection), hosts(tx)
    return CacheStatistics(
        limit_bytes=meta["limit_bytes"],
        eviction_policy=meta["policy"],
        used_bytes=totals["ready_bytes"],
        filling_bytes=totals["filling_bytes"],
        overhead_bytes=disk.overhead_bytes(),
        index_bytes=disk.index_bytes(),
        entries=totals["entries"],
        pinned_entries=pinned["entries"],
        stored_samples=stored["entries"],
        stored_sample_bytes=stored["bytes"],
        bypassed_objects=counters["bypassed"],
        unstored_samples=counters["unstored"],
        hits=counters["hits"],
        misses=counters["misses"],
        quarantined=counters["quarantined"],
        evictions=counters["evictions"],
        evicted_bytes=counters["evicted_bytes"],
        requests=counters["requests"],
        downloaded_bytes=counters["downloaded_bytes"],
        retries=counters["retries"],
        failures=counters["failures"],
        wait_seconds=counters["wait_microseconds"] / 1e6,
        datasets=tuple(DatasetUse(**row) for row in datasets),
        shard_units=tuple(ShardUnitUse(**row) for row in units),
        owners=tuple(
            OwnerUse(**{field.name: row[field.name] for field in fields(OwnerUse)})
            for row in owners
            if disk.owners.is_live(row["id"])
        ),
        hosts=used_hosts,
    )
