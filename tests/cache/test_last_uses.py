"""`clear --older-than` goes by what the ledger knows of last uses, not by the files' times, which do not move under noatime."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.files.read_hold import ReadHold
from sqlstream.cache.ledger.last_uses import RecentUses, note_last_uses
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.errors import CacheError, ConfigError
from sqlstream.testing.disk import cached_files
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.actors import Stage, objects
from tests.cache.old_ledgers import as_version
from tests.cache.session import Session

if TYPE_CHECKING:
    from sqlstream import StreamingDataset

Way: TypeAlias = Callable[[Path, list[str], int], None]
NUM, SIZE, HOUR = 8, 4000, 3600
FAR, NEAR = 1 << 20, (NUM + 1) * 4096
READ = range(NUM // 2)
"""The objects that are read again: the first half."""


@pytest.fixture
def urls(server: FaultyHttpServer) -> list[str]:
    server.objects.update(objects([SIZE] * NUM))
    return [f"{server.url}/o/{i}.bin" for i in range(NUM)]


@pytest.fixture
def noatime(tmp_path: Path) -> Iterator[Path]:
    """A file system on which reading moves no time; without root, a plain folder: `age` sets the times back anyway."""
    mount = tmp_path / "noatime"
    mount.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64m,noatime", "none", str(mount)]
    is_mounted = subprocess.run(mounting, capture_output=True, check=False).returncode == 0
    yield mount
    if is_mounted:
        subprocess.run(["umount", mount], check=True)


def set_times_back(directory: Path) -> None:
    """Have all files look as on a mount that notes no access, made two hours ago."""
    for path in directory.glob("data/*/*"):
        os.utime(path, (time.time() - 2 * HOUR,) * 2)


def age(directory: Path) -> None:
    """Have all that happened so far have happened two hours ago."""
    with Cache(directory) as cache:
        Session(cache).owner.flush()
        with Session(cache).transaction() as tx:
            tx.connection.execute(f"UPDATE entry SET created_at = created_at - {2 * HOUR}")
            tx.connection.execute(f"UPDATE used SET at = at - {2 * HOUR}")
    set_times_back(directory)


def remaining(directory: Path, urls: list[str]) -> list[int]:
    """Clear what was not used for an hour, and return the numbers of the objects that are left."""
    set_times_back(directory)
    with Cache(directory) as cache:
        cache.clear(older_than_seconds=HOUR)
        known = Session(cache).ledger.find([ObjectRef.of(url).key for url in urls])
        assert len(cached_files(directory)) == len(known)
    return [i for i, url in enumerate(urls) if ObjectRef.of(url).key in known]


def read_by_rows(directory: Path, urls: list[str], limit: int) -> None:
    with Cache(directory, limit=limit) as cache:
        cache.acquire_many(urls)
        cache.release_many(urls)


def read_pinned(directory: Path, urls: list[str], limit: int) -> None:
    with Cache(directory, limit=limit) as cache:
        for url in urls:
            with cache.pinned(url) as path:
                path.read_bytes()


def read_under_locks(directory: Path, urls: list[str], limit: int) -> None:
    with Cache(directory, limit=limit) as cache:
        Session(cache).owner.run(lambda _: None)  # registered
        refs = [(ObjectRef.of(url),) for url in urls]
        for ref in refs:
            hold = Session(cache).acquire_one(ref, for_reading=True)
            assert isinstance(hold, ReadHold)
            assert Session(cache).claim(hold)
            Session(cache).release(hold)


@contextlib.contextmanager
def opened_dataset(directory: Path, urls: list[str], limit: int) -> Iterator[StreamingDataset]:
    from sqlstream import StreamingDataset  # here: other processes import this module, and have no use for torch
    from sqlstream.transforms.presets import LoadFromDiskTransform

    table = directory.parent / "t.csv"
    table.write_text("index,object\n" + "".join(f"{i},{url}\n" for i, url in enumerate(urls)))
    with StreamingDataset(
        table,
        directory,
        columns_to_download=["object"],
        transforms=[LoadFromDiskTransform(["object"])],
        cache_limit=limit,
        show_progress=False,
    ) as dataset:
        yield dataset


def iterate(directory: Path, urls: list[str], limit: int) -> None:
    with opened_dataset(directory, urls, limit) as dataset:
        assert sum(1 for _ in dataset) == len(urls)


def access(directory: Path, urls: list[str], limit: int) -> None:
    with opened_dataset(directory, urls, limit) as dataset:
        for row in range(len(urls)):
            dataset[row]


WAYS = [read_by_rows, read_pinned, read_under_locks, iterate, access]


def in_process(
    _: Connection, way: Callable[[Path, list[str], int], None], directory: Path, urls: list[str], limit: int
) -> None:
    way(directory, urls, limit)


@pytest.mark.parametrize("limit", [FAR, NEAR], ids=["far", "near"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_was_read_a_moment_ago_is_not_cleared_as_old(noatime: Path, urls: list[str], way: Way, limit: int) -> None:
    directory = noatime / "cache"
    read_by_rows(directory, urls, limit)
    age(directory)
    way(directory, urls[: len(READ)], limit)
    assert remaining(directory, urls) == list(READ)
    age(directory)
    assert remaining(directory, urls) == []


def test_uses_of_another_process_count(directory: Path, urls: list[str], stage: Stage) -> None:
    read_by_rows(directory, urls, FAR)
    age(directory)
    stage.run_all(in_process, [(read_under_locks, directory, urls[:2], FAR), (read_pinned, directory, urls[2:4], FAR)])
    assert remaining(directory, urls) == list(READ)


def num_keys(cache: Cache) -> int:
    """How many keys the log has."""
    return int(Session(cache).read("SELECT sum(length(keys)) / 16 FROM used")[0][0])


def test_a_long_log_is_made_short_and_loses_no_last_use(directory: Path, urls: list[str]) -> None:
    keys = [ObjectRef.of(url).key for url in urls]
    read_by_rows(directory, urls, FAR)
    age(directory)
    with Cache(directory) as cache:
        for key in (*keys[: len(READ)], *[bytes([i]) * 16 for i in range(50)] * 2):  # the others are here no more
            with Session(cache).transaction() as tx:
                note_last_uses(tx, [key], max_log_keys=10)
            assert num_keys(cache) <= 2 * NUM
    assert remaining(directory, urls) == list(READ)


def test_a_use_repeated_at_other_times_is_kept_once_with_its_last_time(directory: Path, urls: list[str]) -> None:
    keys = [ObjectRef.of(url).key for url in urls]
    now = int(time.time())
    read_by_rows(directory, urls, FAR)
    with Cache(directory) as cache:
        for hours in (5, 1, 3):  # the clock was set back after the second
            with Session(cache).transaction() as tx:
                note_last_uses(tx, keys, max_log_keys=1000)
                tx.connection.execute(f"UPDATE used SET at = {now - hours * HOUR} WHERE seq = (SELECT max(seq) FROM used)")
        with Session(cache).transaction() as tx:
            note_last_uses(tx, [bytes(16)], max_log_keys=NUM)
            tx.connection.execute("UPDATE entry SET created_at = 0")
            assert RecentUses(time.time() - 1.5 * HOUR).among(tx, keys) == set(keys)
            assert RecentUses(time.time() - 0.5 * HOUR).among(tx, keys) == set()
        assert num_keys(cache) == NUM + 1


def test_uses_that_are_noted_while_others_are_cleared_are_seen(directory: Path, urls: list[str]) -> None:
    keys = [ObjectRef.of(url).key for url in urls]
    read_by_rows(directory, urls, FAR)
    age(directory)
    recent = RecentUses(time.time() - HOUR)
    with Cache(directory) as cache:
        for i, key in enumerate(keys * 3):
            with Session(cache).transaction() as tx:
                assert recent.among(tx, keys) == set(keys[:i])
                note_last_uses(tx, [key], max_log_keys=3)


def test_a_last_use_in_the_future_is_kept_and_age_zero_takes_all(directory: Path, urls: list[str]) -> None:
    read_by_rows(directory, urls, FAR)
    with Cache(directory) as cache:
        with Session(cache).transaction() as tx:
            tx.connection.execute(f"UPDATE entry SET created_at = {int(time.time()) + HOUR}")  # the clock was set back
        assert cache.clear(older_than_seconds=1).removed_entries == 0
        assert cache.clear(older_than_seconds=0).removed_entries == NUM


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_an_upgrade_counts_as_a_use(directory: Path, urls: list[str], number: int) -> None:
    read_by_rows(directory, urls, FAR)
    age(directory)
    as_version(directory, number)
    assert remaining(directory, urls) == list(range(NUM))


def test_a_rebuild_counts_as_a_use(directory: Path, urls: list[str]) -> None:
    read_by_rows(directory, urls, FAR)
    age(directory)
    (directory / "ledger.sqlite").write_bytes(b"no database" * 1000)
    for extra in ("-wal", "-shm"):
        (directory / f"ledger.sqlite{extra}").unlink(missing_ok=True)
    with contextlib.suppress(CacheError):
        Cache(directory).close()
    assert remaining(directory, urls) == list(range(NUM))


@pytest.mark.parametrize("seconds", [-1, float("nan"), "7d"])
def test_a_time_that_is_none_clears_nothing(directory: Path, urls: list[str], seconds: Any) -> None:
    read_by_rows(directory, urls, FAR)
    with Cache(directory) as cache:
        with pytest.raises(ConfigError, match=f"older_than_seconds={seconds!r} is .*: give 0.0 or more"):
            cache.clear(older_than_seconds=seconds)
        assert cache.statistics().entries == NUM
