"""What tests do to a cache beside its public face; the one place that knows how its inner parts are reached."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from sqlstream.cache import Cache
from sqlstream.cache.acquire.downloads import Downloads
from sqlstream.cache.acquire.holds import Hold, Holds
from sqlstream.cache.acquire.owner import Owner
from sqlstream.cache.acquire.put import Putter
from sqlstream.cache.acquire.reserve import NextUses
from sqlstream.cache.acquire.uses import UseRules
from sqlstream.cache.directory import close_store, open_store
from sqlstream.cache.failover import FailoverSession
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.files.read_hold import ReadHold
from sqlstream.cache.ledger.database import Database
from sqlstream.cache.ledger.ledger import Ledger, LedgerTransaction
from sqlstream.cache.ledger_session import LedgerSession
from sqlstream.cache.model.policies import POLICIES
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.model.tuning import CacheTuning
from sqlstream.cache.private_files import PrivateFilesSession
from sqlstream.cache.session import AnyHold


class Session:
    """A cache as the engine uses it: holds, ledger, files. It keeps nothing itself, so two of one cache are the same.

    Args:
        cache: It stays open for as long as the session is used; or the session of one.
    """

    def __init__(self, cache: Cache | LedgerSession | FailoverSession) -> None:
        session = cache.session if isinstance(cache, Cache) else cache
        self.of_engine = session
        """What the engine is given."""
        self.primary = session.primary if isinstance(session, FailoverSession) else session
        self.directory = self.primary._directory
        """One object for all caches of this process in one directory."""

    # -- holds --------------------------------------------------------------------------------------------------------

    @overload
    def acquire(self, groups: Sequence[Sequence[ObjectRef]], next_uses: NextUses = None) -> list[Hold]: ...
    @overload
    def acquire(
        self, groups: Sequence[Sequence[ObjectRef]], next_uses: NextUses = None, *, for_reading: bool
    ) -> Sequence[AnyHold]: ...
    def acquire(
        self, groups: Sequence[Sequence[ObjectRef]], next_uses: NextUses = None, *, for_reading: bool = False
    ) -> Sequence[AnyHold]:
        """Return holds on as many groups as there is room for now."""
        return self.of_engine.acquire(groups, next_uses, for_reading=for_reading)

    @overload
    def acquire_one(self, group: Sequence[ObjectRef], next_use: int | None = None) -> Hold: ...
    @overload
    def acquire_one(self, group: Sequence[ObjectRef], next_use: int | None = None, *, for_reading: bool) -> AnyHold: ...
    def acquire_one(self, group: Sequence[ObjectRef], next_use: int | None = None, *, for_reading: bool = False) -> AnyHold:
        """Return a hold on one group, waiting for room if need be."""
        return self.of_engine.acquire_one(group, next_use, for_reading=for_reading)

    def wait(self, hold: AnyHold, timeout_seconds: float | None = None) -> bool:
        """Wait until every object of `hold` is here, or one failed; return whether it is settled."""
        return self.of_engine.wait(hold, timeout_seconds).is_settled

    def claim(self, hold: AnyHold) -> bool:
        """Put a prefetched hold to use; return False if it was revoked."""
        return self.of_engine.open(hold)

    def retain(self, hold: AnyHold) -> AnyHold:
        """Keep the paths of a used hold valid; return the hold that does."""
        return self.of_engine.retain(hold)

    def release(self, hold: AnyHold) -> None:
        """Give a hold back; the ledger learns of it with the next transaction."""
        self.of_engine.release(hold)

    def hand_over(self, give: Callable[[int], None]) -> None:
        """End, and leave the pins of retained holds to the process that `give` gives a descriptor to."""
        self.of_engine.hand_over(give)

    def collect(self) -> None:
        """Take back the pins of holds that are forgotten."""
        self.directory.holds.collect()

    def flush(self) -> None:
        """Write what waits for a transaction."""
        self.of_engine.flush()

    def close(self) -> None:
        """Give everything back and end the background thread."""
        self.directory.close()

    @property
    def held_bytes(self) -> int:
        """Bytes on disk of all holds."""
        return self.directory.holds.held_bytes

    @property
    def pinned_keys(self) -> list[bytes]:
        """Keys that this process pins by rows."""
        return self.directory.owner._pinned()

    # -- the ledger ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self) -> Iterator[LedgerTransaction]:
        """A transaction of the ledger that is not this owner's."""
        with self.ledger.transaction() as tx:
            yield tx

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of a query."""
        return self.database.read(sql, parameters)

    @property
    def num_transactions(self) -> int:
        """Transactions of this process so far."""
        return self.database.num_transactions

    # -- parts --------------------------------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        return self.directory.ledger

    @property
    def database(self) -> Database:
        return self.directory.ledger.database

    @property
    def disk(self) -> Disk:
        return self.directory.disk

    @property
    def owner(self) -> Owner:
        return self.directory.owner

    @property
    def holdings(self) -> Holds:
        return self.directory.holds

    @property
    def downloads(self) -> Downloads:
        return self.directory.downloads

    @property
    def failover(self) -> FailoverSession:
        """The session of a cache that may be bypassed."""
        assert isinstance(self.of_engine, FailoverSession)
        return self.of_engine

    def bypassed(self) -> Session:
        """The same cache, with private files that stand in for it when it fails."""
        return Session(FailoverSession(self.primary, PrivateFilesSession(self.primary.fetcher)))

    def look_again(self) -> None:
        """Forget limit and policy, which are looked at every so often."""
        self.directory.lookup._num_left = 0

    def read_holds(self, groups: Sequence[Sequence[ObjectRef]]) -> list[ReadHold]:
        """Read holds on all groups, whatever the policy; none where one of their objects is not here."""
        self.directory.lookup.learn(UseRules(POLICIES["lru"], is_order_needed=False))
        return self.directory.lookup.read(groups) or []

    @property
    def putter(self) -> Putter:
        """What stores bytes that were made here."""
        return self.primary._putter

    # -- time ---------------------------------------------------------------------------------------------------------

    def stop_background(self) -> None:
        """End the thread that writes what waits, whenever it likes."""
        self.directory._background.stop()


def tuned_cache(directory: Path, tuning: CacheTuning, **options: Any) -> Cache:
    """Open a cache with other times and thresholds: no cache of this process is open in the directory."""
    store = open_store(directory, create=True, allow_network_fs=False, tuning=tuning)
    try:
        assert store.tuning == tuning, "it is that of the first cache in the directory"
        return Cache(directory, **options)
    finally:
        close_store(store, -1)
