"""One download inside the helper: from an open answer to the caller's descriptor, never past the grant."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from sqlstream.errors import FetchCancelledError, ObjectChangedError, SqlStreamError, StorageError
from sqlstream.storage.base import ObjectInfo, Storage, check_length
from sqlstream.storage.messages import FetchDone, FetchEvent, FetchRequest, GrantNeeded
from sqlstream.storage.resolve import Resolver
from sqlstream.storage.retry import RetryPolicy, Tally, with_retries
from sqlstream.storage.urls import redact


class Transfer:
    """Owns the helper's duplicate of the descriptor until FetchDone is reported.

    `cancel` closes it at once, also while the network is silent: writes happen under the same lock, so that no byte follows.

    Args:
        request: What to bring; `fd` is ours now.
        report: Takes every event.
    """

    def __init__(self, request: FetchRequest, report: Callable[[FetchEvent], None]) -> None:
        self.request = request
        self._report = report
        self._condition = threading.Condition()
        self._granted_bytes = request.granted_bytes
        self._is_over = False
        self._tally = Tally()
        self._started_at = time.monotonic()

    def grant(self, granted_bytes: int) -> None:
        """Allow writing up to `granted_bytes`; never takes back what was allowed."""
        with self._condition:
            self._granted_bytes = max(self._granted_bytes, granted_bytes)
            self._condition.notify_all()

    def cancel(self) -> None:
        """Close the descriptor and report; the thread at work finds out when it comes back from the network."""
        where = redact(self.request.url)
        self._finish(0, None, FetchCancelledError(f"{where}: the download was cancelled", url=where))

    def run(self, resolver: Resolver, policy: RetryPolicy) -> None:
        """Download, with retries, and report; returns at once if it was cancelled while it waited in the queue."""
        self._started_at = time.monotonic()
        url = self.request.url
        try:
            info, size = with_retries(
                resolver.candidates(url),
                self._attempt,
                policy=policy,
                tally=self._tally,
                wait=self._wait,
                on_unsupported=lambda: resolver.prefer_exact(url),
            )
        except SqlStreamError as error:
            self._finish(0, None, error)
        except Exception as error:
            where = redact(url)
            self._finish(0, None, StorageError(f"{where}: unexpected {type(error).__name__}", url=where))
            raise  # a bug of ours: the caller logs it whole
        else:
            self._finish(size, info.etag, None)

    def _attempt(self, storage: Storage) -> tuple[ObjectInfo, int]:
        """Download once, from offset 0; return what it is and how many bytes it has."""
        self._raise_if_over()
        request = self.request
        stream = storage.get(request.url)
        try:
            info = stream.info
            self._check_version(info)
            if info.size_bytes is not None:
                self._wait_for_grant(info.size_bytes, info.size_bytes)
            offset = 0
            for chunk in stream.chunks():
                self._tally.downloaded_bytes += len(chunk)
                self._write(chunk, offset, info.size_bytes)
                offset += len(chunk)
        finally:
            stream.close()
        if info.size_bytes is not None:
            check_length(request.url, received=offset, expected=info.size_bytes)
        if request.expected_bytes is not None and offset != request.expected_bytes:
            raise self._changed(f"has {offset} bytes, {request.expected_bytes} were expected")
        return info, offset

    def _check_version(self, info: ObjectInfo) -> None:
        expected = self.request
        if None not in (expected.expected_bytes, info.size_bytes) and info.size_bytes != expected.expected_bytes:
            raise self._changed(f"has {info.size_bytes} bytes, {expected.expected_bytes} were expected")
        if expected.expected_etag and info.etag and _bare(info.etag) != _bare(expected.expected_etag):
            raise self._changed(f"has the etag {info.etag}, {expected.expected_etag} was expected")

    def _changed(self, fact: str) -> ObjectChangedError:
        where = redact(self.request.url)
        return ObjectChangedError(f"{where} {fact}: it changed since it was indexed; rebuild the index", url=where)

    def _write(self, chunk: memoryview, offset: int, size_bytes: int | None) -> None:
        """Write a chunk, the part that fits first when the grant is too small."""
        while chunk:
            self._wait_for_grant(offset + 1, size_bytes)
            with self._condition:
                self._raise_if_over()
                fitting = chunk[: self._granted_bytes - offset]
                try:
                    num_written = os.pwrite(self.request.fd, fitting, offset)
                except OSError as error:
                    where = redact(self.request.url)
                    text = f"{where}: writing it to disk failed: {os.strerror(error.errno or 0)}"
                    raise StorageError(text, url=where, errno=error.errno) from error
            chunk, offset = chunk[num_written:], offset + num_written

    def _wait_for_grant(self, needed_bytes: int, size_bytes: int | None) -> None:
        """Ask for room, and wait for it, if the grant is below `needed_bytes`."""
        while True:
            with self._condition:
                self._raise_if_over()
                granted = self._granted_bytes
                if granted >= needed_bytes:
                    return
            self._report(GrantNeeded(ticket=self.request.ticket, size_bytes=size_bytes))
            with self._condition:
                self._condition.wait_for(lambda granted=granted: self._is_over or self._granted_bytes > granted)  # type: ignore[misc]

    def _wait(self, seconds: float) -> None:
        """Sleep between two tries; a cancel ends it."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_over, timeout=seconds)
        self._raise_if_over()

    def _raise_if_over(self) -> None:
        if self._is_over:
            raise FetchCancelledError(f"{redact(self.request.url)}: the download was cancelled")

    def _finish(self, size_bytes: int, etag: str | None, error: SqlStreamError | None) -> None:
        """Close the descriptor, then report; only the first call counts."""
        with self._condition:
            if self._is_over:
                return
            self._is_over = True
            os.close(self.request.fd)
            self._condition.notify_all()
        tally = self._tally
        self._report(
            FetchDone(
                ticket=self.request.ticket,
                size_bytes=size_bytes,
                etag=etag,
                seconds=time.monotonic() - self._started_at,
                num_requests=tally.num_requests,
                num_retries=tally.num_retries,
                downloaded_bytes=tally.downloaded_bytes,
                error=error,
            )
        )


def _bare(etag: str) -> str:
    """Return an etag without quotes and without the mark of a weak one: servers and clients spell them differently."""
    return etag.removeprefix("W/").strip('"')
