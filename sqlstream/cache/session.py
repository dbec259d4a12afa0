"""All that a reader of samples uses of a cache, beside `Cache` itself: the one module that the engine imports.

A session belongs to one `Cache`. It holds the objects of samples, stores samples that were made, and notes what the ledger
reports. Objects go in as `ObjectRef`, holds come out:

    acquire ──> hold ──wait──> whole ──open──> its files stay under `hold.paths` ──retain──> and longer ──> release
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias, TypeVar

from sqlstream.cache.acquire.checksums import VerifyReads
from sqlstream.cache.acquire.holds import Hold
from sqlstream.cache.acquire.put import PutItem
from sqlstream.cache.acquire.reserve import NextUses
from sqlstream.cache.files.read_hold import ReadHold
from sqlstream.cache.ledger.reports import Failure, FailureRecord
from sqlstream.cache.ledger.shard_units import ChosenUnit, ShardWish
from sqlstream.cache.model.policies import Policy
from sqlstream.cache.model.refs import KEY_BYTES, STORED_SAMPLE_EXTENSION, ListedObject, ObjectParts, ObjectRef
from sqlstream.cache.private_files import PrivateHold
from sqlstream.storage.fetcher import Fetcher

__all__ = [
    "KEY_BYTES",
    "STORED_SAMPLE_EXTENSION",
    "AnyHold",
    "CacheSession",
    "ChosenUnit",
    "Failure",
    "FailureRecord",
    "ListedObject",
    "ObjectParts",
    "ObjectRef",
    "Policy",
    "PutItem",
    "ShardWish",
    "VerifyReads",
]


H = TypeVar("H")


class SessionOf(Protocol[H]):
    """What a reader of samples asks of a cache."""

    @property
    def fetcher(self) -> Fetcher:
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

    def acquire(
        self, groups: Sequence[Sequence[ObjectRef]], next_uses: NextUses = None, *, for_reading: bool = False
    ) -> Sequence[H]:
        """Return holds on the longest prefix of `groups` (the objects of one sample each) for which there is room now.

        Args:
            groups: The objects of each sample.
            next_uses: After how many further uses of the cache, counted from this one, those of each sample are used again.
            for_reading: The caller reads the files between `open` and `release` only, and hands no path out.
        """

    def acquire_one(self, group: Sequence[ObjectRef], next_use: int | None = None, *, for_reading: bool = False) -> H:
        """Return a hold on the objects of one sample, waiting for room if need be.

        Raises:
            CacheFullError: No process gave room back in time.
        """

    def wait(self, hold: H, timeout_seconds: float | None = None) -> H:
        """Wait until every object of a hold is here, or one failed; return the hold, or the one that took its place."""

    def open(self, hold: H) -> bool:
        """Begin to use a settled hold: its files are at `hold.paths`, in the order of its objects, until it is released.

        Returns:
            False if the hold was revoked, or a file is not what its row says: release it, and acquire the sample again.
        """

    def release(self, hold: H) -> None:
        """Give a hold back; it may be called twice."""

    def retain(self, hold: H) -> H:
        """Keep the paths of an open hold valid until it is released, within this process's share of the limit.

        Returns:
            The hold that keeps them: this one or another in its place.
        """

    def prefetched(self, refs: Sequence[ObjectRef]) -> AbstractContextManager[None]:
        """Fetch objects that the body holds together before it begins, as far as that is better than in it."""

    def split(self, hold: H) -> Sequence[H]:
        """Return an open hold for each object of an open hold, in its place."""

    def warn_of_paths(self) -> None:
        """Say once that the limit leaves too little room for the paths that should stay valid."""

    def hand_over(self, give: Callable[[int], None]) -> None:
        """End, and leave the pins of retained holds to the process that `give` gives a descriptor to."""

    def expect(self, num_processes: int) -> None:
        """Note how many processes of this node will share limit and network."""

    def expect_forks(self, num_objects: int | None) -> None:
        """Prepare for helpers of processes that are forked from this one, if the cache cannot have so many objects.

        Args:
            num_objects: Objects that will be read; None: not known.
        """

    def flush(self) -> None:
        """Write what waits for a transaction, and close the shards that are kept open."""

    def rest(self) -> None:
        """End the helper process, and what it still brings; the next miss starts it again."""

    def close(self) -> None:
        """End what this session has of its own."""

    # -- samples that were made ---------------------------------------------------------------------------------------

    def stored(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of `keys` whose samples are stored."""

    def put(self, items: Sequence[PutItem]) -> str | None:
        """Store bytes that this process has made; return why some were not stored, None if all are here."""

    def hold_made(self, group: Sequence[ObjectRef], bodies: Mapping[bytes, bytes]) -> H:
        """Return an open hold on the objects of one sample, of which this process has made some: these wait for room, too.

        Args:
            group: The objects.
            bodies: The content of those that were made, by key. It is stored where they are not here.

        Raises:
            CacheFullError: No process gave room back in time.
            StorageError: One of the others failed.
        """

    def discard(self, ref: ObjectRef) -> bool:
        """Remove an entry whose bytes proved damaged; False if it is in use, or the cache fails, and it stays."""

    # -- reports ------------------------------------------------------------------------------------------------------

    def drop_other_versions(self, refs: Iterable[ObjectRef]) -> Set[bytes]:
        """Remove entries of another version than a listing names; return the keys of those in use, which stay."""

    def register(self, name: str, src: str, fingerprint: str) -> int | None:
        """Return the id of a dataset in the ledger; None where there is no ledger."""

    def limit_in_force(self) -> int | None:
        """Return the limit in bytes; None: there is none."""

    def shard_unit(self, wish: ShardWish, choose: Callable[[int | None], ChosenUnit]) -> ChosenUnit:
        """Return in what unit shards are fetched: as a living process has chosen that opened the epoch first.

        Args:
            wish: Who asks.
            choose: Returns what this process chooses if it is the first, by the limit of the cache in bytes (None: none).
        """

    def note_failures(self, failed: Sequence[Failure]) -> None:
        """Write down which samples failed, and why."""


AnyHold: TypeAlias = Hold | ReadHold | PrivateHold
"""What a sample's objects are held by: rows of the ledger, locks on their files, or files of its own."""
CacheSession: TypeAlias = SessionOf[AnyHold]
"""The session that an engine gets."""
