"""The public face of a cache directory."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sqlstream.cache.acquire.checksums import VerifyReads, check_verify_reads, num_without, verify_content
from sqlstream.cache.admin import statistics
from sqlstream.cache.admin.age import age_seconds
from sqlstream.cache.admin.clear import ClearReport, clear
from sqlstream.cache.admin.statistics import CacheStatistics
from sqlstream.cache.directory import CacheDirectory, close_store, open_stand_in, open_store
from sqlstream.cache.failover import FailoverSession
from sqlstream.cache.files.layout import local_directory
from sqlstream.cache.ledger import reports
from sqlstream.cache.ledger.reports import FailureRecord
from sqlstream.cache.ledger_session import LedgerSession
from sqlstream.cache.model.policies import Policy, policy_named
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.private_files import PrivateFilesSession
from sqlstream.cache.recovery import recover
from sqlstream.cache.recovery.recover import Finding
from sqlstream.cache.session import AnyHold, CacheSession
from sqlstream.config import (
    AS_IT_IS,
    AsItIs,
    Limit,
    OnCacheError,
    StorageOptions,
    cache_error_policy,
    flag_of,
    list_of,
    parse_bytes,
    parse_limit,
)
from sqlstream.errors import CacheClosedError, CacheError, ConfigError
from sqlstream.logs import configure_logs
from sqlstream.process import interrupts, locks
from sqlstream.storage.base import urls
from sqlstream.storage.base.access import check_providers
from sqlstream.storage.base.identity import Identity
from sqlstream.storage.fetcher import Fetcher


class Cache:
    """A directory of remote objects under a hard limit of bytes, shared by every process of this node that opens it.

    Pickles as its path and options; safe in threads, across fork, spawn and forkserver.

    Args:
        path: The directory; created if absent. Must be empty or a cache, node-local, and this user's own.
        limit: Most bytes on disk for objects, whole and on their way: a count or a text such as `'10gb'`; None: no limit;
            `AS_IT_IS`: the limit in force. The smallest that living users gave holds, and what is above it is evicted.
        storage_options: Backend settings as fsspec users write them, or a `StorageOptions` value.
        eviction_policy: Who goes first when room is needed: `'lru'`, `'fifo'`, `'lfu'` or `'belady'`; None: as it is.
        on_cache_error: With a broken (not: a full) cache, `'raise'`, or `'bypass'` it: read past it, to private files.
        min_free_bytes: So much of the directory's file system stays free, whatever fills it. A count or a text.
        cache_namespace: A text that parts what different users see under one URL (docs/cache.md); None: nothing to part.
        verify_reads: `'crc'`: compare each file with its checksum before its first use by this process; `'never'`.
        max_age: What came longer ago goes first, and is fetched again: seconds, or `'7d'` (docs/cache.md); None: no limit.
        providers: `{"asset": "module:function"}`: functions that turn the URLs of a scheme into bytes, a file or another URL
            (docs/storage.md).
        create: False: refuse a directory that is not a cache yet.
        allow_network_fs: Do not refuse network file systems; for one process at a time.

    Raises:
        CacheDirectoryError: The directory is not usable; the message says why and what to do.
        ConfigError: `path` is a URL, `limit` not a size, or `eviction_policy` no policy.

    Example:
        >>> cache = Cache(directory, limit="1gb")
        >>> with cache.pinned("s3://bucket/photo.jpg") as path:
        ...     data = path.read_bytes()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        limit: int | str | AsItIs | None = AS_IT_IS,
        storage_options: Mapping[str, object] | StorageOptions | None = None,
        eviction_policy: str | None = None,
        on_cache_error: OnCacheError | str = OnCacheError.RAISE,
        min_free_bytes: int | str = 0,
        cache_namespace: str | None = None,
        verify_reads: VerifyReads | str = VerifyReads.NEVER,
        create: bool = True,
        allow_network_fs: bool = False,
        max_age: str | float | None = None,
        providers: Mapping[str, str] | None = None,
    ) -> None:
        configure_logs()
        self.path = local_directory(path)
        self._arguments = {
            "limit": limit,
            "storage_options": storage_options,
            "eviction_policy": eviction_policy,
            "on_cache_error": on_cache_error,
            "min_free_bytes": min_free_bytes,
            "cache_namespace": cache_namespace,
            "verify_reads": verify_reads,
            "allow_network_fs": allow_network_fs,
            "max_age": max_age,
        }
        self._limit_bytes = parse_limit(limit)
        create, allow_network_fs = flag_of("create", create), flag_of("allow_network_fs", allow_network_fs)
        max_age_seconds = age_seconds(max_age)
        if eviction_policy is not None:
            policy_named(eviction_policy)
        if not isinstance(storage_options, StorageOptions):
            storage_options = StorageOptions(storage_options={} if storage_options is None else storage_options)
        if providers is not None:
            storage_options = replace(storage_options, providers=providers)
        check_providers(storage_options.providers)
        self.storage_options = self._arguments["storage_options"] = storage_options
        self.identity = Identity(storage_options, cache_namespace)
        is_bypassed = cache_error_policy(on_cache_error) is OnCacheError.BYPASS
        self.verifies_reads = check_verify_reads(verify_reads) is VerifyReads.CRC
        least_free_bytes = parse_bytes(min_free_bytes, "min_free_bytes") or 0
        self.is_closed = False
        """Whether `close` was called: any further use is an error."""
        self._holds: dict[str, list[AnyHold]] = {}
        self._user = next(_numbers)
        with locks.uninterrupted():  # no handler raises between a store that is opened and the one who closes it
            try:
                self._directory = open_store(self.path, create=create, allow_network_fs=allow_network_fs)
            except CacheError as error:
                if not is_bypassed:
                    raise
                self._directory = open_stand_in(self.path, error)
                self.path = self._directory.disk.root
            fetcher = Fetcher(self.storage_options)
            session = LedgerSession(
                self._directory, fetcher, verifies_reads=self.verifies_reads, max_age_seconds=max_age_seconds
            )
            self.session = FailoverSession(session, PrivateFilesSession(fetcher)) if is_bypassed else session
            self._finalizer = weakref.finalize(self, _close_aside, self._directory, self.session, self._user)
            self._finalizer.atexit = False
        _open.add(self)
        try:
            self._directory.downloads.free_space.ask(self._user, least_free_bytes)
            self._directory.checksums.ask(self._user, verifies=self.verifies_reads)
            self.session.begin(self._user, self._limit_bytes, eviction_policy)
            fetcher.check_providers()
        except BaseException:
            self.close()
            raise

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle path and options: another process opens the directory itself."""
        private = self.session.stand_in.directory if isinstance(self.session, FailoverSession) else None
        return (_reopen, (self.path, self._arguments, private, os.getpid()))

    def __repr__(self) -> str:
        """Return directory and limit; nothing is read."""
        return f"{type(self).__name__}({str(self.path)!r}, limit={self._limit_bytes!r}{', closed' if self.is_closed else ''})"

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- objects ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def pinned(self, url: str | os.PathLike[str]) -> Iterator[Path]:
        """Bring one object if it is not here, and keep it on disk while the body runs.

        Args:
            url: Where the object is; a local path is read in place.

        Raises:
            ObjectNotFoundError: There is no such object.
            CacheFullError: It is larger than the limit, or everything else is pinned.
            StorageError: It cannot be read.
        """
        url = url if isinstance(url, str) else _text(url)
        if not urls.is_remote(url):
            yield urls.found_path(url)
            return
        hold = None
        try:
            ref = ObjectRef.of(url, identity=self.identity)
            hold = self.hold((ref,))  # an exception before the next line forgets it: then Python gives it back
            yield Path(hold.paths[0])
        finally:
            if hold is not None:
                self.session.release(hold)

    def acquire_many(self, wanted: Iterable[str | os.PathLike[str]]) -> list[Path]:
        """Bring and pin objects, all or none; return their paths, valid until `release_many` of the same URLs.

        Raises:
            ConfigError: `wanted` is a single text.
            ObjectNotFoundError: One of them does not exist.
            CacheFullError: They do not fit under the limit together.
            StorageError: One of them cannot be read.
        """
        wanted = _listed(wanted)
        paths = {url: urls.found_path(url) for url in wanted if not urls.is_remote(url)}
        refs = {url: ObjectRef.of(url, identity=self.identity) for url in wanted if urls.is_remote(url)}
        acquired = _hold_each(self, refs) if refs else {}
        paths |= {url: self.path_of(refs[url], hold) for url, hold in acquired.items()}
        in_order = [paths[url] for url in wanted]
        is_noted = False
        try:  # last: what a handler raises before drops the holds, which gives them back
            with self._directory.owner.state:
                for url, hold in acquired.items():
                    self._holds.setdefault(url, []).append(hold)
                is_noted = True
        except BaseException:  # of a handler at the end of the section
            if is_noted:
                self.release_many(list(acquired))
            raise
        return in_order

    def release_many(self, wanted: Iterable[str | os.PathLike[str]]) -> None:
        """Give back what `acquire_many` pinned; local paths, which are read in place, need it not.

        Raises:
            ConfigError: A URL was not acquired by this object, or `wanted` is a single text; nothing is given back.
        """
        for hold in _take_holds(self, list(filter(urls.is_remote, dict.fromkeys(_listed(wanted))))):
            self.session.release(hold)  # what a handler raises here drops the others, which gives them back

    def hold(self, refs: Sequence[ObjectRef]) -> AnyHold:
        """Return an open hold on objects that are all here (the engine plans many at once, with `session`)."""
        session = self.session
        while True:
            self.check_open()
            hold = session.acquire_one(refs)
            try:
                if hold.outstanding or hold.error is not None:
                    hold = session.wait(hold)
            except BaseException:
                session.release(hold)
                raise
            if hold.error is not None:
                session.release(hold)
                raise hold.error
            if session.open(hold):
                return hold
            session.release(hold)

    def serves(self, other: Cache) -> bool:
        """Return whether objects may come through this cache object in place of another: one directory, the same settings."""
        aside = {"limit": None, "eviction_policy": None}  # which concern the directory
        return self.path == other.path and self._arguments | aside == other._arguments | aside

    def check_open(self) -> None:
        """Raise CacheClosedError after `close`."""
        if self.is_closed:
            raise CacheClosedError(f"the cache {self.path} was closed, or the dataset that reads through it: open it again")

    def path_of(self, ref: ObjectRef, hold: AnyHold | None = None) -> Path:
        """Return where an object is that `hold` holds."""
        return Path(self.file_of(ref, hold))

    def file_of(self, ref: ObjectRef, hold: AnyHold | None = None) -> str:
        """Return the same as text, which takes a tenth of the time."""
        for held, path in zip(hold.refs, hold.paths, strict=False) if hold is not None else ():
            if held.key == ref.key:
                return path
        return self._directory.disk.data_path(ref.key, ref.ext)

    @property
    def fetcher(self) -> Fetcher:
        """The client of remote storage that brings objects for this cache."""
        return self.session.fetcher

    @fetcher.setter
    def fetcher(self, fetcher: Fetcher) -> None:
        self.session.fetcher = fetcher

    # -- the directory ------------------------------------------------------------------------------------------------

    @property
    def limit_bytes(self) -> Limit:
        """The limit that this cache object gave; the one in force is in `statistics()`. May be set at any time."""
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit: int | str | AsItIs | None) -> None:
        self.check_open()
        self._limit_bytes = parse_limit(limit)
        self._arguments["limit"] = limit
        self._directory.limits.give(self._user, self._limit_bytes)

    @property
    def policy(self) -> Policy:
        """The eviction policy in force; of a cache that fails and is bypassed, the default."""
        return self.session.policy

    def statistics(self) -> CacheStatistics:
        """Return the account of this moment."""
        self.check_open()
        self._directory.owner.flush()
        return statistics.collect(self._directory.ledger, self._directory.disk)

    def clear(self, *, dataset: str | None = None, older_than_seconds: float | None = None, index: bool = False) -> ClearReport:
        """Remove entries, never a pinned one; see `sqlstream.cache.admin.clear`."""
        index = flag_of("index", index)
        self.check_open()
        self._directory.flush()
        return clear(
            self._directory.ledger, self._directory.disk, dataset=dataset, older_than_seconds=older_than_seconds, index=index
        )

    def verify(self, repair: bool = False, deep: bool = False) -> list[Finding]:
        """Return all on which ledger and disk disagree, `deep`: contents too; with `repair`, mend it beside all readers."""
        self.check_open()
        self._directory.flush()
        checks = (recover.verify, verify_content) if deep else (recover.verify,)
        return [found for check in checks for found in check(self._directory.ledger, self._directory.disk, repair=repair)]

    def failures(self) -> list[FailureRecord]:
        """Return what failed in this cache, in any process, the most frequent first."""
        self.check_open()
        return reports.failures(self._directory.ledger)

    def num_without_checksum(self) -> int:
        """Return how many whole objects have no checksum, so that a deep `verify` does not read them; a scan."""
        return num_without(self._directory.ledger)

    def rest(self) -> None:
        """End the helper process and what it still brings; the next miss starts it again."""
        if self.is_closed:  # at the latest as Python ends, where an iterator may be ended after all else
            return
        self.session.rest()

    def close(self) -> None:
        """Give every pin back, end the helper process and threads, close all files."""
        with locks.uninterrupted():
            self.is_closed = True
            if self._finalizer.detach() is not None:
                _close(self._directory, self.session, self._user)


_open: weakref.WeakSet[Cache] = weakref.WeakSet()
_numbers = itertools.count()
"""Of the cache objects of this process. Not their `id`: one that was forgotten is closed when the next may have its address."""


@atexit.register
def _close_all() -> None:
    for cache in list(_open):
        cache.close()


def _reopen(path: Path, arguments: dict[str, object], private_directory: str | None, pid: int) -> Cache:
    cache = Cache(path, **arguments)  # type: ignore[arg-type]  # what __init__ took
    if private_directory is not None and isinstance(cache.session, FailoverSession) and os.getpid() != pid:
        cache.session.stand_in.join(private_directory)
    return cache


def _listed(wanted: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return URLs and paths as a list of texts, also those that an iterator gives once."""
    if isinstance(wanted, str):
        raise ConfigError(f"{urls.redact(wanted)!r} is a single text: give a list of URLs")
    return [url if isinstance(url, str) else _text(url) for url in list_of("wanted", wanted, "give a list of URLs")]


def _text(url: os.PathLike[str]) -> str:
    """Return a path as a text."""
    text = os.fspath(url) if isinstance(url, os.PathLike) else None
    if not isinstance(text, str):
        raise ConfigError(f"{url!r} is no URL and no path: give a text or a Path")
    return text


def _hold_each(cache: Cache, refs: Mapping[str, ObjectRef]) -> dict[str, AnyHold]:
    """Return a hold, in use, for each of several objects that are here together, by URL."""
    with cache.session.prefetched(list(refs.values())):
        hold = cache.hold(tuple(refs.values()))
    pieces = {piece.refs[0].key: piece for piece in cache.session.split(hold)}
    # Two URLs may lead to one object: each of them holds it, so that it stays until both are released.
    return {url: pieces.pop(ref.key) if ref.key in pieces else cache.hold((ref,)) for url, ref in refs.items()}


def _take_holds(cache: Cache, wanted: Sequence[str]) -> list[AnyHold]:
    """Return what `acquire_many` noted for each URL, and forget it; all of it or none."""
    taken: list[AnyHold] = []
    with cache._directory.owner.state:
        for url in wanted:
            if not cache._holds.get(url):
                raise ConfigError(f"{urls.redact(url)} is not acquired: release once for each call that acquired it")
        for url in wanted:
            taken.append(cache._holds[url].pop())
            if not cache._holds[url]:
                del cache._holds[url]
    return taken


def _close_aside(directory: CacheDirectory, session: CacheSession, user: int) -> None:
    """Close for a cache that the garbage collector found, in a thread: to close waits, and this may come anywhere."""
    thread = threading.Thread(target=_close, args=(directory, session, user), name="sqlstream-cache-close")
    try:
        thread.start()
    except (RuntimeError, MemoryError):  # no more threads: what waits for others waits for the end of this thread's section
        interrupts.call_outside(lambda: _close(directory, session, user))


def _close(directory: CacheDirectory, session: CacheSession, user: int) -> None:
    """Give back what a cache object has; a handler that raises while something here waits ends that wait, not the rest."""
    with contextlib.ExitStack() as steps:
        steps.callback(_without_cache_errors, lambda: close_store(directory, user))
        steps.callback(directory.downloads.free_space.ask, user, 0)
        steps.callback(lambda: directory.checksums.ask(user, verifies=False))
        steps.callback(session.close)


def _without_cache_errors(step: Callable[[], None]) -> None:
    with contextlib.suppress(CacheError):  # the directory may be gone: nothing is left to give back
        step()
