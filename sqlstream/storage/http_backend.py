"""urllib3: the exact HTTP client, for what the direct one leaves: redirects, proxies, escapes, unknown lengths, compression.

It also takes over after a first failure.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from urllib.parse import urljoin, urlsplit

import urllib3
import urllib3.exceptions

from sqlstream.config import StorageOptions
from sqlstream.errors import SqlStreamError, StorageError, TransientStorageError
from sqlstream.storage.answers import NOT_FOR_HEAD, object_info, range_headers, without_user
from sqlstream.storage.base import ObjectInfo, RangeBytes, read_range
from sqlstream.storage.http_pools import Pools
from sqlstream.storage.policy import check_redirect
from sqlstream.storage.retry import error_for_status
from sqlstream.storage.settings import http_headers
from sqlstream.storage.urls import redact, redact_text

_CHUNK_BYTES = 1 << 20
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 10  # as curl and reqwest, roughly

ERRORS: dict[type[BaseException], type[SqlStreamError]] = {
    urllib3.exceptions.SSLError: StorageError,  # a bad certificate stays bad
    urllib3.exceptions.LocationValueError: StorageError,
    urllib3.exceptions.DecodeError: StorageError,
    urllib3.exceptions.ResponseError: StorageError,  # too many redirects
    urllib3.exceptions.ProxySchemeUnknown: StorageError,
    urllib3.exceptions.UnrewindableBodyError: StorageError,
    urllib3.exceptions.HTTPError: TransientStorageError,  # the base: connection, DNS, timeout, short body
}
"""The first row that an error is an instance of holds."""


def map_error(error: Exception, url: str) -> SqlStreamError:
    """Return our error for one of urllib3's."""
    if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason is not None:
        error = error.reason
    where = redact(url)
    kind = next((ours for theirs, ours in ERRORS.items() if isinstance(error, theirs)), StorageError)
    return kind(f"{where}: {redact_text(str(error))}", url=where)


class HttpStorage:
    """Keeps connections alive per host."""

    def __init__(self, options: StorageOptions) -> None:
        self._options = options
        self._pools = Pools(options)

    def head(self, url: str) -> ObjectInfo:
        """Return size and etag of one object."""
        response = self._request("HEAD", url, {}, accept=NOT_FOR_HEAD)[0]
        if response.status in NOT_FOR_HEAD:
            response.close()
            response = self._request("GET", url, {})[0]
        info, _ = object_info(url, response.status, response.headers)
        response.close() if response.status == 200 and info.size_bytes else response.release_conn()
        return info

    def get(self, url: str, *, start: int = 0, stop: int | None = None, etag: str | None = None) -> HttpStream:
        """Open the object, whole or a range."""
        deadline = time.monotonic() + self._options.total_timeout_seconds
        response, num_redirects = self._request("GET", url, range_headers(start, stop, etag))
        return HttpStream(url, response, num_redirects=num_redirects, deadline=deadline)

    def get_range(self, url: str, start: int, stop: int, *, etag: str | None = None) -> RangeBytes:
        """Return exactly the bytes `[start, stop)`; also from a server that ignores ranges."""
        return read_range(self, url, start, stop, etag)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Raise: HTTP has no listing."""
        where = redact(prefix)
        raise StorageError(f"{where}: an HTTP server has no listing: give a text file of URLs as the source", url=where)

    def _request(
        self, method: str, url: str, headers: Mapping[str, str], accept: frozenset[int] = frozenset()
    ) -> tuple[urllib3.BaseHTTPResponse, int]:
        """Ask, and follow redirects that are allowed; return the open answer and the number of redirects.

        Raises:
            StorageError: With the number of redirects in its context as `num_extra_requests`.
        """
        num_redirects = 0
        own = {"Accept-Encoding": "identity"}
        target, user = without_user(url)
        sent = {**user, **own, **http_headers(self._options.storage_options), **headers}
        try:
            while True:
                response = self._send(method, target, sent, url)
                location = response.headers.get("Location")
                if response.status not in _REDIRECTS or not location:
                    break
                response.close()
                source, target = target, urljoin(target, location)
                if num_redirects == _MAX_REDIRECTS:
                    raise StorageError(f"{redact(url)}: more than {_MAX_REDIRECTS} redirects", url=redact(url))
                check_redirect(source, target)
                num_redirects += 1
                if urlsplit(target)[:2] != urlsplit(source)[:2]:  # another server: what was meant for the first one stays here
                    sent = {**own, **headers}
            _check_status(response, url, accept)
        except StorageError as error:
            error.context["num_extra_requests"] = num_redirects
            raise
        return response, num_redirects

    def _send(self, method: str, target: str, headers: Mapping[str, str], url: str) -> urllib3.BaseHTTPResponse:
        parts = urlsplit(target)
        try:
            pool = self._pools.pool(parts.scheme, parts.hostname or "")
            return pool.request(method, target, headers=headers, preload_content=False, redirect=False)
        except urllib3.exceptions.HTTPError as error:
            raise map_error(error, url) from error


def _check_status(response: urllib3.BaseHTTPResponse, url: str, accept: frozenset[int]) -> None:
    if response.status >= 300 and response.status not in accept:
        response.close()
        raise error_for_status(
            response.status, url, detail=response.reason or "", retry_after=response.headers.get("Retry-After")
        )


class HttpStream:
    """An open answer of urllib3."""

    def __init__(self, url: str, response: urllib3.BaseHTTPResponse, *, num_redirects: int, deadline: float) -> None:
        self._url = url
        self._response = response
        self._deadline = deadline
        self.num_extra_requests = num_redirects
        try:
            self.info, self.start = object_info(url, response.status, response.headers)
        except BaseException:
            response.close()
            raise

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes in order, decompressed if the server compressed them."""
        try:
            while chunk := self._response.read1(_CHUNK_BYTES, decode_content=True):
                yield memoryview(chunk)
                if time.monotonic() > self._deadline:
                    raise TransientStorageError(f"{redact(self._url)}: the answer took too long", url=redact(self._url))
        except urllib3.exceptions.HTTPError as error:
            raise map_error(error, self._url) from error
        self._response.release_conn()

    def close(self) -> None:
        """Close the connection if its body was not read to the end."""
        self._response.close()
