"""Checksums of index files, in the files themselves: in a field that older versions leave alone, so they read them as before.

An SQLite file has its CRC-32 in the header's user version (0: it has none), counted with that field as 0; a .npy file has it
behind its numbers. A flip of any bit, and any run of damage up to 32 bits long, changes it.
"""

from __future__ import annotations

import logging
import os
import stat
import zlib
from pathlib import Path

from sqlstream.errors import IndexDatabaseError

logger = logging.getLogger(__name__)

CHECKED_BYTES = 16 << 20
"""Largest file that is checked whenever it is opened for a dataset: some 10 ms. Larger ones by `sqlstream index verify`."""
_SQLITE, _NPY = b"SQLite format 3\0", b"\x93NUMPY"
_FIELD = slice(60, 64)  # of the header: the user version, big endian
_MARK = b"sqstcrc1"  # behind the numbers of a .npy file, then four bytes
_BLOCK_BYTES = 1 << 20


def check_plain(path: Path) -> None:
    """Raise if `path` is there and is no plain file: to open a pipe may wait for ever, and a link leads elsewhere.

    Raises:
        IndexDatabaseError: It is something that we never make, or cannot be looked at.
    """
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise IndexDatabaseError(f"{path} cannot be read ({error}): look at its directory and that disk's health") from error
    if not stat.S_ISREG(mode):
        kinds = {
            stat.S_IFLNK: "a symbolic link",
            stat.S_IFIFO: "a pipe",
            stat.S_IFDIR: "a directory",
            stat.S_IFSOCK: "a socket",
        }
        raise IndexDatabaseError(
            f"{path} is {kinds.get(stat.S_IFMT(mode), 'a device')}, which sqlstream never makes there: remove it, and the next "
            "run builds the index again"
        )


def is_there(path: Path) -> bool:
    """Return whether a file is there and, as far as its checksum tells, as it was written; that it is damaged is logged.

    Raises:
        IndexDatabaseError: Something else is there, that we never make; or it may not be read.
    """
    check_plain(path)
    if not path.exists():
        return False
    try:
        found = is_intact(path)
    except PermissionError as error:
        raise IndexDatabaseError(
            f"{path} may not be read ({error.strerror}): give each user a dst of their own, or the file the rights that it had"
        ) from error
    if found is False:
        logger.warning("the index file %s is damaged: building it again", path)
        return False
    return True


def stamp_sqlite(path: Path) -> None:
    """Write the checksum of a finished SQLite file into it."""
    checksum = _checksum(path, os.stat(path).st_size)
    with open(path, "r+b") as file:
        file.seek(_FIELD.start)
        file.write(checksum.to_bytes(4, "big"))


def npy_trailer(path: Path) -> bytes:
    """Return what goes behind the numbers of the .npy file at `path`."""
    return _MARK + _checksum(path, os.stat(path).st_size).to_bytes(4, "big")


def is_intact(path: Path, *, most_bytes: int | None = CHECKED_BYTES) -> bool | None:
    """Return whether a file is as it was written; None where it has no checksum, or is larger than `most_bytes`.

    What the head says is compared at any size: that the file is of its kind, and how long a database is.
    """
    if path.suffix == ".json":  # it is written without a checksum; who parses it sees that it is damaged
        return None
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_FIELD.stop)
        if head.startswith(_SQLITE):
            stored, num_bytes = int.from_bytes(head[_FIELD], "big"), size
            if size != _length_of(head):
                return False
        elif head.startswith(_NPY):
            trailer = len(_MARK) + 4
            file.seek(max(0, size - trailer))
            tail = file.read(trailer)
            if not tail.startswith(_MARK):
                return False if size % 8 == trailer % 8 else None  # header and numbers are whole words
            stored, num_bytes = int.from_bytes(tail[-4:], "big"), size - trailer
        else:
            return False
    if not stored or (most_bytes is not None and size > most_bytes):
        return None
    return stored == _checksum(path, num_bytes)


def _length_of(head: bytes) -> int:
    """Return how many bytes an SQLite file has by its header: the size of a page, where 1 is 65536, and how many there are."""
    page_bytes = int.from_bytes(head[16:18], "big")
    return (page_bytes if page_bytes != 1 else 1 << 16) * int.from_bytes(head[28:32], "big")


def _checksum(path: Path, num_bytes: int) -> int:
    """Return the CRC-32 of the first bytes of a file, the field for it counted as 0; never 0."""
    with open(path, "rb") as file:
        block = bytearray(file.read(min(num_bytes, _BLOCK_BYTES)))
        if block.startswith(_SQLITE):
            block[_FIELD] = bytes(4)
        checksum, left = zlib.crc32(block), num_bytes - len(block)
        while left > 0 and (more := file.read(min(left, _BLOCK_BYTES))):
            checksum, left = zlib.crc32(more, checksum), left - len(more)
    return checksum or 1
