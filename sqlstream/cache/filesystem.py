"""Which directories may hold a cache: kernel locks and SQLite's WAL need a local file system of our own."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import uuid
from pathlib import Path

from sqlstream import locks
from sqlstream.errors import CacheDirectoryError

NETWORK_FILESYSTEMS = frozenset(
    "nfs nfs4 cifs smb3 smbfs lustre gpfs beegfs ceph glusterfs afs 9p virtiofs fuse fuseblk".split()
)
"""File systems on which flock is emulated, absent or not shared between hosts."""


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
            raise CacheDirectoryError(f"cannot create and lock files in {directory}: {error.strerror}") from error
        finally:
            path.unlink(missing_ok=True)
    if not works:
        raise CacheDirectoryError(
            f"file locks do not work in {directory}: give a node-local directory "
            "(allow_network_fs=True insists, for one process at a time)"
        )


def is_network(kind: str) -> bool:
    """Return True for a file system type that is not local; every FUSE type counts as one."""
    return kind in NETWORK_FILESYSTEMS or kind.startswith("fuse.")


def filesystem_kind(root: Path, mountinfo: str = "/proc/self/mountinfo") -> str:
    """Return the type of the file system that holds `root` (`ext4`, `tmpfs`, `nfs4`, …), '' where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return ""
    target = os.path.realpath(root)
    best, kind = "", ""
    with open(mountinfo, encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            before, _, after = line.partition(" - ")
            mount = before.split()[4].encode("utf-8", "surrogateescape").decode("unicode_escape")
            inside = target == mount or target.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, after.split()[0]
    return kind
