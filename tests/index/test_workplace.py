"""Where index files grow: on a disk that has no room, in a directory that goes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sqlstream import StreamingDataset
from sqlstream.errors import CacheDirectoryError, CacheDiskError
from sqlstream.index.file.workplace import sweep_dead, workplace


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


def remove_files(index: Path) -> None:
    for path in index.iterdir():
        path.unlink()


def remove_cache(index: Path) -> None:
    shutil.rmtree(index.parent)


@pytest.mark.parametrize("remove", [shutil.rmtree, remove_cache, remove_files])
def test_an_index_that_is_removed_while_it_is_built_is_an_error_with_the_cure(
    remove: Callable[[Path], None], tmp_path: Path
) -> None:
    def rows() -> Iterator[dict[str, int]]:
        yield from ({"n": number} for number in range(10_000))  # some parts of them are written
        while removals:
            removals.pop()(tmp_path / "cache/index")
        yield {"n": 10_000}

    removals = [remove]

    with pytest.raises(CacheDirectoryError, match=r"cache/index was removed, or a file in it, .* open the dataset anew"):
        StreamingDataset(rows, tmp_path / "cache", columns_to_download=[], show_progress=False)
    with StreamingDataset(rows, tmp_path / "cache", columns_to_download=[], show_progress=False) as dataset:
        assert len(dataset) == 10_001


def test_a_directory_that_is_gone_has_nothing_to_sweep(tmp_path: Path) -> None:
    sweep_dead(tmp_path / "gone")
