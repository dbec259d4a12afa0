"""urllib3: the exact HTTP client, for what obstore cannot: queries, escapes, answers without a length, compressed ones.

It also takes over after a first failure, since it sees the status and Retry-After.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator, Mapping
from urllib.parse import unquote, urljoin, urlsplit

import urllib3
import urllib3.exceptions

from sqlstream.config import StorageOptions
from sqlstream.errors import SqlStreamError, StorageError, TransientStorageError
from sqlstream.storage.base import ObjectInfo, RangeBytes, read_range
from sqlstream.storage.http_pools import Pools
from sqlstream.storage.policy import check_redirect
from sqlstream.storage.retry import error_for_status
from sqlstream.storage.settings import store_settings
from sqlstream.storage.urls import redact, redact_text, scheme

_CHUNK_BYTES = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 10  # as curl and reqwest, roughly
_NOT_FOR_HEAD = frozenset({400, 403, 405, 501})  # signed for GET only, or not built: asked again with GET

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
        response = self._request("HEAD", url, {}, accept=_NOT_FOR_HEAD)
        if response.status in _NOT_FOR_HEAD:
            response.close()
            response = self._request("GET", url, {})
        info, _ = _info(url, response)
        response.close() if response.status == 200 and info.size_bytes else response.release_conn()
        return info

    def get(self, url: str, *, start: int = 0, stop: int | None = None, etag: str | None = None) -> HttpStream:
        """Open the object, whole or a range."""
        headers = {}
        if start or stop is not None:
            headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        if etag:
            headers["If-Match"] = etag
        deadline = time.monotonic() + self._options.total_timeout_seconds
        return HttpStream(url, self._request("GET", url, headers), deadline=deadline)

    def get_range(self, url: str, start: int, stop: int, *, etag: str | None = None) -> RangeBytes:
        """Return exactly the bytes `[start, stop)`; also from a server that ignores ranges."""
        return read_range(self, url, start, stop, etag)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Raise: HTTP has no listing."""
        where = redact(prefix)
        raise StorageError(f"{where}: an HTTP server has no listing: give a text file of URLs as the source", url=where)

    def _request(
        self, method: str, url: str, headers: Mapping[str, str], accept: frozenset[int] = frozenset()
    ) -> urllib3.BaseHTTPResponse:
        """Make one request, follow redirects that are allowed; return the open answer."""
        own = store_settings(scheme(url), self._options.storage_options).headers
        target, sent = _without_user(url, {"Accept-Encoding": "identity", **own, **headers})
        for _ in range(_MAX_REDIRECTS):
            response = self._send(method, target, sent, url)
            location = response.headers.get("Location")
            if response.status not in _REDIRECTS or not location:
                break
            response.close()
            source, target = target, urljoin(target, location)
            check_redirect(source, target)
            if urlsplit(target)[:2] != urlsplit(source)[:2]:  # another server: what was meant for the first one stays here
                sent = {"Accept-Encoding": "identity", **headers}
        else:
            raise StorageError(f"{redact(url)}: more than {_MAX_REDIRECTS} redirects", url=redact(url))
        if response.status >= 300 and response.status not in accept:
            response.close()
            raise error_for_status(
                response.status, url, detail=response.reason or "", retry_after=response.headers.get("Retry-After")
            )
        return response

    def _send(self, method: str, target: str, headers: Mapping[str, str], url: str) -> urllib3.BaseHTTPResponse:
        parts = urlsplit(target)
        try:
            pool = self._pools.pool(parts.scheme, parts.hostname or "")
            return pool.request(method, target, headers=headers, preload_content=False, redirect=False)
        except urllib3.exceptions.HTTPError as error:
            raise map_error(error, url) from error


def _without_user(url: str, headers: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the URL without `user:password@` and fragment, and the headers with them."""
    parts, sent = urlsplit(url), dict(headers)
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        sent.setdefault("Authorization", "Basic " + base64.b64encode(pair.encode()).decode())
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl(), sent


class HttpStream:
    """An open answer of urllib3."""

    def __init__(self, url: str, response: urllib3.BaseHTTPResponse, *, deadline: float) -> None:
        self._url = url
        self._response = response
        self._deadline = deadline
        self.num_extra_requests = 0
        try:
            self.info, self.start = _info(url, response)
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


def _info(url: str, response: urllib3.BaseHTTPResponse) -> tuple[ObjectInfo, int]:
    """Return what the answer's header says of the whole object, and at which of its bytes the body starts."""
    headers = response.headers
    length = headers.get("Content-Length")
    is_plain = headers.get("Content-Encoding", "identity") == "identity"
    size = int(length) if length and length.isdigit() and is_plain else None
    start = 0
    if response.status == 206:
        said = headers.get("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(said)
        if match is None or (size is not None and size != int(match[2]) + 1 - int(match[1])):
            where = redact(url)
            raise TransientStorageError(f"{where}: the answer says the range {said!r} and the length {length}", url=where)
        start, size = int(match[1]), int(match[3])
    return ObjectInfo(url=url, size_bytes=size, etag=headers.get("ETag")), start
