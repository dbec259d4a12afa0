"""Where index files grow, on a disk that has no room."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from pathlib import Path

import pytest

from sqlstream.errors import CacheDiskError
from sqlstream.index.file.workplace import workplace


def fail(directory: Path, error: Exception) -> None:
    """Build something, until the disk fails."""
    with workplace(directory, "key") as place:
        place.temporary().write_bytes(b"half")
        raise error


def full_database() -> sqlite3.Error:
    """Return what SQLite raises where its file may not grow."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("PRAGMA max_page_count = 1")
        with pytest.raises(sqlite3.OperationalError) as caught:
            connection.execute("CREATE TABLE rows (value)")
    return caught.value


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_without_room_is_one_clear_error_and_leaves_nothing(number: int, tmp_path: Path) -> None:
    with pytest.raises(CacheDiskError, match=r"cannot be written into .*free space on that disk"):
        fail(tmp_path, OSError(number, os.strerror(number)))
    assert list(tmp_path.iterdir()) == []


def test_a_database_without_room_is_the_same_error(tmp_path: Path) -> None:
    with pytest.raises(CacheDiskError, match="database or disk is full"):
        fail(tmp_path, full_database())


def test_other_errors_of_a_builder_stay_what_they_are(tmp_path: Path) -> None:
    for error in (OSError(errno.ENOENT, "gone"), sqlite3.ProgrammingError("ours")):
        with pytest.raises(type(error)):
            fail(tmp_path, error)
