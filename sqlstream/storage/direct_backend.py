"""http(s) on plain sockets: the fast client for the usual answer. For every other one urllib3 stands behind it.

It follows no redirect, so that nothing is reached that was not checked (`policy.check_redirect`).
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Mapping
from functools import cache
from urllib.parse import urlsplit

from sqlstream.config import StorageOptions
from sqlstream.errors import SqlStreamError, StorageError, TransientStorageError
from sqlstream.storage.answers import NOT_FOR_HEAD, object_info, range_headers, without_user
from sqlstream.storage.base import ObjectInfo, RangeBytes, UnsupportedAnswerError, read_range
from sqlstream.storage.retry import error_for_status
from sqlstream.storage.settings import http_headers
from sqlstream.storage.spelling import is_plain
from sqlstream.storage.urls import redact, redact_text
from sqlstream.storage.wire import Connection, Connections, Head, Origin, UnusualAnswerError

ERRORS: dict[type[BaseException], type[SqlStreamError]] = {
    UnusualAnswerError: UnsupportedAnswerError,
    ssl.SSLCertVerificationError: StorageError,  # a bad certificate stays bad
    OSError: TransientStorageError,  # name, connection, timeout, TLS, an end in the middle
}
"""The first row that an error is an instance of holds."""


def map_error(error: BaseException, url: str) -> SqlStreamError:
    """Return our error for one of the socket's."""
    where = redact(url)
    kind = next(ours for theirs, ours in ERRORS.items() if isinstance(error, theirs))
    return kind(f"{where}: {redact_text(str(error)) or type(error).__name__}", url=where)


class DirectHttpStorage:
    """Keeps connections alive per host; redirects, proxies, escapes, encodings and unknown lengths are not for it."""

    def __init__(self, options: StorageOptions) -> None:
        self._options = options
        self._connections = Connections(options)
        self._headers = {"Accept-Encoding": "identity", **http_headers(options.storage_options)}

    def head(self, url: str) -> ObjectInfo:
        """Return size and etag of one object."""
        connection, head = self._ask("HEAD", url, {})
        if head.status in NOT_FOR_HEAD:
            connection.close()
            connection, head = self._ask("GET", url, {})
            with DirectStream(url, connection, head, self._connections, deadline=0.0) as stream:
                return stream.info
        with DirectStream(url, connection, head, self._connections, deadline=0.0, has_body=False) as stream:
            return stream.info

    def get(self, url: str, *, start: int = 0, stop: int | None = None, etag: str | None = None) -> DirectStream:
        """Open the object, whole or a range."""
        deadline = time.monotonic() + self._options.total_timeout_seconds
        connection, head = self._ask("GET", url, range_headers(start, stop, etag))
        return DirectStream(url, connection, head, self._connections, deadline=deadline)

    def get_range(self, url: str, start: int, stop: int, *, etag: str | None = None) -> RangeBytes:
        """Return exactly the bytes `[start, stop)`; also from a server that ignores ranges."""
        return read_range(self, url, start, stop, etag)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Raise: HTTP has no listing."""
        where = redact(prefix)
        raise StorageError(f"{where}: an HTTP server has no listing: give a text file of URLs as the source", url=where)

    def close(self) -> None:
        """Close the connections that are kept."""
        self._connections.close()

    def _ask(self, method: str, url: str, headers: Mapping[str, str]) -> tuple[Connection, Head]:
        """Make one request; return the head of its answer, and the connection with its body."""
        if not is_plain(url):  # two lines of a request, perhaps
            raise UnsupportedAnswerError(f"{redact(url)}: this name is not for the direct client", url=redact(url))
        kind, _, rest = url.partition("#")[0].partition("://")
        authority, slash, path = rest.partition("/")
        user = without_user(url)[1] if "@" in authority else {}
        place = authority.rpartition("@")[2]
        lines = [f"{method} {slash}{path} HTTP/1.1", f"Host: {place}"]
        lines += [f"{name}: {value}" for name, value in {**user, **self._headers, **headers}.items()]
        request = "\r\n".join([*lines, "\r\n"]).encode("latin-1")
        try:
            connection = self._connections.take(_origin(kind.lower(), place))
            try:
                return connection, connection.ask(request)
            except BaseException:
                connection.close()
                raise
        except (OSError, UnusualAnswerError) as error:
            raise map_error(error, url) from error


class DirectStream:
    """An open answer."""

    def __init__(
        self,
        url: str,
        connection: Connection,
        head: Head,
        connections: Connections,
        *,
        deadline: float,
        has_body: bool = True,
    ) -> None:
        self._url = url
        self._connection: Connection | None = connection
        self._connections = connections
        self._is_kept = head.keeps_connection
        self._deadline = deadline
        self.num_extra_requests = 0
        try:
            _check_status(url, head)
            length = _length(url, head)
            self._num_left = length if has_body else 0
            self.info, self.start = object_info(url, head.status, head.headers)
        except BaseException:
            connection.close()
            raise

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes in order; each is valid until the next one is asked for."""
        assert self._connection is not None
        try:
            while self._num_left:
                chunk = self._connection.read(self._num_left)
                self._num_left -= len(chunk)
                yield chunk
                if self._num_left and time.monotonic() > self._deadline:
                    raise TimeoutError("the answer took too long")
        except OSError as error:
            raise map_error(error, self._url) from error

    def close(self) -> None:
        """Give the connection back, closed if its body was not read to the end."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._is_kept and not self._num_left:
            self._connections.give_back(connection)
        else:
            connection.close()

    def __enter__(self) -> DirectStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@cache
def _origin(scheme: str, place: str) -> Origin:
    """Return where a host and port are; few are asked for in a process."""
    parts = urlsplit(f"//{place}")
    is_tls = scheme == "https"
    return Origin(is_tls=is_tls, host=parts.hostname or "", port=parts.port or (443 if is_tls else 80))


def _check_status(url: str, head: Head) -> None:
    """Raise unless the answer is the object, plainly."""
    if head.status in (200, 206):
        encoding = head.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise UnsupportedAnswerError(f"{redact(url)}: the server sent it compressed ({encoding})", url=redact(url))
        return
    if head.status >= 400:
        raise error_for_status(head.status, url, detail=head.reason, retry_after=head.headers.get("retry-after"))
    raise UnsupportedAnswerError(f"{redact(url)}: the server answers {head.status}", url=redact(url))


def _length(url: str, head: Head) -> int:
    try:
        return head.length_bytes
    except UnusualAnswerError as error:
        raise map_error(error, url) from error
