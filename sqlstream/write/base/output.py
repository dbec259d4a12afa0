"""Where the files of one writing go: a directory, a URL, or both. An index is the last that gets there.

    part file   .NAME.part in the local directory         while a shard is written
    stored      renamed to NAME; or uploaded, and compared with what the server then has
    noted       in the journal, so that a writing that ended early can go on
    index       when all shards are stored: what ended early has none, and claims nothing

Shards are stored by threads, some at a time; `store` waits when twice as many are under way, which bounds the local disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlstream.errors import OutputExistsError, SqlStreamError, StorageError
from sqlstream.storage.base import urls
from sqlstream.storage.base.checksum import md5_of
from sqlstream.storage.base.protocols import ObjectInfo
from sqlstream.storage.base.unfinished import JOURNAL_NAME
from sqlstream.storage.fetcher import Fetcher
from sqlstream.write.base.disk import temporary_disk
from sqlstream.write.base.journal import (
    LocalJournal,
    Progressed,
    RemoteJournal,
    SourcePoint,
    StoredShard,
    WriteJournal,
    check_settings,
    has_object,
    parse_journal,
    put_bytes,
    read_text,
)
from sqlstream.write.base.options import Out, WriteOptions
from sqlstream.write.base.place import OutputPlace, place_of

_LOG = logging.getLogger(__name__)
_CURE = "write elsewhere, or say exist_ok to write over it"
IndexFiles = Callable[[Sequence[StoredShard]], Mapping[str, bytes]]
"""From the stored shards to the files of the index, in the order in which they are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedShard:
    """A shard whose part files are complete."""

    num_samples: int
    files: Mapping[str, int]
    """Sizes in bytes by name."""
    record: Mapping[str, Any]
    """What the index of the format needs of it."""


class Output:
    """Stores the files of one writing. `open` makes it ready.

    Args:
        out: Where they go.
        options: How.
        settings: What a resumed writing must have in common with the one that ended early.
        index_names: Names of the files of the index.
    """

    def __init__(self, out: Out, options: WriteOptions, settings: Mapping[str, Any], index_names: Sequence[str]) -> None:
        self.place = place_of(out).part(options.part_name)
        """Where they go."""
        self._out, self._options, self._settings, self._index_names = out, options, settings, index_names
        self._remote = None if self.place.remote is None else options.remote or Fetcher(options.storage)
        self._directory = self.place.local
        self._keeps_local = self.place.remote is None or (options.keep_local and self.place.local is not None)
        self._claim: LocalJournal | None = None
        """The lock of the local directory; its journal too, where there is no store."""
        self._journal: WriteJournal | None = None
        self._is_ours = False
        self._stored: dict[int, StoredShard] = {}
        self._etags: dict[str, str | None] = {}
        """ETags of the objects that were stored, by name."""
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(2 * options.num_uploads)
        self._pool = ThreadPoolExecutor(options.num_uploads, thread_name_prefix="sqlstream-write")
        self._futures: list[Future[None]] = []

    def open(self, empty_index: Mapping[str, bytes]) -> tuple[StoredShard, ...]:
        """Make the output ready, and return the shards that are there already (`resume`).

        Args:
            empty_index: An index without shards: it takes the place of an earlier one that is written over in a store.

        Raises:
            OutputExistsError: Something is there.
            ConfigError: What is there cannot be resumed.
        """
        if self._directory is None:
            with temporary_disk(f"shards of {self.place} wait there for their upload"):
                self._directory = Path(tempfile.mkdtemp(prefix="sqlstream-write-"))
        else:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                raise OutputExistsError(
                    f"{self._directory} cannot be made, a file is in its place or above it: write elsewhere"
                ) from error
        if self.place.local is not None:  # first of all: who is refused takes nothing away from the process that writes there
            is_kept = bool(self._options.source)  # a second writing of the same source then knows it
            self._claim = LocalJournal(self._directory, is_kept=is_kept)
        if self._remote is None:
            self._journal = self._claim
        found = self._progress() if self._options.resume else None
        if found is not None:
            check_settings(found.settings, self._settings, str(self.place))
            if found.is_complete and self._has_files(empty_index):
                text = f"{self.place} is complete: there is nothing to resume; say exist_ok to write anew"
                raise OutputExistsError(text, is_complete=True)
        else:
            self._check_free(empty_index)
        shards = () if found is None else self._present(found.shards)
        self._begin(shards, is_resumed=found is not None)
        self._retract(empty_index)  # behind the journal, which would else call complete what has no index any more
        self._stored = {shard.number: shard for shard in shards}
        return shards

    def _begin(self, shards: Sequence[StoredShard], *, is_resumed: bool) -> None:
        """Have the journal say that a writing has begun, or goes on."""
        if self._remote is not None and self.place.remote is not None:
            self._journal = RemoteJournal(self.place.remote, self._remote, self._settings, shards)
        elif isinstance(self._journal, LocalJournal):
            if is_resumed:
                self._journal.resume(len(shards))
            else:
                self._journal.begin(self._settings)
        self._is_ours = True

    def _progress(self) -> Progressed | None:
        """Return what the journal there says; None: there is none."""
        if isinstance(self._journal, LocalJournal):
            text: str | None = self._journal.text
        else:
            text = read_text(self._remote, f"{self.place.remote}{JOURNAL_NAME}")
        if text is None or "\n" not in text:  # the writing ended before its first line
            return None
        return parse_journal(text, f"{self.place}: its journal")

    def _has_files(self, names: Iterable[str]) -> bool:
        """Return whether files are there: of a writing that ended as it began to write over another, the index is not."""
        if self._remote is not None:
            return all(has_object(self._remote, f"{self.place.remote}{name}") for name in names)
        return all((self._local / name).exists() for name in names)

    def _check_free(self, empty_index: Mapping[str, bytes]) -> None:
        """Raise if something is there, unless that is allowed, and an index can be taken away."""
        if self.place.local is not None and not self._options.exist_ok:
            names = [name for name in os.listdir(self._local) if not _is_part(name) and name != JOURNAL_NAME]
            has_begun = isinstance(self._journal, LocalJournal) and "\n" in self._journal.text
            if names or has_begun:
                raise OutputExistsError(f"{self._local} is not empty{self._cure(has_journal=has_begun)}")
        for place, name in self._claims():
            is_here = place.local is not None and name != JOURNAL_NAME and (place.local / name).exists()
            is_stored = self._remote is not None and has_object(self._remote, f"{place.remote}{name}")
            if (is_here or is_stored) and not self._options.exist_ok:
                where = place.local / name if is_here and place.local is not None else f"{place}{name}"
                raise OutputExistsError(f"{where} is there{self._cure(has_journal=name == JOURNAL_NAME)}")
            if is_stored and name not in empty_index and name != JOURNAL_NAME:
                raise OutputExistsError(f"{place}{name} would name what was there before: remove it, or write elsewhere")

    def _cure(self, *, has_journal: bool) -> str:
        if self._options.resume:
            return f", and has no journal of a writing that ended early: {_CURE}"
        return f": {_CURE}, or resume to go on with a writing that ended early" if has_journal else f": {_CURE}"

    def _claims(self) -> list[tuple[OutputPlace, str]]:
        """Return the files that say what is there, with their places: the journal, the index, that of merged parts."""
        claims = [(self.place, name) for name in self._index_names]
        if self.place.remote is not None:
            claims = [(self.place, JOURNAL_NAME), *claims]
        if self._options.part is not None:  # what was merged before names shards that are written over now
            claims += [(place_of(self._out), name) for name in self._index_names]
        return claims

    def _retract(self, empty_index: Mapping[str, bytes]) -> None:
        """Remove an index; a store removes nothing: there an empty index replaces it."""
        for place, name in self._claims():
            if name == JOURNAL_NAME:
                continue
            if place.local is not None:
                (place.local / name).unlink(missing_ok=True)
            if self._remote is not None and name in empty_index and has_object(self._remote, f"{place.remote}{name}"):
                put_bytes(self._remote, f"{place.remote}{name}", empty_index[name])

    def _present(self, shards: Sequence[StoredShard]) -> tuple[StoredShard, ...]:
        """Return the first shards whose files are there, with their sizes: in the store, and where they are kept locally."""
        places = [self._sizes()]
        if self._remote is not None and self._keeps_local:  # another machine may have begun, or have lost its disk
            places.append(self._local_sizes())
        present: list[StoredShard] = []
        for shard in shards:
            if any(sizes.get(name) != size for sizes in places for name, size in shard.files.items()):
                break
            present.append(shard)
        return tuple(present)

    def _sizes(self) -> dict[str, int | None]:
        """Return the sizes of the files that are stored, by name."""
        if self._remote is not None:
            return {name: info.size_bytes for name, info in self._objects().items()}
        return self._local_sizes()

    def _local_sizes(self) -> dict[str, int | None]:
        files = (entry for entry in os.scandir(self._local) if not _is_part(entry.name) and entry.is_file())
        return {entry.name: entry.stat().st_size for entry in files}

    def _objects(self) -> dict[str, ObjectInfo]:
        """Return the objects that are stored, by name."""
        assert self._remote is not None
        assert self.place.remote is not None
        prefix = self.place.remote
        return {info.url.removeprefix(prefix): info for info in self._remote.list(prefix)}

    @property
    def _local(self) -> Path:
        assert self._directory is not None, "open() comes first"
        return self._directory

    def part_path(self, name: str) -> Path:
        """Return where a file is written, until it is stored under its name."""
        return self._local / f".{name}.part"

    def store(self, number: int, shard: FinishedShard, point: SourcePoint | None = None) -> None:
        """Have the part files of a shard stored; wait while too many shards are under way.

        Args:
            number: Of the shard.
            shard: Its files.
            point: Where the source goes on behind it.

        Raises:
            StorageError: An earlier one could not be stored.
        """
        self._slots.acquire()
        self._raise_failure()
        self._futures = [future for future in self._futures if not future.done() or future.exception() is not None]
        self._futures.append(self._pool.submit(self._store, number, shard, point))

    def _raise_failure(self) -> None:
        for future in self._futures:
            if future.done() and (error := future.exception()) is not None:
                raise error

    def _store(self, number: int, shard: FinishedShard, point: SourcePoint | None) -> None:
        try:
            if (
                self._keeps_local and len(shard.files) > 1
            ):  # of a shard that is written over: one file would contradict the other
                for name in reversed(tuple(shard.files)):
                    (self._local / name).unlink(missing_ok=True)
            for name, size in shard.files.items():
                self._store_file(name, size)
            stored = StoredShard(
                number=number, num_samples=shard.num_samples, files=shard.files, record=shard.record, point=point
            )
            with self._lock:
                assert self._journal is not None
                self._stored[number] = stored
                self._journal.add(stored)
        finally:
            self._slots.release()

    def _store_file(self, name: str, size: int) -> None:
        path = self.part_path(name)
        if self._remote is not None:
            self._etags[name] = self._upload(path, f"{self.place.remote}{name}", size)
        if self._keeps_local:
            _sync(path)
            path.replace(self._local / name)
        else:
            path.unlink()

    def _upload(self, path: Path, url: str, size: int) -> str | None:
        """Store a file as an object, compare what the server has then, and return its ETag.

        Raises:
            StorageError: It has another one.
        """
        assert self._remote is not None
        self._remote.upload(path, url)
        info = self._remote.head(url)
        where = urls.redact(url)
        if info.size_bytes is not None and info.size_bytes != size:
            raise StorageError(
                f"{where} has {info.size_bytes} bytes, {size} were stored: something else writes there", url=where
            )
        expected = md5_of(info.etag) if self._options.storage_options.get("verify_etag") else None
        if expected is not None:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            if digest != expected:
                raise StorageError(
                    f"{where} has the MD5 {expected}, the file that was stored {digest}: store it again", url=where
                )
        return info.etag

    def finish(self, index_files: IndexFiles, store_beside: Callable[[], None]) -> tuple[StoredShard, ...]:
        """Wait until all shards are stored, then store the index and what comes behind it, and return the shards.

        Args:
            index_files: Makes the index.
            store_beside: Stores more files, before the writing counts as complete.

        Raises:
            StorageError: A shard or the index could not be stored. What is stored can be resumed.
        """
        self._pool.shutdown(wait=True)
        self._raise_failure()
        shards = tuple(self._stored[number] for number in sorted(self._stored))
        self._check_alone(shards)
        self._warn_of_others(shards)
        for name, content in index_files(shards).items():
            path = self.part_path(name)
            path.write_bytes(content)
            self._store_file(name, len(content))
        store_beside()
        assert self._journal is not None
        self._remove_parts()
        self._journal.complete()
        self._close()
        return shards

    def _check_alone(self, shards: Sequence[StoredShard]) -> None:
        """Raise if another writer has begun in the same store, or has put its objects in the place of ours.

        Raises:
            OutputExistsError: It has begun.
            StorageError: An object is not the one that was stored.
        """
        assert self._journal is not None
        self._journal.check()
        if self._remote is None:
            return
        objects = self._objects()
        for name, size in (file for shard in shards for file in shard.files.items()):
            info, stored = objects.get(name), self._etags.get(name)
            if info is None or info.size_bytes not in (None, size) or (stored and info.etag and info.etag != stored):
                where = f"{self.place}{name}"
                raise StorageError(
                    f"{where} is not what was stored: another process writes there as well; give each a place of its own, and "
                    "write this one again",
                    url=where,
                )

    def _warn_of_others(self, shards: Sequence[StoredShard]) -> None:
        """Say which files an earlier writing left: a reader that goes by names would take them for this dataset's."""
        if not shards or not (self._options.exist_ok or self._options.resume):  # what is resumed may have begun over others
            return
        written = {name for shard in shards for name in shard.files}
        kinds = {urls.extension(name) for name in written}
        others = sorted(name for name in self._sizes() if name not in written and urls.extension(name) in kinds)
        if others:
            _LOG.warning(
                "%s has %d files that this writing did not make, such as %s: remove them, unless they belong there",
                self.place,
                len(others),
                others[0],
            )

    def abandon(self) -> None:
        """End early: shards that are full are stored, the journal is kept, and no index is made.

        Where one could not be stored, those that wait behind it are left out: each would be tried as often.
        """
        has_failed = any(future.done() and future.exception() is not None for future in self._futures)
        self._pool.shutdown(wait=True, cancel_futures=has_failed)
        self._remove_parts()
        try:
            if self._journal is not None:
                self._journal.close()
        except (SqlStreamError, OSError) as error:  # what ended the writing says more
            _LOG.warning("%s: the journal of the writing that ended early could not be stored: %s", self.place, error)
        finally:
            self._close()

    def _close(self) -> None:
        self._pool.shutdown(wait=True)
        if self._claim is not None:
            self._claim.close()
        if isinstance(self._remote, Fetcher) and self._remote is not self._options.remote:
            self._remote.close()
        if self.place.local is None and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        elif self._directory is not None and self._is_ours and not self._keeps_local:
            with contextlib.suppress(OSError):  # it holds something else
                self._directory.rmdir()

    def _remove_parts(self) -> None:
        """Remove part files, before the lock goes: the next writer has files of these names."""
        if not self._is_ours:
            return
        for path in (self._local / name for name in os.listdir(self._local) if _is_part(name)):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _is_part(name: str) -> bool:
    return name.startswith(".") and name.endswith(".part")


def _sync(path: Path) -> None:
    """Have the bytes of a file on the disk: its journal and its index must not outlive them."""
    with open(path, "rb") as file:
        os.fdatasync(file.fileno())
