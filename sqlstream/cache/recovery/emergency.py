"""Room on a full disk for the ledger itself, whose own tables cannot be asked then: the ballast, then objects by their files.

SQLite opens no ledger without room for its -shm and -wal, a process registers with a file of its own, and each COMMIT needs
room in the WAL. Without the ballast nothing of that is to be had, although the whole cache might be evicted.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import secrets
from collections.abc import Collection

from sqlstream.cache.files.disk import LEDGER_ROOM_BYTES, DataFile, Disk
from sqlstream.disk_room import FULL
from sqlstream.errors import CacheError

logger = logging.getLogger(__name__)

_ROOM_INODES = 16
"""What the next steps find, beside the ledger's bytes. Generously."""
_MAX_FILES = 200  # a few bytes each of the note of removals, which has its blocks from the start
_LOOKED_AT = 4096
"""Files among which the longest unused are sought, where there are more: hundredths of a second, for other processes wait.

300 000 took seven seconds. The number is arbitrary."""
_NUM_FOLDERS = 256


def give_room(disk: Disk, keep: Collection[bytes] = ()) -> None:
    """Give the ballast up; where that is not enough, remove objects that no process pins or reads, the longest unused of some.

    Under the write lock. Their rows go as those of any process that dies between unlink and COMMIT: by the note of removals.
    The policy is not asked, for it is in the ledger.

    Args:
        disk: Where the files are.
        keep: Keys that the transaction under way pins, beside those in the notes of owners.
    """
    disk.drop_ballast()
    with contextlib.suppress(CacheError):
        disk.remove_empty_folders()
    if disk.has_room(LEDGER_ROOM_BYTES, _ROOM_INODES):
        return
    with contextlib.suppress(OSError, CacheError):  # what cannot be given is named by the step that needs it
        removed = _remove_objects(disk, keep)
        logger.warning(
            "the disk below the cache at %s has no room for its ledger: removed %d objects to go on", disk.root, removed
        )


def give_room_after(error: OSError, disk: Disk, keep: Collection[bytes] = ()) -> bool:
    """Give room (`give_room`) if `error` says that the disk is full; return whether it says so. Under the write lock."""
    if error.errno not in FULL:
        return False
    give_room(disk, keep)
    return True


def _remove_objects(disk: Disk, keep: Collection[bytes]) -> int:
    noted = disk.read_removal()  # their rows may be there still
    kept = {key.hex() for key in keep} | disk.published_keys() | {name.partition(".")[0] for name in disk.scan_parts()}
    for owner in disk.owners.scan():
        if (note := disk.owners.read_note(owner)) is not None and disk.owners.is_live(owner):
            kept |= {key.hex() for key in note.pinned}
    # A note that would grow takes the room that is sought; where it is full, the next transaction of an owner empties it.
    num_files = min(_MAX_FILES, disk.num_removals_noted() - len(noted))
    oldest = heapq.nsmallest(num_files, _some_files(disk, kept), key=lambda file: file.used_at)
    disk.announce_removal([*dict.fromkeys([*noted, *(file.key for file in oldest)])])
    num_removed = 0
    for file in oldest:
        if disk.has_room(LEDGER_ROOM_BYTES, _ROOM_INODES):
            break
        num_removed += disk.remove_data(file.key, file.ext)
    disk.remove_empty_folders()
    return num_removed


def _some_files(disk: Disk, kept: Collection[str]) -> list[DataFile]:
    """Return files that may go: all of a small cache, and of a large one those of some folders, which hashes fill alike."""
    found: list[DataFile] = []
    start = secrets.randbelow(_NUM_FOLDERS)
    for number in range(start, start + _NUM_FOLDERS):
        found += [file for file in disk.scan_data(f"{number % _NUM_FOLDERS:02x}") if file.key.hex() not in kept]
        if len(found) >= _LOOKED_AT:
            break
    return found
