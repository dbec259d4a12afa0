"""Wildcards over table files: `*` and `?` stay within a directory, `**` crosses them, `[…]` is a set."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

from sqlstream.errors import SourceError
from sqlstream.index.sources.base.access import local_file, named_errors
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader

_TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)


def has_wildcard(src: str) -> bool:
    """Return True if `src` names many files; a local file of exactly that name comes first, a '?' in http is a query."""
    if not urls.is_remote(src):
        return glob.has_magic(src) and not os.path.exists(urls.local_path(src))
    return bool(re.search(r"[*]" if urls.scheme(src).startswith("http") else r"[*?\[]", src))


def fixed_part(pattern: str) -> str:
    """Return the directory before the first wildcard, with its slash at the end.

    Example:
        >>> fixed_part("s3://bucket/data/part-*.csv"), fixed_part("*.csv")
        ('s3://bucket/data/', '')
    """
    return re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")[0] + "/" if "/" in pattern else ""


def matcher(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a wildcard.

    Example:
        >>> bool(matcher("a/**/*.csv").fullmatch("a/b/c/x.csv")), bool(matcher("a/*.csv").fullmatch("a/b/x.csv"))
        (True, False)
    """
    return re.compile("".join(map(_translate, _TOKEN.findall(pattern))), re.DOTALL)


def match_files(src: str, remote: RemoteReader) -> list[SourceFile]:
    """Return the files of a wildcard, sorted by name.

    Raises:
        SourceError: There is none.
    """
    files = sorted(_remote_matches(src, remote) if urls.is_remote(src) else _local_matches(src), key=lambda file: file.url)
    if not files:
        raise SourceError(
            f"no file matches {urls.redact(src)}: check the spelling; '*' stays within one directory, '**' does not"
        )
    return files


def _remote_matches(src: str, remote: RemoteReader) -> Iterator[SourceFile]:
    wanted = matcher(src)
    with named_errors(src):
        for info in remote.list(fixed_part(src)):
            if wanted.fullmatch(info.url):
                yield SourceFile(url=info.url, size_bytes=info.size_bytes, etag=info.version)


def _local_matches(src: str) -> Iterator[SourceFile]:
    pattern = os.path.abspath(urls.local_path(src))
    for path in glob.iglob(pattern, recursive=True):
        if os.path.isfile(path):
            yield local_file(Path(path))


def _translate(token: str) -> str:
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    if token in known:
        return known[token]
    if len(token) > 1:  # a set
        inside = token[1:-1].replace("\\", r"\\").replace("[", r"\[")
        return f"[{'^' + inside[1:] if inside.startswith('!') else inside}]"
    return re.escape(token)
