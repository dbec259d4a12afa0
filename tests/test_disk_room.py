"""Room is asked for by taking it: what a quota leaves is in no statistics."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from sqlstream.cache import Cache
from sqlstream.disk_room import has_room
from sqlstream.errors import CacheDiskError
from sqlstream.testing.servers import FaultyHttpServer


def test_there_is_room_as_far_as_it_is_to_be_had(tmp_path: Path) -> None:
    assert has_room(tmp_path, 1 << 20, 4)
    assert not has_room(tmp_path, 1 << 62, 4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "has"), [(errno.EDQUOT, False), (errno.ENOSPC, False), (errno.EIO, True)], ids=["EDQUOT", "ENOSPC", "EIO"]
)
def test_a_quota_leaves_no_room_whatever_the_statistics_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, has: bool
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(number, os.strerror(number))))
    assert has_room(tmp_path, 1 << 20, 4) == has
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.EACCES, "Give the user of this process the right"),
        (errno.EROFS, "Mount that disk writable"),
        (errno.ENOSPC, "Free space on that disk"),
        (errno.EIO, "Look at that disk's health"),
    ],
    ids=["EACCES", "EROFS", "ENOSPC", "EIO"],
)
def test_the_cure_is_that_of_what_the_disk_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, cure: str
) -> None:
    """To free space gives no right to write, and mounts nothing."""
    with FaultyHttpServer({"/a.bin": bytes(1 << 20)}) as server, Cache(tmp_path / "cache", limit="100mb") as cache:
        monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(number, os.strerror(number))))
        with (
            pytest.raises(CacheDiskError, match=rf"a\.bin .*{os.strerror(number)}\. {cure}"),
            cache.pinned(f"{server.url}/a.bin"),
        ):
            pass


def test_folders_of_a_cache_on_two_file_systems_are_told_as_that(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    Cache(directory).close()
    (directory / "data").rmdir()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other, FaultyHttpServer({"/a.bin": b"a"}) as server:
        if os.stat(other).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("there is one file system only")
        (directory / "data").symlink_to(other)
        with (
            Cache(directory) as cache,
            pytest.raises(CacheDiskError, match=r"a\.bin .* link\. Have data/ and part/ of the cache on one file system"),
            cache.pinned(f"{server.url}/a.bin"),
        ):
            pass
