"""A cache directory as this process sees it: one object per directory, whoever uses it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

from sqlstream import locks
from sqlstream.cache import rebuild, recover
from sqlstream.cache.bypass import remove_directory
from sqlstream.cache.disk import Disk
from sqlstream.cache.fetch import Acquirer
from sqlstream.cache.ledger import Ledger
from sqlstream.db import Database
from sqlstream.errors import CacheDamagedError, CacheDiskError, CacheError

logger = logging.getLogger(__name__)


class Store:
    """Disk, ledger and acquirer of one directory, shared by all datasets and caches of this process that use it."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        database = Database(
            disk.root / "ledger.sqlite", refill=lambda connection: rebuild.refill(connection, disk), on_full=disk.drop_ballast
        )
        self.ledger = Ledger(database)
        self.acquirer = Acquirer(disk, self.ledger)
        self.num_users = 0
        self.remove_stand_in: Callable[[], object] | None = None
        """Ends a directory that only stands in for another one."""


_stores: dict[tuple[int, int], Store] = {}


def open_store(path: str | os.PathLike[str], *, create: bool, allow_network_fs: bool) -> Store:
    """Return the store of a directory, made on first use; give it back with `close_store`.

    One object per (device, inode) of the directory: two ledgers of one process would not see each other's pins.
    """
    with locks.fork_guard():
        disk = Disk(Path(path), allow_network_fs=allow_network_fs)
        disk.open(create=create)
        identity = _identity(disk.root)
        if identity not in _stores:
            store = Store(disk)
            try:
                _settle(store)
            except BaseException:
                _close(store)
                raise
            disk.restore_ballast()
            _stores[identity] = store
        _stores[identity].num_users += 1
        return _stores[identity]


def open_stand_in(path: Path, error: CacheError) -> Store:
    """Return the store of a private temporary directory, in place of one that cannot be used; removed when it is closed."""
    directory = tempfile.mkdtemp(prefix="sqlstream-stand-in-")
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


def close_store(store: Store) -> None:
    """Give a store back; the last user of the process closes it."""
    with locks.fork_guard():
        store.num_users -= 1
        if store.num_users > 0:
            return
        for identity in [identity for identity, known in _stores.items() if known is store]:
            del _stores[identity]
    _close(store)  # joins a thread that may want the guard


def _settle(store: Store) -> None:
    """Give back what the dead held, as nobody: who only looks is no owner, and has no say in the limit; see to a restart."""
    for is_last in (False, True):
        try:
            with store.ledger.transaction() as tx:
                recover.reap(tx, store.disk)
            rebuild.reconcile(store.ledger, store.disk)
        except (CacheDamagedError, CacheDiskError):
            if is_last:
                raise
        else:
            return  # else once more: by now it may have been mended


def _close(store: Store) -> None:
    try:
        with contextlib.suppress(CacheError):  # what cannot be written off is reaped by whoever comes next
            store.acquirer.close()
    finally:
        store.ledger.database.close()
        if store.remove_stand_in is not None:
            store.remove_stand_in()


def _identity(root: Path) -> tuple[int, int]:
    status = os.stat(root)
    return (status.st_dev, status.st_ino)
