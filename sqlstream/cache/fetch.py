"""Acquiring and giving back the objects of samples; waiting for what others bring, and for room.

What is here is pinned, what is not is led by one process of the node. Others that find a download under way look at its
part's lock: the death of a leader (and its helper) frees it, and the next acquirer takes over with a new part.

Nobody waits for room while it keeps anything from others: before waiting, a process gives up what it prefetched and then
what it retained; and a process that sleeps in its trainer does the same when it sees others in line (`_watch_others`).
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, overload

from sqlstream import locks
from sqlstream.cache.awaiter import Awaiter, wait_for_change
from sqlstream.cache.bypass import Bypass, is_fault
from sqlstream.cache.disk import Disk, Part
from sqlstream.cache.downloads import Downloads
from sqlstream.cache.free_space import FreeSpace
from sqlstream.cache.hits import Hits
from sqlstream.cache.holds import AnyHold, Hold, Holdings
from sqlstream.cache.keeper import Keeper
from sqlstream.cache.keys import ObjectRef
from sqlstream.cache.ledger import Ledger
from sqlstream.cache.light import Lights
from sqlstream.cache.light_hold import LightHold
from sqlstream.cache.line import Line
from sqlstream.cache.owner import Owner
from sqlstream.cache.passage import Passage
from sqlstream.cache.room import Room, make_space
from sqlstream.cache.upkeep import Upkeep
from sqlstream.cache.uses import Uses
from sqlstream.errors import CacheDamagedError, CacheDiskError, CacheError, CacheFullError
from sqlstream.storage.fetcher import Fetcher

logger = logging.getLogger(__name__)

Acquire: TypeAlias = Callable[[Sequence[Sequence[ObjectRef]], Fetcher], list[Hold]]

PATIENCE_SECONDS = 2.0
"""After so long in line for room, older waiters are no longer let through first: one of them may be stopped."""
MAX_UNWRITTEN = 64
"""Releases that wait for the next transaction; more are written by one of their own."""
MAX_UNPREPARED = 4
"""For so few objects, and after a window of hits, a look ahead costs more than part files created inside the door."""
PATHS_GIVEN_UP = (
    "the cache limit is too small to keep the paths of yielded samples valid: raise cache_limit, "
    "or read the files in transforms"
)


class Acquirer:
    """Acquires, waits for and releases objects, for all users of a cache directory in this process.

    Args:
        disk: The directory's files.
        ledger: The directory's ledger.
        room_timeout_seconds: How long to wait for others to give room back.
    """

    def __init__(self, disk: Disk, ledger: Ledger, *, room_timeout_seconds: float = 120.0) -> None:
        self.owner = Owner(disk, ledger)
        self.holdings = Holdings(self.owner)
        self._uses = Uses(self.owner)
        self._hits = Hits(disk, self.owner, self.holdings, self._uses)
        self._keeper = Keeper(lambda: self._upkeep.run(self.num_expected))
        self.downloads = Downloads(disk, self.owner, self.holdings, self._keeper.wake)
        self.bypass = Bypass(self.owner, self.downloads.settled)
        self._lights = Lights(disk, ledger, self.holdings, self.bypass, self._uses)
        self._line = Line(self.owner)
        self._upkeep = Upkeep(disk, ledger, self.holdings, self.bypass, self._line)
        self._awaiter = Awaiter(disk, ledger, self.downloads, self.holdings, self.bypass)
        self._disk = disk
        self._ledger = ledger
        self._room_timeout_seconds = room_timeout_seconds
        self.num_expected = 1
        """Processes that will share the limit: the first DataLoader worker must not take what the others come for."""
        self._share_bytes: int | None = None
        self._expects_misses = True
        self._has_warned = False

    # -- acquiring ----------------------------------------------------------------------------------------------------

    @overload
    def acquire(self, groups: Sequence[Sequence[ObjectRef]], fetcher: Fetcher) -> list[Hold]: ...
    @overload
    def acquire(self, groups: Sequence[Sequence[ObjectRef]], fetcher: Fetcher, *, lightly: bool) -> Sequence[AnyHold]: ...
    def acquire(self, groups: Sequence[Sequence[ObjectRef]], fetcher: Fetcher, *, lightly: bool = False) -> Sequence[AnyHold]:
        """Return holds on the longest prefix of `groups` (the objects of one sample each) for which there is room now.

        With `lightly`, the caller only reads the files between claim and release, and gives their paths to nobody: where all
        objects are here and the cache is far from full, no transaction is needed (`LightHold`).
        """
        if lightly and not self._expects_misses and (holds := self._lights.acquire(groups, fetcher)) is not None:
            self._keeper.wake()
            return holds
        return self._or_past_the_cache(self._acquire_prefix, groups, fetcher)

    def _acquire_prefix(self, groups: Sequence[Sequence[ObjectRef]], fetcher: Fetcher) -> list[Hold]:
        holds: list[Hold] = []
        while len(holds) < len(groups):
            passage = self._pass(groups[len(holds) :], fetcher)
            holds += passage.holds
            if passage.room is not Room.AGAIN:
                break
        return holds

    @overload
    def acquire_one(self, group: Sequence[ObjectRef], fetcher: Fetcher) -> Hold: ...
    @overload
    def acquire_one(self, group: Sequence[ObjectRef], fetcher: Fetcher, *, lightly: bool) -> AnyHold: ...
    def acquire_one(self, group: Sequence[ObjectRef], fetcher: Fetcher, *, lightly: bool = False) -> AnyHold:
        """Return a hold on one sample's objects, waiting for room if need be; for `lightly` see `acquire`.

        Raises:
            CacheFullError: Nobody gave room back in time.
        """
        if lightly and (holds := self._lights.acquire([group], fetcher)) is not None:
            self._keeper.wake()
            return holds[0]
        return self._or_past_the_cache(self._acquire_first, [group], fetcher)[0]

    def _or_past_the_cache(self, acquire: Acquire, groups: Sequence[Sequence[ObjectRef]], fetcher: Fetcher) -> list[Hold]:
        """Return the holds that `acquire` returns; if the cache fails and may be bypassed, holds on private files."""
        if not self.bypass.allows(fetcher):
            return acquire(groups, fetcher)
        if self.bypass.is_cache_left_alone:
            return self.bypass.acquire(groups, fetcher)
        try:
            holds = acquire(groups, fetcher)
        except CacheError as error:
            if not is_fault(error) or self.owner.is_closed:
                raise
            self.bypass.note(error)
            return self.bypass.acquire(groups, fetcher)
        for hold in holds:
            hold.fetcher = fetcher
        return holds

    def _acquire_first(self, groups: Sequence[Sequence[ObjectRef]], fetcher: Fetcher) -> list[Hold]:
        hold = self._hits.acquire(groups[0])
        if hold is not None:
            self._keeper.wake()
            return [hold]
        return self._pass(groups, fetcher, must_fit=True).holds or self._acquire_in_line(groups, fetcher)

    def _acquire_in_line(self, groups: Sequence[Sequence[ObjectRef]], fetcher: Fetcher) -> list[Hold]:
        """Return a hold on one sample's objects: ask again and again, and give back meanwhile."""
        started = time.monotonic()
        has_more_to_give = True
        with self._line.place() as place:
            while True:
                waited = time.monotonic() - started
                in_line = waited < PATIENCE_SECONDS
                passage = self._pass(groups, fetcher, must_fit=True, takes_least=not has_more_to_give, in_line=in_line)
                if passage.holds:
                    return passage.holds
                if passage.room is Room.AGAIN:
                    continue
                had_more_to_give, has_more_to_give = has_more_to_give, self._give_something_back()
                if has_more_to_give or had_more_to_give:
                    continue
                if waited > self._room_timeout_seconds:
                    raise _no_room(self._ledger, passage.need_bytes, waited, self.downloads.free_space)
                place.wait_for(passage.need_bytes)
                wait_for_change(self._ledger, self.downloads)

    def _pass(
        self,
        groups: Sequence[Sequence[ObjectRef]],
        fetcher: Fetcher,
        *,
        must_fit: bool = False,
        takes_least: bool = False,
        in_line: bool = True,
    ) -> Passage:
        """Go through the door once, then send what is to be downloaded; once more if the ledger has just failed."""
        with locks.uninterrupted():
            try:
                return self._pass_once(groups, fetcher, must_fit=must_fit, takes_least=takes_least, in_line=in_line)
            except (CacheDamagedError, CacheDiskError):
                return self._pass_once(groups, fetcher, must_fit=must_fit, takes_least=takes_least, in_line=in_line)

    def _pass_once(
        self, groups: Sequence[Sequence[ObjectRef]], fetcher: Fetcher, *, must_fit: bool, takes_least: bool, in_line: bool
    ) -> Passage:
        keys = dict.fromkeys([ref.key for group in groups for ref in group]).keys()  # in the order of their use
        parts: dict[bytes, Part] = {}
        if self._expects_misses and len(keys) > MAX_UNPREPARED:  # file work stays outside the door
            parts = _create_parts(self._disk, self.owner, keys - self._ledger.find(keys).keys() - self.downloads.leads.keys())
        passage: Passage | None = None
        try:
            with self.owner.transaction() as tx:
                assert self.owner.id is not None
                self._line.leave_if_nobody_waits(tx)
                passage = Passage(
                    owner=self.owner.id,
                    disk=self._disk,
                    downloads=self.downloads,
                    holdings=self.holdings,
                    uses=self._uses,
                    fetcher=fetcher,
                    window=keys,
                    parts=parts,
                    must_fit=must_fit,
                    takes_least=takes_least,
                    in_line=in_line,
                    num_expected=self.num_expected,
                )
                passage.run(tx, groups)
        except BaseException:
            if passage is not None:
                self.downloads.discard(passage.leads)
                for hold in passage.holds:
                    self.holdings.release(hold)
            raise
        finally:
            self._disk.discard_parts(parts.values())
        self._share_bytes, self._expects_misses = passage.share_bytes, bool(passage.leads)
        self._hits.learn(passage.policy, is_order_needed=passage.is_order_needed)
        with locks.fork_guard():
            passage.note_uses()
        if passage.leads:
            fetcher.share_node(passage.num_sharing)
        self.downloads.start(passage.leads)
        self._hits.check_files(passage.holds, passage.ready)
        if passage.holds and passage.share_bytes is not None:
            self._keeper.wake()
        return passage

    def wait(self, hold: AnyHold, timeout_seconds: float | None = None) -> bool:
        """Wait until every object of `hold` is here, or one failed; return whether it is settled."""
        return isinstance(hold, LightHold) or self._awaiter.wait(hold, timeout_seconds)

    # -- giving back --------------------------------------------------------------------------------------------------

    def release(self, hold: AnyHold) -> None:
        """Give a hold back; it reaches the ledger with the next transaction, or when many have gathered."""
        self.holdings.release(hold)
        self._bound_unwritten()

    def retain(self, hold: AnyHold, capacity: int) -> AnyHold:
        """Keep the paths of a used hold valid for the next `capacity` ones, within this process's share of the limit.

        Returns:
            The hold that keeps them: another one in the place of a light hold.
        """
        if isinstance(hold, LightHold):
            hold = self._lights.by_rows(hold)
            if isinstance(hold, LightHold):
                return hold
        self.holdings.retain(hold, capacity=capacity, share_bytes=self._share_bytes)
        self._bound_unwritten()
        return hold

    def _bound_unwritten(self) -> None:
        if self.owner.num_unwritten + len(self.holdings.released) > MAX_UNWRITTEN:
            self.flush()
        elif not self._keeper.is_woken:
            self._keeper.wake()

    def flush(self) -> None:
        """Write what waits for a transaction; not into a cache that fails and is bypassed."""
        if not self.bypass.is_cache_left_alone:
            with self.bypass.tolerated():
                self.owner.flush()

    def close(self) -> None:
        """Give everything back and end the keeper."""
        self._keeper.stop()
        self.bypass.close()
        self.owner.close()

    def _give_something_back(self) -> bool:
        """Revoke the prefetched hold that is needed last, else the oldest retained one; True if there was any."""
        if not self.holdings.revoke_prefetched(at_most=1):
            if not self.holdings.release_oldest_retained():
                return False
            if not self._has_warned:
                self._has_warned = True
                logger.warning(PATHS_GIVEN_UP)
        self.owner.flush()
        return True


def _no_room(ledger: Ledger, need_bytes: int, waited: float, free_space: FreeSpace) -> CacheFullError:
    pins = ledger.pinned_bytes_by_owner()
    holders = ", ".join(f"{name} (pid {pid}): {num_bytes} bytes" for name, pid, num_bytes in pins) or "nobody"
    return CacheFullError(
        f"no room for {need_bytes} bytes under the cache limit of {ledger.account().limit_bytes} bytes after {waited:.0f} s; "
        f"{f'{free_space.describe()}; ' if free_space.min_bytes else ''}"
        f"pinned by {holders}: raise cache_limit, or release paths sooner"
    )


def _create_parts(disk: Disk, owner: Owner, missing: Iterable[bytes]) -> dict[bytes, Part]:
    """Return a locked part file for each key; on a full disk some room is made for the next try.

    Raises:
        CacheDiskError: They cannot be created.
    """
    parts: dict[bytes, Part] = {}
    try:
        for key in missing:
            parts[key] = disk.create_part(key)
    except OSError as error:
        disk.discard_parts(parts.values())
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            make_space(owner.run, disk, 0)
        raise CacheDiskError(
            f"cannot create files in {disk.root} ({error.strerror}): free space on that disk, or raise `ulimit -n`"
        ) from error
    return parts
