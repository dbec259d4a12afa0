"""What may be read on whose word. An index from elsewhere must not make this node read its own files or its network.

Pure but for `is_private_host`, which asks the resolver for names.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from functools import lru_cache
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from sqlstream.errors import AccessDeniedError
from sqlstream.storage.urls import is_remote, local_path, redact, scheme

REMOTE_SCHEMES = frozenset(
    "s3 s3a gs gcs az abfs abfss adl http https hf ftp ftps sftp ssh webdav webdavs webhdfs hdfs oss oci gdrive dropbox".split()
)
"""Schemes that a remote index may use: each of them leads to a server. Not here: what fsspec reads from this machine (`file`,
`local`, `memory`, `dir`, `reference`), and chains (`zip::…`), which may end in those."""

_WEB_ORIGIN = re.compile(r"https?://[^/?#]*", re.IGNORECASE)


def check_allowed(url: str, *, index_url: str, allowed_roots: Sequence[str] = ()) -> None:
    """Raise unless the index at `index_url` may name `url`.

    A local index is the user's own: it may name anything. A remote one may name objects on servers, none of them in a private
    network (unless the index itself comes from one), and what lies below the roots that the user allowed.

    Args:
        url: What a row names, already joined to the index's directory if it was relative.
        index_url: Where the row comes from.
        allowed_roots: Local directories and URL prefixes that any index may name.

    Raises:
        AccessDeniedError: It may not.

    Example:
        >>> check_allowed("s3://bucket/a.jpg", index_url="s3://bucket/index.parquet")
        >>> check_allowed("/data/a.jpg", index_url="s3://bucket/index.parquet", allowed_roots=["/data"])
        >>> check_allowed("/etc/passwd", index_url="s3://bucket/index.parquet", allowed_roots=["/data"])
        Traceback (most recent call last):
            ...
        sqlstream.errors.AccessDeniedError: /etc/passwd is named by the remote index s3://bucket/index.parquet, ...
    """
    if not is_remote(index_url):
        return
    if (".." in url or "%" in url) and ".." in _segments(url):  # percent escapes may spell dots
        raise _denied(url, index_url, "has '..' in its path")
    if any(is_below(url, root) for root in allowed_roots):
        return
    if not is_remote(url):
        raise _denied(url, index_url, "is a local file outside the allowed roots")
    if "::" in url or scheme(url) not in REMOTE_SCHEMES:
        raise _denied(url, index_url, f"has the scheme {scheme(url)!r}, which may read from this machine")
    if is_private_literal(host_name(url)) and not is_private_literal(host_name(index_url)):
        raise _denied(url, index_url, "lies in a private network")


def host_name(url: str) -> str:
    """Return the host of an http(s) URL in lower case, `''` for other schemes (their authority is a bucket)."""
    return _host_of(url[: match.end()]) if (match := _WEB_ORIGIN.match(url)) else ""


@lru_cache(maxsize=1024)  # the objects of an index lie on few hosts
def _host_of(origin: str) -> str:
    try:
        return (urlsplit(origin).hostname or "").rstrip(".")
    except ValueError:  # brackets that do not match
        return ""


@lru_cache(maxsize=1024)
def is_private_literal(host: str) -> bool:
    """Return True if a host is this machine or an address of a private network, judged by its spelling alone.

    Example:
        >>> [is_private_literal(host) for host in ("localhost", "169.254.169.254", "::1", "example.org", "0x7f000001")]
        [True, True, True, False, True]
    """
    if host == "localhost" or host.endswith((".localhost", ".internal", ".local")):
        return True
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        pass
    try:  # the forms that C libraries take: 127.1, 0x7f000001, 2130706433
        return not ipaddress.ip_address(socket.inet_aton(host)).is_global
    except (OSError, ValueError):
        return False


def is_private_host(host: str) -> bool:
    """Return True if a host is in a private network by its spelling, or by any address that its name resolves to."""
    if is_private_literal(host):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False  # no address: the request itself will say so
    return any(not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_global for *_, address in found)


def check_redirect(source: str, target: str) -> None:
    """Raise if the server of `source` sends us where it may not: another scheme, or from a public into a private network.

    Raises:
        AccessDeniedError: It may not.
    """
    if scheme(target) not in ("http", "https"):
        raise AccessDeniedError(f"{redact(source)} redirects to {redact(target)}: only http and https are followed")
    host, came_from = host_name(target), host_name(source)
    if host != came_from and is_private_host(host) and not is_private_host(came_from):
        where = redact(source)
        text = f"{where} redirects into a private network ({host}): refused; name that address yourself if you mean it"
        raise AccessDeniedError(text, url=where)


def _segments(url: str) -> list[str]:
    path = url.partition("://")[2] if "://" in url else url
    return [segment for part in (path, unquote(path)) for segment in part.replace("\\", "/").split("/")]


def is_below(url: str, root: str) -> bool:
    """Return whether `url` lies below the directory or URL prefix `root`; judged by its spelling, links are not followed."""
    if is_remote(root) or is_remote(url):
        return is_remote(root) and is_remote(url) and url.startswith(root.rstrip("/") + "/")
    path = PurePosixPath(os.path.normpath(local_path(url)))
    return path.is_absolute() and path.is_relative_to(os.path.abspath(local_path(root)))


def _denied(url: str, index_url: str, reason: str) -> AccessDeniedError:
    where = redact(url)
    text = f"{where} is named by the remote index {redact(index_url)}, but {reason}: allow its directory if you trust both"
    return AccessDeniedError(text, url=where)
