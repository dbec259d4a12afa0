"""L1 to L8, each by its name; and the check itself: it must see what is broken."""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.model.refs import ObjectRef, charged_bytes, object_key
from sqlstream.testing.disk import DiskWatch, cached_files
from sqlstream.testing.invariants import check_invariants, violations
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.cache.actors import Stage, body, objects, pin_until_told, read_in_threads
from tests.cache.session import Session

NUM = 30


@contextmanager
def watched(directory: Path) -> Iterator[list[str]]:
    """Check the promises again and again while the body works; the list gets what was broken."""
    found: list[str] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.003):
            if (directory / "ledger.sqlite").exists():
                found.extend(violations(directory))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def urls(server: FaultyHttpServer) -> list[str]:
    server.objects.update(objects([1000 + 7001 * i % 30_000 for i in range(NUM)]))
    return [f"{server.url}/o/{i}.bin" for i in range(NUM)]


def test_l1_to_l6_hold_at_every_moment_of_a_busy_cache(directory: Path, urls: list[str], stage: Stage) -> None:
    with watched(directory) as found:
        assert stage.run_all(read_in_threads, [(directory, 300_000, urls, 3)] * 2) == [3 * NUM] * 2
    assert found == []
    check_invariants(directory, at_rest=True)


def test_l1_charged_is_at_least_the_bytes_on_disk_while_downloading(
    server: FaultyHttpServer, directory: Path, urls: list[str]
) -> None:
    server.script("/o/5.bin", FaultyAnswer(fault=Fault.HOLD, after_bytes=500, gate=(gate := threading.Event())))
    with Cache(directory, limit=200_000) as cache:
        hold = Session(cache).acquire_one([ObjectRef.of(urls[5])])
        num_looks = 0
        while not Session(cache).wait(hold, timeout_seconds=0.001):
            num_looks += bool(cached_files(directory))
            assert violations(directory) == []
            if num_looks > 3:
                gate.set()  # from here to its end, and looked at after it, too
        assert violations(directory) == []
        Session(cache).release(hold)


def test_l2_charged_never_passes_the_limit(directory: Path, urls: list[str]) -> None:
    limit = 100_000
    with Cache(directory, limit=limit) as cache, DiskWatch(directory) as watch:
        for url in urls:
            with cache.pinned(url):
                assert cache.statistics().used_bytes <= limit
        assert cache.statistics().evictions > 10
    assert watch.highest_bytes <= limit


def test_l3_totals_equal_the_sums_after_every_transaction(directory: Path, urls: list[str]) -> None:
    with Cache(directory, limit=100_000) as cache:
        for url in urls:
            with cache.pinned(url), Session(cache).transaction() as tx:
                account = tx.account()
                assert (account.entries, account.ready_bytes, account.filling_bytes) == tx.sums()


def test_l4_a_file_in_data_is_complete(server: FaultyHttpServer, directory: Path) -> None:
    data = body("/slow.bin", 100_000)
    server.objects["/slow.bin"] = data
    server.script(
        "/slow.bin", FaultyAnswer(fault=Fault.TRUNCATE, after_bytes=500), FaultyAnswer(fault=Fault.DRIP, seconds=0.01)
    )
    seen: set[bytes] = set()
    with Cache(directory) as cache:
        hold = Session(cache).acquire_one([ObjectRef.of(f"{server.url}/slow.bin")])
        while not Session(cache).wait(hold, timeout_seconds=0.001):
            seen.update(path.read_bytes() for path in (directory / "data").rglob("*.bin"))
        assert hold.error is None
        seen.add(cache.path_of(hold.refs[0]).read_bytes())
    assert seen == {data}


def test_l5_a_pinned_file_is_never_unlinked(directory: Path, urls: list[str], stage: Stage) -> None:
    holder = stage.start(pin_until_told, directory, 150_000, urls[:3])
    paths = [Path(path) for path in holder.hear()]
    with Cache(directory, limit=150_000) as cache:
        for url in urls[3:]:
            with cache.pinned(url):
                assert all(path.exists() for path in paths)
        assert cache.statistics().evictions > 0
        report = cache.clear()
        assert report.kept_pinned_entries == 3
        assert all(path.exists() for path in paths)
    holder.tell()
    holder.hear()  # it has read its files once more
    check_invariants(directory)


def test_l6_one_leader_at_a_time_for_a_key(server: FaultyHttpServer, directory: Path, stage: Stage) -> None:
    server.objects.update(objects([200_000]))
    server.script("/o/0.bin", FaultyAnswer(fault=Fault.DRIP, seconds=0.02))
    with watched(directory) as found:
        assert stage.run_all(read_in_threads, [(directory, None, [f"{server.url}/o/0.bin"], 2)] * 3) == [2] * 3
    assert found == []
    assert len(server.requests("/o/0.bin")) == 1


def test_l7_at_rest_the_account_equals_the_disk(directory: Path, urls: list[str], stage: Stage) -> None:
    killed = stage.start(read_in_threads, directory, 200_000, urls, 2)
    while not any((directory / "data").rglob("*.bin")):  # in the middle of its downloads
        time.sleep(0.001)
    killed.kill()
    check_invariants(directory, at_rest=True)
    with Cache(directory) as cache:
        stats = cache.statistics()
    files = [charged_bytes(size) for size in cached_files(directory).values()]
    assert (stats.used_bytes, stats.filling_bytes, stats.entries) == (sum(files), 0, len(files))
    assert sum(path.stat().st_blocks * 512 for path in (directory / "data").rglob("*.bin")) <= stats.used_bytes


def test_l8_nobody_waits_for_room_while_holding_pins_of_unyielded_samples(directory: Path, server: FaultyHttpServer) -> None:
    """Two threads with all the room pinned ahead: the one that must wait gives its prefetched samples back first."""
    server.objects.update(objects([30_000] * 11))  # what has arrived leaves no more room than what is awaited
    urls = [f"{server.url}/o/{i}.bin" for i in range(11)]
    with Cache(directory, limit=100_000) as cache:
        session = Session(cache)
        ahead = session.acquire([[ObjectRef.of(url, size_bytes=30_000)] for url in urls[:10]])
        assert ahead
        with cache.pinned(urls[10]):
            pass
        session.owner.flush()
        assert ahead[-1].is_void  # as many as are needed, from the last on
        assert cache.statistics().pinned_entries == sum(not hold.is_void for hold in ahead)


def sabotage(directory: Path, *statements: str) -> None:
    connection = sqlite3.connect(directory / "ledger.sqlite")
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


@pytest.mark.parametrize(
    ("law", "statements"),
    [
        ("L1", ["UPDATE entry SET charged_bytes = 4096"]),
        ("L2", ["INSERT INTO owner VALUES ('x', 1, 'h', 1, 'n', 5000, NULL, NULL, NULL, x'')"]),
        ("L2", ["UPDATE meta SET limit_bytes = 5000"]),
        ("L3", ["UPDATE totals SET ready_bytes = ready_bytes + 1"]),
        ("L4", ["UPDATE entry SET size = size + 1"]),
    ],
)
def test_the_check_sees_a_wrong_account(directory: Path, urls: list[str], law: str, statements: list[str]) -> None:
    with Cache(directory) as cache, cache.pinned(urls[4]):
        pass
    check_invariants(directory, at_rest=True)
    sabotage(directory, *statements)
    with pytest.raises(AssertionError, match=law):
        check_invariants(directory)


def test_the_check_sees_a_pinned_file_that_is_gone_and_files_that_nobody_counts(directory: Path, urls: list[str]) -> None:
    with Cache(directory) as cache, cache.pinned(urls[4]) as path:
        cache.statistics()  # publishes
        path.unlink()
        with pytest.raises(AssertionError, match=f"L5: {object_key(urls[4]).hex()} is pinned"):
            check_invariants(directory)
    stray = directory / "data" / "00" / ("00" * 16)
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(bytes(100_000))
    with pytest.raises(AssertionError, match=re.compile("L1.*L7", re.DOTALL)):
        check_invariants(directory, at_rest=True)


def test_the_check_sees_two_leaders(directory: Path, urls: list[str]) -> None:
    with Cache(directory) as cache:
        key = object_key(urls[0])
        parts = [Session(cache).disk.create_part(key) for _ in range(2)]
        for part in parts:
            os.posix_fallocate(part.fd, 0, 4096)
        sabotage(
            directory,
            "INSERT INTO entry (key, url, charged_bytes, state, tick, part, ext, created_at) "
            f"VALUES (x'{key.hex()}', 'u', 8192, 'filling', 0, '{parts[0].name}', '', 0)",
        )
        with pytest.raises(AssertionError, match="L6"):
            check_invariants(directory)
        Session(cache).disk.discard_parts(parts)
