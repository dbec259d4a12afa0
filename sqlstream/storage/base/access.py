"""Which objects a row may name, by its writer: an index from elsewhere must not read this node's own files or network. Pure.

A row is the user's own if its table lies on this machine, else foreign: the writer of the table may be another person.
SECURITY.md has the rules as one table.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

from sqlstream.errors import AccessDeniedError, ConfigError
from sqlstream.storage.base.addresses import Server, is_private_literal, origin_of, server_of
from sqlstream.storage.base.credentials import belongs_to, place_of
from sqlstream.storage.base.urls import COMMAND, DATABASES, is_remote, local_path, parent, redact, scheme, shown

WEB_SCHEMES = frozenset(("http", "https"))
"""Schemes whose connections are judged when they are made."""
BUCKET_SCHEMES = frozenset("s3 s3a gs gcs az abfs abfss adl hf oss oci gdrive dropbox".split())
"""Schemes whose server is that of a cloud, or an endpoint of the options: their URLs name buckets, not hosts."""
HOST_SCHEMES = frozenset("ftp ftps sftp ssh webdav webdavs webhdfs hdfs smb".split())
"""Schemes whose clients look hosts up by themselves, so that nothing binds them to an address that was judged."""
REMOTE_SCHEMES = WEB_SCHEMES | BUCKET_SCHEMES | HOST_SCHEMES
"""Schemes that lead to a server. Not here: what fsspec reads from this machine (`file`, `local`, `memory`, `dir`, `reference`),
and chains (`zip::…`), which may end in those."""
_OTHER_SCHEMES = frozenset(
    "file local memory dir reference data zip tar libarchive filecache blockcache cached simplecache generic "
    "asyncwrapper asynclocal box dask dbfs dvc gist git github jlab jupyter lakefs ocilake pyscript root tos tosfs "
    "pipe wandb".split()
)
"""What else fsspec reads."""
_SCHEME_NAME = re.compile(r"[a-z][a-z0-9+.-]*")

_BUCKET = re.compile(r"(?:[^@/?#\\\s]*@)?[\w.-]+", re.ASCII)  # it becomes part of a host's name; before it a user or container
_MAX_KNOWN = 4096  # servers whose verdict is kept; a row in a new one costs some microseconds


class Access(NamedTuple):
    """How an object is read."""

    is_judged: bool = False
    """True: over http(s), connect to public addresses only."""
    is_signed: bool = True
    """True: send the headers and credentials of `storage_options`."""
    onward: Onward | None = None
    """What judges the URL that a provider gives for it; None: the user named it, so that it may be anything."""
    runs_command: bool = False
    """True: it is what a command prints that the user named, and said that it is to be run."""


OWN = Access()
"""The access of objects that the user names."""
ALLOWED_COMMAND = Access(runs_command=True)
"""The access of commands that the user named as a source, with `allow_pipes`; the rules for rows never give it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The writer of some rows."""

    is_foreign: bool
    """True: their table, or the list that names it, came from elsewhere."""
    is_private: bool = False
    """True: it came from a private network, and may name what is there."""


OWN_ROWS = Origin(is_foreign=False)


class Allowed(NamedTuple):
    """A URL that a row may read, and its access."""

    url: str
    access: Access


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules for what the rows of a dataset may name, and for the access to it."""

    allowed_roots: tuple[str, ...] = ()
    """Local directories and URL prefixes that any row may name."""
    credential_hosts: tuple[str, ...] = ()
    """Hosts and buckets that credentials go to, beside those of the source."""
    places: frozenset[str] = frozenset()
    """Hosts and buckets of the source, as the user named them (`credentials.place_of`)."""
    providers: frozenset[str] = frozenset()
    """Schemes that functions of the user serve: rows may name all of them, and the URLs that come of it are judged, too."""
    _known: dict[tuple[str, Origin], Access | str] = field(default_factory=dict, repr=False, compare=False)

    def judge(
        self, url: str, origin: Origin, *, named_by: str | Callable[[], str], written: str = "", by: str = "the remote index"
    ) -> Allowed:
        """Return what a row may read.

        Args:
            url: What it names, already joined to the index's directory if it was relative.
            origin: Who wrote it.
            named_by: Where it comes from, or how that is found out, for the error.
            written: The row's own text, for the error.
            by: What `named_by` is.

        Raises:
            AccessDeniedError: It may not.

        Example:
            >>> rules, origin = Rules(allowed_roots=("s3://bucket",)), origin_at("s3://bucket/index.parquet")
            >>> rules.judge("s3://bucket/meta/../a.jpg", origin, named_by="the index").url
            's3://bucket/a.jpg'
            >>> rules.judge("/etc/passwd", origin, named_by="the index")
            Traceback (most recent call last):
                ...
            sqlstream.errors.AccessDeniedError: /etc/passwd is named by the remote index the index, but ...
        """
        if url.startswith(COMMAND):
            raise command_denied(url, named_by)
        if not origin.is_foreign:
            if not self.credential_hosts or not is_remote(url):
                return Allowed(url, OWN)
            return Allowed(url, self._onward(url, origin) or Access(is_signed=self._signs(url)))
        if (".." in url or "%" in url) and ".." in _segments(url):  # percent escapes may spell dots
            plain = _normalised(url)
            if plain is None or not self._is_allowed(plain):
                raise _denied(url, "has '..' in its path", (by, named_by), written, parent(plain or url))
            url = plain
        if (onward := self._onward(url, origin)) is not None:
            return Allowed(url, onward)
        if self._is_allowed(url):
            return Allowed(url, Access(is_signed=self._signs(url)) if is_remote(url) else OWN)
        if not is_remote(url):
            root = str(PurePosixPath(local_path(url)).parent)
            raise _denied(url, "is a local file outside the allowed roots", (by, named_by), written, root)
        head, separator, rest = url.partition("://")
        start = f"{head}{separator}{rest.partition('/')[0]}"  # of a bucket's name, `#` and `?` are a part
        if head.lower() == "hf":
            start = place_of(url)
        verdict = self._known.get((start, origin))
        if verdict is None:
            verdict = self._verdict(url, origin)
            if len(self._known) < _MAX_KNOWN:
                self._known[start, origin] = verdict
        if isinstance(verdict, str):
            raise _denied(url, verdict, (by, named_by), written, start + "/")
        return Allowed(url, verdict)

    def _verdict(self, url: str, origin: Origin) -> Access | str:
        """Return how a foreign row's URL is read, or why it is not; the same for all of a server."""
        kind = scheme(url)
        if "::" in url.partition("://")[0] or kind not in REMOTE_SCHEMES:
            return f"has the scheme {kind!r}, which may read from this machine"
        if kind in BUCKET_SCHEMES:
            named = url.partition("://")[2].partition("/")[0]
            is_plain = kind in ("gdrive", "dropbox") or _BUCKET.fullmatch(named)  # those two name folders
            return Access(is_signed=self._signs(url)) if is_plain else "has no plain name of a bucket"
        server = server_of(origin_of(url))
        reason = ""
        if server is None or not server.host:
            reason = "has a host that can be read in more than one way"
        elif is_private_literal(server.host) and not origin.is_private:
            reason = "lies in a private network"
        elif kind in HOST_SCHEMES and place_of(url) not in self.places:
            reason = f"has the scheme {kind!r}, whose client cannot be bound to a public address"
        return reason or Access(is_judged=not origin.is_private, is_signed=self._signs(url))

    def _onward(self, url: str, origin: Origin) -> Access | None:
        """Return the access of a URL that a provider serves; None: none does."""
        if not self.providers or provided_scheme(url) not in self.providers:
            return None
        known = self._known.get(("", origin))
        if not isinstance(known, Access):
            known = self._known["", origin] = Access(onward=Onward(rules=replace(self, _known={}), origin=origin))
        return known

    def _is_allowed(self, url: str) -> bool:
        return any(is_below(url, root) for root in self.allowed_roots)

    def _signs(self, url: str) -> bool:
        place = place_of(url)
        return place in self.places or belongs_to(place, self.credential_hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Onward:
    """What judges the URLs that a provider gives for the objects of some rows: the rules of these rows."""

    rules: Rules
    origin: Origin

    def judge(self, url: str, provided: str) -> Allowed:
        """Return what is read for the URL that a provider gave for the object at `provided`.

        Raises:
            AccessDeniedError: The row may not lead there.
        """
        return self.rules.judge(url, self.origin, named_by=provided, by="a provider, for")


def provided_scheme(url: str) -> str:
    """Return the scheme of a URL as providers are named by it; `''` for a path, and for a chain (`zip::…`)."""
    head, separator, _ = url.partition("://")
    return head.lower() if separator and "::" not in head else ""


def check_providers(schemes: Iterable[str]) -> None:
    """Look whether functions of the user may serve these schemes.

    Raises:
        ConfigError: One is no scheme, or one that is read by other means.
    """
    for name in schemes:
        cure = "give another name, such as 'asset', and write it into the URLs"
        if not _SCHEME_NAME.fullmatch(name):
            raise ConfigError(
                f"providers[{name!r}] is no scheme, which has lower-case letters, digits and '+-.', a letter first: {cure}"
            )
        if name in REMOTE_SCHEMES | _OTHER_SCHEMES or name.partition("+")[0] in DATABASES:
            raise ConfigError(f"providers[{name!r}]: {name}:// is read without a provider: {cure}")


def origin_at(url: str, *, is_private: bool = False) -> Origin:
    """Return who wrote the rows of the table at `url`.

    Args:
        url: Of the table.
        is_private: It was read over a connection to a private address.
    """
    return Origin(is_foreign=is_remote(url), is_private=is_private or is_private_literal(host_name(url)))


def host_name(url: str) -> str:
    """Return the host of a URL as it is looked up, `''` if it names none: that of an object store is a bucket."""
    if scheme(url) not in WEB_SCHEMES | HOST_SCHEMES:
        return ""
    return (server_of(origin_of(url)) or Server("", None)).host


def check_redirect(source: str, target: str) -> None:
    """Raise if the server of `source` sends us where it may not, judged by spelling; the connection is judged when it is made.

    Raises:
        AccessDeniedError: Another scheme, no clear host, or from a public into a private network.
    """
    if scheme(target) not in WEB_SCHEMES:
        raise AccessDeniedError(f"{redact(source)} redirects to {redact(target)}: only http and https are followed")
    host, came_from, where = host_name(target), host_name(source), redact(source)
    if not host:
        text = f"{where} redirects to {redact(target)}, whose host and port cannot be read in one way only: mend that server"
        raise AccessDeniedError(text, url=where)
    if host != came_from and is_private_literal(host) and not is_private_literal(came_from):
        text = f"{where} redirects into a private network ({host}): refused; name that address yourself if you mean it"
        raise AccessDeniedError(text, url=where)


def _segments(url: str) -> list[str]:
    path = url.partition("://")[2] if "://" in url else url
    return [segment for part in (path, unquote(path)) for segment in part.replace("\\", "/").split("/")]


def _normalised(url: str) -> str | None:
    """Return `url` without dot segments; None if they lead above its root, or are spelled by escapes or backslashes."""
    head, separator, rest = url.partition("://")
    start, slash, path = rest.partition("/") if separator else ("", "", url)
    if separator and (not slash or posixpath.normpath(path).startswith("..")):
        return None
    plain = posixpath.normpath(path)
    return None if ".." in _segments(plain) else f"{head}{separator}{start}{slash}{plain}" if separator else plain


def is_below(url: str, root: str) -> bool:
    """Return whether `url` lies below the directory or URL prefix `root`; judged by its spelling, links are not followed."""
    if is_remote(root) or is_remote(url):
        return is_remote(root) and is_remote(url) and url.startswith(root.rstrip("/") + "/")
    path = PurePosixPath(os.path.normpath(local_path(url)))
    return path.is_absolute() and path.is_relative_to(os.path.abspath(local_path(root)))


def command_denied(url: str, named_by: str | Callable[[], str]) -> AccessDeniedError:
    """Return the error for a command that a table or a list names."""
    where = redact(url)
    index = redact(named_by if isinstance(named_by, str) else named_by())
    return AccessDeniedError(
        f"{where} is a command, named by {index}: none is run on the word of a table or a list, whatever allow_pipes says. "
        "Name it in src if you trust it",
        url=where,
    )


def _denied(url: str, reason: str, named_by: tuple[str, str | Callable[[], str]], written: str, root: str) -> AccessDeniedError:
    where, text = redact(url), shown(written)
    by, name_of = named_by
    index = redact(name_of if isinstance(name_of, str) else name_of())
    name = where if text in ("", where) else f"{where}, written {text!r},"
    return AccessDeniedError(
        f"{name} is named by {by} {index}, but {reason}: pass allowed_roots=[{redact(root)!r}] if you trust both",
        url=where,
    )
