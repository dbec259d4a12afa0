"""The only writer of a cache directory. No SQL here; who calls what in which order is the protocol in `fetch` and `room`.

<root>/ FORMAT CACHEDIR.TAG lock gate ledger.sqlite ballast
    data/ab/<32 hex><ext>     whole files, never changed
    part/<32 hex>.<uuid>      on their way; flocked by their leader and its helper
    owners/<uuid>             one per process; flocked for its life
    index/                    immutable index files (see sqlstream.index)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sqlstream import locks
from sqlstream.cache import keys
from sqlstream.cache.filesystem import check_directory
from sqlstream.errors import CacheDirectoryError

FORMAT_VERSION = 1
BALLAST_BYTES = 8 << 20
"""Given up on a full disk, so that SQLite can write the deletes that free it: a dozen WAL truncations' worth."""
_OURS = frozenset(
    "FORMAT CACHEDIR.TAG lock gate ballast data part owners index ledger.sqlite ledger.sqlite-wal ledger.sqlite-shm".split()
)
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# A cache of sqlstream; backups may leave it out (bford.info/cachedir).\n"
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


class Disk:
    """The files of one cache directory.

    Args:
        root: The directory.
        allow_network_fs: Do not refuse file systems on which locks are not reliable.
    """

    def __init__(self, root: Path, *, allow_network_fs: bool = False) -> None:
        self.root = Path(os.path.abspath(root))
        self._data = f"{self.root}/data"
        self._part = f"{self.root}/part"
        self._owners = f"{self.root}/owners"
        self._allow_network_fs = allow_network_fs

    def open(self, *, create: bool) -> None:
        """Check the directory, and make it a cache if it is empty or absent.

        Raises:
            CacheDirectoryError: It is not ours, not a cache, not writable, or (without `create`) there is none.
        """
        if not create and not (self.root / "FORMAT").is_file():
            raise CacheDirectoryError(f"there is no sqlstream cache at {self.root}: check the path")
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CacheDirectoryError(f"cannot create the cache directory {self.root}: {error.strerror}") from error
        check_directory(self.root, allow_network_fs=self._allow_network_fs)
        if (self.root / "FORMAT").is_file():
            self._check_format()
            return
        strangers = sorted(set(os.listdir(self.root)) - _OURS)
        if strangers:
            raise CacheDirectoryError(
                f"{self.root} holds files that are not a sqlstream cache ({', '.join(strangers[:3])}): give an empty directory"
            )
        self._create()

    def _check_format(self) -> None:
        try:
            version = json.loads((self.root / "FORMAT").read_text())["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise CacheDirectoryError(f"{self.root / 'FORMAT'} is not readable as ours: give another directory") from error
        if version != FORMAT_VERSION:
            raise CacheDirectoryError(
                f"{self.root} has layout {version}, this sqlstream knows {FORMAT_VERSION}: upgrade sqlstream"
            )

    def _create(self) -> None:
        """Lay the directory out; FORMAT comes last, so that a killed creation is simply repeated."""
        self.root.chmod(0o700)
        for name in ("data", "part", "owners", "index", *(f"data/{byte:02x}" for byte in range(256))):
            (self.root / name).mkdir(mode=0o700, exist_ok=True)
        (self.root / "CACHEDIR.TAG").write_text(_TAG)
        self.restore_ballast()
        fresh = (
            self.root / f"index/.format-{uuid.uuid4().hex}"
        )  # inside a folder of ours: other openers may be looking at the root
        fresh.write_text(json.dumps({"format": FORMAT_VERSION, "uuid": uuid.uuid4().hex}))
        with contextlib.suppress(FileExistsError):
            os.link(fresh, self.root / "FORMAT")  # the first of several creators wins
        fresh.unlink()

    # -- data ---------------------------------------------------------------------------------------------------------

    def data_path(self, key: bytes, ext: str) -> str:
        """Return the path of an entry's file."""
        name = key.hex()
        return f"{self._data}/{name[:2]}/{name}{ext}"

    def data_size(self, key: bytes, ext: str) -> int | None:
        """Return the size in bytes of an entry's file, None when it is absent or not a plain file."""
        try:
            status = os.lstat(self.data_path(key, ext))
        except FileNotFoundError:
            return None
        return status.st_size if status.st_mode & 0o170000 == 0o100000 else None

    def remove_data(self, key: bytes, ext: str) -> bool:
        """Unlink an entry's file; True when nothing is left of it. Must come before its row goes."""
        try:
            os.unlink(self.data_path(key, ext))
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def scan_data(self) -> Iterator[DataFile]:
        """Yield every file in data/ that is named as ours; others are not touched by anyone."""
        for folder in os.scandir(self._data):
            if not folder.is_dir(follow_symlinks=False):
                continue
            for file in os.scandir(folder.path):
                match = _DATA_NAME.fullmatch(file.name)
                if match and file.name[:2] == folder.name:
                    with contextlib.suppress(FileNotFoundError):
                        size_bytes = file.stat(follow_symlinks=False).st_size
                        yield DataFile(key=bytes.fromhex(match[1]), ext=match[2] or "", size_bytes=size_bytes)

    # -- parts --------------------------------------------------------------------------------------------------------

    def create_part(self, key: bytes) -> Part:
        """Return a new, empty, locked part file; it must exist before its row does."""
        name = f"{key.hex()}.{uuid.uuid4().hex}"
        return Part(name=name, fd=_create_locked(f"{self._part}/{name}"))

    def allocate(self, part: Part, num_bytes: int) -> None:
        """Take `num_bytes` of disk for a part now, so that a full disk shows before the download, not in its middle."""
        if num_bytes:
            os.posix_fallocate(part.fd, 0, num_bytes)

    def publish(self, part: Part, key: bytes, ext: str, size_bytes: int) -> None:
        """Make a whole part the entry's file; its lock stays until `close_part`."""
        os.ftruncate(part.fd, size_bytes)
        os.rename(f"{self._part}/{part.name}", self.data_path(key, ext))

    def close_part(self, part: Part) -> None:
        """Give the part's lock back; waiters wake."""
        locks.close_descriptor(part.fd)

    def discard_parts(self, parts: Iterable[Part]) -> None:
        """Remove parts that never got a row."""
        for part in parts:
            self.remove_part(part.name)
            self.close_part(part)

    def remove_part(self, name: str) -> None:
        """Unlink a part; must come before its row goes."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._part}/{name}")

    def part_is_live(self, name: str) -> bool | None:
        """Return whether a leader or its helper holds the part; None when the file is gone (renamed or removed)."""
        return _is_locked(f"{self._part}/{name}")

    def scan_parts(self) -> list[str]:
        """Return the names of all part files."""
        return [name for name in os.listdir(self._part) if _PART_NAME.fullmatch(name)]

    # -- owners -------------------------------------------------------------------------------------------------------

    def create_owner(self, owner: str) -> int:
        """Return the locked descriptor of a new owner file; it must exist before its row does."""
        return _create_locked(f"{self._owners}/{owner}")

    def write_pins(self, fd: int, pinned: Iterable[bytes]) -> None:
        """Write an owner's pinned keys into its file: a rebuild of the ledger reads them."""
        body = b"".join(pinned)
        os.pwrite(fd, struct.pack("<Q", len(body)) + body, 0)

    def read_pins(self, owner: str) -> list[bytes]:
        """Return the pinned keys that an owner wrote down last."""
        with contextlib.suppress(FileNotFoundError), open(f"{self._owners}/{owner}", "rb") as file:
            raw = file.read()
            body = raw[8 : 8 + struct.unpack_from("<Q", raw)[0]] if len(raw) >= 8 else b""
            return [body[i : i + keys.KEY_BYTES] for i in range(0, len(body), keys.KEY_BYTES)]
        return []

    def owner_is_live(self, owner: str) -> bool:
        """Return whether the process behind an owner file lives: the kernel holds its lock."""
        return bool(_is_locked(f"{self._owners}/{owner}"))

    def remove_owner(self, owner: str) -> None:
        """Unlink a dead owner's file; only inside the door."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._owners}/{owner}")

    def scan_owners(self) -> list[str]:
        """Return the ids of all owner files."""
        return [name for name in os.listdir(self._owners) if re.fullmatch(r"[0-9a-f]{32}", name)]

    # -- the rest -----------------------------------------------------------------------------------------------------

    def index_files(self) -> list[Path]:
        """Return the files below index/."""
        return sorted(path for path in (self.root / "index").iterdir() if path.is_file())

    def overhead_bytes(self) -> int:
        """Return the bytes on disk beside data, parts and index files: ledger, WAL, ballast."""
        names = ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "ballast")
        total = 0
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(self.root / name).st_blocks * 512
        return total

    def drop_ballast(self) -> None:
        """Give the ballast's bytes back to a full disk."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.root / "ballast")

    def restore_ballast(self) -> None:
        """Take the ballast's bytes again if they are to be had."""
        if (self.root / "ballast").exists():
            return
        fd = os.open(self.root / "ballast", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, BALLAST_BYTES)
        except OSError:
            self.drop_ballast()  # a disk as full as that: the account still holds, only the comfort is gone
        finally:
            os.close(fd)


def _create_locked(path: str) -> int:
    """Return a descriptor on a new file, locked; a reaper may take the file between creation and lock, then once more."""
    while True:
        fd = locks.open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        if locks.try_lock(fd) and os.fstat(fd).st_nlink > 0:
            return fd
        locks.close_descriptor(fd)


def _is_locked(path: str) -> bool | None:
    """Return whether somebody holds the lock of the file at `path`; None when there is no file."""
    try:
        fd = locks.open_descriptor(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        return not locks.try_lock(fd)
    finally:
        locks.close_descriptor(fd)
