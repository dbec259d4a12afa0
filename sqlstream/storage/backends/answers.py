"""The headers of HTTP, sent and received, and whether an answer is what was asked for. Pure.

`check_part` is the one place that compares a body's range with the one that was asked for, and `exact` the one that compares
a body's length with its range; every backend uses both.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit

from sqlstream.errors import StorageError, TransientStorageError
from sqlstream.storage.base.protocols import check_length
from sqlstream.storage.base.urls import redact, redact_text

NOT_FOR_HEAD = frozenset({400, 403, 405, 501})
"""Answers to a HEAD that a GET may not get: signed for GET only, or not built."""
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)", re.IGNORECASE)
_PLAIN_URL = re.compile(
    r"(https?)://([a-z0-9][a-z0-9.-]*)(?::([1-9][0-9]{0,4}))?"
    r"((?:/(?!\.)(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-F]{2})*)+(?:\?(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-F]{2})+)?)"
)
_ASCII = "".join(map(chr, range(32, 127)))
_PARTS = "multipart/byteranges"  # in answers to several ranges alone (RFC 9110, 15.3.7.2)
_LEFT_OUT = str.maketrans({"\t": "%09", "\n": "%0A", "\r": "%0D"})
"""What `urllib.parse` leaves out of a URL, as browsers do: the name of another object would be left."""
_LENGTH = re.compile(r"[0-9]{1,18}")  # of one number: a list, a sign or an exponent is read in several ways


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyRange:
    """The bytes of an object that a body holds, half open."""

    start: int
    stop: int | None
    """None: to the object's end, which the server does not name."""
    total_bytes: int | None
    """Length of the whole object, None when the server does not say it."""


class PlainUrl(NamedTuple):
    """The parts of a URL of http(s) that every client reads alike."""

    scheme: str
    hostname: str
    port: int | None
    """None: it names none."""
    target: str
    """Path and query, as they are sent."""


def plain_url(url: str) -> PlainUrl | None:
    """Return the parts of a URL that no client changes before it sends it; None for any other.

    Scheme and host in lower case, no segment that begins with a dot, escapes of all that needs them, no user, no fragment: most
    URLs of an index. The rules of urllib3 and of `urllib.parse`, for any other, cost a tenth of a small request.

    Example:
        >>> plain_url("https://h/a%20b?c=1"), plain_url("https://h/../a"), plain_url("https://me@h/a")
        (PlainUrl(scheme='https', hostname='h', port=None, target='/a%20b?c=1'), None, None)
    """
    match = _PLAIN_URL.fullmatch(url)
    if match is None or int(match[3] or 0) > 65535:
        return None
    scheme, host, port, target = match.groups()
    return PlainUrl(scheme, host, int(port) if port else None, target)


def without_user(url: str) -> tuple[str, dict[str, str]]:
    """Return the URL without `user:password@` and fragment, and the header that says them instead.

    Raises:
        StorageError: It is no URL.

    Example:
        >>> without_user("http://me:secret@host/x#part")
        ('http://host/x', {'Authorization': 'Basic bWU6c2VjcmV0'})
    """
    if _PLAIN_URL.fullmatch(url):
        return url, {}
    headers = {}
    try:
        parts = urlsplit(url.translate(_LEFT_OUT))
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
    except ValueError:  # its text may hold the password
        where = redact(url)
        raise StorageError(f"{where} is no URL that can be read: check its user, host and port", url=where) from None
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl(), headers


def redirect_target(url: str, locations: Collection[str]) -> str:
    r"""Return where the values of the header Location lead from `url`; bytes beyond ASCII stay what they are.

    Raises:
        StorageError: To nothing that is a URL, or to more than one.

    Example:
        >>> redirect_target("https://h/a/b", ["../caf\xe9.jpg "]), redirect_target("https://h/a", ["//h2?x=%20"])
        ('https://h/caf%E9.jpg', 'https://h2?x=%20')
    """
    location, *others = locations
    if others:  # clients differ in which one they take, or make one of them
        raise StorageError(f"{redact(url)} redirects to {len(locations)} places at once", url=redact(url))
    try:
        return urljoin(url, quote(location.strip(" \t\r\n").encode("latin-1"), safe=_ASCII))
    except ValueError as error:
        raise StorageError(
            f"{redact(url)} redirects to {redact_text(location)[:100]!r}, which is no URL", url=redact(url)
        ) from error


def range_headers(start: int, stop: int | None, etag: str | None) -> dict[str, str]:
    """Return the headers that ask for the bytes `[start, stop)` of the version `etag`."""
    headers = {}
    if start or stop is not None:
        headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
    if etag:
        headers["If-Match"] = etag
    return headers


def content_encoding(headers: Mapping[str, str]) -> str:
    """Return how a body is coded, in lower case; `''` when it is not."""
    encoding = headers.get("content-encoding", "").strip().lower()
    return "" if encoding == "identity" else encoding


def body_length(url: str, headers: Mapping[str, str]) -> int | None:
    """Return the bytes of a body as it is sent; None when it is sent in chunks, or up to the end of the connection.

    Raises:
        TransientStorageError: Two headers that contradict each other, or a length that is not one number.
        StorageError: A transfer coding that is not known.
    """
    length, coding = headers.get("content-length"), headers.get("transfer-encoding")
    if coding is not None and coding.lower() != "chunked":  # to the letter, as http.client knows it: `chunked ` it reads raw
        raise StorageError(
            f"{redact(url)}: the answer has the Transfer-Encoding {coding!r}, which is not known", url=redact(url)
        )
    if length is None:
        return None
    if coding or not _LENGTH.fullmatch(length.strip(" \t")):
        said = f"the Content-Length {length!r}{' and is sent in chunks' if coding else ''}"
        raise _contradiction(url, f"the answer has {said}")
    return int(length)


def part_of_answer(url: str, status: int, headers: Mapping[str, str], *, start: int, stop: int | None) -> BodyRange:
    """Return which bytes of an object the body of an answer holds, checked against what was asked for.

    Args:
        url: The object.
        status: Of the answer.
        headers: By name, in lower case (or in any, if the mapping does not mind).
        start: First byte that was asked for.
        stop: End of the bytes that were asked for; None: of the object.

    Raises:
        TransientStorageError: An answer that contradicts itself, or is not the one to this question.
        StorageError: No answer that holds an object, or one whose end could not be told from a break.
    """
    if status not in (200, 206):
        raise StorageError(
            f"{redact(url)}: the server answers {status}, which is not an object", url=redact(url), status=status
        )
    length, said = body_length(url, headers), headers.get("content-range")
    encoding = content_encoding(headers)
    is_bounded = length is not None or headers.get("transfer-encoding") is not None
    if not is_bounded and encoding != "deflate":  # that shows its own end; gzip does not: another member could have followed
        text = "the server does not say where the body ends: it could have broken off"
        cure = "use a server that sends a Content-Length; chunks do for what is read whole, which shards are not"
        raise StorageError(f"{redact(url)}: {text}; {cure}", url=redact(url))
    part = BodyRange(start=0, stop=length, total_bytes=length)
    if said is not None or status == 206:
        if status == 206 and headers.get("content-type", "").strip().lower().startswith(_PARTS):
            raise _contradiction(url, f"the answer to one range is a {_PARTS}, whose bytes lie among heads of parts")
        part = _said_part(url, said or "")
        if length is not None and not encoding and length != (part.stop or 0) - part.start:
            raise _contradiction(url, f"the answer says the range {said!r} and the length {length}")
    if not encoding:
        check_part(url, part, start=start, stop=stop, is_whole=status == 200)
        return part
    if status == 206:
        raise StorageError(f"{redact(url)}: the server sent a part of it coded as {encoding!r}", url=redact(url), status=200)
    return BodyRange(start=0, stop=None, total_bytes=None)


def _said_part(url: str, content_range: str) -> BodyRange:
    match = _CONTENT_RANGE.fullmatch(content_range.strip())
    if match is None or int(match[2]) < int(match[1]) or (match[3] != "*" and int(match[3]) <= int(match[2])):
        raise _contradiction(url, f"the answer says the range {content_range!r}")
    return BodyRange(start=int(match[1]), stop=int(match[2]) + 1, total_bytes=None if match[3] == "*" else int(match[3]))


def check_part(url: str, part: BodyRange, *, start: int, stop: int | None, is_whole: bool = False) -> None:
    """Raise unless a body holds exactly what was asked for.

    Args:
        url: The object.
        part: What the body holds, as the server says.
        start: First byte that was asked for.
        stop: End of the bytes that were asked for (the object's end, if that is nearer); None: the object's end.
        is_whole: The server ignored the range and sends the whole object.

    Raises:
        TransientStorageError: It holds other bytes.
    """
    total = part.total_bytes
    if is_whole:
        start, stop = 0, None
    end = total if stop is None else stop if total is None else min(stop, total)
    if (part.start, part.stop) == (start, end) and (is_whole or end is not None) and (end is None or start <= end):
        return
    wanted = f"the bytes {start} to {'the end' if stop is None else stop}"
    raise _contradiction(url, f"{wanted} were asked for, {part.start} to {part.stop} of {total} are sent")


def exact(url: str, chunks: Iterable[bytes | memoryview], part: BodyRange) -> Iterator[memoryview]:
    """Yield a body's chunks, as many bytes as its part says.

    Raises:
        TransientStorageError: The body is longer or shorter.
    """
    expected = None if part.stop is None else part.stop - part.start
    num_bytes = 0
    for chunk in chunks:
        num_bytes += len(chunk)
        if expected is not None and num_bytes > expected:
            break
        yield memoryview(chunk)
    if expected is not None:
        check_length(url, received=num_bytes, expected=expected)


def _contradiction(url: str, text: str) -> TransientStorageError:
    """Return the error for an answer that cannot be right; it may be one bad server of many, so it is asked again."""
    return TransientStorageError(f"{redact(url)}: {text}", url=redact(url))
