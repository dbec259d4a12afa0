"""A disk without inodes is a full disk: files are evicted, and the work goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream import StreamingDataset
from sqlstream.cache import Cache
from sqlstream.cache.acquire.room import make_space
from sqlstream.cache.files.disk import Disk, Part
from sqlstream.errors import CacheDiskError, CacheError
from sqlstream.testing.invariants import violations
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.actors import body, objects
from tests.cache.session import Session

NUM_INODES, NUM, SIZE = 400, 500, 100  # data/ may have 256 folders


@pytest.fixture
def num_inodes() -> int:
    return NUM_INODES


@pytest.fixture
def few_inodes(tmp_path: Path, num_inodes: int) -> Iterator[Path]:
    """A file system that has room for all bytes, and for few files."""
    mount = tmp_path / "few"
    mount.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size=64m,nr_inodes={num_inodes}", "none", str(mount)]
    if subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("needs root, to mount a tmpfs")
    try:
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True)


@pytest.fixture
def urls(server: FaultyHttpServer) -> list[str]:
    server.objects.update(objects([SIZE] * NUM))
    return [f"{server.url}/o/{i}.bin" for i in range(NUM)]


@pytest.mark.parametrize(("num_inodes", "window"), [(NUM_INODES, 1), (NUM_INODES, 20), (40, 1), (60, 10)])
def test_files_are_evicted_where_no_inode_is_left(few_inodes: Path, urls: list[str], num_inodes: int, window: int) -> None:
    with Cache(few_inodes / "cache", limit=None) as cache:
        for start in range(0, NUM, window):
            wanted = urls[start : start + window]
            for url, path in zip(wanted, cache.acquire_many(wanted), strict=True):
                assert path.read_bytes() == body(url[url.index("/o/") :], SIZE)
            cache.release_many(wanted)
        statistics = cache.statistics()
        assert statistics.failures == 0
        assert statistics.evictions > 0
        assert os.statvfs(few_inodes).f_files == num_inodes
    assert violations(few_inodes / "cache", at_rest=True) == []


def test_as_many_files_are_evicted_as_are_to_be_made_however_large_they_are(tmp_path: Path, server: FaultyHttpServer) -> None:
    sizes = [1 << 20, *[SIZE] * 60]
    server.objects.update(objects(sizes))
    with Cache(tmp_path / "cache", limit=None) as cache:
        for i in range(len(sizes)):
            with cache.pinned(f"{server.url}/o/{i}.bin"):
                pass
        make_space(Session(cache).owner, Session(cache).disk, need_bytes=0, num_files=40)
        assert cache.statistics().evictions == 40


def test_a_window_is_asked_for_again_while_others_take_the_inodes_that_it_gave_back(
    tmp_path: Path, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    create_part, num_left = Disk.create_part, 2

    def create(disk: Disk, key: bytes) -> Part:
        nonlocal num_left
        if num_left:
            num_left -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create_part(disk, key)

    with Cache(tmp_path / "cache", limit=None) as cache:
        for url in urls[:10]:
            with cache.pinned(url):
                pass
        monkeypatch.setattr(Disk, "create_part", create)
        for url, path in zip(urls[10:15], cache.acquire_many(urls[10:15]), strict=True):
            assert path.read_bytes() == body(url[url.index("/o/") :], SIZE)
        assert num_left == 0
        assert cache.statistics().evictions > 0
        num_left = 1 << 30
        with pytest.raises(CacheDiskError, match="No space left on device"):
            cache.acquire_many([urls[15]])


@pytest.mark.parametrize("num_inodes", [NUM_INODES, 80])
def test_a_stream_goes_on_where_no_inode_is_left(few_inodes: Path, tmp_path: Path, urls: list[str]) -> None:
    (tmp_path / "t.csv").write_text("index,file\n" + "".join(f"{i},{url}\n" for i, url in enumerate(urls)))

    def read(sample: dict[str, object]) -> dict[str, object]:
        return {"data": Path(str(sample["file"])).read_bytes()}

    with StreamingDataset(
        f"{tmp_path}/t.csv",
        str(few_inodes / "cache"),
        columns_to_download=["file"],
        transforms=[read],
        prefetch=16,
        on_error="raise",
    ) as dataset:
        assert [sample["data"] for sample in dataset] == [body(f"/o/{i}.bin", SIZE) for i in range(NUM)]


def test_a_folder_that_another_process_removes_is_made_again_for_its_file(
    tmp_path: Path, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename
    removed: list[str] = []

    def remove_folder_and_rename(source: str, target: str) -> None:
        if len(removed) < 2 and os.path.isdir(os.path.dirname(target)):
            removed.append(os.path.dirname(target))
            os.rmdir(removed[-1])
        rename(source, target)

    with Cache(tmp_path / "cache", limit=None) as cache:
        monkeypatch.setattr(os, "rename", remove_folder_and_rename)
        with cache.pinned(urls[0]) as path:
            assert path.read_bytes() == body("/o/0.bin", SIZE)
    assert len(removed) == 2


def test_a_cache_that_cannot_be_made_without_an_inode_is_one_clear_error(few_inodes: Path) -> None:
    with contextlib.suppress(OSError):
        for i in range(NUM_INODES):
            (few_inodes / f"{i}").touch()
    assert os.statvfs(few_inodes).f_ffree == 0
    with pytest.raises(CacheError, match="0 of its 400 inodes are free") as caught:
        Cache(few_inodes / "cache", limit=None)
    assert str(few_inodes / "cache") in str(caught.value)
    (few_inodes / "0").unlink()  # the directory itself finds an inode, and what belongs in it does not
    with pytest.raises(CacheError, match="0 of its 400 inodes are free"):
        Cache(few_inodes / "cache", limit=None)
    for path in few_inodes.glob("[0-9]*"):
        path.unlink()
    Cache(few_inodes / "cache", limit=None).close()
    assert violations(few_inodes / "cache", at_rest=True) == []


def test_a_cache_that_is_there_and_cannot_be_opened_without_an_inode_is_one_clear_error(
    few_inodes: Path, urls: list[str]
) -> None:
    directory = few_inodes / "cache"
    with Cache(directory, limit=None) as cache, cache.pinned(urls[0]) as path:
        assert path.read_bytes() == body("/o/0.bin", SIZE)
    with contextlib.suppress(OSError):
        for i in range(NUM_INODES):
            (few_inodes / f"{i}").touch()
    with pytest.raises(CacheError, match=rf"{directory}.*No space left on device.*, 0 of its 400 inodes are free"):
        Cache(directory, limit=None)
    for path in few_inodes.glob("[0-9]*"):
        path.unlink()
    Cache(directory, limit=None).close()
    assert violations(directory, at_rest=True) == []


@pytest.mark.parametrize("num_inodes", [12, 17])
def test_a_file_system_with_too_few_inodes_for_any_object_is_named(few_inodes: Path, urls: list[str], num_inodes: int) -> None:
    with (
        pytest.raises(CacheError, match=rf"of its {num_inodes} inodes are free"),
        Cache(few_inodes / "cache", limit=None) as cache,
        cache.pinned(urls[0]),
    ):
        pass


def test_a_cache_is_opened_on_a_full_disk_with_the_room_of_its_ballast(few_inodes: Path) -> None:
    Cache(few_inodes / "cache", limit=None).close()
    assert (few_inodes / "cache" / "ballast").exists()
    with (few_inodes / "other").open("wb") as file:
        status = os.statvfs(few_inodes)
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize)
    with Cache(few_inodes / "cache", limit=None) as cache:
        assert cache.statistics().evictions == 0
    (few_inodes / "other").unlink()
