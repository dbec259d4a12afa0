"""A directory becomes a cache, or is refused: locks of the kernel and SQLite's WAL need a local file system of our own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from sqlstream.cache.model.refs import BLOCK_BYTES
from sqlstream.disk_room import cure_of, lack_of_inodes
from sqlstream.errors import CacheDirectoryError, CacheDiskError, ConfigError
from sqlstream.process import interrupts, locks
from sqlstream.storage.base import urls

NETWORK_FILESYSTEMS = frozenset(
    "nfs nfs4 cifs smb3 smbfs lustre gpfs beegfs ceph glusterfs afs 9p virtiofs fuse fuseblk".split()
)
"""File systems on which flock is emulated, absent or not shared between hosts."""
_OCTAL = re.compile(r"\\([0-7]{3})")
"""How the kernel writes a blank, a tab, a line feed and a backslash of a mount point; all else stands there as it is."""


def check_directory(root: Path, *, allow_network_fs: bool) -> None:
    """Raise CacheDirectoryError unless `root` is a real directory of this user on a local file system."""
    status = os.lstat(root)
    if stat.S_ISLNK(status.st_mode):
        raise CacheDirectoryError(f"the cache directory {root} is a symbolic link: give the directory that it points to")
    if not stat.S_ISDIR(status.st_mode):
        raise CacheDirectoryError(f"the cache directory {root} is a file: give a directory")
    if status.st_uid != os.geteuid():
        raise CacheDirectoryError(
            f"the cache directory {root} belongs to user {status.st_uid}, we are {os.geteuid()}: give a directory of your own"
        )
    if not os.access(root, os.W_OK | os.X_OK):
        raise CacheDirectoryError(f"the cache directory {root} is not writable: mend its rights or give another one")
    kind = filesystem_kind(root)
    if not allow_network_fs and is_network(kind):
        raise CacheDirectoryError(
            f"the cache directory {root} is on {kind}: locks there are not reliable. Give a node-local directory "
            "(allow_network_fs=True insists, for one process at a time)"
        )


def check_is_cache(root: Path, *, allow_network_fs: bool) -> None:
    """Raise CacheDirectoryError unless there is a cache at `root`, or it is not ours to look at."""
    if os.path.isdir(root):
        check_directory(root, allow_network_fs=allow_network_fs)
    if not os.path.isfile(root / "FORMAT"):
        raise CacheDirectoryError(f"there is no sqlstream cache at {root}: check the path")


def check_locks(directory: Path) -> None:
    """Raise CacheDirectoryError unless a lock taken through one descriptor keeps another one out.

    One process is enough: where flock is missing it always succeeds, and where it is emulated it belongs to the process.
    """
    path = directory / f".locks-{uuid.uuid4().hex}"
    with contextlib.ExitStack() as stack:
        try:
            first = locks.open_descriptor(path, os.O_RDWR | os.O_CREAT)
            stack.callback(locks.close_descriptor, first)
            second = locks.open_descriptor(path, os.O_RDWR)
            stack.callback(locks.close_descriptor, second)
            works = locks.try_lock(first) and not locks.try_lock(second)
        except OSError as error:
            raise CacheDirectoryError(
                f"cannot create and lock files in {directory} ({error.strerror}{lack_of_inodes(directory)}): {cure_of(error)}"
            ) from error
        finally:
            path.unlink(missing_ok=True)
    if not works:
        raise CacheDirectoryError(
            f"file locks do not work in {directory}: give a node-local directory "
            "(allow_network_fs=True insists, for one process at a time)"
        )


class AllocationUnit:
    """What files of a cache are counted in: whole units of their file system.

    Args:
        directory: Where the files are.
        look: Returns what a file of one byte takes in a directory.
    """

    def __init__(self, directory: str, look: Callable[[str], int]) -> None:
        self._directory = directory
        self._look = look
        self.num_bytes = BLOCK_BYTES
        """Of this file system, once it was looked at or the ledger has told."""

    def charge(self, size_bytes: int) -> int:
        """Return what a file of `size_bytes` counts against the limit."""
        return -(-size_bytes // self.num_bytes) * self.num_bytes

    def measure(self) -> int:
        """Find out the unit, count in it from now on, and return it."""
        self.num_bytes = self._look(self._directory)
        return self.num_bytes

    def filesystem_id(self) -> str:
        """Return what tells the directory's file system from others of this machine."""
        return f"{os.stat(self._directory).st_dev:x}-{os.statvfs(self._directory).f_fsid:x}"


def allocation_unit(directory: str) -> int:
    """Return the bytes that a file of one byte takes on disk, at least `BLOCK_BYTES`.

    `statvfs` does not tell: a file system of 1 KiB blocks may give them out in clusters of 64 KiB.
    """
    path = f"{directory}/.unit-{uuid.uuid4().hex}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, b"1")
        os.fsync(fd)  # until then some file systems have allocated nothing
        os.close(fd)  # and some give back what they took too much
        fd = -1
        return max(BLOCK_BYTES, os.lstat(path).st_blocks * 512)
    finally:
        if fd >= 0:
            os.close(fd)
        os.unlink(path)


def allocate_file(path: Path, num_bytes: int) -> bool:
    """Make a file of so many bytes; False, and there is none, when the disk does not have them."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # no inode, no descriptor
        return False
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError:
        with contextlib.suppress(FileNotFoundError):  # another process has failed at the same moment
            os.unlink(path)
        return False
    finally:
        os.close(fd)
    return True


def entries_of(directory: str) -> list[os.DirEntry[str]]:
    """Return what is in a folder; nothing if it was removed.

    Raises:
        CacheDiskError: It cannot be read.
    """
    try:
        with interrupts.uninterrupted(), os.scandir(directory) as entries:  # else a handler may leave it open
            return list(entries)
    except OSError as error:
        if not interrupts.is_of_system_call(error):
            raise
        if isinstance(error, FileNotFoundError):
            return []
        raise unreadable(directory, error) from error


def unreadable(path: str, error: OSError) -> CacheDiskError:
    """Return the error for what the disk does not let us read."""
    return CacheDiskError(f"cannot read {path} ({error.strerror}): look at that disk's health and rights, and at `ulimit -n`")


def is_network(kind: str) -> bool:
    """Return True for a file system type that is not local; every FUSE type counts as one."""
    return kind in NETWORK_FILESYSTEMS or kind.startswith("fuse.")


def filesystem_kind(root: Path, mountinfo: str = "/proc/self/mountinfo") -> str:
    """Return the type of the file system that holds `root` (`ext4`, `tmpfs`, `nfs4`, …), '' where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return ""
    target = os.path.realpath(root)
    best, kind = "", ""
    with open(mountinfo, "rb") as lines:
        for line in map(os.fsdecode, lines):  # as `target` is decoded, whatever the locale
            before, _, after = line.partition(" - ")
            mount = _OCTAL.sub(lambda escape: chr(int(escape[1], 8)), before.split(" ")[4])
            inside = target == mount or target.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, after.split(" ")[0]
    return kind


FORMAT_VERSION = 1
_OURS = frozenset(
    "FORMAT CACHEDIR.TAG REBUILD removing lock gate ballast data part owners index "
    "ledger.sqlite ledger.sqlite-journal ledger.sqlite-wal ledger.sqlite-shm "
    "ledger.sqlite.bad ledger.sqlite.bad-wal ledger.sqlite.bad-shm".split()
)
"""The journal is there while a new ledger goes into WAL mode; a user of a directory that was replaced may make it before us."""
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# A cache of sqlstream; backups may leave it out (bford.info/cachedir).\n"


def local_directory(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a cache directory as a user names it, `~` expanded.

    Raises:
        ConfigError: It is no path, an empty one, or a URL: a cache lies on a disk of this machine.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise ConfigError(f"the cache directory {path!r} is no path: give a text or a Path, such as '/scratch/cache'") from None
    if not text:  # a variable that is not set, say: the working directory is not meant
        raise ConfigError("the cache directory '' is empty: give a path, such as '/scratch/cache'")
    if urls.scheme(text) != "file" or text.lower().startswith("file:"):
        raise ConfigError(
            f"the cache directory {urls.redact(text)!r} is a URL: give a directory on a disk of this machine, such as "
            "'/scratch/cache'; it keeps what is read from remote storage"
        )
    if "\0" in text:
        raise ConfigError(f"the cache directory {text!r} has a NUL in it: give another one")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:  # half of a surrogate pair, as JSON may hold it
        raise ConfigError(f"the cache directory {text!r} is the name of no file ({error}): give another one") from None
    return Path(os.path.abspath(os.path.expanduser(text)))


def open_directory(root: Path, *, create: bool, allow_network_fs: bool) -> None:
    """Check the directory, and make it a cache if it is empty or absent.

    Raises:
        CacheDirectoryError: It is not ours, not a cache, not writable, or (without `create`) there is none.
    """
    for parent in Path(os.path.realpath(root)).parents:
        if os.path.isfile(parent / "FORMAT") and os.path.exists(parent / "ledger.sqlite"):  # False where we may not look
            raise CacheDirectoryError(
                f"{root} lies inside the cache {parent}, whose files are removed as it sees fit: give a directory outside of it"
            )
    if not create:
        check_is_cache(root, allow_network_fs=allow_network_fs)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CacheDirectoryError(
            f"cannot create the cache directory {root} ({error.strerror}{lack_of_inodes(root.parent)}): give another one, or "
            "mend the rights or the disk of its parent"
        ) from error
    check_directory(root, allow_network_fs=allow_network_fs)
    if (root / "FORMAT").is_dir():
        raise CacheDirectoryError(f"{root / 'FORMAT'} is a directory, which sqlstream never makes there: remove it")
    if (root / "FORMAT").is_file() and not _is_cut_short(root):
        _check_format(root)
        try:
            make_folders(root)
        except OSError as error:
            raise CacheDirectoryError(f"cannot make the folders of {root} ({error}): mend its rights") from error
    else:
        try:
            strangers = sorted(set(os.listdir(root)) - _OURS)
        except OSError as error:
            raise CacheDirectoryError(
                f"cannot read {root} ({error.strerror}): mend its rights, or raise `ulimit -n`"
            ) from error
        if strangers:
            raise CacheDirectoryError(
                f"{root} holds files that are not a sqlstream cache ({', '.join(strangers[:3])}): give an empty directory"
            )
        try:
            _create(root)
        except OSError as error:
            raise CacheDirectoryError(
                f"cannot make {root} a cache ({error}{lack_of_inodes(root)}): free space there, or mend its rights"
            ) from error
    if not allow_network_fs:
        check_locks(root / "index")


def _is_cut_short(root: Path) -> bool:
    """Return whether FORMAT is empty: the machine lost its power soon after the directory was made."""
    return (root / "FORMAT").stat().st_size == 0


def make_folders(root: Path) -> None:
    """Make the folders of a cache that are not there: people remove one to free space."""
    for name in ("data", "part", "owners", "index"):
        with contextlib.suppress(FileExistsError):
            os.mkdir(root / name, 0o700)


def _check_format(root: Path) -> None:
    try:
        version = json.loads((root / "FORMAT").read_text())["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CacheDirectoryError(
            f"{root / 'FORMAT'} is not as sqlstream writes it: remove that file if {root} is a cache of sqlstream, which goes "
            "on with what it has, else give another directory"
        ) from error
    if version != FORMAT_VERSION:
        raise CacheDirectoryError(f"{root} has layout {version}, this sqlstream knows {FORMAT_VERSION}: upgrade sqlstream")


def _create(root: Path) -> None:
    """Lay the directory out; FORMAT comes last, so that a killed creation is simply repeated."""
    os.chmod(root, 0o700)
    make_folders(root)
    (root / "CACHEDIR.TAG").write_text(_TAG)
    fresh = root / f"index/.format-{uuid.uuid4().hex}"  # in a folder of ours: other openers may be looking at the root
    with open(fresh, "w", encoding="utf-8") as file:
        file.write(json.dumps({"format": FORMAT_VERSION, "uuid": uuid.uuid4().hex}))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(fresh, root / "FORMAT")  # the first of several creators wins
    except FileExistsError:
        if _is_cut_short(root):
            os.replace(fresh, root / "FORMAT")
    fresh.unlink(missing_ok=True)
