"""http(s) by urllib3; redirects are followed here, one by one, each checked first (`access.check_redirect`)."""

from __future__ import annotations

import hashlib
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import urllib3
import urllib3.exceptions

from sqlstream.config import StorageOptions
from sqlstream.errors import AccessDeniedError, SqlStreamError, StorageError, TransientStorageError
from sqlstream.storage.backends.answers import (
    NOT_FOR_HEAD,
    BodyRange,
    body_length,
    content_encoding,
    exact,
    part_of_answer,
    range_headers,
    redirect_target,
    without_user,
)
from sqlstream.storage.backends.coding import check_coding, decoded
from sqlstream.storage.backends.http_pools import Pools, is_private_answer
from sqlstream.storage.backends.judged import PrivateAddressError
from sqlstream.storage.base.access import check_redirect, host_name
from sqlstream.storage.base.addresses import is_private_literal, origin_of
from sqlstream.storage.base.checksum import md5_of
from sqlstream.storage.base.credentials import place_of
from sqlstream.storage.base.protocols import ObjectInfo, RangeBytes, read_range
from sqlstream.storage.base.retry import error_for_status
from sqlstream.storage.base.service_errors import read_error
from sqlstream.storage.base.settings import headers_over, http_headers
from sqlstream.storage.base.urls import redact, redact_text

_CHUNK_BYTES = 1 << 18  # the largest read; as much as a socket usually has
_OWN_HEADERS = {"Accept-Encoding": "identity"}
_ERROR_BYTES = 1 << 14  # of a body that says why; S3 writes some hundred
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
    cause = error.args[0] if isinstance(error, urllib3.exceptions.SSLError) and error.args else None
    if isinstance(cause, ssl.SSLEOFError):  # the server, or what is before it, closed the connection
        return TransientStorageError(f"{where}: the connection ended while it was being encrypted: {cause}", url=where)
    kind = next((ours for theirs, ours in ERRORS.items() if isinstance(error, theirs)), StorageError)
    return kind(f"{where}: {redact_text(str(error))}{_tls_cure(cause)}", url=where)


def _tls_cure(cause: object) -> str:
    if isinstance(cause, ssl.SSLCertVerificationError):
        return "; check the host's name and this machine's clock, or trust its authority by storage_options['root_certificate']"
    if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
        return "; what answers at this port does not encrypt: check the port, or use http://"
    return ""


class HttpStorage:
    """Keeps connections alive per host.

    Args:
        options: Headers, proxies, certificates and timeouts.
        pools: Connections that are shared with others; None: own ones.
        is_judged: Connect to public addresses only. The target of a public server's redirect is always judged.
    """

    def __init__(self, options: StorageOptions, pools: Pools | None = None, *, is_judged: bool = False) -> None:
        self._options = options
        self._pools = pools or Pools(options)
        self._is_judged = is_judged

    @cached_property
    def _headers(self) -> dict[str, str]:
        """Headers of each first request; made by the first one, which raises what is wrong with the options."""
        return headers_over(_OWN_HEADERS, http_headers(self._options.storage_options))

    def head(self, url: str) -> ObjectInfo:
        """Return size and etag of one object.

        Where the answer to HEAD is none of an object with a size (many servers leave its length out, or say 0), the head of the
        answer to GET holds.
        """
        deadline = time.monotonic() + self._options.total_timeout_seconds
        answer = self._request("HEAD", url, {}, deadline, accept=NOT_FOR_HEAD)
        response = answer.response
        try:
            if response.status < 200:
                text = f"{redact(url)}: the server answers {response.status} to HEAD"
                raise StorageError(text, url=redact(url), status=response.status)
            if response.status == 200:
                if content_encoding(response.headers):
                    return _info(url, None, answer)
                if size_bytes := body_length(url, response.headers):
                    return _info(url, size_bytes, answer)
        finally:
            response.close()  # not kept: some servers send the body nevertheless, and the next answer would begin with it
        stream = self.get(url)
        stream.close()
        return stream.info

    def get(self, url: str, *, start: int = 0, stop: int | None = None, etag: str | None = None) -> HttpStream:
        """Open the object, whole or a range."""
        deadline = time.monotonic() + self._options.total_timeout_seconds
        answer = self._request("GET", url, range_headers(start, stop, etag), deadline)
        response = answer.response
        try:
            part = part_of_answer(url, response.status, response.headers, start=start, stop=stop)
            check_coding(url, content_encoding(response.headers))
        except BaseException as error:
            response.close()
            if isinstance(error, StorageError):
                error.context["num_extra_requests"] = answer.num_redirects
            raise
        return HttpStream(url, answer, part)

    def get_range(self, url: str, start: int, stop: int, *, etag: str | None = None) -> RangeBytes:
        """Return exactly the bytes `[start, stop)`; also from a server that ignores ranges."""
        return read_range(self, url, start, stop, etag)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Raise: HTTP has no listing."""
        del after
        where = redact(prefix)
        raise StorageError(f"{where}: an HTTP server has no listing: give a text file of URLs as the source", url=where)

    def _request(
        self, method: str, url: str, headers: Mapping[str, str], deadline: float, accept: frozenset[int] = frozenset()
    ) -> _Answer:
        """Ask, and follow redirects that are allowed.

        Raises:
            StorageError: With the number of redirects in its context as `num_extra_requests`.
        """
        num_redirects, is_judged, is_private = 0, self._is_judged, True
        target, user = without_user(url)
        sent = headers_over(user, self._headers, headers)
        try:
            while True:
                response = self._send(method, target, sent, url, deadline=deadline, is_judged=is_judged)
                reached = is_private_answer(response)
                is_private &= is_private_literal(host_name(target)) if reached is None else reached
                is_judged |= not is_private
                if response.status not in _REDIRECTS:
                    break
                locations = {location for location in response.headers.getlist("Location") if location}
                if not locations:
                    break
                response.close()
                source, target = target, without_user(redirect_target(target, locations))[0]
                if num_redirects == _MAX_REDIRECTS:
                    raise StorageError(f"{redact(url)}: more than {_MAX_REDIRECTS} redirects", url=redact(url))
                check_redirect(source, target)
                num_redirects += 1
                if place_of(target) != place_of(source):  # another server: what was meant for the first one stays here
                    sent = {**_OWN_HEADERS, **headers}
            _check_status(response, url, accept)
        except StorageError as error:
            error.context["num_extra_requests"] = num_redirects
            raise
        return _Answer(response, num_redirects, is_private)

    def _send(
        self, method: str, target: str, headers: Mapping[str, str], url: str, *, deadline: float, is_judged: bool
    ) -> urllib3.BaseHTTPResponse:
        try:
            return self._pools.request(method, target, headers, deadline=deadline, is_judged=is_judged)
        except PrivateAddressError as error:
            raise _refused(url, target, str(error)) from error
        except urllib3.exceptions.HTTPError as error:
            raise map_error(error, url) from error


def _check_status(response: urllib3.BaseHTTPResponse, url: str, accept: frozenset[int]) -> None:
    if response.status >= 300 and response.status not in accept:
        detail = _error_body(response) or response.reason or ""
        response.close()
        raise error_for_status(response.status, url, detail=detail, retry_after=response.headers.get("Retry-After"))


def _error_body(response: urllib3.BaseHTTPResponse) -> str:
    """Return the start of the body of an answer that is an error, if an object store may have written it."""
    if "xml" not in response.headers.get("Content-Type", "").lower():
        return ""
    try:
        body = response.read(_ERROR_BYTES, decode_content=False).decode("utf-8", "replace")
    except urllib3.exceptions.HTTPError:
        return ""
    return redact_text(body) if read_error(body) else ""


class _Answer(NamedTuple):
    """An open answer."""

    response: urllib3.BaseHTTPResponse
    num_redirects: int
    is_private: bool
    """True: all connections on the way to it led to private addresses."""


def _refused(url: str, target: str, fact: str) -> AccessDeniedError:
    where = redact(url)
    if target != without_user(url)[0]:
        text = f"{where} redirects into a private network ({fact}): refused; name that address yourself if you mean it"
    else:
        root = redact(origin_of(target)) + "/"
        text = f"{where} is named by a remote index, but lies in a private network ({fact}): "
        text += f"pass allowed_roots=[{root!r}] if you trust both"
    return AccessDeniedError(text, url=where)


def _info(url: str, size_bytes: int | None, answer: _Answer) -> ObjectInfo:
    headers = answer.response.headers
    etag, changed = headers.get("ETag"), headers.get("Last-Modified")
    return ObjectInfo(url=url, size_bytes=size_bytes, etag=etag, last_modified=changed, is_private=answer.is_private)


class HttpStream:
    """An open answer of urllib3."""

    def __init__(self, url: str, answer: _Answer, part: BodyRange) -> None:
        self.info = _info(url, part.total_bytes, answer)
        self.start = part.start
        self.num_extra_requests = answer.num_redirects
        self._url = url
        self._response = answer.response
        self._part = part

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes in order, decoded if the server coded them."""
        received = exact(self._url, self._received(), self._part)
        encoding = content_encoding(self._response.headers)
        if not encoding:
            yield from received
            return
        digest = None if md5_of(self.info.etag) is None else hashlib.md5(usedforsecurity=False)
        yield from decoded(self._url, encoding, received if digest is None else _hashed(received, digest))
        if digest is not None:
            self.info = replace(self.info, coded_md5=digest.hexdigest())

    def _received(self) -> Iterator[bytes]:
        try:
            while chunk := self._response.read1(_CHUNK_BYTES, decode_content=False):
                yield chunk
                if self._response.length_remaining == 0:
                    break
        except urllib3.exceptions.HTTPError as error:
            raise map_error(error, self._url) from error
        if getattr(getattr(self._response, "_original_response", None), "has_more", False):  # of `http_response`
            raise TransientStorageError(f"{redact(self._url)}: the body is longer than announced", url=redact(self._url))
        self._response.release_conn()

    def close(self) -> None:
        """Close the connection if its body was not read to the end."""
        self._response.close()


def _hashed(chunks: Iterable[memoryview], digest: hashlib._Hash) -> Iterator[memoryview]:
    for chunk in chunks:
        digest.update(chunk)
        yield chunk
