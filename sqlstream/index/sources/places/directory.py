"""A directory of samples: files that share the name before the first dot are one sample, as in WebDataset and `sds`.

    a/001.jpg  a/001.txt  a/002.jpg   →   index | jpg       | txt
                                          001   | a/001.jpg | a/001.txt
                                          002   | a/002.jpg | None

Files of a group without a file of the main type are grouped once more, by the name before the last dot: IMG.2024.01.jpg is a
picture, and not the part `2024.01.jpg` of a sample without a picture. One warning names what belongs to no sample then.

Values are paths relative to the directory. Names are grouped and sorted in a temporary SQLite file, so memory is flat.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from sqlstream.errors import SourceChangedError, SourceError
from sqlstream.index.sources.base.access import named_errors
from sqlstream.index.sources.base.base import BATCH_ROWS
from sqlstream.index.types.models import SourceFile
from sqlstream.sample_types import DataSampleType
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader, has_own_version
from sqlstream.storage.base.settings import SCHEMES

logger = logging.getLogger(__name__)

KEY = "index"
"""The key column of a directory, as in `sds`."""
_MAX_EXTENSIONS = 500  # arbitrary, below SQLite's 2000 columns: more is a naming scheme that puts dots into keys
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

    def version(self) -> tuple[str, int]:
        """Return a digest of all files with their versions, and their number; the order of listing does not matter."""
        census = _Census()
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
            if entry.is_dir():
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


class _Census:
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


class DirectoryTable:
    """The samples of a listing as a table; made anew for each build.

    Args:
        listing: The files.
        kind: Samples are the keys that own a file of this type.
        temporary: A path for the sorting; removed by `close`.
        label_column: A column for the name of each sample's folder; keys are then paths, so that cat/1.jpg is not dog/1.jpg.
    """

    def __init__(self, listing: Listing, kind: DataSampleType, temporary: Path, label_column: str | None = None) -> None:
        self._label = label_column
        self._listing, self._kind, self._path = listing, kind, temporary
        self._name = urls.redact(listing.directory)
        self._db = sqlite3.connect(temporary, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=OFF")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.execute("CREATE TABLE file (key TEXT, ext TEXT, path TEXT, PRIMARY KEY (key, ext)) WITHOUT ROWID")
        self._db.execute("CREATE TABLE bare (path TEXT)")
        self._db.execute("CREATE TABLE said (path TEXT PRIMARY KEY, size_bytes INTEGER, etag TEXT) WITHOUT ROWID")

    def read(self, version: tuple[str, int]) -> None:
        """Take all files in; `version` is what `Listing.version` said.

        Raises:
            SourceError: Two files have the same key and extension, or no key owns a file of the main type.
            SourceChangedError: The directory is no longer that version.
        """
        census = _Census()
        self._db.execute("BEGIN")
        for file in self._listing.files():
            census.add(file)
            self._note(file)
            name = file.url.rpartition("/")[2]
            key, _, extension = name.partition(".")
            if key and extension:
                self._add(key, extension, file.url)
            elif key:  # else it is hidden
                self._db.execute("INSERT INTO bare VALUES (?)", (file.url.encode(errors="replace").decode(),))
        self._group_again()
        self._db.execute("COMMIT")
        if census.version != version:
            raise SourceChangedError(
                f"{self._name} changed while it was indexed: wait until its writer is done, and start again"
            )
        if not self._find_samples():
            wanted = ", ".join(sorted(self._kind.extensions)[:12])
            raise SourceError(
                f"{self._name} holds {version[1]} files but no {self._kind} ({wanted}, …): check src and data_type"
            )
        self._warn_of_strays()

    def schema(self) -> pa.Schema:
        """Return the key column and one text column for each extension."""
        extensions = [ext for (ext,) in self._db.execute("SELECT DISTINCT ext FROM file JOIN sample USING (key) ORDER BY ext")]
        if KEY in extensions:
            path = self._db.execute("SELECT path FROM file JOIN sample USING (key) WHERE ext = ?", (KEY,)).fetchone()[0]
            raise SourceError(f"{self._name}: {path} has the extension of the key column {KEY!r}: rename it")
        if self._label in (KEY, *extensions):
            raise SourceError(f"{self._name}: label_column={self._label!r} is a column of the samples: give it another name")
        if len(extensions) > _MAX_EXTENSIONS:
            some = ", ".join(repr(ext) for ext in extensions[:3])
            raise SourceError(
                f"{self._name} has {len(extensions)} different extensions ({some}, …), and each would be a column. "
                "A sample's key ends at the first dot of the name: rename the files, or list them in a table"
            )
        labels = () if self._label is None else (self._label,)
        return pa.schema([pa.field(name, pa.string()) for name in (KEY, *extensions, *labels)])

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the samples, sorted by key."""
        files = self._db.execute("SELECT key, ext, path FROM file JOIN sample USING (key) ORDER BY key")
        samples = (
            {KEY: key, self._label: key.rpartition("/")[0].rpartition("/")[2]} | {ext: path for _, ext, path in rows}
            for key, rows in groupby(files, key=lambda row: str(row[0]))
        )
        while rows := list(islice(samples, BATCH_ROWS)):
            arrays = [pa.array([row.get(name) for row in rows], pa.string()) for name in names]
            yield pa.RecordBatch.from_arrays(arrays, names=list(names))

    def listed(self) -> Iterator[str]:
        """Yield for each sample, sorted by key, what a remote listing says of its files: JSON, `{column: [bytes, etag]}`."""
        if not urls.is_remote(self._listing.directory):  # local files are read in place
            return
        files = self._db.execute(
            "SELECT key, ext, size_bytes, etag FROM file JOIN sample USING (key) LEFT JOIN said USING (path) ORDER BY key"
        )
        for _, rows in groupby(files, key=lambda row: str(row[0])):
            yield json.dumps({ext: [size_bytes, etag] for _, ext, size_bytes, etag in rows}, separators=(",", ":"))

    def close(self) -> None:
        """Remove the temporary file."""
        self._db.close()
        self._path.unlink(missing_ok=True)

    def _find_samples(self) -> int:
        """Find the keys that own a file of the main type; return their number."""
        self._db.execute("CREATE TABLE IF NOT EXISTS sample (key TEXT PRIMARY KEY) WITHOUT ROWID")
        marks = ", ".join("?" * len(self._kind.extensions))
        self._db.execute(
            f"INSERT OR IGNORE INTO sample SELECT DISTINCT key FROM file WHERE ext IN ({marks})", sorted(self._kind.extensions)
        )
        return int(self._db.execute("SELECT count(*) FROM sample").fetchone()[0])

    def _group_again(self) -> None:
        """Give the files of groups without a main file the key before the last dot of their names."""
        self._find_samples()
        self._db.execute("CREATE TEMP TABLE stray AS SELECT path FROM file WHERE key NOT IN sample AND instr(ext, '.')")
        self._db.execute("DELETE FROM file WHERE key NOT IN sample AND instr(ext, '.')")
        for (path,) in self._db.execute("SELECT path FROM stray ORDER BY path"):
            key, _, extension = path.rpartition("/")[2].rpartition(".")
            self._add(key, extension, path)

    def _warn_of_strays(self) -> None:
        """Say which files belong to no sample."""
        strays = "(SELECT path FROM file WHERE key NOT IN sample UNION ALL SELECT path FROM bare)"
        (count,) = self._db.execute(f"SELECT count(*) FROM {strays}").fetchone()
        if count:
            some = self._db.execute(f"SELECT path FROM {strays} ORDER BY path LIMIT 3").fetchall()
            logger.warning(
                "%s: %d files belong to no sample, since none of type %s shares their name: %s%s. Rename them, or list the "
                "samples in a table, if they should be part of one",
                self._name, count, self._kind, ", ".join(path for (path,) in some), ", …" if count > len(some) else "",
            )  # fmt: skip

    def _note(self, file: SourceFile) -> None:
        """Keep what a remote listing says of a file; ETags only of object stores, whose answers name the same ones."""
        if urls.is_remote(self._listing.directory):
            is_store = urls.scheme(self._listing.directory) in SCHEMES and has_own_version(file.etag)
            etag = file.etag if is_store else None
            self._db.execute("INSERT OR IGNORE INTO said VALUES (?, ?, ?)", (file.url, file.size_bytes, etag))

    def _add(self, name: str, extension: str, path: str) -> None:
        """Take in one file; with a label column the key holds the folder."""
        folder, slash, _ = path.rpartition("/")
        key, extension = name if self._label is None else folder + slash + name, extension.lower()
        try:
            self._db.execute("INSERT INTO file VALUES (?, ?, ?)", (key, extension, path))
        except sqlite3.IntegrityError:
            other = self._db.execute("SELECT path FROM file WHERE key = ? AND ext = ?", (key, extension)).fetchone()[0]
            one, two = sorted((other, path))
            raise SourceError(
                f"{self._name}: {one} and {two} have the same key {key!r} and extension {extension!r}: "
                "names must be unique over all sub-directories, so rename one, or list the files in a table"
            ) from None
        except UnicodeEncodeError as error:
            raise SourceError(f"{self._name}: the name {path!r} is not UTF-8: rename it") from error


def _digest(file: SourceFile) -> int:
    text = f"{file.url}\0{file.size_bytes}\0{file.etag}".encode("utf-8", "surrogateescape")
    return int.from_bytes(blake2b(text, digest_size=_DIGEST_BITS // 8).digest(), "big")
