"""All that a reader of samples uses of a cache, beside `Cache` itself: the one module that the engine imports.

A session belongs to one `Cache`. It holds the objects of samples, stores samples that were made, and notes what the ledger
reports. Objects go in as `ObjectRef`, holds come out:

    acquire ──> hold ──wait──> whole ──open──> its files stay under `hold.paths` ──retain──> and longer ──> release
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Protocol

from sqlstream.cache.acquire.checksums import VerifyReads
from sqlstream.cache.acquire.holds import AnyHold
from sqlstream.cache.acquire.put import PutItem, Putter
from sqlstream.cache.admin.versions import drop_other_versions
from sqlstream.cache.directory import CacheDirectory
from sqlstream.cache.files.read_hold import ReadHold
from sqlstream.cache.ledger.reports import Failure, FailureRecord, record_failures
from sqlstream.cache.model.policies import Policy, policy_named
from sqlstream.cache.model.refs import KEY_BYTES, STORED_SAMPLE_EXTENSION, ListedObject, ObjectRef
from sqlstream.storage.fetcher import Fetcher

__all__ = [
    "KEY_BYTES",
    "STORED_SAMPLE_EXTENSION",
    "AnyHold",
    "CacheSession",
    "Failure",
    "FailureRecord",
    "LedgerSession",
    "ListedObject",
    "ObjectRef",
    "Policy",
    "PutItem",
    "VerifyReads",
]


class CacheSession(Protocol):
    """What a reader of samples asks of a cache."""

    fetcher: Fetcher
    """What brings objects that are not here."""

    @property
    def directories(self) -> tuple[str, ...]:
        """Folders in which the files of holds lie, each with a slash at its end."""

    @property
    def is_closed(self) -> bool:
        """Whether the last user of the directory in this process has closed it."""

    @property
    def policy(self) -> Policy:
        """The eviction policy in force."""

    # -- holds --------------------------------------------------------------------------------------------------------

    def acquire(self, groups: Sequence[Sequence[ObjectRef]], *, for_reading: bool = False) -> Sequence[AnyHold]:
        """Return holds on the longest prefix of `groups` (the objects of one sample each) for which there is room now.

        Args:
            groups: The objects of each sample.
            for_reading: The caller reads the files between `open` and `release` only, and hands no path out.
        """

    def acquire_one(self, group: Sequence[ObjectRef], *, for_reading: bool = False) -> AnyHold:
        """Return a hold on the objects of one sample, waiting for room if need be.

        Raises:
            CacheFullError: No process gave room back in time.
        """

    def wait(self, hold: AnyHold, timeout_seconds: float | None = None) -> AnyHold:
        """Wait until every object of a hold is here, or one failed; return the hold, or the one that took its place."""

    def open(self, hold: AnyHold) -> bool:
        """Begin to use a settled hold: its files are at `hold.paths`, in the order of its objects, until it is released.

        Returns:
            False if the hold was revoked, or a file is not what its row says: release it, and acquire the sample again.
        """

    def release(self, hold: AnyHold) -> None:
        """Give a hold back; it may be called twice."""

    def retain(self, hold: AnyHold) -> AnyHold:
        """Keep the paths of an open hold valid until it is released, within this process's share of the limit.

        Returns:
            The hold that keeps them: this one or another in its place.
        """

    def warn_of_paths(self) -> None:
        """Say once that the limit leaves too little room for the paths that should stay valid."""

    def hand_over(self, give: Callable[[int], None]) -> None:
        """End, and leave the pins of retained holds to the process that `give` gives a descriptor to."""

    def expect(self, num_processes: int) -> None:
        """Note how many processes of this node will share limit and network."""

    def flush(self) -> None:
        """Write what waits for a transaction."""

    # -- samples that were made ---------------------------------------------------------------------------------------

    def stored(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of `keys` whose samples are stored."""

    def put(self, items: Sequence[PutItem]) -> str | None:
        """Store bytes that this process has made; return why some were not stored, None if all are here."""

    def discard(self, ref: ObjectRef) -> bool:
        """Remove an entry whose bytes proved damaged; False if it is in use, or the cache fails, and it stays."""

    # -- reports ------------------------------------------------------------------------------------------------------

    def drop_other_versions(self, refs: Iterable[ObjectRef]) -> Set[bytes]:
        """Remove entries of another version than a listing names; return the keys of those in use, which stay."""

    def register(self, name: str, src: str, fingerprint: str) -> int | None:
        """Return the id of a dataset in the ledger; None where the ledger fails and is bypassed."""

    def note_failures(self, failed: Sequence[Failure]) -> None:
        """Write down which samples failed, and why."""


class LedgerSession:
    """The session of a cache directory: objects are counted and pinned in its ledger.

    Args:
        directory: The directory, as all caches of this process share it.
        fetcher: What brings objects for this cache.
        verifies_reads: Compare each file with its checksum before its first use.
    """

    def __init__(self, directory: CacheDirectory, fetcher: Fetcher, *, verifies_reads: bool) -> None:
        self.fetcher = fetcher
        self._directory = directory
        self._disk = directory.disk
        self._acquirer = directory.acquirer
        self._holds = directory.acquirer.holdings
        self._checksums = directory.acquirer.checksums if verifies_reads else None
        self._putter = Putter(directory.acquirer, directory.disk)

    @property
    def directories(self) -> tuple[str, ...]:
        """See `CacheSession`."""
        return (f"{self._disk.root}/data/", f"{self._acquirer.bypass.directory}/")

    @property
    def is_closed(self) -> bool:
        """See `CacheSession`."""
        return self._acquirer.owner.is_closed

    @property
    def policy(self) -> Policy:
        """The eviction policy in force; of a cache that fails and is bypassed, the default."""
        name = "lru"
        with self._acquirer.bypass.tolerated():
            name = self._directory.ledger.policy()
        return policy_named(name)

    # -- holds --------------------------------------------------------------------------------------------------------

    def acquire(self, groups: Sequence[Sequence[ObjectRef]], *, for_reading: bool = False) -> Sequence[AnyHold]:
        """See `CacheSession`."""
        return self._acquirer.acquire(groups, self.fetcher, for_reading=for_reading)

    def acquire_one(self, group: Sequence[ObjectRef], *, for_reading: bool = False) -> AnyHold:
        """See `CacheSession`."""
        return self._acquirer.acquire_one(group, self.fetcher, for_reading=for_reading)

    def wait(self, hold: AnyHold, timeout_seconds: float | None = None) -> AnyHold:
        """See `CacheSession`."""
        self._acquirer.wait(hold, timeout_seconds)
        return hold

    def open(self, hold: AnyHold) -> bool:
        """See `CacheSession`."""
        if isinstance(hold, ReadHold):
            is_open = hold.claim()
        else:
            is_open = self._holds.claim(hold)
            if hold.files is not None:
                hold.paths = [hold.files[ref.key].path for ref in hold.refs]
            else:
                hold.paths = self._disk.data_paths(hold.refs)
        return is_open and (self._checksums is None or self._checksums.is_right(hold))

    def release(self, hold: AnyHold) -> None:
        """See `CacheSession`."""
        if isinstance(hold, ReadHold):
            hold.close()  # it has no row in the ledger to release
        else:
            self._acquirer.release(hold)

    def retain(self, hold: AnyHold) -> AnyHold:
        """See `CacheSession`."""
        return self._acquirer.retain(hold)

    def warn_of_paths(self) -> None:
        """See `CacheSession`."""
        self._acquirer.warn_of_paths()

    def hand_over(self, give: Callable[[int], None]) -> None:
        """See `CacheSession`."""
        self._acquirer.hand_over(give)

    def expect(self, num_processes: int) -> None:
        """See `CacheSession`."""
        self._acquirer.num_expected = num_processes
        self.fetcher.share_node(num_processes)

    def flush(self) -> None:
        """See `CacheSession`."""
        self._acquirer.flush()

    # -- samples that were made ---------------------------------------------------------------------------------------

    def stored(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of `keys` whose samples are stored; those that this process has just made are written first."""
        if self._acquirer.bypass.is_cache_left_alone:
            return set()
        rows = self._directory.ledger.find(keys)
        if any(not row.is_ready and key in self._acquirer.downloads.leads for key, row in rows.items()):
            self._acquirer.owner.flush()
            rows = self._directory.ledger.find(keys)
        return {key for key, row in rows.items() if row.is_ready}

    def put(self, items: Sequence[PutItem]) -> str | None:
        """See `CacheSession`."""
        return None if self._acquirer.bypass.is_cache_left_alone else self._putter.put(items)

    def discard(self, ref: ObjectRef) -> bool:
        """See `CacheSession`."""
        return self._putter.discard(ref)

    # -- reports ------------------------------------------------------------------------------------------------------

    def drop_other_versions(self, refs: Iterable[ObjectRef]) -> Set[bytes]:
        """See `CacheSession`."""
        return drop_other_versions(self._directory, refs)

    def register(self, name: str, src: str, fingerprint: str) -> int | None:
        """See `CacheSession`."""
        dataset: int | None = None
        with self._acquirer.bypass.tolerated(), self._directory.ledger.transaction() as tx:
            dataset = tx.add_dataset(name, src, fingerprint)
        return dataset  # noqa: RET504 - what fails in the body may be tolerated

    def note_failures(self, failed: Sequence[Failure]) -> None:
        """See `CacheSession`."""
        with self._directory.ledger.transaction() as tx:
            record_failures(tx, failed)
