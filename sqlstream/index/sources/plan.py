"""From what users write as `src` to the files that make the index."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlstream.config import IndexOptions
from sqlstream.errors import ConfigError
from sqlstream.index.models import SourceFile, fingerprint
from sqlstream.index.sources import formats, path_list, wildcard
from sqlstream.index.sources.access import stat_file
from sqlstream.index.sources.directory import KEY, Listing
from sqlstream.records import DataSampleType
from sqlstream.storage import urls
from sqlstream.storage.base import RemoteReader


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """What will be read: table files, or one directory of samples."""

    src: str
    """As the user gave it, credentials included."""
    base_url: str
    """Where relative paths in the rows start; credentials included."""
    key_column: str
    files: tuple[SourceFile, ...] = ()
    directory: Listing | None = None
    kind: DataSampleType | None = None
    """Of a directory."""
    version: tuple[str, int] = ("", 0)
    """Of a directory: digest of its listing, number of files."""

    def identity(self) -> dict[str, object]:
        """Return what a fingerprint must tell apart: sources and their versions (without one, the URL with its query)."""
        if self.directory is not None:
            return {"directory": urls.redact(self.directory.directory), "version": list(self.version), "kind": self.kind}
        return {
            "files": [
                [urls.redact(file.url), file.size_bytes, file.etag or fingerprint({"url": file.url})] for file in self.files
            ]
        }


def plan_sources(options: IndexOptions, temporary: Callable[[], Path], remote: RemoteReader) -> SourcePlan:
    """Return what `options.src` is.

    Args:
        options: Source, data type, limits.
        temporary: Gives a path for a short download (of a list of paths).
        remote: Heads, lists and downloads.

    Raises:
        ConfigError: It is nothing that an index can be made of.
        ObjectNotFoundError: It does not exist.
        AccessDeniedError: It may not be read.
    """
    src = options.src if urls.is_remote(options.src) else str(urls.local_path(options.src).absolute()) + _slash(options.src)
    if wildcard.has_wildcard(src):
        formats.check_table(src, src)
        files = wildcard.match_files(src, remote)
        return _tables(options, files, wildcard.fixed_part(src).rstrip("/") or urls.parent(src))
    if _is_directory(src, options):
        return _directory(src, options, remote)
    if urls.extension(src) == formats.PATH_LIST:
        paths = path_list.read_paths(src, temporary(), remote)[: options.max_index_files]
        return _tables(options, path_list.list_files(paths, remote), urls.parent(src))
    formats.check_table(src, src)
    return _tables(options, [stat_file(src, remote)], urls.parent(src))


def _tables(options: IndexOptions, files: list[SourceFile], base_url: str) -> SourcePlan:
    chosen = tuple(files[: options.max_index_files])
    return SourcePlan(src=options.src, base_url=base_url, key_column=options.key_column, files=chosen)


def _directory(src: str, options: IndexOptions, remote: RemoteReader) -> SourcePlan:
    if options.data_type is None:
        raise ConfigError(
            f"{urls.redact(src)} is a directory: give data_type, which says whose files make a sample: "
            f"one of {', '.join(DataSampleType)}"
        )
    if options.key_column != KEY:
        raise ConfigError(
            f"index_col_name={options.key_column!r}: the key column of a directory is always {KEY!r}; leave it out"
        )
    kind = DataSampleType.from_str(options.data_type)
    listing = Listing(src, remote)
    return SourcePlan(
        src=options.src,
        base_url=listing.directory.rstrip("/") or "/",
        key_column=KEY,
        directory=listing,
        kind=kind,
        version=listing.version(),
    )


def _is_directory(src: str, options: IndexOptions) -> bool:
    """Return True for a local directory, a slash at the end, or a remote name without extension when a data_type is given."""
    if not urls.is_remote(src):
        return src.endswith("/") or os.path.isdir(urls.local_path(src))
    return src.endswith("/") or (options.data_type is not None and not urls.extension(src))


def _slash(src: str) -> str:
    return "/" if src.endswith("/") and src != "/" else ""
