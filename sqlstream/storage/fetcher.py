"""Remote reading and writing for one process, done by its helper process. Nothing here imports a storage client.

Why a process: obstore hangs for ever in a forked child whose parent made one request, s3fs raises there; and so downloads do
not share the trainer's interpreter lock, to end them is a kill, and a client that crashes takes nothing with it.
"""

from __future__ import annotations

import builtins
import os
import queue
import uuid
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from sqlstream.config import StorageOptions
from sqlstream.process import locks
from sqlstream.storage.base.access import OWN, Access
from sqlstream.storage.base.protocols import DownloadRoom, ObjectInfo, RemoteReader
from sqlstream.storage.base.urls import redact
from sqlstream.storage.client.helpers import HELPERS
from sqlstream.storage.client.outstanding import HelperUser, Sink
from sqlstream.storage.protocol.messages import (
    USUAL_TIMING,
    CheckProviders,
    FetchDone,
    FetchEvent,
    FetchRequest,
    GrantNeeded,
    Head,
    HelperTiming,
    NextPage,
    Put,
    Ranges,
    ReadOptions,
)

__all__ = ["FetchDone", "FetchEvent", "FetchRequest", "Fetcher", "GrantNeeded", "Sink"]

_UNLIMITED = 1 << 62


class Fetcher:
    """Downloads into open files, answers head, list and download (it is a `RemoteReader`), and stores files (`RemoteWriter`).

    Thread safe. The fetchers of a process that read from the same servers as the same identity share one helper process; how
    often each tries, how long it waits and how much it downloads at a time goes with its requests. The helper starts on first
    use and ends with `stop()` of the last fetcher that used it, with that object, or with this process, whatever that died of;
    while it owes nothing also before this process forks, and after 30 s (the next use starts another). A helper that dies is
    replaced and what it had open is asked again. In a forked child a Fetcher starts anew on first use; pickled, it is its
    options.

    Args:
        options: What the helper reads with.
        timing: When the helper is taken for idle or hanging.
    """

    def __init__(self, options: StorageOptions, timing: HelperTiming = USUAL_TIMING) -> None:
        self._options = options
        self._timing = timing
        self._user = HelperUser(_read_options(options))
        self._client = HELPERS.client(options, timing)
        weakref.finalize(self, self._client.abandon, self._user)  # wherever garbage is collected: it waits for nothing

    def __reduce__(self) -> tuple[type[Fetcher], tuple[StorageOptions, HelperTiming]]:
        return (Fetcher, (self._options, self._timing))

    @property
    def is_running(self) -> bool:
        """True while a helper process runs that this fetcher has asked."""
        return self.helper_pid is not None

    @property
    def helper_pid(self) -> int | None:
        """Process id of the helper that this fetcher has asked, None when none runs."""
        return self._client.helper_pid(self._user)

    @property
    def num_pending(self) -> int:
        """Downloads and calls without their answer."""
        return self._client.num_pending(self._user)

    @property
    def num_processes(self) -> int:
        """Number of processes of this node that read, as `share_node` said last."""
        return self._user.options.num_processes

    def expect_forks(self) -> None:
        """Prepare for helpers of this process and of those that are forked from it: what they import is imported once, now.

        A process of 30 MB, until this fetcher stops; without effect where the system has no pidfds.
        """
        self._client.expect_forks(self._user)

    def submit(self, requests: Sequence[FetchRequest], sink: Sink) -> None:
        """Start downloads; returns when the helper has been told.

        Args:
            requests: Any number; the helper queues what its threads are too few for. Descriptors stay the caller's, open
                until FetchDone.
            sink: Called in the receiver thread with all events at hand; must not wait for another event. Every request
                ends with exactly one FetchDone.

        Raises:
            ValueError: A ticket is outstanding already.
            StorageError: The helper process does not start.
        """
        if requests:
            self._client.fetch(self._user, requests, sink)

    def grant(self, ticket: str, granted_bytes: int) -> None:
        """Let a download write up to `granted_bytes` (a total, not a step); without effect when it has ended."""
        self._client.grant(self._user, ticket, granted_bytes)

    def cancel(self, tickets: Sequence[str]) -> None:
        """Give downloads up; each ends with a FetchDone (FetchCancelledError, or its result if that was faster)."""
        self._client.cancel(self._user, tickets)

    def with_access(self, access: Access) -> RemoteReader:
        """Return a reader with the access of a row that the user did not write."""
        return _Reader(self, access)

    def head(self, url: str, *, access: Access = OWN) -> ObjectInfo:
        """Return size and etag of one object.

        Raises:
            ObjectNotFoundError: No object at this URL.
            StorageError: It cannot be read.
        """
        return self._client.call(
            self._user, Head(call=uuid.uuid4().hex, options=self._user.options, url=url, access=access)
        ).objects[0]

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object below `prefix` (ends in '/'), at any depth; fetched page by page."""
        listing = uuid.uuid4().hex
        is_first = True
        try:
            while True:
                question = NextPage(
                    call=uuid.uuid4().hex, options=self._user.options, listing=listing, prefix=prefix, is_first=is_first
                )
                page = self._client.call(self._user, question).objects
                if not page:
                    return
                yield from page
                is_first = False
        finally:
            self._client.end_listing(self._user, listing)

    def get_ranges(
        self, url: str, ranges: Sequence[tuple[int, int]], size_bytes: int | None = None, *, access: Access = OWN
    ) -> builtins.list[bytes]:
        """Return parts of one object, in the order asked, all of one version; near ones come with one request.

        For small parts (footers, directories of archives): the bytes pass through memory.

        Args:
            url: Which object.
            ranges: Half open, in bytes.
            size_bytes: Of the whole object, if that is known.
            access: How it is read.

        Raises:
            ObjectChangedError: It changed between two requests, or has another size.
            StorageError: It cannot be read, or ends before a range does.
        """
        question = Ranges(
            call=uuid.uuid4().hex,
            options=self._user.options,
            url=url,
            ranges=tuple(ranges),
            size_bytes=size_bytes,
            access=access,
        )
        return list(self._client.call(self._user, question).parts)

    def check_providers(self) -> None:
        """Have the functions imported that `providers` names, if it names some.

        Raises:
            ConfigError: One is not there, or cannot be called.
        """
        if self._options.providers:
            self._client.call(self._user, CheckProviders(call=uuid.uuid4().hex))

    def share_node(self, num_processes: int) -> None:
        """Say how many processes of this node read, this one included: with `num_threads="auto"` they share its downloads."""
        self._user.options = self._user.options._replace(num_processes=num_processes)

    def download(self, url: str, path: Path, room: DownloadRoom | None = None, *, access: Access = OWN) -> ObjectInfo:
        """Write the whole object to the local file `path`, streamed; when it fails, no file is left.

        Args:
            url: Which object.
            path: Created or emptied.
            room: Is asked before each step is written; what it raises ends the download.
            access: How it is read.

        Raises:
            StorageError: It cannot be read, or not be written.
        """
        batches: queue.SimpleQueue[Sequence[FetchEvent]] = queue.SimpleQueue()
        fds: list[int] = []
        try:
            with locks.uninterrupted():  # what a handler raises comes when the descriptor is noted
                fds.append(locks.open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
            (fd,) = fds
            granted = 0 if room is None else room.step_bytes
            request = FetchRequest(ticket=uuid.uuid4().hex, url=url, fd=fd, granted_bytes=granted or _UNLIMITED, access=access)
            if room is not None:
                room.need(granted)
            self.submit([request], batches.put)
            (event,) = batches.get()
            while isinstance(event, GrantNeeded):
                assert room is not None
                wanted = max(event.size_bytes or 0, granted + room.step_bytes)
                try:
                    room.need(wanted - os.fstat(fd).st_blocks * 512)
                except BaseException:
                    self.cancel([request.ticket])
                    batches.get()  # the helper writes no more
                    raise
                granted = wanted
                self.grant(request.ticket, granted)
                (event,) = batches.get()
            done = event
            if done.error is not None:
                raise done.error
            os.ftruncate(fd, done.size_bytes)  # a failed try may have written more
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            try:
                locks.close_descriptors(fds)
            except BaseException:  # of a handler before it
                locks.close_descriptors(fds)
                raise
        return ObjectInfo(url=url, size_bytes=done.size_bytes, etag=done.etag, is_private=done.is_private)

    def upload(self, path: Path, url: str) -> None:
        """Store a local file as an object, whole or not at all; what is there is replaced.

        Args:
            path: The file; it must not change meanwhile.
            url: Which object, or a local path.

        Raises:
            ConfigError: What is at this URL can only be read.
            StorageError: It cannot be written.
        """
        question = Put(call=uuid.uuid4().hex, options=self._user.options, url=url, path=str(path.absolute()))
        self._client.call(self._user, question)

    def stop(self) -> None:
        """Give up what is outstanding: it ends with FetchCancelledError before this returns. Usable again.

        The last fetcher that used the helper ends it and its thread, and waits for both.
        """
        self._client.stop(self._user)

    def close(self) -> None:
        """Stop for good: what is asked from now on raises ConfigError."""
        self._client.close(self._user)


class _Reader:
    """A fetcher's reads with one access; see `Fetcher.with_access`."""

    def __init__(self, fetcher: Fetcher, access: Access) -> None:
        self._fetcher, self._access = fetcher, access

    def with_access(self, access: Access) -> RemoteReader:
        """Return a reader with another access."""
        return _Reader(self._fetcher, access)

    def head(self, url: str) -> ObjectInfo:
        """Return size and etag of one object."""
        return self._fetcher.head(url, access=self._access)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Raise: only what the user names is listed."""
        raise AssertionError(f"a listing of {redact(prefix)} on another's word")

    def download(self, url: str, path: Path, room: DownloadRoom | None = None) -> ObjectInfo:
        """Write the whole object to a local file."""
        return self._fetcher.download(url, path, room, access=self._access)

    def get_ranges(self, url: str, ranges: Sequence[tuple[int, int]], size_bytes: int | None = None) -> builtins.list[bytes]:
        """Return small parts of one object."""
        return self._fetcher.get_ranges(url, ranges, size_bytes, access=self._access)


def _read_options(options: StorageOptions) -> ReadOptions:
    """Return what of the options goes with each request, for a new user."""
    return ReadOptions(
        user=uuid.uuid4().hex,
        num_retries=options.num_retries,
        connect_timeout_seconds=options.connect_timeout_seconds,
        read_timeout_seconds=options.read_timeout_seconds,
        total_timeout_seconds=options.total_timeout_seconds,
        num_threads=options.num_threads,
        checks_etag=bool(options.storage_options.get("verify_etag")),
    )
