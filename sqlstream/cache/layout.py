"""A directory becomes a cache, or is refused."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from pathlib import Path

from sqlstream.cache.filesystem import check_directory, check_locks
from sqlstream.errors import CacheDirectoryError

FORMAT_VERSION = 1
_OURS = frozenset(
    "FORMAT CACHEDIR.TAG REBUILD removing lock gate ballast data part owners index "
    "ledger.sqlite ledger.sqlite-journal ledger.sqlite-wal ledger.sqlite-shm "
    "ledger.sqlite.bad ledger.sqlite.bad-wal ledger.sqlite.bad-shm".split()
)
"""The journal is there while a new ledger goes into WAL mode; a user of a directory that was replaced may make it before us."""
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# A cache of sqlstream; backups may leave it out (bford.info/cachedir).\n"


def open_directory(root: Path, *, create: bool, allow_network_fs: bool) -> None:
    """Check the directory, and make it a cache if it is empty or absent.

    Raises:
        CacheDirectoryError: It is not ours, not a cache, not writable, or (without `create`) there is none.
    """
    if not create and not (root / "FORMAT").is_file():
        raise CacheDirectoryError(f"there is no sqlstream cache at {root}: check the path")
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CacheDirectoryError(f"cannot create the cache directory {root}: {error.strerror}") from error
    check_directory(root, allow_network_fs=allow_network_fs)
    if (root / "FORMAT").is_file():
        _check_format(root)
    else:
        strangers = sorted(set(os.listdir(root)) - _OURS)
        if strangers:
            raise CacheDirectoryError(
                f"{root} holds files that are not a sqlstream cache ({', '.join(strangers[:3])}): give an empty directory"
            )
        try:
            _create(root)
        except OSError as error:
            raise CacheDirectoryError(f"cannot make {root} a cache ({error}): free space there, or mend its rights") from error
    if not allow_network_fs:
        check_locks(root / "index")


def _check_format(root: Path) -> None:
    try:
        version = json.loads((root / "FORMAT").read_text())["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CacheDirectoryError(f"{root / 'FORMAT'} is not readable as ours: give another directory") from error
    if version != FORMAT_VERSION:
        raise CacheDirectoryError(f"{root} has layout {version}, this sqlstream knows {FORMAT_VERSION}: upgrade sqlstream")


def _create(root: Path) -> None:
    """Lay the directory out; FORMAT comes last, so that a killed creation is simply repeated."""
    os.chmod(root, 0o700)
    for name in ("data", "part", "owners", "index"):
        with contextlib.suppress(FileExistsError):
            os.mkdir(root / name, 0o700)
    (root / "CACHEDIR.TAG").write_text(_TAG)
    fresh = root / f"index/.format-{uuid.uuid4().hex}"  # in a folder of ours: other openers may be looking at the root
    fresh.write_text(json.dumps({"format": FORMAT_VERSION, "uuid": uuid.uuid4().hex}))
    with contextlib.suppress(FileExistsError):
        os.link(fresh, root / "FORMAT")  # the first of several creators wins
    fresh.unlink()
