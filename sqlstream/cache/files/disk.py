"""The only writer of a cache directory. No SQL here; who calls what in which order is the protocol in `cache.acquire`.

<root>/ FORMAT CACHEDIR.TAG lock gate ledger.sqlite ballast removing
    data/ab/<32 hex><ext>     whole files, never changed
    part/<32 hex>.<uuid>      on their way; flocked by their leader and its helper
    owners/<uuid>             one per process; flocked for its life
    index/                    immutable index files (see sqlstream.index)
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sqlstream import disk_room
from sqlstream.cache.files import layout, locked_files
from sqlstream.cache.files.layout import AllocationUnit, allocation_unit
from sqlstream.cache.files.owner_files import OwnerFiles
from sqlstream.cache.files.read_hold import is_object
from sqlstream.cache.model import refs
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.model.rows import ReadyRow
from sqlstream.process import interrupts, locks

logger = logging.getLogger(__name__)

BALLAST_BYTES = 8 << 20
"""Given up on a full disk, so that SQLite can write the deletes that free it: a dozen WAL truncations' worth."""
LEDGER_ROOM_BYTES = 2 << 20
"""What the next steps of a ledger on a full disk find: -shm and -wal, an owner file, a transaction. Generously."""
_NOTE_BYTES = 16384  # of the note of removals: the keys of five emergencies, and far more than one eviction looks at first
_PUBLISH_TRIES = 8  # arbitrary: how often another process removes an empty folder between two calls of this one
_LENGTH = struct.Struct("<Q")
_DATA_NAME = re.compile(r"([0-9a-f]{32})(\.[a-z0-9.]*)?")
_PART_NAME = re.compile(r"([0-9a-f]{32})\.[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A file on its way, locked through `fd`."""

    name: str
    fd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file found in data/."""

    key: bytes
    ext: str
    size_bytes: int
    allocated_bytes: int
    came_at: float
    """When it was last written: nothing writes to it once it is here."""
    used_at: float
    """Its access or change time, whichever is later."""


class FileIdentity(NamedTuple):
    """What tells a file from another one that takes its name later, also with its inode."""

    inode: int
    changed_ns: int


class Disk:
    """The files of one cache directory.

    Args:
        root: The directory.
        allow_network_fs: Do not refuse file systems on which locks are not reliable.
        unit_of: Returns the allocation unit of a directory.
    """

    def __init__(self, root: Path, *, allow_network_fs: bool = False, unit_of: Callable[[str], int] = allocation_unit) -> None:
        self.root = Path(os.path.abspath(root))
        self.data = f"{self.root}/data"
        self._part = f"{self.root}/part"
        self.owners = OwnerFiles(f"{self.root}/owners", self._make_folders, self.drop_ballast)
        self._allow_network_fs = allow_network_fs
        self.unit = AllocationUnit(self.data, unit_of)
        self.is_ballast_dropped = False
        """This process gave the ballast up and has not got it back yet."""
        self.was_told_full = False
        """This process, or the one that it was forked from, has logged that the disk is full."""
        self._published: dict[str, int] = {}
        """Files in data/ whose part a process (by its id) still has locked, by the hex of their key."""

    def open(self, *, create: bool) -> None:
        """Check the directory, and make it a cache if it is empty or absent; see `layout`."""
        layout.open_directory(self.root, create=create, allow_network_fs=self._allow_network_fs)
        self.restore_ballast()
        locked_files.create_note(f"{self.root}/removing", _NOTE_BYTES)

    def is_there(self) -> bool:
        """Return whether a cache is at the path; it may be another one, or a stranger's directory by now."""
        return (self.root / "FORMAT").is_file()

    # -- data ---------------------------------------------------------------------------------------------------------

    def data_path(self, key: bytes, ext: str) -> str:
        """Return the path of an entry's file."""
        name = key.hex()
        return f"{self.data}/{name[:2]}/{name}{ext}"

    def data_paths(self, wanted: Iterable[ObjectRef]) -> list[str]:
        """Return the paths of the files of objects, in their order."""
        data, paths = self.data, []
        for ref in wanted:
            name = ref.key.hex()
            paths.append(f"{data}/{name[:2]}/{name}{ref.ext}")
        return paths

    def data_size(self, key: bytes, ext: str) -> int | None:
        """Return the size in bytes of an entry's file, None when it is absent or not a plain file."""
        status = _status_of(self.data_path(key, ext))
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None

    def identity_of_data(self, key: bytes, ext: str) -> FileIdentity | None:
        """Return which file is an entry's now; None when there is none."""
        status = _status_of(self.data_path(key, ext))
        return None if status is None else FileIdentity(status.st_ino, status.st_ctime_ns)

    def remove_data(self, key: bytes, ext: str) -> bool:
        """Unlink an entry's file, unless a process reads it under a lock; True when nothing is left. Its row goes after it."""
        path = self.data_path(key, ext)
        try:
            return locked_files.unlink_unread(path, is_ours=self._published.get(key.hex()) == os.getpid())
        except FileNotFoundError:
            return True
        except IsADirectoryError:
            os.rename(path, f"{path}.foreign-{uuid.uuid4().hex}")  # not ours to delete; no longer a name that we use
        except OSError as error:
            logger.warning("cannot remove %s (%s): it stays counted", path, error.strerror)
            return False
        return True

    def is_read(self, key: bytes, ext: str) -> bool:
        """Return whether a process reads an entry's file under a lock."""
        return locked_files.is_read(self.data_path(key, ext))

    def announce_removal(self, removed: Sequence[bytes]) -> None:
        """Write down which files go next; under the write lock, so one note for the whole directory is enough.

        A death between unlink and COMMIT leaves rows without a file: the note says which, without a look at all of them.
        """
        body = b"".join(removed)
        fd = locked_files.open_note(f"{self.root}/removing", self.drop_ballast)
        try:
            locked_files.write_note(fd, _LENGTH.pack(len(body)) + body, self.drop_ballast)
        finally:
            os.close(fd)

    def read_removal(self) -> list[bytes]:
        """Return the keys that were announced last."""
        with contextlib.suppress(FileNotFoundError):
            raw = locked_files.read_note(f"{self.root}/removing")
            if len(raw) >= _LENGTH.size:
                return refs.split_keys(raw[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(raw)[0]])
        return []

    def num_removals_noted(self) -> int:
        """Return how many keys may be announced without room on the disk."""
        with contextlib.suppress(FileNotFoundError):
            return (os.stat(f"{self.root}/removing").st_size - _LENGTH.size) // refs.KEY_BYTES
        return 0

    def scan_data(self, only: str = "") -> Iterator[DataFile]:
        """Yield every file in data/, or in one folder of it, that is named as ours; others are not touched by anyone."""
        for folder in layout.entries_of(self.data):
            if not folder.is_dir(follow_symlinks=False) or not folder.name.startswith(only):
                continue
            for file in layout.entries_of(folder.path):
                match = _DATA_NAME.fullmatch(file.name)
                if match and file.name[:2] == folder.name and (status := _status_of(file.path)) is not None:
                    yield DataFile(
                        key=bytes.fromhex(match[1]),
                        ext=match[2] or "",
                        size_bytes=status.st_size,
                        allocated_bytes=status.st_blocks * 512,
                        came_at=status.st_mtime,
                        used_at=max(status.st_atime, status.st_mtime),
                    )

    # -- parts --------------------------------------------------------------------------------------------------------

    def create_part(self, key: bytes) -> Part:
        """Return a new, empty, locked part file; it must exist before its row does."""
        while True:
            name = f"{key.hex()}.{uuid.uuid4().hex}"
            try:
                fd = locked_files.create_locked(f"{self._part}/{name}")
            except FileNotFoundError:
                self._make_folders()
                continue
            if fd is not None:
                return Part(name=name, fd=fd)

    def _make_folders(self) -> None:
        """Make the folders that a user has removed.

        Raises:
            FileNotFoundError: This is no cache any more.
        """
        if not self.is_there():
            raise FileNotFoundError(errno.ENOENT, "the cache directory is gone", str(self.root))
        layout.make_folders(self.root)

    def allocate(self, part: Part, num_bytes: int, *, takes_room: bool = True) -> None:
        """Have a part's length say how much may be written to it: a rebuild of the ledger counts that.

        With `takes_room`, take the disk for it now, so that a full one shows before the download, not in its middle.

        Raises:
            OSError: The disk is full, or would have no room for the ledger then.
        """
        length = os.fstat(part.fd).st_size
        if takes_room and num_bytes:
            os.posix_fallocate(part.fd, 0, num_bytes)
        else:
            os.ftruncate(part.fd, num_bytes)
        kept_bytes = self.kept_bytes if num_bytes else 0
        if kept_bytes and not self.has_room(kept_bytes if takes_room else kept_bytes + num_bytes, 1):
            os.ftruncate(part.fd, length)  # what is written of it stays
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} beside {kept_bytes} bytes for the ledger")

    def publish(self, part: Part, key: bytes, ext: str, size_bytes: int) -> None:
        """Make a whole part the entry's file; its lock stays until `close_part`."""
        if os.fstat(part.fd).st_size != size_bytes:
            os.ftruncate(part.fd, size_bytes)
        source, path = f"{self._part}/{part.name}", self.data_path(key, ext)
        for num_tries_left in range(_PUBLISH_TRIES, -1, -1):
            try:
                os.rename(source, path)
                break
            except FileNotFoundError:  # the first file of its folder, which another process may remove again
                if not num_tries_left or not os.path.lexists(source):
                    raise
            if not os.path.isdir(self.data):
                self._make_folders()
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(path), 0o700)
        self._published[key.hex()] = os.getpid()

    def remove_empty_folders(self) -> None:
        """Give the inodes of folders in data/ back that hold nothing: they are made again for their next file."""
        for folder in layout.entries_of(self.data):
            with contextlib.suppress(OSError):
                os.rmdir(folder.path)

    def published_keys(self) -> set[str]:
        """Return the keys, as hex, of files in data/ whose row this process has not made ready yet."""
        return {key for key, pid in list(self._published.items()) if pid == os.getpid()}

    def close_part(self, part: Part) -> None:
        """Give the part's lock back; waiters wake."""
        self._published.pop(part.name.partition(".")[0], None)
        locks.close_descriptor(part.fd)

    def discard_parts(self, parts: Iterable[Part]) -> None:
        """Remove parts that never got a row."""
        for part in parts:
            self.remove_part(part.name)
            self.close_part(part)

    def remove_part(self, name: str) -> bool:
        """Unlink a part, which is written no more; True when nothing is left of it. Must come before its row goes.

        Its descriptor, which is its lock, may be open until the row is gone, and would keep the bytes: on a full disk the
        ledger may need them for that very row. Cut by name: by descriptor it could be a file that has the number by now, or
        one in data/.
        """
        path = f"{self._part}/{name}"
        try:
            os.truncate(path, 0)
            os.unlink(path)
        except FileNotFoundError:
            return True
        except OSError as error:
            logger.warning("cannot remove %s/%s (%s): it stays counted", self._part, name, error.strerror)
            return False
        return True

    def part_is_live(self, name: str) -> bool | None:
        """Return whether a leader or its helper holds the part; None when the file is gone (renamed or removed)."""
        return locked_files.is_locked(f"{self._part}/{name}")

    def part_holder(self, name: str) -> int | None:
        """Return the pid of a part's leader, None where no process has it or the system does not tell."""
        return locks.lock_holder(f"{self._part}/{name}")

    def remove_dead_part(self, name: str) -> None:
        """Unlink a part that has no row, unless a process holds it: it may have been created a moment ago."""
        locked_files.unlink_unlocked(f"{self._part}/{name}")

    def part_bytes(self, name: str) -> int:
        """Return the larger of a part's length and of what it takes on disk."""
        with contextlib.suppress(FileNotFoundError):
            return max(os.lstat(f"{self._part}/{name}").st_size, self.allocated_part_bytes(name))
        return 0

    def allocated_part_bytes(self, name: str) -> int:
        """Return what a part takes on disk."""
        return _allocated_bytes(f"{self._part}/{name}")

    def scan_parts(self) -> list[str]:
        """Return the names of all part files."""
        return [file.name for file in layout.entries_of(self._part) if _PART_NAME.fullmatch(file.name)]

    # -- the rest -----------------------------------------------------------------------------------------------------

    def index_files(self) -> list[Path]:
        """Return the files below index/."""
        return sorted(
            Path(file.path) for file in layout.entries_of(f"{self.root}/index") if file.is_file(follow_symlinks=False)
        )

    def index_bytes(self) -> int:
        """Return the sizes of the files below index/ together."""
        num_bytes = 0
        for path in self.index_files():
            with contextlib.suppress(FileNotFoundError):  # another process has removed it since
                num_bytes += path.stat().st_size
        return num_bytes

    def overhead_bytes(self) -> int:
        """Return the bytes on disk beside data, parts and index files: ledger, WAL, ballast."""
        names = ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "ballast")
        return sum(_allocated_bytes(f"{self.root}/{name}") for name in names)

    def drop_ballast(self) -> None:
        """Give the ballast's bytes back to a full disk."""
        self.is_ballast_dropped = True
        with contextlib.suppress(OSError):  # what cannot be given up is no worse than none
            os.unlink(self.root / "ballast")

    def restore_ballast(self) -> None:
        """Take the ballast's bytes again if they are to be had, and as many more stay free."""
        if (self.root / "ballast").exists():
            self.is_ballast_dropped = False
        elif self.free_bytes() >= 2 * BALLAST_BYTES:  # without it the account still holds, only the comfort is gone
            self.is_ballast_dropped = not layout.allocate_file(self.root / "ballast", BALLAST_BYTES)

    @property
    def kept_bytes(self) -> int:
        """What objects leave free for the ledger once its ballast is gone: else no pin could be given back, nothing evicted."""
        return 0 if (self.root / "ballast").exists() else LEDGER_ROOM_BYTES

    def free_bytes(self) -> int:
        """Return what this user may still write to the file system."""
        return disk_room.free_bytes(self.root)

    def has_room(self, num_bytes: int, num_files: int) -> bool:
        """Return whether so many bytes and inodes are to be had; see `disk_room`."""
        return disk_room.has_room(self.root, num_bytes, num_files)


def changed_files(disk: Disk, rows: Iterable[ReadyRow]) -> list[bytes]:
    """Return the keys of entries whose file is not what their row says: absent, of another size, or no plain file."""
    data, changed = disk.data, []
    for key, size_bytes, _, ext in rows:
        name = key.hex()
        status = _status_of(f"{data}/{name[:2]}/{name}{ext}")
        if status is None or not is_object(status, size_bytes):
            changed.append(key)
    return changed


def _status_of(path: str) -> os.stat_result | None:
    """Return what the file system says of a name, None if there is nothing.

    Raises:
        CacheDiskError: It does not say so.
    """
    try:
        return os.lstat(path)
    except OSError as error:
        if not interrupts.is_of_system_call(error):
            raise
        if isinstance(error, FileNotFoundError):
            return None
        raise layout.unreadable(path, error) from error


def _allocated_bytes(path: str) -> int:
    """Return what a file takes on disk; none if there is no such file."""
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_blocks * 512
    return 0
