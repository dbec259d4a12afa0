"""URLs and local paths as text. Pure: nothing here touches disk or network, but for `found_path`.

A URL is `scheme://…`, a chain `scheme::scheme://…`, or a command `pipe:…`; what else has no `://` is a local path (`a::b.txt`).
Names are kept as they are spelled (keys of an object store may hold any character): only what is said below is cut off.
"""

from __future__ import annotations

import os
import re
import stat
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

from sqlstream.errors import AccessDeniedError, ConfigError, ObjectNotFoundError, StorageError

COMMAND = "pipe:"
"""What a command begins with: the object is what it prints. The rest is its text, never a URL."""
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)(?:://|::(?=(?s:.*)://))|(?-i:(pipe):)", re.IGNORECASE)
_REMOTE = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*(?:://|::(?=(?s:.*)://))|(?-i:pipe:)", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=://)[^/?#]*@")
_PASSWORD = re.compile(r"[^/?#@\[]*:(?![0-9]{1,5}(?:/|$))[^@]*@")
"""A user and a password with `/`, `#` or `?` in it: behind the colon stands no port."""
_DATABASE_USER = re.compile(r"[^:/@]*(?::[^@]*)?@")  # as SQLAlchemy reads it
_QUERY_END = re.compile(r"\?\w[\w.-]*=[^?]*$")
_URL_IN_TEXT = re.compile(r"[a-z][a-z0-9+.-]*://(?:(?:(?!://)[^\s@])*@)*[^\s'\"<>(){}]*", re.IGNORECASE)
_SECRET_IN_TEXT = re.compile(
    r"(?<![a-z])((?:password|passwd|pwd|secret|signature|sig|x-(?:amz|goog)-(?:signature|credential|security-token)|"
    r"[a-z_-]*(?:token|access_?key(?:_?id)?|api_?key))=)[^\s&,;'\"]+",
    re.IGNORECASE,
)
_SECRET_OPTION = re.compile(
    r"((?<!\S)(?:-H|-u|-U|-b|--(?:[a-z-]*(?:header|cookie|user|password|token|secret|key|credential)[a-z-]*))(?:\s+|=)?)"
    r"(?:'[^']*'?|\"[^\"]*\"?|\S+)"
)
"""An option of a command whose value may be a credential: `-H 'Authorization: …'`, `--user me:secret`."""
DATABASES = frozenset(
    """
    bigquery clickhouse cockroachdb databricks db2 duckdb mariadb mssql mysql oracle postgres postgresql redshift snowflake
    sqlite teradatasql trino
    """.split()
)
"""Dialects of SQLAlchemy."""
_CONTAINER_SCHEMES = ("abfs", "abfss")  # abfs://container@account/…: no user before the @
_EXTENSION = re.compile(r"\.[a-z0-9.]{1,15}")  # 16 with the dot: longer "extensions" are parts of a name
_CHAIN = re.compile(r"(zip|tar)://(.*?)::(.*)", re.IGNORECASE | re.DOTALL)
_WEB = re.compile(r"https?://", re.IGNORECASE)
_ESCAPED = str.maketrans({"%": "%25", "#": "%23", "?": "%3F"})
"""What would end a path, or be taken for an escape; clients escape the rest."""


def is_command(url: str) -> bool:
    """Return whether a URL is a command whose output is the object.

    Example:
        >>> is_command("pipe:zstd -dcq x.tar.zst"), is_command("s3://bucket/x.tar")
        (True, False)
    """
    return url.startswith(COMMAND)


class ChainedUrl(NamedTuple):
    """A member of an archive, as fsspec and Hugging Face write it."""

    kind: str
    """`zip` or `tar`."""
    inner: str
    """Name of the member: data, never a path."""
    outer: str
    """The archive: a URL, a path, or a relative path."""


def chain_of(url: str) -> ChainedUrl | None:
    """Return the member and the archive that a chained URL names; None: it is none of an archive that is read member by member.

    Example:
        >>> chain_of("zip://a/1.png::https://host/a.zip")
        ChainedUrl(kind='zip', inner='a/1.png', outer='https://host/a.zip')
    """
    match = _CHAIN.fullmatch(url) if "::" in url else None
    return None if match is None else ChainedUrl(match[1].lower(), match[2], match[3])


def scheme(url: str) -> str:
    """Return the scheme in lower case (`'s3'`), `'file'` for a local path; of a chained URL (`a::b://…`) the first.

    Example:
        >>> scheme("S3://bucket/key"), scheme("data/x.csv")
        ('s3', 'file')
    """
    match = _SCHEME.match(url)
    return (match[1] or match[2]).lower() if match else "file"


def is_remote(url: str) -> bool:
    """Return True if `url` has a scheme other than `file`."""
    return _REMOTE.match(url) is not None


def without_file(url: str) -> str:
    """Return the path of `file:path`, as WebDataset and wids write it; all else, `file:///path` too, as it is.

    Example:
        >>> without_file("file:/data/x.tar"), without_file("file:x.tar"), without_file("file:///data/x.tar")
        ('/data/x.tar', 'x.tar', 'file:///data/x.tar')
    """
    return url[5:] if url[:5].lower() == "file:" and url[5:7] != "//" else url


def local_path(url: str) -> Path:
    """Return the path of a plain path or a `file://` URL (percent escapes of the latter are decoded).

    Raises:
        ConfigError: The URL is remote, or names another host.

    Example:
        >>> local_path("file:///data/a%20b.csv")
        PosixPath('/data/a b.csv')
    """
    if not _SCHEME.match(url):
        return Path(url)
    host, slash, path = url.partition("://")[2].partition("/")
    if is_remote(url) or host not in ("", "localhost") or not slash:
        raise ConfigError(f"{redact(url)} is not a local path: give a path or file:///absolute/path")
    return Path("/" + unquote(path))


def local_name(url: str) -> str:
    """Return `local_path` as a text; not by way of `Path`, which takes ten times as long, where that could change nothing.

    Example:
        >>> local_name("/data/a.csv"), local_name("/data//./a.csv"), local_name("file:///data/a%20b.csv")
        ('/data/a.csv', '/data/a.csv', '/data/a b.csv')
    """
    may_change = not url or url[0] == "." or url[-1] == "/" or "//" in url or "/." in url
    return str(local_path(url)) if may_change or _SCHEME.match(url) else url


def found_path(url: str) -> Path:
    """Return the path of a local source file, which is read in place: never entered in the ledger, never deleted.

    Raises:
        ObjectNotFoundError: It is not there.
        StorageError: The disk refuses to say so, since its name is too long for instance.
    """
    path = local_path(url)
    try:
        is_there = stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last one: a name with a NUL
        is_there = False
    except PermissionError as error:
        raise AccessDeniedError(f"{path} may not be looked for ({error.strerror}): check the rights of its folders") from error
    except OSError as error:
        text = f"{str(path)[:200]} cannot be read ({error.strerror}): check the path in the index, and the disk or mount"
        raise StorageError(text) from error
    if not is_there:
        raise ObjectNotFoundError(f"there is no file {path}: check the path in the index")
    return path


def join(base: str, relative: str) -> str:
    """Return `relative` below the directory `base`; a URL or an absolute path stays as it is below a local base.

    A relative path is the name of a file: below a web address its `%`, `#` and `?` are escaped. Not escaped are a query that
    names a secret, which is a signature, and dot segments that are spelled by escapes, which `access` refuses.

    Example:
        >>> join("s3://bucket/data", "a/b.jpg"), join("/data", "s3://bucket/x"), join("/data/", "/x")
        ('s3://bucket/data/a/b.jpg', 's3://bucket/x', '/x')
        >>> join("https://host/data", "track#1.mp3"), join("s3://bucket/data", "track#1.mp3"), join("https://host", "x?sig=abc")
        ('https://host/data/track%231.mp3', 's3://bucket/data/track#1.mp3', 'https://host/x?sig=abc')
    """
    if _SCHEME.match(relative) or (relative.startswith("/") and not is_remote(base)):
        return relative
    if ("%" in relative or "#" in relative or "?" in relative) and _WEB.match(base):
        is_written_as_url = _signed_query(relative) is not None or _num_dots(unquote(relative)) > _num_dots(relative)
        relative = relative if is_written_as_url else relative.translate(_ESCAPED)
    return f"{base.rstrip('/')}/{relative.lstrip('/')}" if base else relative


def _num_dots(path: str) -> int:
    return path.replace("\\", "/").split("/").count("..")


def _signed_query(path: str) -> re.Match[str] | None:
    """Return the secret that the query of a relative URL names; None: it names none, and what follows `?` is part of a name."""
    return _SECRET_IN_TEXT.search(path, path.find("?") + 1) if "?" in path else None


def shown(written: str) -> str:
    """Return a row's own text fit for logs and errors: of a URL what `redact` leaves, of a relative path the whole name.

    Example:
        >>> shown("https://me:secret@host/x?sig=abc"), shown("q?x=1.jpg"), shown("y.jpg?sig=abc")
        ('https://host/x', 'q?x=1.jpg', 'y.jpg')
    """
    if _SCHEME.match(written):
        return redact(written).partition("?")[0]
    return written if _signed_query(written) is None else written.partition("?")[0]


def parent(url: str) -> str:
    """Return the directory of `url`, without a slash at its end (but for the root), of a web address without its query.

    Example:
        >>> parent("s3://bucket/a/x.csv"), parent("s3://bucket/x"), parent("/x.csv"), parent("x.csv")
        ('s3://bucket/a', 's3://bucket', '/', '.')
    """
    if is_command(url):  # what it names lies where it runs
        return "."
    head, separator, tail = url.rpartition("://")
    path = PurePosixPath(named(url) if not separator else named(url)[len(head) + 3 :])
    if not separator:
        return str(path.parent)
    if tail.startswith("/"):  # file:///data/x
        return f"{head}://{path.parent}"
    return f"{head}://{path.parent}" if len(path.parts) > 1 else f"{head}://{path}"


def extension(url: str) -> str:
    """Return the last extension: lower case, with its dot, query and fragment cut off; `''` if it is none worth keeping.

    Kept only when made of `[a-z0-9.]` and at most 16 characters long, since it becomes part of a local file's name. That of a
    member of an archive is the member's own.

    Example:
        >>> extension("s3://bucket/a/photo.JPG"), extension("https://host/x.tar.gz?sig=1"), extension("/data/README")
        ('.jpg', '.gz', '')
        >>> extension("zip://a/1.png::https://host/a.zip")
        '.png'
    """
    if url[: len(COMMAND)] == COMMAND:  # `startswith` takes three times as long
        return ""
    if "?" not in url and "#" not in url and "::" not in url:  # nearly always
        stem, _, suffix = url.rpartition(".")
        if stem and stem[-1] != "/" and "/" not in suffix:
            return _kept_suffix(suffix)
    chain = chain_of(url) if "::" in url else None
    bare = chain.inner if chain is not None else _without_query(url) if "?" in url or "#" in url else url
    name = bare.rstrip("/").rpartition("/")[2]  # what pathlib makes of it takes ten times as long
    stem, _, suffix = name.rpartition(".")
    return _kept_suffix(suffix) if stem else ""


@lru_cache(maxsize=64)  # the objects of an index have few
def _kept_suffix(suffix: str) -> str:
    """Return the extension that follows a dot, with it; `''` if it is none worth keeping."""
    kept = f".{suffix.lower()}"
    return kept if _EXTENSION.fullmatch(kept) else ""


def redact(url: str) -> str:
    """Return `url` fit for logs and errors: no `user:password@`, no query string (signed URLs carry their key there).

    A password may hold `/`, `#` and `?` that should have been escaped: it is known by its colon, behind which no port stands.
    Not an identity: two URLs that differ only in their query read the same.

    Example:
        >>> redact("https://me:secret@host/x.jpg?X-Amz-Signature=abc#part"), redact("postgresql://me:sec/r#e?t@host/db")
        ('https://host/x.jpg#part', 'postgresql://host/db')
        >>> redact("pipe:curl -u me:secret https://host/x.tar?sig=abc | zstd -d")
        'pipe:curl -u *** https://host/x.tar | zstd -d'
    """
    if url.startswith(COMMAND):
        return COMMAND + _SECRET_OPTION.sub(r"\1***", redact_text(url.removeprefix(COMMAND)))
    if ("@" not in url and "?" not in url) or not _SCHEME.match(url):  # nearly always: of every object, twice
        return url
    named = _without_user(url)
    address, hash_sign, fragment = named.partition("#")
    return address.partition("?")[0] + hash_sign + fragment


def _without_user(url: str) -> str:
    head, separator, rest = url.partition("://")
    is_database = head.lower().partition("+")[0] in DATABASES
    if is_database and _DATABASE_USER.match(rest):
        named = _QUERY_END.sub("", rest)
        return f"{head}{separator}{(named if '@' in named else rest).rpartition('@')[2]}"
    if is_database or head.lower() in _CONTAINER_SCHEMES:
        return url
    if "@" not in re.split(r"[/?#]", rest, maxsplit=1)[0] and _PASSWORD.match(rest):
        return f"{head}{separator}{rest.rpartition('@')[2]}"
    return _USER_INFO.sub("", url)


def host(url: str) -> str:
    """Return what requests for `url` are made to, for counting: scheme and authority without credentials, or `'file'`.

    Example:
        >>> host("s3://bucket/a/b"), host("https://me:secret@h:8080/x?sig=1"), host("/data/x")
        ('s3://bucket', 'https://h:8080', 'file')
    """
    if not is_remote(url):
        return "file"
    if is_command(url):
        return COMMAND
    head, separator, tail = redact(url).partition("://")
    return f"{head}{separator}{tail.partition('/')[0].partition('#')[0]}"


def redact_text(text: str) -> str:
    """Return `text` (a foreign library's message) with every URL in it redacted, and the values of `password=` and the like."""
    return _SECRET_IN_TEXT.sub(r"\1***", _URL_IN_TEXT.sub(lambda match: redact(match[0]), text))


def _without_query(url: str) -> str:
    return re.split(r"[?#]", url, maxsplit=1)[0] if is_remote(url) and not is_command(url) else url


def named(url: str) -> str:
    """Return what of a URL or path names a file: all of it, but what a web address has behind a `?` or `#`.

    Example:
        >>> named("https://host/s.tar?sig=x"), named("s3://bucket/c#/s?.tar")
        ('https://host/s.tar', 's3://bucket/c#/s?.tar')
    """
    return re.split(r"[?#]", url, maxsplit=1)[0] if _WEB.match(url) else url


def spells_exactly(url: str) -> bool:
    """Return True if obstore asks for this very name: it drops or refuses empty and dot segments."""
    return not {"", ".", ".."} & set(url.partition("://")[2].partition("/")[2].split("/"))
