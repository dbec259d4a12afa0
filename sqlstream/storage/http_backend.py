"""urllib3: the exact HTTP client, for what obstore cannot: queries, escapes, answers without a length, compressed ones.

It also takes over after a first failure, since it sees the status and Retry-After.
"""

from __future__ import annotations

import base64
import functools
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import unquote, urlsplit

import urllib3
import urllib3.exceptions

from sqlstream.config import StorageOptions
from sqlstream.errors import SqlStreamError, StorageError, TransientStorageError
from sqlstream.storage.base import ObjectInfo, check_length
from sqlstream.storage.retry import error_for_status
from sqlstream.storage.settings import store_settings
from sqlstream.storage.urls import redact, redact_text, scheme

_CHUNK_BYTES = 1 << 20
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
        self._pools: dict[str, urllib3.PoolManager] = {}

    def head(self, url: str) -> ObjectInfo:
        """Return size and etag of one object."""
        response = self._request("HEAD", url, {}, accept=_NOT_FOR_HEAD)
        if response.status in _NOT_FOR_HEAD:
            response.close()
            response = self._request("GET", url, {})
        info = _info(url, response)
        response.close() if response.status == 200 and info.size_bytes else response.release_conn()
        return info

    def get(self, url: str) -> HttpStream:
        """Open the whole object."""
        return HttpStream(url, self._request("GET", url, {}))

    def get_range(self, url: str, start: int, stop: int) -> bytes:
        """Return exactly the bytes `[start, stop)`; also from a server that ignores ranges."""
        if start >= stop:
            return b""
        response = self._request("GET", url, {"Range": f"bytes={start}-{stop - 1}"})
        try:
            data = response.read(decode_content=True)
        except urllib3.exceptions.HTTPError as error:
            raise map_error(error, url) from error
        finally:
            response.release_conn()
        if response.status != 206:
            data = data[start:stop]
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            said = response.headers.get("Content-Range")
            raise TransientStorageError(
                f"{redact(url)}: asked for bytes {start}-{stop - 1}, the answer is {said}", url=redact(url)
            )
        check_length(url, received=len(data), expected=stop - start)
        return data

    def get_ranges(self, url: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range, in the order asked."""
        return [self.get_range(url, start, stop) for start, stop in ranges]

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Raise: HTTP has no listing."""
        where = redact(prefix)
        raise StorageError(f"{where}: an HTTP server has no listing: give a text file of URLs as the source", url=where)

    def _request(
        self, method: str, url: str, headers: Mapping[str, str], accept: frozenset[int] = frozenset()
    ) -> urllib3.BaseHTTPResponse:
        sent = {**store_settings(scheme(url), self._options.storage_options).headers, "Accept-Encoding": "identity", **headers}
        parts = urlsplit(url)
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            sent.setdefault("Authorization", "Basic " + base64.b64encode(pair.encode()).decode())
        bare = parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl()
        try:
            response = self._pool(parts.scheme, parts.hostname or "").request(method, bare, headers=sent, preload_content=False)
        except urllib3.exceptions.HTTPError as error:
            raise map_error(error, url) from error
        if response.status >= 300 and response.status not in accept:
            response.close()
            raise error_for_status(
                response.status, url, detail=response.reason or "", retry_after=response.headers.get("Retry-After")
            )
        return response

    def _pool(self, kind: str, host: str) -> urllib3.PoolManager:
        """Return the pool for the environment's proxy, or the direct one."""
        proxy = "" if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(kind, "")
        if proxy not in self._pools:
            maker = functools.partial(urllib3.ProxyManager, proxy) if proxy else urllib3.PoolManager
            timeout = urllib3.Timeout(connect=self._options.connect_timeout_seconds, read=self._options.read_timeout_seconds)
            retries = urllib3.Retry(
                total=None, connect=0, read=0, status=0, other=0, redirect=10, respect_retry_after_header=False
            )
            verify = not self._options.storage_options.get("allow_invalid_certificates")
            self._pools[proxy] = maker(  # two threads may both make one: the later stays, the other closes when done
                num_pools=64,
                maxsize=self._options.num_threads,
                timeout=timeout,
                retries=retries,
                cert_reqs="CERT_REQUIRED" if verify else "CERT_NONE",
            )
        return self._pools[proxy]


class HttpStream:
    """An open answer of urllib3."""

    def __init__(self, url: str, response: urllib3.BaseHTTPResponse) -> None:
        self._url = url
        self._response = response
        self.info = _info(url, response)

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes in order, decompressed if the server compressed them."""
        try:
            for chunk in self._response.stream(_CHUNK_BYTES, decode_content=True):
                yield memoryview(chunk)
        except urllib3.exceptions.HTTPError as error:
            raise map_error(error, self._url) from error
        self._response.release_conn()

    def close(self) -> None:
        """Close the connection if its body was not read to the end."""
        self._response.close()


def _info(url: str, response: urllib3.BaseHTTPResponse) -> ObjectInfo:
    length = response.headers.get("Content-Length")
    is_plain = response.headers.get("Content-Encoding", "identity") == "identity"
    size = int(length) if length and length.isdigit() and is_plain else None
    return ObjectInfo(url=url, size_bytes=size, etag=response.headers.get("ETag"))
