"""Wildcards over table files: `*` and `?` stay within a directory, `**` crosses them, `[…]` is a set."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import logging
import os
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from sqlstream.errors import AccessDeniedError, ObjectNotFoundError, SourceError
from sqlstream.index.sources.base.access import local_file, named_errors
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import ObjectInfo, RemoteReader
from sqlstream.storage.base.unfinished import END, JOURNAL_NAME

logger = logging.getLogger(__name__)

_TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)
_ESCAPED = re.compile(r"\[([*?\[])\]")


def has_wildcard(src: str) -> bool:
    """Return True if `src` names many files; a local file of exactly that name comes first, a '?' in http is a query."""
    if not urls.is_remote(src):
        return glob.has_magic(src) and not os.path.exists(urls.local_path(src))
    return bool(re.search(r"[*]" if urls.scheme(src).startswith("http") else r"[*?\[]", src))


def fixed_part(pattern: str) -> str:
    """Return the directory before the first wildcard, with its slash at the end; a set of one mark, as `[[]`, is that mark.

    Example:
        >>> fixed_part("s3://bucket/data/part-*.csv"), fixed_part("*.csv"), fixed_part("/run[[]1]/d/*.csv")
        ('s3://bucket/data/', '', '/run[1]/d/')
    """
    fixed = "".join(_ESCAPED.sub(r"\1", token) for token in takewhile(_is_fixed, _TOKEN.findall(pattern)))
    return fixed.rpartition("/")[0] + "/" if "/" in pattern else ""


def anchored(pattern: str) -> str:
    """Return a local wildcard from the root on; marks in the name of the working directory are none of it."""
    path = urls.local_path(pattern)
    return os.path.abspath(path if path.is_absolute() else f"{glob.escape(os.getcwd())}/{path}")


def matcher(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a wildcard.

    Example:
        >>> bool(matcher("a/**/*.csv").fullmatch("a/b/c/x.csv")), bool(matcher("a/*.csv").fullmatch("a/b/x.csv"))
        (True, False)
    """
    return re.compile("".join(map(_translate, _TOKEN.findall(pattern))), re.DOTALL)


def match_files(src: str, remote: RemoteReader) -> list[SourceFile]:
    """Return the files of a wildcard, sorted by name; a writing of ours beside them that has not ended is a warning.

    Raises:
        SourceError: There is none.
    """
    found, journals = _remote_matches(src, remote) if urls.is_remote(src) else _local_matches(src)
    files = sorted(found, key=lambda file: file.url)
    if not files:
        raise SourceError(
            f"no file matches {urls.redact(src)}: check the spelling; '*' stays within one directory, '**' does not"
        )
    folders = {urls.parent(file.url) for file in files}
    for folder in sorted(urls.parent(url) for url in journals):
        if folder in folders:
            logger.warning(
                "the writing of shards in %s has not ended (%s is there): %s lacks what was not written; resume the writing, "
                "or remove that file if it has been given up",
                urls.redact(folder),
                JOURNAL_NAME,
                urls.redact(src),
            )
    return files


def _remote_matches(src: str, remote: RemoteReader) -> tuple[list[SourceFile], list[str]]:
    """Return the files, and the journals of writings that have not ended."""
    wanted, found, journals = matcher(src), [], []
    with named_errors(src):
        for info in remote.list(fixed_part(src)):
            if wanted.fullmatch(info.url):
                found.append(SourceFile(url=info.url, size_bytes=info.size_bytes, etag=info.version))
            elif info.url.endswith(f"/{JOURNAL_NAME}"):
                journals.append(info)
        return found, [info.url for info in journals if _is_open(info, remote)]


def _is_open(journal: ObjectInfo, remote: RemoteReader) -> bool:
    """Return whether a writing has not ended; a journal that may not be read, or has gone just now, says nothing of it."""
    size_bytes = journal.size_bytes or 0
    with contextlib.suppress(ObjectNotFoundError, AccessDeniedError):
        return size_bytes < len(END) or remote.get_ranges(journal.url, [(size_bytes - len(END), size_bytes)])[0] != END
    return False


def _local_matches(src: str) -> tuple[list[SourceFile], list[str]]:
    """Return the files, and the journals of writings that have not ended."""
    found = [Path(path) for path in dict.fromkeys(_matches(anchored(src))) if os.path.isfile(path)]
    journals = []
    for folder in {path.parent for path in found}:
        with contextlib.suppress(FileNotFoundError, PermissionError):  # as `_is_open`
            if not (folder / JOURNAL_NAME).read_bytes().endswith(END):
                journals.append(str(folder / JOURNAL_NAME))
    return [local_file(path) for path in found], journals


def _matches(pattern: str) -> Iterator[str]:
    """Yield the paths of a wildcard; `glob` alone goes around in links to folders that hold them, 40 times or for ever."""
    before, mark, behind = re.sub(r"/(?:\*\*/)+", "/**/", f"{pattern}/").partition("/**/")
    if not mark:
        yield from glob.iglob(pattern)
        return
    for folder in glob.iglob(f"{before}/"):
        for below in _folders(folder, frozenset()):
            yield from _matches(f"{glob.escape(below)}/{behind.rstrip('/') or '*'}")


def _folders(folder: str, around: frozenset[str]) -> Iterator[str]:
    """Yield a folder and those below it that are not hidden; links are followed, but to one that holds them."""
    own = os.path.realpath(folder)
    if own in around:
        return
    yield folder.rstrip("/")
    below: list[str] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # as glob: what may not be read has no files
        below += (entry.path for entry in entries if not entry.name.startswith(".") and os.path.isdir(entry.path))
    for path in below:
        yield from _folders(path, around | {own})


def _is_fixed(part: str) -> bool:
    """Return whether a part of a pattern stands for one character alone."""
    return _ESCAPED.fullmatch(part) is not None or (len(part) == 1 and part not in "*?")


def _translate(token: str) -> str:
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    if token in known:
        return known[token]
    return fnmatch.translate(token)[len("(?s:") : -len(r")\Z")]  # a set, or a character as it is
