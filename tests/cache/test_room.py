"""Who is evicted, in which order, and that nobody is evicted for nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.acquire.room import MAX_EVICTIONS
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.cache.actors import Stage, objects, pin_until_told
from tests.cache.session import Session

SIZE, CHARGE = 4000, 4096


@pytest.fixture
def urls(server: FaultyHttpServer) -> list[str]:
    server.objects.update(objects([SIZE] * 100))
    return [f"{server.url}/o/{i}.bin" for i in range(100)]


def use(cache: Cache, *urls: str) -> None:
    for url in urls:
        with cache.pinned(url):
            pass


def is_here(cache: Cache, url: str) -> bool:
    before = cache.statistics().misses
    with cache.pinned(url):
        pass
    return cache.statistics().misses == before


def cached(cache: Cache, urls: list[str]) -> list[int]:
    Session(cache).owner.flush()
    names = {row[0].rpartition("/")[2] for row in Session(cache).read("SELECT url FROM entry")}
    return [i for i, url in enumerate(urls) if url.rpartition("/")[2] in names]


def test_eviction_takes_the_least_recently_used_touches_included(directory: Path, urls: list[str]) -> None:
    with Cache(directory, limit=20 * CHARGE) as cache:
        use(cache, *urls[:20])
        use(cache, *urls[0:20:2])  # the even ones are in use
        use(cache, *urls[20:24])
        gone = set(range(24)) - set(cached(cache, urls))
        assert gone == {1, 3, 5, 7, 9}  # four for the new ones, one more down to 95 %
    check_invariants(directory, at_rest=True)


def test_uses_far_from_the_limit_are_not_written(directory: Path, urls: list[str]) -> None:
    with Cache(directory, limit=100 * CHARGE) as cache:
        use(cache, *urls[:20], *urls[:20])
        assert Session(cache).read("SELECT count(*) FROM touch") == [(0,)]
        use(cache, *urls[:60], *urls[:60])
        cache.statistics()  # uses are written in batches
        assert Session(cache).read("SELECT count(*) > 0 FROM touch") == [(1,)]


@pytest.mark.parametrize("num_objects", [2, 80])
def test_room_is_asked_for_once_a_window_while_there_is_enough(directory: Path, urls: list[str], num_objects: int) -> None:
    seen: list[str] = []
    with Cache(directory, limit="1gb") as cache:
        session = Session(cache)
        session.database.read("SELECT 1")
        assert session.database._connection is not None
        session.database._connection.set_trace_callback(seen.append)
        holds = session.acquire([[ObjectRef.of(url)] for url in urls[:num_objects]])
        session.database._connection.set_trace_callback(None)
        for hold in holds:
            session.wait(hold)
            session.release(hold)
    assert len(holds) == num_objects
    assert sum("waiting_tick" in sql for sql in seen) == 1, "who waits before us"
    check_invariants(directory, at_rest=True)


def test_a_touch_log_longer_than_one_transaction_is_drained_before_anybody_goes(directory: Path, urls: list[str]) -> None:
    with Cache(directory, limit=10 * CHARGE) as cache:
        use(cache, *urls[:10])
        for _ in range(40):
            use(cache, *urls[:9])
            cache.statistics()  # a row each time
        use(cache, urls[50])
        assert 9 not in cached(cache, urls)
        assert set(cached(cache, urls)) >= set(range(3, 9))  # the first of the last round went after it


def test_a_pinned_file_is_never_evicted_however_old(directory: Path, urls: list[str], stage: Stage) -> None:
    holder = stage.start(pin_until_told, directory, 10 * CHARGE, urls[:2])
    paths = [Path(path) for path in holder.hear()]
    with Cache(directory, limit=10 * CHARGE) as cache:
        use(cache, *urls[2:60])
        assert cache.statistics().evictions >= 40
        assert all(path.exists() for path in paths)
    holder.tell()
    holder.hear()


def test_more_than_one_transaction_of_evictions_for_one_large_object(
    server: FaultyHttpServer, directory: Path, urls: list[str]
) -> None:
    server.objects.update(objects([80 * CHARGE], prefix="/large"))
    with Cache(directory, limit=100 * CHARGE) as cache:
        use(cache, *urls)
        before = Session(cache).num_transactions
        use(cache, f"{server.url}/large/0.bin")
        stats = cache.statistics()
        assert stats.evictions >= 80 > 2 * MAX_EVICTIONS
        assert stats.used_bytes <= 100 * CHARGE
        assert Session(cache).num_transactions - before < 15
    check_invariants(directory, at_rest=True)


def test_eviction_goes_down_to_95_percent_so_that_not_every_reservation_evicts(directory: Path, urls: list[str]) -> None:
    with Cache(directory, limit=60 * CHARGE) as cache:
        use(cache, *urls[:60])
        use(cache, urls[60])
        num_evictions = cache.statistics().evictions
        assert 4 <= num_evictions <= 5  # one or two (a guess) for the need; three of 60 are 5 %
        use(cache, *urls[61:63])
        assert cache.statistics().evictions == num_evictions


def test_of_several_limits_the_smallest_of_the_living_holds(directory: Path, urls: list[str], stage: Stage) -> None:
    small = stage.start(pin_until_told, directory, 5 * CHARGE, urls[:1])
    small.hear()
    with Cache(directory, limit=50 * CHARGE) as cache:
        assert cache.statistics().limit_bytes == 5 * CHARGE
        use(cache, *urls[:20])
        assert cache.statistics().used_bytes <= 5 * CHARGE
        small.kill()
        use(cache, *urls[:40])  # the dead one's limit goes before any file does
        stats = cache.statistics()
        assert stats.limit_bytes == 50 * CHARGE
        assert stats.entries == 40
    check_invariants(directory, at_rest=True)


def test_a_file_that_cannot_be_removed_stays_counted_and_stops_nobody(
    directory: Path, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cache(directory, limit=10 * CHARGE) as cache:
        use(cache, *urls[:10])
        unlink = os.unlink

        def refuse(path: str | os.PathLike[str], **options: int) -> None:
            if str(path) == first:
                raise PermissionError(1, "Operation not permitted")
            unlink(path, **options)

        first = str(next((directory / "data").rglob("*.bin")))
        monkeypatch.setattr(os, "unlink", refuse)
        use(cache, *urls[10:40])
        assert Path(first).exists()
        assert cache.statistics().used_bytes <= 10 * CHARGE
        check_invariants(directory)


def test_a_limit_of_the_dead_refuses_nobody(server: FaultyHttpServer, directory: Path, urls: list[str], stage: Stage) -> None:
    """Neither a size that the index knows, nor a guess, nor one that turns out on the way."""
    server.objects.update(objects([50 * CHARGE] * 2, prefix="/large"))
    server.script("/large/1.bin", FaultyAnswer(fault=Fault.NO_LENGTH))
    for ref in (ObjectRef.of(f"{server.url}/large/0.bin", size_bytes=50 * CHARGE), ObjectRef.of(f"{server.url}/large/1.bin")):
        small = stage.start(pin_until_told, directory, 2 * CHARGE, urls[:1])
        small.hear()
        with Cache(directory, limit=100 * CHARGE) as cache:
            small.kill()
            Session(cache).release(cache.hold([ref]))
            assert cache.statistics().limit_bytes == 100 * CHARGE
    check_invariants(directory, at_rest=True)


def test_a_limit_of_the_dead_refuses_nobody_who_pins_more_than_it(directory: Path, urls: list[str], stage: Stage) -> None:
    with Cache(directory, limit=50 * CHARGE) as cache:
        cache.acquire_many(urls[:10])
        small = stage.start(pin_until_told, directory, 2 * CHARGE, urls[:1])
        small.hear()
        small.kill()
        Session(cache).release(cache.hold([ObjectRef.of(url) for url in urls[10:20]]))
        assert cache.statistics().entries == 20
    check_invariants(directory, at_rest=True)
