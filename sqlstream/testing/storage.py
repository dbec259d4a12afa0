"""Storages with scripted faults, in the calling thread: what they do happens in one order, always the same."""

from __future__ import annotations

import builtins
import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from sqlstream.config import StorageOptions
from sqlstream.errors import FetchCancelledError, ObjectNotFoundError, StorageError
from sqlstream.storage.base.access import Access
from sqlstream.storage.base.protocols import DownloadRoom, ObjectInfo
from sqlstream.storage.fetcher import FetchDone, Fetcher, FetchRequest, GrantNeeded, Sink


class ScriptedFetcher(Fetcher):
    """Stands in for a `Fetcher`: downloads end before `submit` returns, or when told to, without a helper process.

    Args:
        objects: Bytes by URL.
        errors: What a URL fails with instead, each time; see `script` for once.
        before_write: Called with the URL before its bytes are written, and again after the first half of them; the default is
            without effect.
    """

    def __init__(
        self,
        objects: Mapping[str, bytes],
        *,
        errors: Mapping[str, StorageError] | None = None,
        before_write: Callable[[str], object] = len,
    ) -> None:
        super().__init__(StorageOptions())
        self.objects = objects
        self.errors = dict(errors or {})
        self.num_gets: Counter[str] = Counter()
        """Number of requests for each URL."""
        self.holds_back = False
        """True: downloads wait for `deliver`, as those of a slow server do."""
        self._scripts: dict[str, deque[StorageError | None]] = {}
        self._pending: dict[str, tuple[FetchRequest, Sink]] = {}
        self._before_write = before_write
        self._granted: dict[str, int] = {}
        self._cancelled: set[str] = set()

    def submit(self, requests: Sequence[FetchRequest], sink: Sink) -> None:
        """Do the downloads, one after the other."""
        for request in requests:
            self.num_gets[request.url] += 1
            self._granted[request.ticket] = request.granted_bytes
            if self.holds_back:
                self._pending[request.url] = (request, sink)
            else:
                sink([self._done(request, sink)])

    def script(self, url: str, *answers: StorageError | None) -> None:
        """Give the next requests of `url` these answers, one each, and then its bytes; None: its bytes."""
        self._scripts[url] = deque(answers)

    def deliver(self, url: str) -> None:
        """End a download that was held back."""
        request, sink = self._pending.pop(url)
        sink([self._done(request, sink)])

    @property
    def pending(self) -> list[str]:
        """URLs that were asked for and are held back, oldest first."""
        return list(self._pending)

    def grant(self, ticket: str, granted_bytes: int) -> None:
        """Let a download write more."""
        self._granted[ticket] = granted_bytes

    def cancel(self, tickets: Sequence[str]) -> None:
        """Give downloads up."""
        self._cancelled.update(tickets)

    def stop(self) -> None:
        """Give up what is held back; there is no process to end."""
        for url in self.pending:
            self.cancel([self._pending[url][0].ticket])
            self.deliver(url)

    def _done(self, request: FetchRequest, sink: Sink) -> FetchDone:
        script = self._scripts.get(request.url)
        error = script.popleft() if script else self.errors.get(request.url)
        if error is None and request.url not in self.objects:
            error = ObjectNotFoundError(f"{request.url} does not exist")
        if error is not None:
            return FetchDone(ticket=request.ticket, error=error, num_requests=1)
        data = self.objects[request.url]
        if len(data) > self._granted[request.ticket]:
            sink([GrantNeeded(ticket=request.ticket, size_bytes=len(data))])
        if request.ticket in self._cancelled:
            return FetchDone(ticket=request.ticket, error=FetchCancelledError(f"{request.url}: cancelled"), num_requests=1)
        half = len(data) // 2
        try:
            for start, stop in ((0, half), (half, len(data))):
                self._before_write(request.url)
                os.pwrite(request.fd, data[start:stop], start)
        except OSError as failure:
            error = StorageError(f"{request.url}: writing it to disk failed: {failure.strerror}", errno=failure.errno)
            return FetchDone(ticket=request.ticket, error=error, num_requests=1)
        return FetchDone(ticket=request.ticket, size_bytes=len(data), num_requests=1, downloaded_bytes=len(data))


class MemoryStore:
    """Objects in memory: a `RemoteReader` and a `RemoteWriter` without a helper process. Thread safe as far as dicts are.

    Args:
        objects: Bytes by URL; it changes them.
        before_upload: Called with the URL before an object is stored; what it raises ends the upload.
    """

    def __init__(self, objects: dict[str, bytes], before_upload: Callable[[str], object] = len) -> None:
        self.objects = objects
        self.uploads: list[str] = []
        """URLs in the order in which they were stored."""
        self._before_upload = before_upload

    def with_access(self, access: Access) -> MemoryStore:
        """Return itself."""
        del access
        return self

    def head(self, url: str) -> ObjectInfo:
        """Return the size of an object, and its MD5 as the ETag."""
        data = self._object(url)
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return ObjectInfo(url=url, size_bytes=len(data), etag=f'"{etag}"')

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield objects by name."""
        for url in sorted(self.objects):
            if url.startswith(prefix):
                yield self.head(url)

    def download(self, url: str, path: Path, room: DownloadRoom | None = None) -> ObjectInfo:
        """Write an object to a file; there is always room."""
        del room
        path.write_bytes(self._object(url))
        return self.head(url)

    def get_ranges(self, url: str, ranges: Sequence[tuple[int, int]], size_bytes: int | None = None) -> builtins.list[bytes]:
        """Return parts of an object."""
        del size_bytes
        return [self._object(url)[start:stop] for start, stop in ranges]

    def upload(self, path: Path, url: str) -> None:
        """Store a file as an object."""
        self._before_upload(url)
        self.objects[url] = path.read_bytes()
        self.uploads.append(url)

    def _object(self, url: str) -> bytes:
        if url not in self.objects:
            raise ObjectNotFoundError(f"{url} does not exist", url=url)
        return self.objects[url]
