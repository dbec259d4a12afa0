"""A directory of samples: files that share the name before the first dot are one sample, as in WebDataset and `sds`.

    a/001.jpg  a/001.txt  a/002.png   →   index | jpg       | png       | txt       | image
                                          001   | a/001.jpg | None      | a/001.txt | a/001.jpg
                                          002   | None      | a/002.png | None      | a/002.png

The column of the main type's name (`image`) is the first file of that type. Where the folders look like classes (all samples
lie in folders of one depth, with several names, and none has files in two of them) the column `label` has the name of each
sample's folder; names that come twice are then told apart by their folders, as with `label_column`.

Files of a group without a file of the main type are grouped once more, by the name before the last dot: IMG.2024.01.jpg is a
picture, and not the part `2024.01.jpg` of a sample without a picture. One warning names what belongs to no sample then.

Values are paths relative to the directory. Names are grouped and sorted in a temporary SQLite file, so memory is flat.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from sqlstream.errors import SourceChangedError, SourceError
from sqlstream.index.file.connection import GuardedConnection
from sqlstream.index.sources.base.base import BATCH_ROWS
from sqlstream.index.sources.places.listing import Census, Listing
from sqlstream.index.types.models import SourceFile
from sqlstream.sample_types import DataSampleType
from sqlstream.storage.base import urls

logger = logging.getLogger(__name__)

KEY = "index"
"""The key column of a directory, as in `sds`."""
LABEL = "label"
"""The column for the names of folders that look like classes, unless files have this extension."""
LAYOUT = 2
"""Grows with the columns that directories have; index files of an earlier layout are built again."""
_EVERY = "(SELECT key, ext, folder FROM file UNION ALL SELECT key, ext, folder FROM twin)"
_MAX_EXTENSIONS = 500  # arbitrary, below SQLite's 2000 columns: more is a naming scheme that puts dots into keys


class DirectoryTable:
    """The samples of a listing as a table; made anew for each build.

    Args:
        listing: The files.
        kind: Samples are the keys that own a file of this type.
        temporary: A path for the sorting; removed by `close`.
        label_column: A column for the name of each sample's folder; keys are then paths, so that cat/1.jpg is not dog/1.jpg.
            None: `label` where folders look like classes.
    """

    def __init__(self, listing: Listing, kind: DataSampleType, temporary: Path, label_column: str | None = None) -> None:
        self._label = label_column
        self._main_column: str | None = kind.value
        """The column of the first file of the main type."""
        self._has_paths_as_keys = label_column is not None
        self.row_rule: str | None = None
        """Names the rule by which rows are others than those that earlier versions made of the same listing; None: the same."""
        self._listing, self._kind, self._path = listing, kind, temporary
        self._name = urls.redact(listing.directory)
        self._db = sqlite3.connect(temporary, isolation_level=None, factory=GuardedConnection)
        self._db.execute("PRAGMA journal_mode=OFF")
        self._db.execute("PRAGMA synchronous=OFF")
        columns = "key TEXT, ext TEXT, path TEXT, folder TEXT"
        self._db.execute(f"CREATE TABLE file ({columns}, PRIMARY KEY (key, ext)) WITHOUT ROWID")
        self._db.execute(f"CREATE TABLE twin ({columns}, PRIMARY KEY (key, ext, path)) WITHOUT ROWID")
        self._db.execute("CREATE TABLE sample (key TEXT PRIMARY KEY) WITHOUT ROWID")
        self._db.create_function("label", 1, _label_of, deterministic=True)
        marks = ", ".join("?" * len(kind.extensions))
        self._main, self._main_extensions = f"ext IN ({marks})", sorted(kind.extensions)
        self._db.execute("CREATE TABLE bare (path TEXT)")
        self._db.execute("CREATE TABLE said (path TEXT PRIMARY KEY, size_bytes INTEGER, etag TEXT) WITHOUT ROWID")

    def read(self, version: tuple[str, int]) -> None:
        """Take all files in; `version` is what `Listing.version` said.

        Raises:
            SourceError: Two files have the same key and extension, or no key owns a file of the main type.
            SourceChangedError: The directory is no longer that version.
        """
        census = Census()
        self._db.execute("BEGIN")
        for file in self._listing.files():
            census.add(file)
            self._note(file)
            if not self._take(file.url) and not file.url.rpartition("/")[2].startswith("."):  # else it is hidden
                self._db.execute("INSERT INTO bare VALUES (?)", (file.url.encode(errors="replace").decode(),))
        self._group_again()
        if self._label is None:
            self._find_labels()
        if self._main_column in (*self._extensions(), self._label):
            self._main_column = None
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
        extensions = self._extensions()
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
        added = [name for name in (self._label, self._main_column) if name is not None]
        return pa.schema([pa.field(name, pa.string()) for name in (KEY, *extensions, *added)])

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the samples, sorted by key."""
        files = self._db.execute("SELECT key, ext, path FROM file JOIN sample USING (key) ORDER BY key, ext")
        samples = (
            self._made(key, {ext: path for _, ext, path in rows}) for key, rows in groupby(files, key=lambda row: str(row[0]))
        )
        while rows := list(islice(samples, BATCH_ROWS)):
            arrays = [pa.array([row.get(name) for row in rows], pa.string()) for name in names]
            yield pa.RecordBatch.from_arrays(arrays, names=list(names))

    def listed(self) -> Iterator[str]:
        """Yield for each sample, sorted by key, what a remote listing says of its files: JSON, `{column: [bytes, etag]}`."""
        if not urls.is_remote(self._listing.directory):  # local files are read in place
            return
        files = self._db.execute(
            "SELECT key, ext, size_bytes, etag FROM file JOIN sample USING (key) LEFT JOIN said USING (path) ORDER BY key, ext"
        )
        for _, rows in groupby(files, key=lambda row: str(row[0])):
            said = {ext: [size_bytes, etag] for _, ext, size_bytes, etag in rows}
            if self._main_column is not None:
                said[self._main_column] = said[self._first_of(said)]
            yield json.dumps(said, separators=(",", ":"))

    def close(self) -> None:
        """Remove the temporary file."""
        self._db.close()
        self._path.unlink(missing_ok=True)

    def _made(self, key: str, paths: Mapping[str | None, str]) -> dict[str | None, str]:
        """Return the sample of a key by column."""
        main = paths[self._first_of(paths)]
        return {KEY: key, self._label: _label_of(main.rpartition("/")[0]), self._main_column: main, **paths}

    def _first_of(self, extensions: Iterable[Any]) -> Any:
        return next(extension for extension in extensions if extension in self._kind.extensions)

    def _extensions(self) -> list[str]:
        """Return the extensions of the files of samples."""
        return [ext for (ext,) in self._db.execute("SELECT DISTINCT ext FROM file JOIN sample USING (key) ORDER BY ext")]

    def _find_samples(self) -> int:
        """Find the keys that own a file of the main type; return their number."""
        self._db.execute(
            f"INSERT OR IGNORE INTO sample SELECT DISTINCT key FROM file WHERE {self._main}", self._main_extensions
        )
        return int(self._db.execute("SELECT count(*) FROM sample").fetchone()[0])

    def _group_again(self) -> None:
        """Give the files of groups without a main file the key before the last dot of their names."""
        self._find_samples()
        self._db.execute("CREATE TEMP TABLE stray (path TEXT)")
        for table in ("file", "twin"):
            self._db.execute(f"INSERT INTO stray SELECT path FROM {table} WHERE key NOT IN sample AND instr(ext, '.')")
            self._db.execute(f"DELETE FROM {table} WHERE key NOT IN sample AND instr(ext, '.')")
        for (path,) in self._db.execute("SELECT path FROM stray ORDER BY path"):
            key, _, extension = path.rpartition("/")[2].rpartition(".")
            self._add(key, extension, path)
        self._db.execute("DROP TABLE stray")

    def _find_labels(self) -> None:
        """Take the names of folders for labels if they look like classes, and paths for keys if names come twice there.

        Raises:
            SourceError: Names come twice in folders that are no classes.
        """
        self._find_samples()
        twin = self._db.execute("SELECT key, ext, path FROM twin ORDER BY key, ext, path").fetchone()
        if not self._look_like_classes():
            if twin is not None:
                raise self._same_key(*twin)
            return
        self._label = None if LABEL in self._extensions() else LABEL
        if not self._are_joined():
            return
        self._has_paths_as_keys = True
        self.row_rule = None if twin else "paths"  # earlier versions refused twins, and took 1.jpg and 1.png for one sample
        self._db.execute("CREATE TABLE known AS SELECT path FROM file UNION ALL SELECT path FROM twin")
        for table in ("file", "twin", "sample"):
            self._db.execute(f"DELETE FROM {table}")
        for (path,) in self._db.execute("SELECT path FROM known ORDER BY path"):
            self._take(path)
        self._group_again()
        self._db.execute("DROP TABLE known")

    def _look_like_classes(self) -> bool:
        """Return whether all main files lie in folders of one depth and several names, which hold no parts of one sample.

        Folders hold such parts if other files join the main one of another folder (`images/1.jpg`, `captions/1.txt`), or if
        each has an extension of its own (`images/1.jpg`, `masks/1.png`).
        """
        every = _EVERY
        depth = "length(folder) - length(replace(folder, '/', '')) + (folder <> '')"
        facts = f"min({depth}), max({depth}), count(DISTINCT label(folder)), count(DISTINCT ext)"
        least, most, num_labels, num_extensions = self._db.execute(
            f"SELECT {facts} FROM {every} WHERE {self._main}", self._main_extensions
        ).fetchone()
        if not num_labels or num_labels < 2 or least != most or not least:
            return False
        kinds = f"SELECT count(DISTINCT ext) AS own FROM {every} WHERE {self._main} GROUP BY folder"
        (most_in_one,) = self._db.execute(f"SELECT max(own) FROM ({kinds})", self._main_extensions).fetchone()
        if most_in_one == 1 and num_extensions > 1 and self._are_joined():
            return False
        beside = " AND ".join(
            f"NOT EXISTS (SELECT 1 FROM {table} AS own WHERE own.key = part.key AND own.folder = part.folder AND {self._main})"
            for table in ("file", "twin")
        )
        apart = f"SELECT 1 FROM {every} AS part WHERE key IN sample AND NOT ({self._main}) AND {beside} LIMIT 1"
        return self._db.execute(apart, self._main_extensions * 3).fetchone() is None

    def _are_joined(self) -> bool:
        """Return whether some name has main files in several folders."""
        names = f"SELECT 1 FROM {_EVERY} WHERE {self._main} GROUP BY key HAVING count(DISTINCT folder) > 1 LIMIT 1"
        return self._db.execute(names, self._main_extensions).fetchone() is not None

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
        """Keep what a remote listing says of a file."""
        if urls.is_remote(self._listing.directory):
            etag = self._listing.version_in_answers(file)
            self._db.execute("INSERT OR IGNORE INTO said VALUES (?, ?, ?)", (file.url, file.size_bytes, etag))

    def _take(self, path: str) -> bool:
        """Take in a file under its name before the first dot; return False if it has no such name or no extension."""
        key, _, extension = path.rpartition("/")[2].partition(".")
        if key and extension:
            self._add(key, extension, path)
        return bool(key and extension)

    def _add(self, name: str, extension: str, path: str) -> None:
        """Take in one file; the key may hold the folder."""
        folder, slash, _ = path.rpartition("/")
        key, extension = folder + slash + name if self._has_paths_as_keys else name, extension.lower()
        try:
            self._db.execute("INSERT INTO file VALUES (?, ?, ?, ?)", (key, extension, path, folder))
        except sqlite3.IntegrityError:
            if self._has_paths_as_keys:
                raise self._same_key(key, extension, path) from None
            self._db.execute("INSERT INTO twin VALUES (?, ?, ?, ?)", (key, extension, path, folder))
        except UnicodeEncodeError as error:
            raise SourceError(f"{self._name}: the name {path!r} is not UTF-8: rename it") from error

    def _same_key(self, key: str, extension: str, path: str) -> SourceError:
        """Return the error of a file whose key and extension another one has."""
        other = self._db.execute("SELECT path FROM file WHERE key = ? AND ext = ?", (key, extension)).fetchone()[0]
        one, two = sorted((other, path))
        cure = "rename one"
        if not self._has_paths_as_keys:
            cure = "pass source_options={'label_column': 'label'}, which names samples by their folders, too, rename one"
        return SourceError(
            f"{self._name}: {one} and {two} have the same key {key!r} and extension {extension!r}: {cure}, "
            "or list the files in a table"
        )


def _label_of(folder: str) -> str:
    """Return the name of a folder."""
    return folder.rpartition("/")[2]
