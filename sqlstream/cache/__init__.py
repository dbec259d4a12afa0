"""The cache: remote objects on local disk, with one exact account in SQLite.

Promises (each has a test named after it):
L1 charged ≥ bytes on disk, always. L2 charged ≤ limit, always. L3 totals equal the sums, in every transaction.
L4 a file in data/ is complete. L5 a pinned file is never unlinked. L6 at most one live leader per key.
L7 at rest, after reaping, charged equals the disk. L8 no process waits for room while holding pins of unyielded samples.

Words: entry, key, pin, owner (a process), reserve → publish | abandon, evict, reap, hold (the pins of one sample).

    cache ┬ admin (statistics, clear, versions)
          └ session (all that the engine imports) ─ directory ─ acquire ┬ downloads ─ storage.fetcher (helper process)
                                └ recovery ─ ledger (SQL only) | files (disk and locks only)
    model: what all of them exchange
"""

from sqlstream.cache.admin.clear import ClearReport
from sqlstream.cache.admin.statistics import CacheStatistics, DatasetUse, OwnerUse
from sqlstream.cache.cache import Cache
from sqlstream.cache.recovery.recover import Finding

__all__ = ["Cache", "CacheStatistics", "ClearReport", "DatasetUse", "Finding", "OwnerUse"]
