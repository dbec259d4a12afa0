"""A cache directory as this process sees it: one object per directory, for all its users."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from sqlstream.cache.acquire.acquirer import Acquirer
from sqlstream.cache.acquire.background import BackgroundThread, BackgroundWork
from sqlstream.cache.acquire.checksums import Checksums
from sqlstream.cache.acquire.downloads import Downloads
from sqlstream.cache.acquire.hits import Lookup
from sqlstream.cache.acquire.holds import Holds
from sqlstream.cache.acquire.owner import Owner
from sqlstream.cache.acquire.room import Limits
from sqlstream.cache.acquire.uses import UsageLog
from sqlstream.cache.acquire.wait import DownloadWaiter, RoomQueue
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.files.read_hold import KeptLocks
from sqlstream.cache.ledger.database import Database
from sqlstream.cache.ledger.ledger import Ledger
from sqlstream.cache.model.tuning import CacheTuning
from sqlstream.cache.recovery import emergency, rebuild, recover
from sqlstream.errors import CacheDamagedError, CacheDiskError, CacheError
from sqlstream.process import locks

logger = logging.getLogger(__name__)


class CacheDirectory:
    """Disk, ledger and acquirer of one directory, shared by all datasets and caches of this process that use it."""

    def __init__(self, disk: Disk, tuning: CacheTuning | None = None) -> None:
        self.disk = disk
        database = Database(
            disk.root / "ledger.sqlite",
            refill=lambda connection: rebuild.refill(connection, disk),
            is_there=disk.is_there,
            on_full=lambda: emergency.give_room(disk),
            is_short=lambda: disk.kept_bytes > 0,
        )
        self.ledger = Ledger(database)
        self.tuning = tuning or CacheTuning()
        self.owner = Owner(disk, self.ledger)
        self.holds = Holds(self.owner)
        self.limits = Limits(disk, self.ledger, self.owner)
        queue = RoomQueue(self.ledger, self.owner)
        self.kept = KeptLocks()
        """Shards that stay open."""
        work = BackgroundWork(disk, self.ledger, self.holds, queue, self.limits, self.kept)
        self._background = BackgroundThread(work.run)
        uses = UsageLog(self.owner)
        self.lookup = Lookup(self.ledger, self.owner, uses, self._background, disk.data, self.kept, self.tuning.num_hits_a_look)
        self.downloads = Downloads(disk, self.owner, self.holds, self._background.wake, self.tuning)
        self.checksums = Checksums(disk, self.ledger, self.owner, self.downloads)
        self.waiter = DownloadWaiter(disk, self.ledger, self.downloads, self.holds)
        self.acquirer = Acquirer(disk, self.holds, self.lookup, self.downloads, queue, self._background, self.tuning, self.kept)
        self.num_users = 0
        self.identity = _identity(disk.root)
        self.remove_stand_in: Callable[[], object] | None = None
        """Ends a directory that only stands in for another one."""

    def limit_in_force(self) -> int | None:
        """Return the limit in bytes, which the first use of a new directory sets; None: there is none."""
        if not self.owner.is_registered:
            self.owner.run(lambda _: None)
        return self.ledger.account().limit_bytes

    def flush(self) -> None:
        """Write what waits for a transaction, and close shards that stay open: what no sample uses may go."""
        self.kept.let_go()
        self.owner.flush()

    def hand_over(self, give: Callable[[int], None]) -> None:
        """End, and leave the pins of retained holds to the process that `give` gives a descriptor to; see `Owner.hand_over`."""
        if not self.holds.num_retained:
            return
        self._background.stop()
        self.holds.revoke_prefetched()
        with contextlib.suppress(CacheError):  # as this process ends: the next one reaps what is left of it
            self.owner.hand_over(give)

    def close(self) -> None:
        """Give everything back and end the background thread; the ledger stays open."""
        with self.limits.kept_at_the_end(), contextlib.ExitStack() as steps:
            steps.callback(self.owner.close)
            steps.callback(self.lookup.forget)
            steps.callback(self.kept.let_go)
            steps.callback(self._background.stop)


_Identity: TypeAlias = tuple[int, int]
_stores: dict[_Identity, CacheDirectory] = {}
_turns: dict[_Identity, locks.Turn] = {}


def open_store(
    path: str | os.PathLike[str], *, create: bool, allow_network_fs: bool, tuning: CacheTuning | None = None
) -> CacheDirectory:
    """Return the store of a directory, made on first use; give it back with `close_store`.

    One object per (device, inode) of the directory: two ledgers of one process would not see each other's pins. One whose
    directory was moved since is of no use to its new name: it goes on under the old one, where it says that it is gone.

    Args:
        path: Of the directory.
        create: False: refuse one that is no cache yet.
        allow_network_fs: Do not refuse network file systems.
        tuning: Times and thresholds; those of the first user hold for all.
    """
    locks.occupy_standard_descriptors()
    disk = Disk(Path(path), allow_network_fs=allow_network_fs)
    disk.open(create=create)
    identity = _identity(disk.root)
    with _turn_of(identity):
        if identity not in _stores or not _is_at(_stores[identity].disk.root, identity):
            store = CacheDirectory(disk, tuning)
            try:
                _settle(store)
            except BaseException:
                _close(store)
                raise
            disk.restore_ballast()
            _stores[identity] = store
        _stores[identity].num_users += 1
        return _stores[identity]


def open_stand_in(path: Path, error: CacheError) -> CacheDirectory:
    """Return the store of a private temporary directory, in place of one that cannot be used; removed when it is closed.

    Raises:
        CacheError: That cannot be used either.
    """
    try:
        directory = tempfile.mkdtemp(prefix="sqlstream-stand-in-")
    except OSError as failure:
        raise CacheDiskError(f"{error}; and no directory can stand in for it ({failure}): set TMPDIR") from error
    logger.error(
        "the cache directory %s cannot be used (%s): %s stands in for it (on_cache_error='bypass')", path, error, directory
    )
    try:
        store = open_store(f"{directory}/cache", create=True, allow_network_fs=False)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    store.remove_stand_in = weakref.finalize(store, remove_directory, directory, os.getpid())
    return store


def close_store(store: CacheDirectory, user: int) -> None:
    """Give a store back: the last user of the process closes it, any other one writes what it gave back and asks no more."""
    with _turn_of(store.identity):
        store.num_users -= 1
        if store.num_users > 0:
            store.owner.drop_user(user)
            store.owner.flush()
            return
        if _stores.get(store.identity) is store:
            del _stores[store.identity]
        _close(store)


@contextlib.contextmanager
def _turn_of(identity: _Identity) -> Iterator[None]:
    """Let one thread after the other open or close a directory; those of other directories go on."""
    with locks.uninterrupted() as section:
        turn = _turns.setdefault(identity, locks.Turn("the cache directory"))
        while not turn.take():
            section.let_through()
        try:
            yield
        finally:
            turn.give_back()


def _settle(store: CacheDirectory) -> None:
    """Give back what the dead held, without an owner: a process that only looks has no say in the limit. See to a restart."""
    for is_last in (False, True):
        try:
            rebuild.learn_unit(store.ledger, store.disk)
            with store.ledger.transaction() as tx:
                recover.reap(tx, store.disk)
            rebuild.reconcile(store.ledger, store.disk)
        except (CacheDamagedError, CacheDiskError):
            if is_last:
                raise
        else:
            return  # else once more: by now it may have been mended


def _close(store: CacheDirectory) -> None:
    database = store.ledger.database
    try:
        with contextlib.suppress(CacheError):  # what cannot be written off is reaped by the next process
            store.close()
        database.end()
    except BaseException:  # of a handler, as something waited for another process: that one would let us wait again
        database.abandon()
        raise
    finally:
        if store.remove_stand_in is not None:
            store.remove_stand_in()


def _is_at(root: Path, identity: _Identity) -> bool:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return _identity(root) == identity
    return False


def _identity(root: Path) -> _Identity:
    status = os.stat(root)
    return (status.st_dev, status.st_ino)


def remove_directory(directory: str, pid: int) -> None:
    """Remove a private directory; not in a forked child of its owner."""
    if os.getpid() == pid:
        shutil.rmtree(directory, ignore_errors=True)
