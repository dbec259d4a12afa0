"""The users of a helper: how each of them reads, and how many downloads it may have at a time.

Users with the same timeouts and number of downloads share the connections of one `Resolver`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

from sqlstream.config import StorageOptions
from sqlstream.storage.backends.provider import Providers
from sqlstream.storage.backends.renewal import CredentialSource
from sqlstream.storage.backends.resolve import Resolver, explained
from sqlstream.storage.base.access import Access
from sqlstream.storage.base.concurrency import DownloadTiming, Observations
from sqlstream.storage.base.protocols import ObjectInfo, Storage
from sqlstream.storage.base.retry import RequestCounts, Result, RetryPolicy, list_with_retries, with_retries
from sqlstream.storage.protocol.messages import FetchEvent, ReadOptions
from sqlstream.storage.worker.transfer import TransferContext
from sqlstream.storage.worker.workers import Lane, Workers

_RESIZE_EVERY = 16  # downloads; to look more often gains nothing


class ServedUser:
    """One user of the helper: its queue of downloads, its listings, and what its downloads share."""

    def __init__(self, options: ReadOptions, context: TransferContext, lane: Lane) -> None:
        self.options = options
        self.context = context
        self.lane = lane
        self.observations = Observations()
        self.listings: dict[str, Iterator[ObjectInfo]] = {}

    def call(self, url: str, access: Access, operation: Callable[[Storage], Result]) -> Result:
        """Return what `operation` returns, tried again as this user wants it."""
        with explained(url, access):
            storage = self.context.resolver.storage(url, access)
            policy = self.context.policy
            return with_retries(lambda: operation(storage), policy=policy, counts=RequestCounts(), wait=time.sleep)

    def begin_listing(self, name: str, prefix: str) -> Iterator[ObjectInfo]:
        """Return a new listing, which is kept under its name until it ends."""
        storage = self.context.resolver.storage(prefix)
        self.listings[name] = listing = list_with_retries(storage, prefix, self.context.policy, time.sleep)
        return listing


class Users:
    """All users of a helper, by name; thread safe.

    Args:
        options: The server and who asks it.
        workers: Run the downloads of all users.
        report: Takes each event of a download.
        credentials: Gives credentials to the clients of all users; None: those of the options hold.
        providers: Functions of the user that serve schemes.
    """

    def __init__(
        self,
        options: StorageOptions,
        workers: Workers,
        report: Callable[[FetchEvent], None],
        credentials: CredentialSource | None = None,
        providers: Providers | None = None,
    ) -> None:
        self._options = options
        self._credentials = credentials
        self._providers = providers
        self._workers = workers
        self._report = report
        self._users: dict[str, ServedUser] = {}
        self._resolvers: weakref.WeakValueDictionary[tuple[object, ...], Resolver] = weakref.WeakValueDictionary()
        """Those with a user: each keeps connections, and users may come with ever other timeouts."""
        self._lock = threading.Lock()

    def get(self, options: ReadOptions) -> ServedUser:
        """Return the user who asks, with the options of this request."""
        with self._lock:
            user = self._users.get(options.user)
            is_known = user is not None and user.options == options and user.lane.is_busy
            if user is None:
                user = self._users[options.user] = self._new(options)
            user.options = options
            num_threads = user.lane.limit if is_known else self._num_threads(user)
        if num_threads != user.lane.limit:
            self._workers.resize(user.lane, num_threads)
        return user

    def end_listing(self, name: str, listing: str) -> None:
        """Forget a listing of a user."""
        if (user := self._users.get(name)) is not None:
            user.listings.pop(listing, None)

    def end(self, name: str) -> TransferContext | None:
        """Forget a user; return what its downloads shared, None if it has asked nothing."""
        with self._lock:
            user = self._users.pop(name, None)
        return None if user is None else user.context

    def _new(self, options: ReadOptions) -> ServedUser:
        connections = {
            "connect_timeout_seconds": options.connect_timeout_seconds,
            "read_timeout_seconds": options.read_timeout_seconds,
            "total_timeout_seconds": options.total_timeout_seconds,
            "num_threads": options.num_threads,
        }
        key = tuple(connections.values())
        if (resolver := self._resolvers.get(key)) is None:
            made = replace(self._options, **connections)  # type: ignore[arg-type]  # each its own
            resolver = self._resolvers[key] = Resolver(made, self._credentials, self._providers)
        context = TransferContext(
            resolver=resolver,
            policy=RetryPolicy(num_retries=options.num_retries),
            report=self._report,
            observe=lambda seen: self._observe(user, seen),
            checks_etag=options.checks_etag,
            request_seconds=options.connect_timeout_seconds + options.total_timeout_seconds,
        )
        user = ServedUser(options, context, Lane(1))
        return user

    def _observe(self, user: ServedUser, seen: DownloadTiming) -> None:
        """Note the timing of a download of a user, and follow it with the number of its downloads."""
        with self._lock:
            user.observations.add(seen)
            is_due = user.observations.num_seen % _RESIZE_EVERY == 0
            num_threads = self._num_threads(user) if is_due else user.lane.limit
        if num_threads != user.lane.limit:
            self._workers.resize(user.lane, num_threads)

    def _num_threads(self, user: ServedUser) -> int:
        """Return how many downloads a user may have at a time; the caller holds the lock."""
        if user.options.num_threads != "auto":
            return user.options.num_threads
        others = [other for other in self._users.values() if other is not user and other.options.num_threads == "auto"]
        num_busy = 1 + sum(other.lane.is_busy for other in others)
        return max(1, user.observations.threads(user.options.num_processes) // num_busy)
