"""The account made anew from the files."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.ledger.database import Database
from sqlstream.cache.ledger.ledger import Ledger
from sqlstream.cache.model.refs import ObjectRef, object_key
from sqlstream.cache.model.rows import EntryRow
from sqlstream.cache.recovery import rebuild
from sqlstream.testing.disk import DiskWatch, cached_files
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.cache.actors import Stage, body, objects, pin_until_told
from tests.cache.kit import destroy, num_gets
from tests.cache.session import Session

SIZE, CHARGE, NUM = 10_000, 12_288, 10


@pytest.fixture
def urls(server: FaultyHttpServer) -> list[str]:
    server.objects.update(objects([SIZE] * 2 * NUM))
    return [f"{server.url}/o/{i}.bin" for i in range(2 * NUM)]


def change_boot_id(directory: Path, *statements: str) -> None:
    connection = sqlite3.connect(directory / "ledger.sqlite")
    with connection:
        for statement in (*statements, "UPDATE meta SET boot_id = 'another start of the machine'"):
            connection.execute(statement)
    connection.close()


def test_a_damaged_ledger_is_rebuilt_from_the_files_and_nothing_is_fetched_again(
    server: FaultyHttpServer, directory: Path, urls: list[str]
) -> None:
    with Cache(directory, limit=1 << 20) as cache:
        cache.acquire_many(urls[:NUM])
    destroy(directory)
    with Cache(directory, limit=1 << 20) as cache:
        assert cache.statistics().used_bytes == NUM * CHARGE
        for path, url in zip(cache.acquire_many(urls[:NUM]), urls, strict=False):
            assert path.read_bytes() == body(url.removeprefix(server.url), SIZE)
        cache.release_many(urls[:NUM])
        assert cache.verify() == []
    assert num_gets(server) == NUM
    assert (directory / "ledger.sqlite.bad").exists()
    check_invariants(directory, at_rest=True)


def test_a_rebuild_keeps_pins_limits_and_downloads_of_the_living(
    server: FaultyHttpServer, directory: Path, urls: list[str], stage: Stage
) -> None:
    limit = 8 * CHARGE
    holder = stage.start(pin_until_told, directory, limit, urls[:3])
    paths = [Path(path) for path in holder.hear()]
    server.script("/o/5.bin", FaultyAnswer(fault=Fault.HOLD, after_bytes=100, gate=(gate := threading.Event())))
    with Cache(directory, limit=1 << 30) as cache, DiskWatch(directory) as watch:
        hold = Session(cache).acquire_one([ObjectRef.of(urls[5])])
        assert Session(cache).claim(hold)  # what is only prefetched would be given up for the others
        destroy(directory)
        for url in urls[6:]:
            with cache.pinned(url) as path:
                assert path.stat().st_size == SIZE
                assert all(pinned.exists() for pinned in paths)
            check_invariants(directory)
        stats = cache.statistics()
        assert stats.limit_bytes == limit  # of the one that has not come by since
        assert stats.evictions > 0
        gate.set()
        Session(cache).wait(hold)
        assert cache.path_of(hold.refs[0]).read_bytes() == body("/o/5.bin", SIZE)
        holder.tell()
        holder.hear()
    assert watch.highest_bytes <= limit
    check_invariants(directory, at_rest=True)


def test_eviction_after_a_rebuild_goes_by_the_age_of_files(directory: Path, urls: list[str]) -> None:
    with Cache(directory, limit=NUM * CHARGE) as cache:
        paths = cache.acquire_many(urls[:NUM])
    for i, path in enumerate(paths):
        os.utime(path, (time.time() - 1000 * ((i * 7) % NUM + 1),) * 2)
    destroy(directory)
    with Cache(directory, limit=NUM * CHARGE) as cache, cache.pinned(urls[NUM]):
        gone = [i for i, path in enumerate(paths) if not path.exists()]
        assert gone
        assert sorted(gone) == sorted(sorted(range(NUM), key=lambda i: -((i * 7) % NUM))[: len(gone)])


def test_a_killed_rebuild_starts_again(directory: Path, urls: list[str]) -> None:
    with Cache(directory) as cache:
        cache.acquire_many(urls[:NUM])
    (directory / "REBUILD").touch()
    (directory / "ledger.sqlite").unlink()
    with Cache(directory) as cache:
        assert cache.statistics().entries == NUM
    assert not (directory / "REBUILD").exists()
    check_invariants(directory, at_rest=True)


def test_after_a_restart_of_the_machine_rows_and_files_are_compared(
    server: FaultyHttpServer, directory: Path, urls: list[str]
) -> None:
    with Cache(directory, limit=1 << 20) as cache:
        paths = cache.acquire_many(urls[:6])
    paths[0].unlink()
    os.truncate(paths[1], 100)
    stray = Path(Disk(directory).data_path(b"\xaa" * 16, ""))  # its row was lost with the last commits
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(bytes(SIZE))
    key = object_key(urls[5]).hex()
    change_boot_id(
        directory,
        "UPDATE entry SET created_at = created_at - 3600",
        f"UPDATE entry SET created_at = created_at + 3500 WHERE key = x'{key}'",  # came in the last moments: may be torn
    )
    with Cache(directory, limit=1 << 20) as cache:
        assert cache.statistics().entries == 3
        assert len(cached_files(directory)) == 3
        assert cache.verify() == []
        cache.acquire_many(urls[:6])
    assert num_gets(server) == 6 + 3
    check_invariants(directory, at_rest=True)


class Overtaken(Ledger):
    """The ledger of a process that compares it while another one, which was faster, has opened the cache and reads."""

    def __init__(self, directory: Path, then: Callable[[], object]) -> None:
        super().__init__(Database(directory / "ledger.sqlite"))
        self._then = [then]

    def ready_after(self, key: bytes, limit: int, dataset: int | None = None) -> list[EntryRow]:
        while self._then:
            self._then.pop()()
        return super().ready_after(key, limit, dataset)


def test_processes_that_compare_after_a_restart_take_nothing_from_one_that_is_done_with_it(
    directory: Path, urls: list[str]
) -> None:
    with Cache(directory, limit=1 << 20) as cache:
        cache.acquire_many(urls[:3])
    change_boot_id(directory, "UPDATE entry SET created_at = created_at - 3600")
    paths: list[Path] = []
    with contextlib.ExitStack() as exit_:

        def open_and_read() -> None:
            with Cache(directory) as cache:
                cache.acquire_many(urls[5:8])
            # A second time: what has just come is locked by its download for a moment, beside the pin.
            paths.extend(exit_.enter_context(Cache(directory)).acquire_many(urls[5:8]))

        ledger = Overtaken(directory, open_and_read)
        rebuild.reconcile(ledger, Disk(directory))
        ledger.database.close()
        assert [path.stat().st_size for path in paths] == [SIZE] * 3, "they are pinned"
        check_invariants(directory)


def rebuilt_after_days(directory: Path, urls: list[str]) -> None:
    """Have objects come one a day, the last one now, and the ledger be made anew."""
    with Cache(directory, limit=1 << 20) as cache:
        paths = cache.acquire_many(urls[:NUM])
    for days, path in enumerate(reversed(paths)):
        os.utime(path, (time.time() - 86_400 * days,) * 2)
    destroy(directory)
    with Cache(directory, limit=1 << 20) as cache:
        assert cache.statistics().entries == NUM


def test_a_rebuild_and_a_later_restart_of_the_machine_leave_what_came_long_before(directory: Path, urls: list[str]) -> None:
    rebuilt_after_days(directory, urls)
    change_boot_id(directory)
    with Cache(directory, limit=1 << 20) as cache:
        assert cache.statistics().entries == NUM - 1, "the last one may be torn"
        assert cache.verify() == []


def test_a_rebuild_makes_no_object_younger(directory: Path, urls: list[str]) -> None:
    rebuilt_after_days(directory, urls)
    with Cache(directory, max_age="84h") as cache:
        assert cache.statistics().entries == 4


def test_a_ledger_that_is_lost_with_the_power_takes_no_torn_file_for_whole(
    server: FaultyHttpServer, directory: Path, urls: list[str]
) -> None:
    with Cache(directory, limit=1 << 20) as cache:
        paths = cache.acquire_many(urls[:6])
    for path in paths[:4]:
        os.utime(path, (time.time() - 3600,) * 2)
    os.truncate(paths[4], 100)
    paths[5].write_bytes(bytes(SIZE))  # the size came to the disk, and the bytes did not
    for name in ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"):
        (directory / name).unlink(missing_ok=True)
    (directory / "lock").write_text("another start of the machine")
    with Cache(directory, limit=1 << 20) as cache:
        for path, url in zip(cache.acquire_many(urls[:6]), urls, strict=False):
            assert path.read_bytes() == body(url.removeprefix(server.url), SIZE)
    assert num_gets(server) == 6 + 2
    check_invariants(directory, at_rest=True)
    (directory / "ledger.sqlite").unlink()
    with Cache(directory, limit=1 << 20) as cache:
        assert cache.statistics().entries == 6, "the machine was not restarted since"


def test_without_a_restart_nothing_is_compared_at_open(directory: Path, urls: list[str]) -> None:
    with Cache(directory, limit=1 << 20) as cache:
        paths = cache.acquire_many(urls[:6])
    paths[0].unlink()
    with Cache(directory, limit=1 << 20) as cache:
        assert cache.statistics().entries == 6


@pytest.mark.parametrize("name", ["ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"])
def test_a_ledger_file_deleted_under_its_users_ends_in_a_true_account(directory: Path, urls: list[str], name: str) -> None:
    with Cache(directory, limit=1 << 20) as cache:
        cache.acquire_many(urls[:NUM])
        (directory / name).unlink()
        with cache.pinned(urls[NUM]) as path:
            assert path.stat().st_size == SIZE
        cache.verify(repair=True)
        assert cache.verify() == []
        check_invariants(directory)
    check_invariants(directory, at_rest=True)
