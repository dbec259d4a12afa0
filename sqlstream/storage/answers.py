"""What is said in the headers of HTTP, sent and received; shared by both HTTP clients. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from sqlstream.errors import TransientStorageError
from sqlstream.storage.base import ObjectInfo
from sqlstream.storage.urls import redact

NOT_FOR_HEAD = frozenset({400, 403, 405, 501})
"""Answers to a HEAD that a GET may not get: signed for GET only, or not built."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


def without_user(url: str) -> tuple[str, dict[str, str]]:
    """Return the URL without `user:password@` and fragment, and the header that says them instead.

    Example:
        >>> without_user("http://me:secret@host/x#part")
        ('http://host/x', {'Authorization': 'Basic bWU6c2VjcmV0'})
    """
    parts = urlsplit(url)
    headers = {}
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl(), headers


def range_headers(start: int, stop: int | None, etag: str | None) -> dict[str, str]:
    """Return the headers that ask for the bytes `[start, stop)` of the version `etag`."""
    headers = {}
    if start or stop is not None:
        headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
    if etag:
        headers["If-Match"] = etag
    return headers


def object_info(url: str, status: int, headers: Mapping[str, str]) -> tuple[ObjectInfo, int]:
    """Return what an answer's header says of the whole object, and at which of its bytes the body starts.

    Args:
        url: What was asked for.
        status: 200 or 206.
        headers: By name, in lower case (or in any, if the mapping does not mind).

    Raises:
        TransientStorageError: A partial answer that contradicts itself.
    """
    length = headers.get("content-length")
    is_plain = headers.get("content-encoding", "identity") == "identity"
    size = int(length) if length and length.isdigit() and is_plain else None
    start = 0
    if status == 206:
        said = headers.get("content-range", "")
        match = _CONTENT_RANGE.fullmatch(said)
        if match is None or (size is not None and size != int(match[2]) + 1 - int(match[1])):
            where = redact(url)
            raise TransientStorageError(f"{where}: the answer says the range {said!r} and the length {length}", url=where)
        start, size = int(match[1]), int(match[3])
    return ObjectInfo(url=url, size_bytes=size, etag=headers.get("etag")), start
