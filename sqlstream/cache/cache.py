"""The public face of a cache directory."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sqlstream import locks
from sqlstream.cache import recover, statistics
from sqlstream.cache.clear import ClearReport, clear
from sqlstream.cache.holds import AnyHold, Hold
from sqlstream.cache.keys import ObjectRef
from sqlstream.cache.policy import Policy, policy_named
from sqlstream.cache.recover import Finding
from sqlstream.cache.statistics import CacheStatistics
from sqlstream.cache.store import Store, close_store, open_stand_in, open_store
from sqlstream.config import OnCacheError, StorageOptions, cache_error_policy, parse_bytes
from sqlstream.errors import CacheError, ConfigError, ObjectNotFoundError
from sqlstream.storage import urls
from sqlstream.storage.fetcher import Fetcher


class Cache:
    """A directory of remote objects under a hard limit of bytes, shared by every process of this node that opens it.

    Pickles as its path and options; safe in threads, across fork, spawn and forkserver.

    Args:
        path: The directory; created if absent. Must be empty or a cache, node-local, and this user's own.
        limit: Most bytes on disk for objects, whole and on their way: a count or a text such as `'10gb'`; None: no limit of
            its own. Of several limits on one directory, the smallest of the living users' holds.
        storage_options: Backend settings as fsspec users write them, or a `StorageOptions` value.
        eviction_policy: Who goes first when room is needed: `'lru'`, `'fifo'`, `'lfu'` or `'belady'` (docs/cache.md), for all
            users of the directory; None: as it is, `'lru'` at first. If a living process holds to another one, that one stays.
        on_cache_error: What to do when the cache is broken (its disk fails, its ledger cannot be rebuilt, its directory is gone
            or not usable): `'raise'` CacheError, or `'bypass'` it, with private temporary files. A full cache is not broken.
        min_free_bytes: So much of the directory's file system stays free, whoever fills it: more is evicted, or CacheFullError
            raised. A count or a text.
        create: False: refuse a directory that is not a cache yet.
        allow_network_fs: Do not refuse network file systems; for one process at a time.

    Raises:
        CacheDirectoryError: The directory is not usable; the message says why and what to do.
        ConfigError: `limit` is not a size, or `eviction_policy` no policy.

    Example:
        >>> cache = Cache(directory, limit="1gb")
        >>> with cache.pinned("s3://bucket/photo.jpg") as path:
        ...     data = path.read_bytes()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        limit: int | str | None = None,
        storage_options: Mapping[str, object] | StorageOptions | None = None,
        eviction_policy: str | None = None,
        on_cache_error: OnCacheError | str = OnCacheError.RAISE,
        min_free_bytes: int | str = 0,
        create: bool = True,
        allow_network_fs: bool = False,
    ) -> None:
        self.path = Path(os.path.abspath(path))
        self._arguments = {
            "limit": limit,
            "storage_options": storage_options,
            "eviction_policy": eviction_policy,
            "on_cache_error": on_cache_error,
            "min_free_bytes": min_free_bytes,
            "allow_network_fs": allow_network_fs,
        }
        self._limit_bytes = parse_bytes(limit)
        if eviction_policy is not None:
            policy_named(eviction_policy)
        if not isinstance(storage_options, StorageOptions):
            storage_options = StorageOptions(storage_options=dict(storage_options or {}))
        self.storage_options = storage_options
        is_bypassed = cache_error_policy(on_cache_error) is OnCacheError.BYPASS
        least_free_bytes = parse_bytes(min_free_bytes, "min_free_bytes") or 0
        try:
            self.store = open_store(self.path, create=create, allow_network_fs=allow_network_fs)
        except CacheError as error:
            if not is_bypassed:
                raise
            self.store = open_stand_in(self.path, error)
            self.path = self.store.disk.root
        self.fetcher = Fetcher(self.storage_options)
        acquirer = self.store.acquirer
        if is_bypassed:
            acquirer.bypass.allow(self.fetcher)
        self._holds: dict[str, list[Hold]] = {}
        self._finalizer = weakref.finalize(self, _close_aside, self.store, self.fetcher, id(self))
        self._finalizer.atexit = False
        _open.add(self)
        try:
            acquirer.downloads.free_space.ask(id(self), least_free_bytes)
            with acquirer.bypass.tolerated():
                acquirer.owner.set_limit(id(self), self._limit_bytes)
                if eviction_policy is not None:
                    acquirer.owner.ask_for_policy(eviction_policy)
        except BaseException:
            self.close()
            raise

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle path and options: another process opens the directory itself."""
        return (_reopen, (self.path, self._arguments, self.store.acquirer.bypass.directory, os.getpid()))

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- objects ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def pinned(self, url: str) -> Iterator[Path]:
        """Bring one object if it is not here, and keep it on disk while the body runs.

        Args:
            url: Where the object is; a local path is read in place.

        Raises:
            ObjectNotFoundError: There is no such object.
            CacheFullError: It is larger than the limit, or everything else is pinned.
            StorageError: It cannot be read.
        """
        if not urls.is_remote(url):
            yield local_file(url)
            return
        hold = None
        try:
            with locks.uninterrupted():
                ref = ObjectRef.of(url)
                hold = self.hold((ref,))
            yield self.path_of(ref, hold)
        finally:
            if hold is not None:
                self.store.acquirer.release(hold)

    def acquire_many(self, wanted: Sequence[str]) -> list[Path]:
        """Bring and pin objects, all or none; return their paths, valid until `release_many` of the same URLs.

        Raises:
            ObjectNotFoundError: One of them does not exist.
            CacheFullError: They do not fit under the limit together.
            StorageError: One of them cannot be read.
        """
        paths = {url: local_file(url) for url in wanted if not urls.is_remote(url)}
        refs = {url: ObjectRef.of(url) for url in wanted if urls.is_remote(url)}
        if refs:
            acquirer = self.store.acquirer
            pieces = {piece.refs[0].key: piece for piece in acquirer.holdings.split(self.hold(tuple(refs.values())))}
            with locks.fork_guard():
                for url, ref in refs.items():
                    self._holds.setdefault(url, []).append(pieces[ref.key])
                    paths[url] = self.path_of(ref, pieces[ref.key])
        return [paths[url] for url in wanted]

    def release_many(self, wanted: Sequence[str]) -> None:
        """Give back what `acquire_many` pinned; local paths, which are read in place, need it not.

        Raises:
            ConfigError: A URL was not acquired by this object.
        """
        for url in filter(urls.is_remote, dict.fromkeys(wanted)):
            with locks.fork_guard():
                holds = self._holds.get(url)
                hold = holds.pop() if holds else None
                if not holds:
                    self._holds.pop(url, None)
            if hold is None:
                raise ConfigError(f"{urls.redact(url)} is not acquired: release once for each call that acquired it")
            self.store.acquirer.release(hold)

    def hold(self, refs: Sequence[ObjectRef]) -> Hold:
        """Return a hold, in use, on objects that are all here (the engine plans many at once, with `store.acquirer`)."""
        acquirer = self.store.acquirer
        while True:
            if not self._finalizer.alive:
                raise ConfigError(f"the cache {self.path} is closed: open it again")
            hold = acquirer.acquire_one(refs, self.fetcher)
            try:
                acquirer.wait(hold)
            except BaseException:
                acquirer.release(hold)
                raise
            if hold.error is not None:
                acquirer.release(hold)
                raise hold.error
            if acquirer.holdings.claim(hold):
                return hold
            acquirer.release(hold)

    def path_of(self, ref: ObjectRef, hold: AnyHold | None = None) -> Path:
        """Return where an object is that `hold` holds."""
        return Path(self.file_of(ref, hold))

    def file_of(self, ref: ObjectRef, hold: AnyHold | None = None) -> str:
        """Return the same as text, which takes a tenth of the time."""
        if hold is not None and hold.files is not None:
            return str(hold.files[ref.key].path)
        return self.store.disk.data_path(ref.key, ref.ext)

    # -- the directory ------------------------------------------------------------------------------------------------

    @property
    def limit_bytes(self) -> int | None:
        """What this cache object asked for; the limit in force is the smallest of all living users'. May be set at any time."""
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit: int | str | None) -> None:
        self._limit_bytes = parse_bytes(limit)
        self._arguments["limit"] = limit
        self.store.acquirer.owner.set_limit(id(self), self._limit_bytes)

    @property
    def policy(self) -> Policy:
        """The eviction policy in force; of a cache that fails and is bypassed, the default."""
        name = "lru"
        with self.store.acquirer.bypass.tolerated():
            name = self.store.ledger.policy()
        return policy_named(name)

    def statistics(self) -> CacheStatistics:
        """Return the account of this moment."""
        self.store.acquirer.owner.flush()
        return statistics.collect(self.store.ledger, self.store.disk)

    def clear(self, *, dataset: str | None = None, older_than_seconds: float | None = None, index: bool = False) -> ClearReport:
        """Remove entries, never a pinned one; see `sqlstream.cache.clear`."""
        self.store.acquirer.owner.flush()
        return clear(self.store.ledger, self.store.disk, dataset=dataset, older_than_seconds=older_than_seconds, index=index)

    def verify(self, repair: bool = False) -> list[Finding]:
        """Return everything on which ledger and disk disagree; with `repair`, mend it without disturbing readers."""
        self.store.acquirer.owner.flush()
        return recover.verify(self.store.ledger, self.store.disk, repair=repair)

    def rest(self) -> None:
        """End the helper process and what it still brings; the next miss starts it again."""
        if not self._finalizer.alive:  # closed, at the latest as Python ends, where an iterator may be ended after all else
            return
        self.store.acquirer.downloads.cancel(self.fetcher)
        self.fetcher.stop()

    def close(self) -> None:
        """Give every pin back, end the helper process and threads, close all files."""
        if self._finalizer.detach() is not None:
            _close(self.store, self.fetcher, id(self))


_open: weakref.WeakSet[Cache] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for cache in list(_open):
        cache.close()


def local_file(url: str) -> Path:
    """Return the path of a local source file, which is read in place: never entered in the ledger, never deleted.

    Raises:
        ObjectNotFoundError: It is not there.
    """
    path = urls.local_path(url)
    if not path.is_file():
        raise ObjectNotFoundError(f"there is no file {path}: check the path in the index")
    return path


def _reopen(path: Path, arguments: dict[str, object], private_directory: str, pid: int) -> Cache:
    cache = Cache(path, **arguments)  # type: ignore[arg-type]  # what __init__ took
    if os.getpid() != pid:
        cache.store.acquirer.bypass.join(private_directory)
    return cache


def _close_aside(store: Store, fetcher: Fetcher, user: int) -> None:
    """Close for a cache that the garbage collector found, in a thread: it may have come in the middle of a transaction."""
    threading.Thread(target=_close, args=(store, fetcher, user), name="sqlstream-cache-close").start()


def _close(store: Store, fetcher: Fetcher, user: int) -> None:
    store.acquirer.downloads.cancel(fetcher)
    fetcher.stop()
    store.acquirer.downloads.free_space.ask(user, 0)
    with contextlib.suppress(CacheError):  # the directory may be gone: nothing is left to give back
        store.acquirer.owner.drop_limit(user)
    with contextlib.suppress(CacheError):
        close_store(store)
