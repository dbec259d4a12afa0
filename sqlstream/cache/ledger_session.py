"""The session of a cache directory: what a reader of samples asks of it is done by its ledger, its locks and its downloads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import NoReturn

from sqlstream.cache.acquire.holds import Hold
from sqlstream.cache.acquire.put import Memory, PutItem, Putter
from sqlstream.cache.acquire.reserve import NextUses
from sqlstream.cache.admin.age import MaxAge
from sqlstream.cache.admin.units import agreed_unit
from sqlstream.cache.admin.versions import drop_other_versions
from sqlstream.cache.directory import CacheDirectory
from sqlstream.cache.files.read_hold import ReadHold
from sqlstream.cache.ledger.reports import Failure, record_failures
from sqlstream.cache.ledger.shard_units import ChosenUnit, ShardWish
from sqlstream.cache.model.policies import Policy, policy_named
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.session import AnyHold
from sqlstream.config import Limit
from sqlstream.errors import CacheClosedError
from sqlstream.storage.fetcher import Fetcher

MAX_DOWNLOADED_TOGETHER = 128
"""Objects of one call of `acquire_many` that are downloaded at a time: an eighth of the usual 1024 descriptors."""


class LedgerSession:
    """The session of a cache directory: objects are counted and pinned in its ledger.

    Args:
        directory: The directory, as all caches of this process share it.
        fetcher: What brings objects for this cache.
        verifies_reads: Compare each file with its checksum before its first use.
        max_age_seconds: Longest time that an object may stay after it came; None: no limit.
    """

    def __init__(
        self, directory: CacheDirectory, fetcher: Fetcher, *, verifies_reads: bool, max_age_seconds: float | None = None
    ) -> None:
        self.fetcher = fetcher
        self._directory = directory
        self._disk = directory.disk
        self._acquirer = directory.acquirer
        self._holds = directory.holds
        self._owner = directory.owner
        self._checksums = directory.checksums if verifies_reads else None
        self._lookup = directory.lookup
        self._putter = Putter(directory.acquirer, directory.owner, directory.disk)
        self._max_age = None if max_age_seconds is None else MaxAge(directory, max_age_seconds)
        self.has_ended = False
        """Whether its cache object was closed; others of this process may use the directory still."""

    @property
    def directories(self) -> tuple[str, ...]:
        """See `CacheSession`."""
        return (f"{self._disk.root}/data/",)

    @property
    def is_closed(self) -> bool:
        """See `CacheSession`."""
        return self._owner.is_closed

    @property
    def policy(self) -> Policy:
        """The eviction policy in force."""
        return policy_named(self._directory.ledger.policy())

    def begin(self, user: int, limit: Limit, eviction_policy: str | None) -> None:
        """Tell the directory what its user asks for."""
        self._directory.limits.give(user, limit)
        if eviction_policy is not None:
            self._owner.ask_for_policy(user, eviction_policy)
        self._remove_older()

    def _remove_older(self) -> None:
        if self._max_age is not None:
            self._max_age.remove_older()

    # -- holds --------------------------------------------------------------------------------------------------------

    def acquire(
        self, groups: Sequence[Sequence[ObjectRef]], next_uses: NextUses = None, *, for_reading: bool = False
    ) -> Sequence[AnyHold]:
        """See `CacheSession`."""
        self._remove_older()
        if for_reading and (holds := self._lookup.read(groups)) is not None:
            return holds
        taken = self._acquirer.acquire(groups, self.fetcher, next_uses)
        if self.has_ended:
            self._give_up(taken)
        return taken

    def acquire_one(self, group: Sequence[ObjectRef], next_use: int | None = None, *, for_reading: bool = False) -> AnyHold:
        """See `CacheSession`."""
        if self._max_age is not None:  # a call less for every sample
            self._max_age.remove_older()
        if for_reading and (hold := self._lookup.read_one(group)) is not None:
            return hold
        taken = self._acquirer.acquire_one(group, self.fetcher, next_use)
        if self.has_ended:
            self._give_up([taken])
        return taken

    def _give_up(self, holds: Sequence[Hold]) -> NoReturn:
        """Release what came as another thread closed the cache object, after that had given back what it held."""
        for hold in holds:
            self._holds.release(hold)
        raise CacheClosedError(f"the cache {self._disk.root} was closed, or the dataset that reads through it: open it again")

    def wait(self, hold: AnyHold, timeout_seconds: float | None = None) -> AnyHold:
        """See `CacheSession`."""
        if isinstance(hold, Hold):
            self._directory.waiter.wait(hold, timeout_seconds)
        return hold

    @contextlib.contextmanager
    def prefetched(self, refs: Sequence[ObjectRef]) -> Iterator[None]:
        """Download objects some at a time, and keep them by holds that other processes may have revoked.

        A download keeps its file open until its row is ready, and a process has few descriptors; a pin by row takes none.
        """
        self._remove_older()
        kept: list[Hold] = []
        start = 0 if len(refs) > MAX_DOWNLOADED_TOGETHER else len(refs)
        try:
            while start < len(refs):
                some = refs[start : start + MAX_DOWNLOADED_TOGETHER]
                holds = self._acquirer.acquire([[ref] for ref in some], self.fetcher)
                if not (holds or kept):
                    break  # no room for a single one: who asks for all of them waits for it, or hears why not
                for hold in kept if not holds else ():
                    self._holds.release(hold)
                kept = [*kept, *holds] if holds else []
                start += len(holds)
                for hold in holds:
                    self._directory.waiter.wait(hold)
                    if hold.error is not None:
                        raise hold.error
                self._owner.flush()
            yield
        finally:
            for hold in kept:
                self._holds.release(hold)

    def split(self, hold: AnyHold) -> Sequence[AnyHold]:
        """Return an open hold for each object of an open hold, in its place."""
        assert isinstance(hold, Hold), "it was not acquired for reading alone"
        return self._holds.split(hold)

    def open(self, hold: AnyHold) -> bool:
        """See `CacheSession`."""
        if isinstance(hold, Hold):
            if not self._holds.claim(hold):
                return False
            hold.paths = self._disk.data_paths(hold.refs)
        elif not hold.claim():
            return False
        if self._checksums is not None and (wrong := self._checksums.find_wrong(hold.refs)):
            if not isinstance(hold, Hold):
                hold.close()  # its locks would keep the files
            self._directory.kept.let_go()  # and so would those of shards that stay open
            self._checksums.remove(wrong)
            return False
        return True

    def release(self, hold: AnyHold) -> None:
        """See `CacheSession`."""
        if isinstance(hold, Hold):
            self._acquirer.release(hold)
        else:
            hold.close()  # it has no row in the ledger to release

    def drop(self, hold: AnyHold) -> None:
        """Give a hold back without a transaction: the next one writes it."""
        if isinstance(hold, Hold):
            self._holds.release(hold)
        else:
            hold.close()

    def retain(self, hold: AnyHold) -> AnyHold:
        """See `CacheSession`."""
        if isinstance(hold, ReadHold):
            hold = self._holds.take_over(hold, self.fetcher)
            if self.has_ended:
                self._give_up([hold])
        if isinstance(hold, Hold):
            self._acquirer.retain(hold)
        return hold

    def warn_of_paths(self) -> None:
        """See `CacheSession`."""
        self._acquirer.warn_of_paths()

    def hand_over(self, give: Callable[[int], None]) -> None:
        """See `CacheSession`."""
        self._directory.hand_over(give)

    def expect(self, num_processes: int) -> None:
        """See `CacheSession`."""
        self._owner.num_expected = num_processes
        self.fetcher.share_node(num_processes)

    def expect_forks(self, num_objects: int | None) -> None:
        """See `CacheSession`."""
        if num_objects is None or self._directory.ledger.account().entries < num_objects:
            self.fetcher.expect_forks()

    def flush(self) -> None:
        """See `CacheSession`."""
        self._directory.flush()

    def rest(self) -> None:
        """End the helper process, and what it still brings."""
        self._directory.downloads.cancel(self.fetcher)
        self.fetcher.stop()

    def close(self) -> None:
        """End it for good, and give back what it holds; the directory is closed with its last user."""
        self.has_ended = True
        try:
            self._holds.release_all(self.fetcher)
            self._directory.downloads.cancel(self.fetcher)
        finally:
            self.fetcher.close()

    def count_bypassed(self, num_objects: int) -> None:
        """Count objects that were read past the cache."""
        self._lookup.uses.note_bypassed(num_objects)

    # -- samples that were made ---------------------------------------------------------------------------------------

    def stored(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of `keys` whose samples are stored; those that this process has just made are written first."""
        rows = self._directory.ledger.find(keys)
        if any(not row.is_ready and key in self._directory.downloads.leads for key, row in rows.items()):
            self._owner.flush()
            rows = self._directory.ledger.find(keys)
        return {key for key, row in rows.items() if row.is_ready}

    def put(self, items: Sequence[PutItem]) -> str | None:
        """See `CacheSession`."""
        return self._putter.put(items)

    def hold_made(self, group: Sequence[ObjectRef], bodies: Mapping[bytes, bytes]) -> AnyHold:
        """See `CacheSession`."""
        self._remove_older()
        memory = Memory(bodies, self.fetcher)
        while True:
            hold = self._acquirer.acquire_one(group, memory)
            try:
                self._directory.waiter.wait(hold)
                if hold.error is not None:
                    raise hold.error
                hold.source = self.fetcher  # it is released with the cache object that it belongs to
                if self.has_ended:
                    self._give_up([hold])
                if self.open(hold):
                    return hold
            except BaseException:
                self._holds.release(hold)
                raise
            self._holds.release(hold)  # it was revoked, or another process that was storing one of them has died

    def discard(self, ref: ObjectRef) -> bool:
        """See `CacheSession`."""
        return self._putter.discard(ref)

    # -- reports ------------------------------------------------------------------------------------------------------

    def drop_other_versions(self, refs: Iterable[ObjectRef]) -> Set[bytes]:
        """See `CacheSession`."""
        return drop_other_versions(self._directory, refs)

    def register(self, name: str, src: str, fingerprint: str) -> int | None:
        """See `CacheSession`."""
        return self._directory.ledger.run(lambda tx: tx.add_dataset(name, src, fingerprint))

    def limit_in_force(self) -> int | None:
        """See `CacheSession`."""
        return self._directory.limit_in_force()

    def shard_unit(self, wish: ShardWish, choose: Callable[[int | None], ChosenUnit]) -> ChosenUnit:
        """See `CacheSession`."""
        return agreed_unit(self._directory, wish, choose)

    def note_failures(self, failed: Sequence[Failure]) -> None:
        """See `CacheSession`."""
        self._directory.ledger.run(lambda tx: record_failures(tx, failed))
