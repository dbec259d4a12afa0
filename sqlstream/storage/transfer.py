"""One download inside the helper: from an open answer to the caller's descriptor, never past the grant."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sqlstream.errors import FetchCancelledError, ObjectChangedError, SqlStreamError, StorageError, TransientStorageError
from sqlstream.storage import checksum
from sqlstream.storage.base import ObjectInfo, ObjectStream, Storage, UnsupportedAnswerError, check_length
from sqlstream.storage.concurrency import Seen
from sqlstream.storage.hedge import Opener
from sqlstream.storage.messages import FetchDone, FetchEvent, FetchRequest, GrantNeeded
from sqlstream.storage.resolve import Resolver
from sqlstream.storage.retry import RetryPolicy, Tally, with_retries
from sqlstream.storage.urls import host, redact
from sqlstream.storage.workers import Slot

_NO_RANGES = frozenset({400, 412, 416, 501})  # answers to a range or If-Match that an object asked for whole does not get


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How downloads go; the same for all of a helper."""

    resolver: Resolver
    policy: RetryPolicy
    opener: Opener
    report: Callable[[FetchEvent], None]
    """Takes every event."""
    observe: Callable[[Seen], None]
    """Told of every whole object."""
    checks_etag: bool = False
    """Compare the MD5 of the bytes with an ETag that has the form of one."""


class _Change:
    """A lock, and how those who wait hear of what changes under it.

    The condition is made for the first who waits: few do, and to make it takes longer than all else that a transfer begins
    with.
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
        """Have whoever waits look again; the caller holds the lock."""
        if self._condition is not None:
            self._condition.notify_all()


class Transfer:
    """Owns the helper's duplicate of the descriptor until FetchDone is reported.

    `cancel` closes it at once, also while the network is silent: writes happen under the same lock, so that no byte follows.

    Args:
        request: What to bring.
        fd: Where to; ours now.
        way: How.
    """

    def __init__(self, request: FetchRequest, fd: int, way: Way) -> None:
        self.request = request
        self._fd = fd
        self._way = way
        self._change = _Change()
        self._granted_bytes = request.granted_bytes
        self._is_over = False
        self._tally = Tally()
        self._started_at = time.monotonic()
        self.active_since: float | None = None
        """When the request that is under way last brought something, by the monotonic clock; None while none is."""
        self._slot: Slot | None = None
        self._silence_seconds = 0.0  # the longest between two chunks of this try
        self._kept: tuple[int, str] | None = None  # bytes of which version are in the file, for the next try
        self._checksum: checksum.Checksum | None = None
        self._wrong_digest: bytes | None = None

    def grant(self, granted_bytes: int) -> None:
        """Allow writing up to `granted_bytes`; never takes back what was allowed."""
        with self._change.lock:
            self._granted_bytes = max(self._granted_bytes, granted_bytes)
            self._change.notify()

    def cancel(self) -> None:
        """Close the descriptor and report; the thread at work finds out when it comes back from the network."""
        where = redact(self.request.url)
        self._finish(0, None, FetchCancelledError(f"{where}: the download was cancelled", url=where))
        if (slot := self._slot) is not None:
            slot.step_aside()  # its thread may be in a silent network for long: others need not wait for it

    def run(self, slot: Slot) -> None:
        """Download, with retries, and report; returns at once if it was cancelled while it waited in the queue."""
        self._slot = slot
        self._started_at = time.monotonic()
        url = self.request.url
        try:
            if self.request.expected_hash:
                self._checksum = checksum.Checksum(self.request.expected_hash)
            info, size = with_retries(
                self._way.resolver.candidates(url),
                self._attempt,
                policy=self._way.policy,
                tally=self._tally,
                wait=self._wait,
                on_unsupported=lambda: self._way.resolver.prefer_exact(url),
            )
        except SqlStreamError as error:
            self._finish(0, None, error)
        except Exception as error:
            where = redact(url)
            self._finish(0, None, StorageError(f"{where}: unexpected {type(error).__name__}", url=where))
            raise  # a bug of ours: the caller logs it whole
        else:
            self._finish(size, info.etag, None)
        finally:
            self.active_since = None

    def _attempt(self, storage: Storage) -> tuple[ObjectInfo, int]:
        """Download once, on from what an earlier try has kept; return what it is and how many bytes it has."""
        self._raise_if_over()
        request = self.request
        if request.span is not None:
            return self._attempt_span(storage, *request.span)
        begun_at = self.active_since = time.monotonic()
        stream = self._open(storage)
        latency = time.monotonic() - begun_at
        offset, info = stream.start, stream.info
        try:
            _check_version(self.request, info)
            if offset == 0:
                self._restart_checksum(info)
            if info.size_bytes is not None:
                self._wait_for_grant(info.size_bytes, info.size_bytes)
            for chunk in self._chunks(stream):
                if self._checksum is not None:
                    self._checksum.update(chunk)
                self._write(chunk, offset, info.size_bytes)
                offset += len(chunk)
            if info.size_bytes is not None:
                check_length(request.url, received=offset, expected=info.size_bytes)
        except TransientStorageError:
            self._keep(offset, info)
            raise
        finally:
            stream.close()
            self._tally.num_requests += stream.num_extra_requests
        if request.expected_bytes is not None and offset != request.expected_bytes:
            raise _changed(request, f"has {offset} bytes, {request.expected_bytes} were expected")
        self._check_digest()
        self._way.observe(Seen(latency_seconds=latency, silence_seconds=self._silence_seconds, size_bytes=offset))
        return info, offset

    def _attempt_span(self, storage: Storage, start: int, stop: int) -> tuple[ObjectInfo, int]:
        """Download a part of the object once, on from what an earlier try has kept; also from a server that ignores ranges."""
        (kept, etag), self._kept = self._kept or (0, self.request.expected_etag), None
        begun_at = self.active_since = time.monotonic()
        stream = storage.get(self.request.url, start=start + kept, stop=stop, etag=_strong(etag))
        latency, offset = time.monotonic() - begun_at, stream.start
        try:
            _check_etag(self.request, stream.info)
            for chunk in self._chunks(stream):
                within = chunk[max(0, start - offset) : max(0, stop - offset)]
                self._write(within, max(start, offset) - start, stop - start)
                offset += len(chunk)
                if offset >= stop:
                    break
            check_length(self.request.url, received=max(0, min(offset, stop) - start), expected=stop - start)
        except TransientStorageError:
            self._keep(offset - start, stream.info)
            raise
        finally:
            stream.close()
            self._tally.num_requests += stream.num_extra_requests
        self._way.observe(Seen(latency_seconds=latency, silence_seconds=self._silence_seconds, size_bytes=stop - start))
        return stream.info, stop - start

    def _chunks(self, stream: ObjectStream) -> Iterator[memoryview]:
        """Yield what comes, counted and timed."""
        asked_at, self._silence_seconds = time.monotonic(), 0.0
        for chunk in stream.chunks():
            self.active_since = time.monotonic()
            self._silence_seconds = max(self._silence_seconds, self.active_since - asked_at)
            self._tally.downloaded_bytes += len(chunk)
            yield chunk
            asked_at = time.monotonic()

    def _open(self, storage: Storage) -> ObjectStream:
        """Open the rest of the object if an earlier try has kept its start, else the whole."""
        url = self.request.url
        if self._kept is not None:
            (offset, etag), self._kept = self._kept, None
            try:
                return self._way.opener.open(storage, url, self._tally, start=offset, etag=etag)
            except StorageError as error:
                if not isinstance(error, UnsupportedAnswerError | ObjectChangedError) and (
                    error.context.get("status") not in _NO_RANGES
                ):
                    raise
                self._tally.count_failed(error)
            self._tally.num_requests += 1
        return self._way.opener.open(storage, url, self._tally)

    def _keep(self, offset: int, info: ObjectInfo) -> None:
        """Have the next try go on at `offset`, if the version that it belongs to has a name."""
        if offset > 0 and info.etag and not info.etag.startswith("W/") and offset < (info.size_bytes or 0):
            self._kept = (offset, info.etag)
            self._tally.furthest_bytes = max(self._tally.furthest_bytes, offset)

    # -- checks -------------------------------------------------------------------------------------------------------

    def _restart_checksum(self, info: ObjectInfo) -> None:
        if self.request.expected_hash is None and self._way.checks_etag:
            self._checksum = checksum.from_etag(info.etag)
        elif self._checksum is not None:
            self._checksum.restart()

    def _check_digest(self) -> None:
        """Raise if the bytes have another digest; what came twice is no fault of the way."""
        if (found := self._checksum) is None or found.is_right:
            return
        assert found.expected is not None
        text = f"has the {found.algorithm} {found.digest.hex()}, {found.expected.hex()} was expected"
        if found.digest == self._wrong_digest:
            raise _changed(self.request, text)
        self._wrong_digest = found.digest
        where = redact(self.request.url)
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
        """Ask for room, and wait for it in nobody's way, if the grant is below `needed_bytes`."""
        if self._granted_bytes >= needed_bytes:
            return
        assert self._slot is not None
        self._slot.step_aside()
        active_since, self.active_since = self.active_since, None
        while True:
            with self._change.lock:
                self._raise_if_over()
                granted = self._granted_bytes
                if granted >= needed_bytes:
                    break
            self._way.report(GrantNeeded(ticket=self.request.ticket, size_bytes=size_bytes))
            self._change.wait_until(lambda granted=granted: self._is_over or self._granted_bytes > granted)  # type: ignore[misc]
        self.active_since = None if active_since is None else time.monotonic()
        self._slot.come_back()

    def _wait(self, seconds: float) -> None:
        """Sleep between two tries; a cancel ends it."""
        self.active_since = None
        self._tally.pause_seconds += seconds
        self._change.wait_until(lambda: self._is_over, timeout_seconds=seconds)
        self._raise_if_over()

    def _raise_if_over(self) -> None:
        if self._is_over:
            raise FetchCancelledError(f"{redact(self.request.url)}: the download was cancelled")

    def _finish(self, size_bytes: int, etag: str | None, error: SqlStreamError | None) -> None:
        """Close the descriptor, then report; only the first call counts."""
        with self._change.lock:
            if self._is_over:
                return
            self._is_over = True
            os.close(self._fd)
            self._change.notify()
        tally = self._tally
        self._way.report(
            FetchDone(
                ticket=self.request.ticket,
                size_bytes=size_bytes,
                etag=etag,
                seconds=time.monotonic() - self._started_at,
                num_requests=tally.num_requests,
                num_retries=tally.num_retries,
                downloaded_bytes=tally.downloaded_bytes,
                pause_seconds=tally.pause_seconds,
                host=host(self.request.url),
                error=error,
            )
        )


def _check_version(request: FetchRequest, info: ObjectInfo) -> None:
    """Raise if an object is not the one that was asked for."""
    if None not in (request.expected_bytes, info.size_bytes) and info.size_bytes != request.expected_bytes:
        raise _changed(request, f"has {info.size_bytes} bytes, {request.expected_bytes} were expected")
    _check_etag(request, info)


def _check_etag(request: FetchRequest, info: ObjectInfo) -> None:
    if request.expected_etag and info.etag and _bare(info.etag) != _bare(request.expected_etag):
        raise _changed(request, f"has the etag {info.etag}, {request.expected_etag} was expected")


def _changed(request: FetchRequest, fact: str) -> ObjectChangedError:
    where = redact(request.url)
    return ObjectChangedError(f"{where} {fact}: it changed since it was indexed; rebuild the index", url=where)


def _strong(etag: str | None) -> str | None:
    """Return an etag that If-Match compares; a weak one it never does."""
    return None if etag is None or etag.startswith("W/") else etag


def _bare(etag: str) -> str:
    """Return an etag without quotes and without the mark of a weak one: servers and clients spell them differently."""
    return etag.removeprefix("W/").strip('"')
