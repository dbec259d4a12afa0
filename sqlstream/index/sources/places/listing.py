"""The files below a directory, local or remote, and a digest of what is there; memory is flat, however many there are."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from sqlstream.errors import StorageError
from sqlstream.index.sources.base.access import named_errors
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.etags import has_own_version
from sqlstream.storage.base.protocols import RemoteReader
from sqlstream.storage.base.settings import SCHEMES

_DIGEST_BITS = 128
_LISTED_AT_A_TIME = 16  # threads: they wait for the disk, or for a file system behind a network
FOLDERS_AT_A_TIME, NAMES_AT_A_TIME = 256, 2048
"""What is in memory of a tree of any size, beside the names of these folders."""


class Listing:
    """The files below a directory, local or remote.

    Args:
        directory: A local path or a URL.
        remote: Lists remote ones.
        folders_at_a_time: Local folders that are read together.
        names_at_a_time: Names of a local folder that are looked at together.
    """

    def __init__(
        self,
        directory: str,
        remote: RemoteReader,
        *,
        folders_at_a_time: int = FOLDERS_AT_A_TIME,
        names_at_a_time: int = NAMES_AT_A_TIME,
    ) -> None:
        self.directory = directory.rstrip("/") + "/"
        self._remote = remote
        self._folders_at_a_time = folders_at_a_time
        self._names_at_a_time = names_at_a_time
        self._is_in_answers = True if urls.scheme(directory) in SCHEMES else None

    def files(self) -> Iterator[SourceFile]:
        """Yield all files, at any depth, in any order; `url` is the path relative to the directory."""
        if not urls.is_remote(self.directory):
            yield from self._local_files()
            return
        with named_errors(self.directory):
            for info in self._remote.list(self.directory):
                name = info.url.removeprefix(self.directory)
                if name and not name.endswith("/"):  # placeholders of empty directories
                    yield SourceFile(url=name, size_bytes=info.size_bytes, etag=info.version)

    def version_in_answers(self, file: SourceFile) -> str | None:
        """Return the version of a listed file if answers to requests for it name the same one; else each would be a change.

        Of object stores that is known; of other file systems the first file with a version is asked for.
        """
        if not has_own_version(file.etag):
            return None
        if self._is_in_answers is None:
            self._is_in_answers = False  # also where it may not be asked for: else each file would be
            with contextlib.suppress(StorageError):
                self._is_in_answers = self._remote.head(self.directory + file.url).version == file.etag
        return file.etag if self._is_in_answers else None

    def version(self) -> tuple[str, int]:
        """Return a digest of all files with their versions, and their number; the order of listing does not matter."""
        census = Census()
        for file in self.files():
            census.add(file)
        return census.version

    def _local_files(self) -> Iterator[SourceFile]:
        root = str(urls.local_path(self.directory).absolute())
        with named_errors(self.directory), ThreadPoolExecutor(_LISTED_AT_A_TIME, thread_name_prefix="list") as pool:
            seen: set[tuple[int, int]] = set()  # links to directories are followed, each directory is walked once
            level = [root]
            while level:  # level by level, in order: so it is always the same one that is the second
                below: list[str] = []
                for start in range(0, len(level), self._folders_at_a_time):
                    for found in pool.map(_scan, level[start : start + self._folders_at_a_time]):
                        if found.identity in seen:
                            continue
                        seen.add(found.identity)
                        below += found.folders
                        some = range(0, len(found.names), self._names_at_a_time)
                        pieces = [found.names[first : first + self._names_at_a_time] for first in some]
                        for files in pool.map(partial(_versions, root, found.path), pieces):
                            yield from files
                level = below


class _SampleFolder(NamedTuple):
    """What is in a directory."""

    path: str
    identity: tuple[int, int]
    folders: list[str]
    """Paths, sorted."""
    names: list[str]
    """Of what is no directory."""


def _scan(path: str) -> _SampleFolder:
    status = os.stat(path)
    folders, names = [], []
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                is_folder = entry.is_dir()
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                continue  # a link to itself leads nowhere
            if is_folder:
                folders.append(entry.path)
            else:
                names.append(entry.name)
    return _SampleFolder(path, (status.st_dev, status.st_ino), sorted(folders), names)


def _versions(root: str, folder: str, names: Sequence[str]) -> list[SourceFile]:
    """Return those of `names` that are files, with their versions."""
    files = []
    place = os.path.relpath(folder, root) + "/" if folder != root else ""
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # a link to nowhere, or a file that has just gone
            status = os.stat(f"{folder}/{name}")
            if stat.S_ISREG(status.st_mode):
                files.append(SourceFile(url=place + name, size_bytes=status.st_size, etag=str(status.st_mtime_ns)))
    return files


class Census:
    """A digest over files in any order, and their number."""

    def __init__(self) -> None:
        self._total = self._count = 0
        self._has_dotted_names = False

    def add(self, file: SourceFile) -> None:
        """Take one more file in."""
        self._total = (self._total + _digest(file)) % (1 << _DIGEST_BITS)
        self._count += 1
        name = file.url.rpartition("/")[2]
        self._has_dotted_names |= name.count(".", 1) > 1

    @property
    def version(self) -> tuple[str, int]:
        """Digest and number; the digest also says whether names with several dots may be grouped by the last one."""
        grouping = "-last-dot" if self._has_dotted_names else ""  # all others keep the index that they have
        return f"{self._total:032x}{grouping}", self._count


def _digest(file: SourceFile) -> int:
    text = f"{file.url}\0{file.size_bytes}\0{file.etag}".encode("utf-8", "surrogateescape")
    return int.from_bytes(blake2b(text, digest_size=_DIGEST_BITS // 8).digest(), "big")
