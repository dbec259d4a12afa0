"""A text file whose lines are paths of table files (`split_file_paths.txt` of `sds`); relative lines start at its own place."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sqlstream.config import MissingShards
from sqlstream.errors import SourceError
from sqlstream.index.sources.base.access import local_copy, shard_file
from sqlstream.index.sources.formats.by_extension import check_table
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.access import Allowed, Rules, origin_at
from sqlstream.storage.base.protocols import CALLS_AT_A_TIME, RemoteReader


def read_paths(file: SourceFile, temporary: Path, remote: RemoteReader) -> list[str]:
    """Return the URLs that the lines of a list name, in their order.

    Raises:
        SourceError: No line names a file, or it is no text.
        ConfigError: A line names no table file.
    """
    src = file.url
    with local_copy(file, temporary, remote) as local:
        try:
            lines = local.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise SourceError(f"{urls.redact(src)} is no text in UTF-8 ({error}): it must hold one path a line") from error
    paths = [urls.join(urls.parent(file.url), line.strip()) for line in lines if line.strip()]
    if not paths:
        raise SourceError(f"{urls.redact(src)} is empty: it must hold one path of an index file a line")
    for number, path in enumerate(paths, 1):
        check_table(path, f"{src}, path {number}")
    return paths


def list_files(
    src: SourceFile,
    paths: list[str],
    rules: Rules,
    remote: RemoteReader,
    num_looked_at: int | None = None,
    missing: MissingShards = MissingShards.RAISE,
) -> list[SourceFile]:
    """Return the files that a list names, with their versions; a request each, so several at a time.

    Args:
        src: The list: a remote one may name what a row of a remote table may.
        paths: What it names.
        rules: What that is.
        remote: Asks for versions.
        num_looked_at: Of so many remote files, the first ones; None: of all.
        missing: What becomes of files that are not there.

    Raises:
        AccessDeniedError: A remote list names what it may not.
    """
    origin = origin_at(src.url, is_private=src.is_private)
    allowed = [rules.judge(path, origin, named_by=src.url) for path in paths]
    most = len(allowed) if num_looked_at is None else num_looked_at

    def find(numbered: tuple[int, Allowed]) -> SourceFile:
        number, (url, access) = numbered
        if number >= most and urls.is_remote(url):
            return SourceFile(url=url, size_bytes=None, etag=None, access=access)
        return shard_file(url, remote, missing, access)

    with ThreadPoolExecutor(CALLS_AT_A_TIME, thread_name_prefix="sqlstream-index") as pool:
        return list(pool.map(find, enumerate(allowed)))
