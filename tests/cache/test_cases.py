"""Cases of failure of the reference that no other page tests; docs/reliability.md lists all of them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import random
import resource
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.ledger.write_lock import WriteLock
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.model.tuning import CacheTuning
from sqlstream.errors import CacheDiskError, CacheError, CacheFullError, ObjectChangedError, StorageError
from sqlstream.process import locks
from sqlstream.testing.clock import MockClock
from sqlstream.testing.disk import cached_files
from sqlstream.testing.faults import SideEffects
from sqlstream.testing.invariants import check_invariants, violations
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.actors import Stage, begin_and_wait, body, objects, pin_until_told, read_in_threads, say
from tests.cache.deaths import OBJECTS, URLS, filled, opened, read
from tests.cache.kit import wait_for_download
from tests.cache.session import Session, tuned_cache
from tests.processes import open_files

SIZE, CHARGE, NUM = 10_000, 12_288, 12


@pytest.fixture
def urls(server: FaultyHttpServer) -> list[str]:
    server.objects.update(objects([SIZE] * NUM))
    return [f"{server.url}/o/{i}.bin" for i in range(NUM)]


# -- the write lock -------------------------------------------------------------------------------------------------------


def die_inside(connection: Connection, directory: Path) -> None:
    """Take the write lock and keep it."""
    with Cache(directory) as cache, Session(cache).transaction() as tx:
        tx.count({"hits": 1_000_000})  # never committed
        say(connection, "inside")
        connection.recv()


def test_case_8_a_process_killed_inside_the_write_lock_lets_the_next_in(directory: Path, urls: list[str], stage: Stage) -> None:
    Cache(directory, limit=1 << 20).close()
    holder = stage.start(die_inside, directory)
    assert holder.hear() == "inside"
    waiters = [stage.start(read_in_threads, directory, 1 << 20, urls[:3], 1) for _ in range(8)]
    while len(list((directory / "owners").iterdir())) < 1 and not any(waiter.connection.poll(0.01) for waiter in waiters):
        if locks.lock_holder(directory / "gate") is not None:
            break  # the first of them waits for the write lock
    holder.kill()
    assert [waiter.hear() for waiter in waiters] == [3] * 8
    with Cache(directory) as cache:
        assert cache.statistics().hits < 1000
    check_invariants(directory, at_rest=True)


def test_case_12_waiting_for_long_at_the_write_lock_names_who_holds_it(
    directory: Path, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    Cache(directory).close()
    holder = stage.start(die_inside, directory)
    assert holder.hear() == "inside"
    os.kill(holder.pid, signal.SIGSTOP)
    entered = threading.Event()

    def enter() -> None:
        lock = WriteLock(directory, patience_seconds=0.05)
        assert lock.take()
        entered.set()
        lock.leave()
        lock.close()

    thread = threading.Thread(target=enter)
    thread.start()
    while not caplog.records:
        time.sleep(0.01)
    assert f"process {holder.pid} holds it: if that process is stopped, continue or end it" in caplog.text
    assert not entered.is_set()  # nobody takes a lock from the living
    os.kill(holder.pid, signal.SIGCONT)
    holder.kill()
    thread.join()
    assert entered.is_set()


# -- killed readers and writers -------------------------------------------------------------------------------------------


def map_until_killed(connection: Connection, directory: Path, limit: int, url: str) -> None:
    with Cache(directory, limit=limit) as cache, cache.pinned(url) as path:
        file = open(path, "rb")  # noqa: SIM115  # only its death closes it
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        say(connection, (str(path), mapped[:4]))
        connection.recv()


def test_case_9_a_mapped_file_of_a_killed_reader_can_go(directory: Path, urls: list[str], stage: Stage) -> None:
    limit = 3 * CHARGE
    reader = stage.start(map_until_killed, directory, limit, urls[0])
    path, start = reader.hear()
    assert start == body("/o/0.bin", 4)
    with Cache(directory, limit=limit) as cache:
        cache.acquire_many(urls[1:3])
        assert os.path.exists(path)
        reader.kill()
        cache.release_many(urls[1:3])
        cache.acquire_many(urls[3:6])  # needs all of the limit
        assert not os.path.exists(path)
    check_invariants(directory, at_rest=True)


def test_case_10_all_processes_killed_at_once_leave_a_ledger_that_opens(directory: Path, urls: list[str], stage: Stage) -> None:
    actors = [stage.start(read_again_and_again, directory, 6 * CHARGE, urls, seed) for seed in range(4)]
    wal = directory / "ledger.sqlite-wal"
    while not (wal.exists() and wal.stat().st_size > 100_000):
        time.sleep(0.01)
    for actor in actors:
        os.kill(actor.pid, signal.SIGKILL)
    for actor in actors:
        actor.process.join()
    assert wal.stat().st_size > 100_000
    with Cache(directory, limit=6 * CHARGE) as cache:
        assert Session(cache).read("PRAGMA integrity_check") == [("ok",)]
    check_invariants(directory, at_rest=True)


def read_again_and_again(_: Connection, directory: Path, limit: int, urls: list[str], seed: int) -> None:
    rng = random.Random(seed)
    with Cache(directory, limit=limit) as cache:
        while True:
            with cache.pinned(rng.choice(urls)):
                pass


def test_case_11_waiting_for_long_for_a_stopped_leader_names_it(
    server: FaultyHttpServer, directory: Path, urls: list[str], stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("/o/0.bin", FaultyAnswer(fault=Fault.STALL, after_bytes=100, seconds=300))
    leader = stage.start(begin_and_wait, directory, 1 << 20, urls[0])
    assert leader.hear() == "asking"
    wait_for_download(server, directory, "/o/0.bin")
    leader.stop_outside_the_write_lock(directory)
    with Cache(directory, limit=1 << 20) as cache, MockClock(rate=1000).installed():  # a minute in a moment
        hold = Session(cache).acquire_one([ObjectRef.of(urls[0])])
        thread = threading.Thread(target=Session(cache).wait, args=(hold,))
        thread.start()
        while not caplog.records:
            time.sleep(0.01)
        leader.kill()
        thread.join()
        assert hold.is_void  # its leader died: it is ours to take over
        Session(cache).release(hold)
    expected = (
        f"waiting for {urls[0]} for 60 s; process {leader.pid} downloads it: if that process is stopped, continue or end it"
    )
    assert caplog.records[0].getMessage() == expected


def interrupt_everywhere(_: Connection, root: Path) -> tuple[int, int]:
    """Ctrl-C before each side effect in turn; returns how many there are, and how many calls were ended by it."""
    filled(root / "original")
    (root / "original" / "ballast").unlink()  # faster to make than to copy
    num_interrupts = 0
    for at in itertools.count(1):
        directory = root / "copy"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(root / "original", directory)
        cache = opened(directory)
        effects = SideEffects(at, lambda name: os.kill(os.getpid(), signal.SIGINT))
        try:
            with effects.installed():
                read(cache, *URLS[5:9], URLS[0])
        except KeyboardInterrupt:
            num_interrupts += 1
        is_over = effects.num_seen < at
        read(cache, *URLS[:4])  # it goes on as if nothing had been
        Session(cache).collect()
        stats = cache.statistics()
        assert (stats.pinned_entries, stats.filling_bytes) == (0, 0), f"at {at}: {stats}"
        cache.close()
        assert open_files(directory) == [], f"at {at}: descriptors leak"
        assert violations(directory, at_rest=True) == [], f"at {at}"
        if is_over:
            return at - 1, num_interrupts
    raise AssertionError


@pytest.mark.timeout(660)
def test_case_28_ctrl_c_at_any_side_effect_leaks_nothing(tmp_path: Path, stage: Stage) -> None:
    num_effects, num_interrupts = stage.start(interrupt_everywhere, tmp_path).hear(600)
    assert num_interrupts == num_effects >= 5


# -- what the server sends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [SIZE - 1, SIZE + 1, 3 * SIZE])
def test_case_14_an_object_of_another_size_than_the_index_says_is_refused_and_leaves_nothing(
    directory: Path, urls: list[str], size_bytes: int
) -> None:
    with Cache(directory, limit=1 << 20) as cache:
        with pytest.raises(ObjectChangedError, match=r"/o/0\.bin"):
            cache.hold([ObjectRef.of(urls[0], size_bytes=size_bytes)])
        assert (cache.statistics().used_bytes, cache.statistics().filling_bytes) == (0, 0)
        assert cached_files(directory) == {}
    check_invariants(directory, at_rest=True)


@pytest.mark.parametrize(
    "url",
    [
        "http://nowhere/../../../etc/passwd",
        "http://nowhere//absolute.bin",
        "http://nowhere/%2e%2e/%2fetc.bin",
        f"http://nowhere/{'x' * 4096}.bin",
        "http://nowhere/a\u0430.bin",
        "http://nowhere/A.BIN",
        "http://nowhere/a.bin\x00.sh",
        "http://nowhere/a\nb.bin",
        "http://nowhere/.",
        "http://nowhere/a.b/../.hidden",
    ],
)
def test_case_31_no_url_makes_a_name_outside_of_the_cache(tmp_path: Path, url: str) -> None:
    with Cache(tmp_path / "cache", limit=1 << 20) as cache:
        cache.fetcher = ScriptedFetcher({url: b"data"})
        with cache.pinned(url) as path:
            assert path.read_bytes() == b"data"
            assert path.resolve().parent.parent == tmp_path / "cache" / "data"
            assert path.name[:32].strip("0123456789abcdef") == ""
            assert path.name[32:].strip("abcdefghijklmnopqrstuvwxyz0123456789.") == ""
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"]
    check_invariants(tmp_path / "cache", at_rest=True)


# -- limits ---------------------------------------------------------------------------------------------------------------


def test_case_24_a_limit_of_nothing_lets_nothing_in(directory: Path, urls: list[str]) -> None:
    with Cache(directory, limit=0) as cache:
        with pytest.raises(CacheFullError, match="the cache limit is 0 bytes"):
            cache.acquire_many(urls[:1])
        cache.limit_bytes = CHARGE
        with cache.pinned(urls[0]):
            cache.limit_bytes = 0  # what is here and pinned stays
            with cache.pinned(urls[0]) as path:
                assert path.stat().st_size == SIZE
    check_invariants(directory)


def test_case_19_too_few_descriptors_are_an_error_and_none_leaks(directory: Path, urls: list[str], stage: Stage) -> None:
    assert stage.run_all(read_with_few_descriptors, [(directory, urls)]) == [True]
    check_invariants(directory, at_rest=True)


def read_with_few_descriptors(_: Connection, directory: Path, urls: list[str]) -> bool:
    has_failed = False
    with Cache(directory, limit=1 << 20) as cache:
        with cache.pinned(urls[0]):
            pass
        before = len(os.listdir("/proc/self/fd"))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 4, hard))  # parts of a dozen downloads do not fit
        try:
            with contextlib.suppress(OSError):
                paths = cache.acquire_many(urls[1:])
                assert all(path.stat().st_size == SIZE for path in paths)
                cache.release_many(urls[1:])
        except (CacheError, StorageError):
            has_failed = True
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        Session(cache).collect()
        for path, url in zip(cache.acquire_many(urls), urls, strict=True):
            assert path.read_bytes() == body("/" + url.split("/", 3)[3], SIZE)
        cache.release_many(urls)
        assert cache.statistics().pinned_entries == 0
        assert len(os.listdir("/proc/self/fd")) <= before + 4
    return has_failed or True


def test_case_19_a_limit_on_the_size_of_files_is_a_clear_error(directory: Path, server: FaultyHttpServer, stage: Stage) -> None:
    server.objects.update(objects([3 << 20, SIZE]))
    urls = [f"{server.url}/o/{i}.bin" for i in range(2)]
    (message,) = stage.run_all(read_with_small_files, [(directory, urls)])
    assert f"cannot write {urls[0]}" in message
    assert "File too large. Raise `ulimit -f`" in message
    check_invariants(directory, at_rest=True)


def read_with_small_files(_: Connection, directory: Path, urls: list[str]) -> str:
    with Cache(directory, limit=1 << 30) as cache:
        with cache.pinned(urls[1]) as path:  # the helper starts without the limit
            assert path.stat().st_size == SIZE
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            cache.hold([ObjectRef.of(urls[0], size_bytes=3 << 20)])
        except CacheDiskError as error:
            message = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        with cache.pinned(urls[0]) as path:
            assert path.stat().st_size == 3 << 20
    return message


# -- clocks ---------------------------------------------------------------------------------------------------------------


def test_case_20_no_step_of_the_clock_changes_who_goes_first(tmp_path: Path) -> None:
    """Order is that of a logical clock; also files that somebody dates differently keep their place."""
    rng = random.Random(0)
    impatient = CacheTuning(room_timeout_seconds=-1.0)
    with (
        tuned_cache(tmp_path, impatient, limit=NUM * CHARGE) as cache,
        MockClock(start=2_000_000_000).installed() as clock,
    ):
        cache.fetcher = ScriptedFetcher(OBJECTS)
        order = rng.sample(URLS[:6], 6)
        for step, url in zip([0, -3600, 365 * 86_400, -400 * 86_400, 60, 0], order, strict=True):
            clock.step(step)
            with cache.pinned(url) as path:
                os.utime(path, (rng.randrange(1 << 31),) * 2)
            cache.statistics()  # publishes, one after the other
        for num_left in range(5, 0, -1):
            cache.limit_bytes = num_left * CHARGE
            with cache.pinned(order[-1]), pytest.raises(CacheFullError):  # the last one used is there, and stays
                cache.hold([ObjectRef.of(URLS[7], size_bytes=num_left * CHARGE)])
            rows = Session(cache).read("SELECT url FROM entry")
            left = [url for url in order if (url,) in rows]
            assert left == order[len(order) - len(left) :]
        assert all(owner.started_at >= 0 for owner in cache.statistics().owners)
    check_invariants(tmp_path, at_rest=True)


# -- damage ---------------------------------------------------------------------------------------------------------------


def overwrite(path: Path, start: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "header of zeros": lambda ledger: overwrite(ledger, 0, bytes(100)),
    "bits of a page header": lambda ledger: overwrite(ledger, 4096, b"\xff\x00\xff"),
    "random page": lambda ledger: overwrite(ledger, 4096, os.urandom(4096)),
    "empty": lambda ledger: os.truncate(ledger, 0),
    "half": lambda ledger: os.truncate(ledger, ledger.stat().st_size // 2),
    "rubbish": lambda ledger: overwrite(ledger, 0, os.urandom(ledger.stat().st_size)),
    "deleted": Path.unlink,
    "replaced by an empty file": lambda ledger: replace(ledger, lambda path: path.touch()),
    "replaced by another database": lambda ledger: replace(ledger, make_database),
}


def replace(path: Path, make: Callable[[Path], object]) -> None:
    """In one step: a background thread that finds no ledger at all makes one, in the midst of ours."""
    strange = path.with_name("strange.sqlite")
    make(strange)
    os.replace(strange, path)


def make_database(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE mine (x)")


@pytest.mark.parametrize("damage", DAMAGES)
def test_case_21_whatever_happens_to_the_ledger_under_its_users_the_right_bytes_come_and_the_account_is_true(
    directory: Path, urls: list[str], stage: Stage, damage: str
) -> None:
    holder = stage.start(pin_until_told, directory, 8 * CHARGE, urls[:2])
    paths = [Path(path) for path in holder.hear()]
    with Cache(directory, limit=8 * CHARGE) as cache:
        with cache.pinned(urls[2]):
            pass
        cache.statistics()
        with Session(cache).transaction() as tx:  # into the file: what is only in the -wal hides the damage
            tx.connection.execute("SELECT 1")
        database = Session(cache).database
        with database._using:
            assert database._connection is not None
            database._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        DAMAGES[damage](directory / "ledger.sqlite")
        for url in [*urls, *urls[:4]]:
            with cache.pinned(url) as path:
                assert path.read_bytes() == body("/" + url.split("/", 3)[3], SIZE)
            assert all(path.exists() for path in paths)
        holder.tell()
        holder.hear()
        cache.verify(repair=True)
        assert cache.verify() == []
    check_invariants(directory, at_rest=True)


def test_case_25_a_pipe_in_the_place_of_a_file_is_not_opened(directory: Path, urls: list[str]) -> None:
    with Cache(directory, limit=1 << 20) as cache:
        with cache.pinned(urls[0]) as path:
            pass
        path.unlink()
        os.mkfifo(path)  # to read it would be to wait for ever
        with cache.pinned(urls[0]) as mended:
            assert mended.read_bytes() == body("/o/0.bin", SIZE)
        assert cache.verify() == []
    check_invariants(directory, at_rest=True)


def clear_again_and_again(connection: Connection, directory: Path) -> int:
    with Cache(directory) as cache:
        num_removed = cache.clear().removed_entries
        say(connection, "sweeping")
        while not connection.poll():
            num_removed += cache.clear().removed_entries
        return num_removed + cache.clear().removed_entries


def test_case_23_two_who_clear_take_nothing_from_readers(directory: Path, urls: list[str], stage: Stage) -> None:
    holder = stage.start(pin_until_told, directory, 1 << 20, urls[:2])
    holder.hear()
    sweepers = [stage.start(clear_again_and_again, directory) for _ in range(2)]
    assert [sweeper.hear() for sweeper in sweepers] == ["sweeping"] * 2
    assert stage.run_all(read_in_threads, [(directory, 1 << 20, urls, 3)] * 2) == [3 * NUM] * 2
    for sweeper in sweepers:
        sweeper.tell()
    assert sum(sweeper.hear() for sweeper in sweepers) > 0
    holder.tell()
    holder.hear()  # its files were there to the end
    check_invariants(directory, at_rest=True)


def test_case_18_a_file_that_cannot_be_unlinked_is_left_and_the_rest_goes(directory: Path, urls: list[str]) -> None:
    effects = SideEffects(1, refuse, only=frozenset({"unlink"}))
    with Cache(directory, limit=1 << 20) as cache:
        cache.acquire_many(urls)
        cache.release_many(urls)
        cache.statistics()
        with effects.installed():
            assert cache.clear().removed_entries == NUM - 1
        assert cache.statistics().used_bytes == CHARGE
        assert cache.clear().removed_entries == 1
    check_invariants(directory, at_rest=True)


def refuse(name: str) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), name)
