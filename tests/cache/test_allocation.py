"""Files are charged by what they take: whole units of their file system, which a file of one byte shows."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.directory import CacheDirectory
from sqlstream.cache.files import layout
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.recovery.rebuild import learn_unit
from sqlstream.testing.invariants import violations
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.actors import body, objects
from tests.cache.kit import destroy

CLUSTER = 65_536
NUM, SIZE = 12, 5_000


@pytest.fixture
def urls(server: FaultyHttpServer) -> list[str]:
    server.objects.update(objects([SIZE] * NUM))
    return [f"{server.url}/o/{i}.bin" for i in range(NUM)]


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB clusters."""
    image, mount = tmp_path / "image", tmp_path / "clusters"
    mount.mkdir()
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    make = ["mkfs.ext4", "-q", "-O", "bigalloc", "-C", str(CLUSTER), str(image)]
    is_made = bool(shutil.which(make[0])) and subprocess.run(make, capture_output=True, check=False).returncode == 0
    if not is_made or subprocess.run(["mount", "-o", "loop", image, mount], capture_output=True, check=False).returncode:
        pytest.skip("needs mkfs.ext4, root and a loop device")
    try:
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True)


def taken_bytes(directory: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for top in ("data", "part") for path in (directory / top).rglob("*.*"))


def fill(directory: Path, urls: list[str], limit: int | None) -> None:
    with Cache(directory, limit=limit) as cache:
        for url in urls:
            with cache.pinned(url) as path:
                assert path.read_bytes() == body(url[url.index("/o/") :], SIZE)
                assert taken_bytes(directory) <= (limit or 1 << 40)


def test_the_limit_holds_on_a_file_system_of_large_clusters(clusters: Path, urls: list[str]) -> None:
    directory = clusters / "cache"
    assert layout.allocation_unit(str(clusters)) == CLUSTER
    fill(directory, urls, limit=6 * CLUSTER)
    with Cache(directory) as cache:
        statistics = cache.statistics()
        assert statistics.used_bytes == taken_bytes(directory) == CLUSTER * statistics.entries
        assert cache.verify() == []
    assert violations(directory, at_rest=True) == []


def test_a_ledger_that_moves_to_another_file_system_is_counted_anew(
    clusters: Path, directory: Path, urls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    fill(directory, urls, limit=None)
    assert taken_bytes(directory) == NUM * 8192
    shutil.copytree(directory, clusters / "cache")
    with Cache(clusters / "cache") as cache:
        assert cache.statistics().used_bytes == taken_bytes(clusters / "cache") == NUM * CLUSTER
    assert f"take whole units of {CLUSTER} bytes" in caplog.text
    assert violations(clusters / "cache", at_rest=True) == []
    caplog.clear()
    shutil.copytree(clusters / "cache", directory.with_name("back"))
    with Cache(directory.with_name("back")) as cache:
        assert cache.statistics().used_bytes == NUM * 8192
    assert "take whole units of 4096 bytes" in caplog.text


def test_a_rebuild_counts_in_the_unit_of_the_file_system(clusters: Path, urls: list[str]) -> None:
    fill(clusters / "cache", urls[:4], limit=None)
    destroy(clusters / "cache")
    with Cache(clusters / "cache") as cache:
        assert cache.statistics().used_bytes == 4 * CLUSTER


def test_the_unit_is_looked_at_once_for_a_file_system(directory: Path, urls: list[str]) -> None:
    fill(directory, urls, limit=None)
    looks: list[str] = []

    def unit(path: str) -> int:
        looks.append(path)
        return 16_384

    for _ in range(2):
        store = CacheDirectory(disk := Disk(directory, unit_of=unit))
        learn_unit(store.ledger, disk)
        assert disk.unit.num_bytes == 4096
        store.ledger.database.close()
    assert looks == []
    store = CacheDirectory(disk := Disk(directory, unit_of=unit))
    with store.ledger.transaction() as tx:
        tx.set_unit(4096, "another one")
    learn_unit(store.ledger, disk)
    with store.ledger.transaction() as tx:
        account = tx.account()
        assert account.charged_bytes == NUM * 16_384
        assert (account.entries, account.ready_bytes, account.filling_bytes) == tx.sums()
    store.ledger.database.close()
    assert len(looks) == 1


def test_a_unit_is_never_below_4096_bytes(tmp_path: Path) -> None:
    assert layout.allocation_unit(str(tmp_path)) == 4096
    assert os.listdir(tmp_path) == []
