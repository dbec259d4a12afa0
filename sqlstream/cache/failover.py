"""What `on_cache_error="bypass"` does: private files stand in for a cache that fails.

So a failing disk, a ledger that cannot be rebuilt or a directory that is gone stops no step that can read remotely. That the
cache is full is no fault of it: `CacheFullError` is raised as ever.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import TypeVar

from sqlstream.cache.acquire.reserve import NextUses
from sqlstream.cache.ledger_session import LedgerSession
from sqlstream.cache.private_files import PrivateFilesSession, PrivateHold
from sqlstream.cache.session import AnyHold, ChosenUnit, Failure, ObjectRef, Policy, PutItem, ShardWish
from sqlstream.config import Limit
from sqlstream.errors import CacheClosedError, CacheError, CacheFullError, SqlStreamError
from sqlstream.process import fork
from sqlstream.storage.fetcher import Fetcher

T = TypeVar("T")
logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""How long a cache that failed is left alone: each try may take a failing disk's time-out. Arbitrary."""
_DISK_ERRORS = frozenset((errno.EDQUOT, errno.EIO, errno.ENOSPC, errno.EROFS))


def is_fault(error: Exception) -> bool:
    """Return whether an error says that cache or disk is broken; not that it is full, or was closed, or that storage failed."""
    if isinstance(error, SqlStreamError) and error.context.get("errno") in _DISK_ERRORS:
        return True
    return isinstance(error, CacheError) and not isinstance(error, CacheFullError | CacheClosedError)


class FailoverSession:
    """A session of a cache directory, and the one that stands in for it while it fails.

    Args:
        primary: What is asked first.
        stand_in: What is asked while that fails; it has the same fetcher.
    """

    def __init__(self, primary: LedgerSession, stand_in: PrivateFilesSession) -> None:
        self.primary = primary
        self.stand_in = stand_in
        self._has_warned = False
        self.after_fork_in_child()
        fork.call_in_child(self, fork.Stage.MEMORY)

    def after_fork_in_child(self) -> None:
        """Another process tries the cache for itself."""
        self._left_alone_until = 0.0

    @property
    def fetcher(self) -> Fetcher:
        """What brings objects for both."""
        return self.primary.fetcher

    @fetcher.setter
    def fetcher(self, fetcher: Fetcher) -> None:
        self.primary.fetcher = self.stand_in.fetcher = fetcher

    @property
    def directories(self) -> tuple[str, ...]:
        """The folders of both."""
        return (*self.primary.directories, *self.stand_in.directories)

    @property
    def is_closed(self) -> bool:
        """Whether the cache directory is closed."""
        return self.primary.is_closed

    @property
    def policy(self) -> Policy:
        """The eviction policy in force; of a cache that fails, the default."""
        return self._tried(lambda: self.primary.policy, self.stand_in.policy)

    # -- which of the two ---------------------------------------------------------------------------------------------

    @property
    def is_left_alone(self) -> bool:
        """Whether the cache failed a moment ago, and is not even tried."""
        return self._left_alone_until > 0.0 and time.monotonic() < self._left_alone_until

    def note(self, error: Exception) -> None:
        """Say once why the cache is bypassed, and leave it alone for a while."""
        self._left_alone_until = time.monotonic() + RETRY_SECONDS
        if not self._has_warned:
            self._has_warned = True
            logger.error("the cache fails, objects are read past it (on_cache_error='bypass'): %s", error)

    def _tried(self, work: Callable[[], T], instead: T) -> T:
        """Return what `work` returns; of a cache that fails, `instead`. What it was to write is lost then."""
        try:
            return work()
        except SqlStreamError as error:
            if not is_fault(error):
                raise
            self.note(error)
            return instead

    def begin(self, user: int, limit: Limit, eviction_policy: str | None) -> None:
        """Tell the directory what its user asks for, if it can be told."""
        self._tried(lambda: self.primary.begin(user, limit, eviction_policy), None)

    # -- holds --------------------------------------------------------------------------------------------------------

    def acquire(
        self, groups: Sequence[Sequence[ObjectRef]], next_uses: NextUses = None, *, for_reading: bool = False
    ) -> Sequence[AnyHold]:
        """Return holds in the cache; while that fails, holds on private files."""
        if not self.is_left_alone:
            try:
                return self.primary.acquire(groups, next_uses, for_reading=for_reading)
            except CacheError as error:
                self._note_unless_closed(error)
        holds = self.stand_in.acquire(groups)
        self.primary.count_bypassed(sum(len(hold.files) for hold in holds))
        return holds

    def acquire_one(self, group: Sequence[ObjectRef], next_use: int | None = None, *, for_reading: bool = False) -> AnyHold:
        """Return a hold in the cache; while that fails, one on private files."""
        if not self.is_left_alone:
            try:
                return self.primary.acquire_one(group, next_use, for_reading=for_reading)
            except CacheError as error:
                self._note_unless_closed(error)
        return self._stand_in_for(group)

    def _note_unless_closed(self, error: CacheError) -> None:
        if not is_fault(error) or self.primary.is_closed or self.primary.has_ended:
            raise error
        self.note(error)

    def _stand_in_for(self, refs: Sequence[ObjectRef]) -> PrivateHold:
        hold = self.stand_in.acquire_one(refs)
        self.primary.count_bypassed(len(hold.files))
        return hold

    @contextlib.contextmanager
    def prefetched(self, refs: Sequence[ObjectRef]) -> Iterator[None]:
        """Keep objects that the body is to hold in the cache, if that works."""
        with contextlib.ExitStack() as stack:
            if not self.is_left_alone:
                self._tried(lambda: stack.enter_context(self.primary.prefetched(refs)), None)
            yield

    def split(self, hold: AnyHold) -> Sequence[AnyHold]:
        """Return an open hold for each object of an open hold, in its place."""
        return self.stand_in.split(hold) if isinstance(hold, PrivateHold) else self.primary.split(hold)

    def wait(self, hold: AnyHold, timeout_seconds: float | None = None) -> AnyHold:
        """Wait until a hold is settled; what the cache fails goes on as a download to private files."""
        if isinstance(hold, PrivateHold):
            return self.stand_in.wait(hold, timeout_seconds)
        try:
            self.primary.wait(hold, timeout_seconds)
            error = hold.error
        except CacheError as failure:
            error = failure
        if error is None:
            return hold
        if not is_fault(error):
            if error is not hold.error:
                raise error
            return hold
        self.note(error)
        private = self._stand_in_for(hold.refs)
        self.primary.drop(hold)
        return self.stand_in.wait(private, timeout_seconds)

    def open(self, hold: AnyHold) -> bool:
        """Begin to use a hold; one that the cache fails is to be acquired again."""
        if isinstance(hold, PrivateHold):
            return hold.claim()
        return self._tried(lambda: self.primary.open(hold), False)

    def release(self, hold: AnyHold) -> None:
        """Give a hold back; a cache that fails is not told."""
        if isinstance(hold, PrivateHold):
            hold.close()
        elif self.is_left_alone:
            self.primary.drop(hold)
        else:
            self._tried(lambda: self.primary.release(hold), None)

    def retain(self, hold: AnyHold) -> AnyHold:
        """Keep the paths of an open hold; one that cannot be pinned by rows keeps the locks on its files."""
        if isinstance(hold, PrivateHold):
            return self.stand_in.retain(hold)
        same: AnyHold = hold
        return self._tried(lambda: self.primary.retain(hold), same)

    def warn_of_paths(self) -> None:
        """Say once that the limit leaves too little room for the paths that should stay valid."""
        self.primary.warn_of_paths()

    def hand_over(self, give: Callable[[int], None]) -> None:
        """End, and leave the pins in the cache to the process that `give` gives a descriptor to."""
        if not self.is_left_alone:
            self.primary.hand_over(give)

    def expect(self, num_processes: int) -> None:
        """Note how many processes of this node will share limit and network."""
        self.primary.expect(num_processes)

    def expect_forks(self, num_objects: int | None) -> None:
        """Prepare for helpers of processes that are forked from this one."""
        if not self.is_left_alone:
            self._tried(partial(self.primary.expect_forks, num_objects), None)

    def flush(self) -> None:
        """Write what waits for a transaction; not into a cache that fails."""
        if not self.is_left_alone:
            self._tried(self.primary.flush, None)

    def rest(self) -> None:
        """End the helper process."""
        self.primary.rest()

    def close(self) -> None:
        """End the helper process, and remove all private files."""
        try:
            self.primary.close()
        finally:
            self.stand_in.close()

    # -- what a cache keeps -------------------------------------------------------------------------------------------

    def stored(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of `keys` whose samples are stored, as far as the cache can be asked."""
        return set() if self.is_left_alone else self._tried(lambda: self.primary.stored(keys), set())

    def put(self, items: Sequence[PutItem]) -> str | None:
        """Store samples, unless the cache fails."""
        return self.stand_in.put(items) if self.is_left_alone else self.primary.put(items)

    def hold_made(self, group: Sequence[ObjectRef], bodies: Mapping[bytes, bytes]) -> AnyHold:
        """Return an open hold in the cache; while that fails, one on private files."""
        if not self.is_left_alone:
            try:
                return self.primary.hold_made(group, bodies)
            except SqlStreamError as error:
                if not is_fault(error) or self.primary.is_closed or self.primary.has_ended:
                    raise
                self.note(error)
        hold = self.stand_in.hold_made(group, bodies)
        self.primary.count_bypassed(len(hold.files))
        return hold

    def discard(self, ref: ObjectRef) -> bool:
        """Remove an entry whose bytes proved damaged."""
        return self.stand_in.discard(ref) if self.is_left_alone else self.primary.discard(ref)

    def drop_other_versions(self, refs: Iterable[ObjectRef]) -> Set[bytes]:
        """Remove entries of another version than a listing names, if the cache can be asked."""
        if self.is_left_alone:
            return frozenset()
        return self._tried(lambda: self.primary.drop_other_versions(refs), frozenset())

    def register(self, name: str, src: str, fingerprint: str) -> int | None:
        """Return the id of a dataset in the ledger; None where the ledger fails."""
        return self._tried(lambda: self.primary.register(name, src, fingerprint), None)

    def limit_in_force(self) -> int | None:
        """Return the limit in bytes; None: there is none, or the ledger fails."""
        return None if self.is_left_alone else self._tried(self.primary.limit_in_force, None)

    def shard_unit(self, wish: ShardWish, choose: Callable[[int | None], ChosenUnit]) -> ChosenUnit:
        """Return in what unit shards are fetched; where the ledger fails, as this process chooses."""
        if self.is_left_alone:
            return self.stand_in.shard_unit(wish, choose)
        agreed = self._tried(lambda: self.primary.shard_unit(wish, choose), None)
        return self.stand_in.shard_unit(wish, choose) if agreed is None else agreed

    def note_failures(self, failed: Sequence[Failure]) -> None:
        """Write down which samples failed, and why, if there is a ledger to write to."""
        if not self.is_left_alone:
            self._tried(lambda: self.primary.note_failures(failed), None)
