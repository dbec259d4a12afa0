"""One download inside the helper: from an open answer to the caller's descriptor, never past the grant."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sqlstream.errors import FetchCancelledError, ObjectChangedError, SqlStreamError, StorageError, TransientStorageError
from sqlstream.storage.backends.resolve import Resolver, explained
from sqlstream.storage.base.checksum import md5_of
from sqlstream.storage.base.concurrency import DownloadTiming
from sqlstream.storage.base.etags import has_own_version, is_strong
from sqlstream.storage.base.protocols import (
    ObjectInfo,
    ObjectStream,
    Storage,
    changed,
    check_length,
    check_size,
    range_of,
)
from sqlstream.storage.base.retry import RequestCounts, RetryPolicy, with_retries
from sqlstream.storage.base.urls import host, redact
from sqlstream.storage.members.unpacked import unpacked
from sqlstream.storage.protocol.messages import FetchDone, FetchEvent, FetchRequest, GrantNeeded
from sqlstream.storage.worker.workers import WorkPermit

_logger = logging.getLogger(__name__)
_NO_RANGES = frozenset({200, 304, 400, 412, 416, 501})
"""Answers to a range or If-Match that an object asked for whole does not get, or not as an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferContext:
    """What all downloads of one user of the helper share."""

    resolver: Resolver
    policy: RetryPolicy
    report: Callable[[FetchEvent], None]
    """Takes each event."""
    observe: Callable[[DownloadTiming], None]
    """Takes the timing of each download that succeeded."""
    checks_etag: bool = False
    """Compare the MD5 of the bytes with an ETag that has the form of one."""
    request_seconds: float = math.inf
    """Longest time of one request, with the time to a connection."""


class _Change:
    """A lock with a condition, which is made for the first thread that waits.

    Few transfers wait, and to make a condition takes longer than everything else that a transfer begins with.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._condition: threading.Condition | None = None

    def wait_until(self, is_met: Callable[[], bool], timeout_seconds: float | None = None) -> None:
        """Wait, without the lock, until `is_met`, which is asked under it."""
        with self.lock:
            if self._condition is None:
                self._condition = threading.Condition(self.lock)
            self._condition.wait_for(is_met, timeout_seconds)

    def notify(self) -> None:
        """Wake the threads that wait; the caller holds the lock."""
        if self._condition is not None:
            self._condition.notify_all()


class Transfer:
    """Owns the helper's duplicate of the descriptor until FetchDone is reported.

    `cancel` closes it at once, also while the network is silent: writes happen under the same lock, so that no byte follows.

    Args:
        request: The object.
        fd: The file to write to; this transfer closes it.
        context: What all transfers of its user share.
    """

    def __init__(self, request: FetchRequest, fd: int, context: TransferContext) -> None:
        self.request = request
        self.context = context
        self._fd = fd
        self._change = _Change()
        self._granted_bytes = request.granted_bytes
        self._is_over = False
        self._counts = RequestCounts()
        self._started_at = time.monotonic()
        self.active_since: float | None = None
        """Time of the last bytes of the request that is under way, by the monotonic clock; None while none is."""
        self._permit: WorkPermit | None = None
        self._kept: tuple[int, ObjectInfo] | None = None  # bytes of which version are in the file, for the next try
        self._md5: hashlib._Hash | None = None  # of what is in the file, if ETags are checked
        self._wrong_md5 = ""  # of the last try

    def grant(self, granted_bytes: int) -> None:
        """Allow writing up to `granted_bytes`; never takes back what was allowed."""
        with self._change.lock:
            self._granted_bytes = max(self._granted_bytes, granted_bytes)
            self._change.notify()

    def cancel(self) -> None:
        """Close the descriptor and report; the thread at work finds out when it comes back from the network."""
        where = redact(self.request.url)
        self._finish(0, None, FetchCancelledError(f"{where}: the download was cancelled", url=where))
        if (permit := self._permit) is not None:
            permit.step_aside()  # its thread may be in a silent network for long: others need not wait for it

    def run(self, permit: WorkPermit) -> None:
        """Download, with retries, and report; returns at once if it was cancelled while it waited in the queue."""
        self._permit = permit
        self._started_at = time.monotonic()
        url = self.request.url
        try:
            with explained(url, self.request.access):
                storage = self.context.resolver.storage(url, self.request.access)
                attempt = functools.partial(self._attempt if self.request.unpack is None else self._attempt_unpacked, storage)
                info, size = with_retries(attempt, policy=self.context.policy, counts=self._counts, wait=self._wait)
        except SqlStreamError as error:
            self._finish(0, None, error)
        except BaseException as error:  # a user's file system may call sys.exit: nothing else would end this download
            where = redact(url)
            self._finish(0, None, StorageError(f"{where}: unexpected {type(error).__name__}", url=where))
            raise  # a bug of ours: the caller logs it whole
        else:
            self._finish(size, info.version, None, is_private=info.is_private)
        finally:
            self.active_since = None

    def _attempt(self, storage: Storage) -> tuple[ObjectInfo, int]:
        """Download the object or its part once, behind what an earlier try has kept; also from a server that ignores ranges.

        Returns:
            What the server says of the object, and the bytes that the file holds.
        """
        self._raise_if_over()
        request = self.request
        start, stop = request.span or (0, None)
        if start == stop:  # an empty member: there is no range of no bytes
            return ObjectInfo(url=request.url, size_bytes=request.whole_bytes, etag=request.expected_etag), 0
        begun_at = self.active_since = time.monotonic()
        with range_of(request.url, stop or 0, request.whole_bytes):
            stream = self._open(storage, start, stop)
        latency, offset, info = time.monotonic() - begun_at, stream.start, stream.info
        size_bytes = info.size_bytes if stop is None else stop - start
        try:
            _check_version(request, info)
            self._begin_md5(offset)
            if size_bytes is not None:
                self._wait_for_grant(size_bytes, size_bytes)
            for chunk in self._chunks(stream):
                within = chunk[max(0, start - offset) : None if stop is None else max(0, stop - offset)]
                self._write(within, max(start, offset) - start, size_bytes)
                offset += len(chunk)
                if stop is not None and offset > stop:  # not at its end: a stream may look there whether the object is the same
                    break
            num_bytes = max(0, (offset if stop is None else min(offset, stop)) - start)
            if size_bytes is not None:
                check_length(request.url, received=num_bytes, expected=size_bytes)
            info = _ended(request, stream, info)
        except TransientStorageError:
            self._keep(offset - start, info)
            raise
        finally:
            stream.close()
            self._counts.num_requests += stream.num_extra_requests
        check_size(request.url, num_bytes, request.expected_bytes)
        self._check_md5(info)
        is_python = self.context.resolver.is_by_urllib3(request.url)
        self.context.observe(DownloadTiming(latency_seconds=latency, size_bytes=num_bytes, is_python=is_python))
        return info, num_bytes

    def _attempt_unpacked(self, storage: Storage) -> tuple[ObjectInfo, int]:
        """Download what is compressed, an object or a member of an archive, and write what it holds; each try begins anew."""
        self._raise_if_over()
        request, unpack = self.request, self.request.unpack
        assert unpack is not None, "there is another attempt for objects as they are"
        begun_at = self.active_since = time.monotonic()
        start, stop = request.span or (0, None)
        with range_of(request.url, stop or 0, request.whole_bytes):
            stream = self._open(storage, start, stop)
        latency, num_bytes, before = time.monotonic() - begun_at, 0, self._counts.downloaded_bytes
        begun = stream.info
        try:
            _check_version(request, begun)
            self._begin_md5(stream.start)
            for piece in unpacked(self._within(stream, start, stop), unpack, redact(request.url)):
                self._write(memoryview(piece), num_bytes, unpack.raw_bytes)
                num_bytes += len(piece)
            info = _ended(request, stream, begun)
        finally:
            stream.close()
            self._counts.num_requests += stream.num_extra_requests
        self._check_md5(info)
        self.context.observe(DownloadTiming(latency_seconds=latency, size_bytes=self._counts.downloaded_bytes - before))
        return info, num_bytes

    def _within(self, stream: ObjectStream, start: int, stop: int | None) -> Iterator[memoryview]:
        """Yield the bytes of an answer that lie in a part, which must be whole; a server that ignores ranges sends more."""
        offset = stream.start
        for chunk in self._chunks(stream):
            if within := chunk[max(0, start - offset) : None if stop is None else max(0, stop - offset)]:
                yield within
            offset += len(chunk)
            if stop is not None and offset > stop:
                break
        if stop is not None:
            check_length(self.request.url, received=min(offset, stop) - start, expected=stop - start)

    def _chunks(self, stream: ObjectStream) -> Iterator[memoryview]:
        """Yield the bytes of an answer; count and hash them."""
        for chunk in stream.chunks():
            self.active_since = time.monotonic()
            self._counts.downloaded_bytes += len(chunk)
            if chunk:
                if self._md5 is not None:
                    self._md5.update(chunk)
                yield chunk
            else:  # nothing has come for a while
                self._raise_if_over()

    def _open(self, storage: Storage, start: int, stop: int | None) -> ObjectStream:
        """Open the rest of the object or span if an earlier try has kept its start, and the rest is surely of that version.

        Else open all of it: what the file holds of the earlier try is written over, and is no part of the size reported.
        """
        url, expected = self.request.url, self.request.expected_etag
        kept, self._kept = self._kept, None
        if kept is not None:
            num_bytes, info = kept
            try:
                stream = storage.get(url, start=start + num_bytes, stop=stop, etag=info.strong_etag)
            except StorageError as error:
                if not isinstance(error, ObjectChangedError) and error.context.get("status") not in _NO_RANGES:
                    raise
                self._counts.count_failed(error)
            else:
                if stream.start == 0 or stream.info.is_surely(info):
                    return stream
                stream.close()
                self._counts.num_requests += stream.num_extra_requests
            self._counts.num_requests += 1
        strong = expected if stop is not None and expected is not None and is_strong(expected) else None
        return storage.get(url, start=start, stop=stop, etag=strong)

    def _keep(self, num_bytes: int, info: ObjectInfo) -> None:
        """Have the next try continue behind the first `num_bytes`, if a strong ETag names their version.

        What came whole and was refused nevertheless (something followed it) is asked for anew: there is no range of no bytes.
        """
        if info.strong_etag is None or info.size_bytes is None:
            return
        start, stop = self.request.span or (0, info.size_bytes)
        if 0 < num_bytes < stop - start:
            self._kept = (num_bytes, info)
            self._counts.furthest_bytes = max(self._counts.furthest_bytes, num_bytes)

    # -- checks -------------------------------------------------------------------------------------------------------

    def _begin_md5(self, offset: int) -> None:
        """Hash an object, if ETags are checked, from its start, or behind what an earlier try has kept; a part has no MD5."""
        if self.context.checks_etag and self.request.span is None and offset == 0:
            self._md5 = hashlib.md5(usedforsecurity=False)

    def _check_md5(self, info: ObjectInfo) -> None:
        """Raise if the bytes have another MD5 than the ETag says; the network does not damage them twice in the same way.

        The ETag of a coded body is that of what is sent (RFC 9110, 8.8.3.3), and S3 keeps such objects; some servers leave that
        of the file.
        """
        expected = md5_of(info.etag)
        if self._md5 is None or expected is None:
            return
        found = self._md5.hexdigest()
        if expected in (found, info.coded_md5):
            return
        text = f"has the md5 {found}, its ETag says {expected}"
        where = redact(self.request.url)
        if found == self._wrong_md5:
            raise ObjectChangedError(
                f"{where} {text}: its ETag is no MD5 of its content: leave storage_options['verify_etag'] out", url=where
            )
        self._wrong_md5 = found
        raise TransientStorageError(f"{where} {text}: it was damaged on its way", url=where)

    # -- writing ------------------------------------------------------------------------------------------------------

    def _write(self, chunk: memoryview, offset: int, size_bytes: int | None) -> None:
        """Write a chunk, the part that fits first when the grant is too small."""
        while chunk:
            self._wait_for_grant(offset + 1, size_bytes)
            with self._change.lock:
                self._raise_if_over()
                fitting = chunk[: self._granted_bytes - offset]
                try:
                    num_written = os.pwrite(self._fd, fitting, offset)
                except OSError as error:
                    where = redact(self.request.url)
                    text = f"{where}: writing it to disk failed: {os.strerror(error.errno or 0)}"
                    raise StorageError(text, url=where, errno=error.errno) from error
            chunk, offset = chunk[num_written:], offset + num_written

    def _wait_for_grant(self, needed_bytes: int, size_bytes: int | None) -> None:
        """Ask for room if the grant is below `needed_bytes`, and give up the permit while this waits for it."""
        if self._granted_bytes >= needed_bytes:
            return
        assert self._permit is not None
        self._permit.step_aside()
        active_since, self.active_since = self.active_since, None
        while True:
            with self._change.lock:
                self._raise_if_over()
                granted = self._granted_bytes
                if granted >= needed_bytes:
                    break
            self.context.report(GrantNeeded(ticket=self.request.ticket, size_bytes=size_bytes))
            self._change.wait_until(lambda granted=granted: self._is_over or self._granted_bytes > granted)  # type: ignore[misc]
        self.active_since = None if active_since is None else time.monotonic()
        self._permit.come_back()

    def _wait(self, seconds: float) -> None:
        """Sleep between two tries; a cancel ends it."""
        self.active_since = None
        self._counts.pause_seconds += seconds
        self._change.wait_until(lambda: self._is_over, timeout_seconds=seconds)
        self._raise_if_over()

    def _raise_if_over(self) -> None:
        if self._is_over:
            raise FetchCancelledError(f"{redact(self.request.url)}: the download was cancelled")

    def _finish(self, size_bytes: int, etag: str | None, error: SqlStreamError | None, *, is_private: bool = False) -> None:
        """Close the descriptor, then report; only the first call counts."""
        with self._change.lock:
            if self._is_over:
                return
            self._is_over = True
            os.close(self._fd)
            self._change.notify()
        counts = self._counts
        self.context.report(
            FetchDone(
                ticket=self.request.ticket,
                size_bytes=size_bytes,
                etag=etag,
                is_private=is_private,
                seconds=time.monotonic() - self._started_at,
                num_requests=counts.num_requests,
                num_retries=counts.num_retries,
                downloaded_bytes=counts.downloaded_bytes,
                pause_seconds=counts.pause_seconds,
                host=self.context.resolver.providers.asked(self.request.url),
                error=error,
            )
        )


def _ended(request: FetchRequest, stream: ObjectStream, begun: ObjectInfo) -> ObjectInfo:
    """Return what is known of an object that was read to its end: the version of what a command printed is known there."""
    if stream.info is not begun:
        _check_version(request, stream.info)
    return stream.info


def _check_version(request: FetchRequest, info: ObjectInfo) -> None:
    """Raise if an object is not the one that was asked for."""
    is_whole = request.span is None and request.unpack is None
    check_size(request.url, info.size_bytes, request.expected_bytes if is_whole else request.whole_bytes)
    if request.expected_etag and not info.has_version(request.expected_etag):
        raise changed(request.url, f"has the version {info.version}, {request.expected_etag} was expected")
    if has_own_version(request.expected_etag) and info.etag is None:
        _warn_of_no_etag(host(request.url))


@functools.cache  # and so logged once
def _warn_of_no_etag(where: str) -> None:
    text = "%s has sent an object without an ETag, though the index or a listing has one: the sizes alone are compared"
    _logger.warning(text, where)
