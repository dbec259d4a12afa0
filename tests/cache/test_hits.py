"""Holding what is here: single hits, releases that are only noted, claims against revocations."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.files.read_hold import ReadHold
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.model.tuning import CacheTuning
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.actors import Stage, pin_until_told
from tests.cache.session import Session

OBJECTS = {f"http://nowhere/o/{i}.bin": bytes([i]) * 100 for i in range(64)}
URLS = list(OBJECTS)
REFS = [ObjectRef.of(url) for url in URLS]


@pytest.fixture
def cache(directory: Path) -> Iterator[Cache]:
    with Cache(directory, limit=4096 * len(URLS)) as cache:
        cache.fetcher = ScriptedFetcher(OBJECTS)
        cache.acquire_many(URLS)
        cache.release_many(URLS)
        cache.statistics()
        yield cache
    check_invariants(directory, at_rest=True)


def test_a_single_hit_is_one_transaction_and_its_use_is_written_with_many(cache: Cache) -> None:
    database = Session(cache).database
    Session(cache).stop_background()  # which may write what waits, when we are stopped for long
    before, num_rows = database.num_transactions, database.read("SELECT count(*) FROM touch")[0][0]
    for _ in range(4):
        for url in URLS:
            with cache.pinned(url) as path:
                assert path.read_bytes() == OBJECTS[url]
    assert database.num_transactions - before == 4 * len(URLS)
    cache.statistics()
    assert database.read("SELECT count(*) FROM touch")[0][0] - num_rows <= 5
    assert cache.statistics().hits == 4 * len(URLS)
    assert cache.statistics().pinned_entries == 0


def test_a_limit_changed_by_another_process_is_seen_after_a_bounded_number_of_hits(directory: Path, stage: Stage) -> None:
    """Far from the limit no use is noted; from the change on it must be, or what is used all the time goes first."""
    new = "http://nowhere/o/new.bin"
    with Cache(directory, limit=40 * 4096 * len(URLS)) as cache:
        cache.fetcher = fetcher = ScriptedFetcher({**OBJECTS, new: b"new"})
        for url in URLS:
            with cache.pinned(url):
                pass
        other = stage.start(pin_until_told, directory, 4096 * len(URLS), URLS[-1:])
        other.hear()  # its limit holds
        for _ in range(CacheTuning().num_hits_a_look + 2):
            with cache.pinned(URLS[0]):
                pass
        with cache.pinned(new):  # somebody must go: of all objects the first one came first
            pass
        with cache.pinned(URLS[0]) as path:
            assert path.read_bytes() == OBJECTS[URLS[0]]
        assert cache.statistics().evictions > 0
        assert fetcher.num_gets[URLS[0]] == 1
        other.tell()
    check_invariants(directory)


def test_a_hold_released_twice_gives_back_one_pin(cache: Cache) -> None:
    session = Session(cache)
    first, second = (cache.hold([REFS[0]]) for _ in range(2))
    session.release(first)
    session.release(first)
    assert cache.statistics().pinned_entries == 1
    assert session.held_bytes == 4096
    session.release(second)
    assert cache.statistics().pinned_entries == 0
    assert session.held_bytes == 0


def test_a_prefetched_hold_is_claimed_or_revoked_never_both(cache: Cache) -> None:
    session = Session(cache)
    for _ in range(20):
        holds = session.acquire([[ref] for ref in REFS])
        assert len(holds) == len(REFS)
        num_revoked: list[int] = []
        thread = threading.Thread(target=lambda counts=num_revoked: counts.append(session.holdings.revoke_prefetched()))
        thread.start()
        claimed = [hold for hold in holds if session.claim(hold)]
        thread.join()
        assert len(claimed) + num_revoked[0] == len(holds)
        assert session.held_bytes == 4096 * len(claimed)
        for hold in claimed:
            session.release(hold)
    assert cache.statistics().pinned_entries == 0


SHARDS = {f"http://nowhere/shard/{i}.tar": bytes(8 << 20) for i in range(4)}


@pytest.mark.parametrize("way", ["misses", "hits"])
def test_an_entry_that_many_samples_share_counts_once(directory: Path, way: str) -> None:
    """256 samples of 4 shards under 100 MB: all of them are held, and 32 MiB count."""
    refs = [ObjectRef.of(url) for url in SHARDS]
    with Cache(directory, limit=100_000_000) as cache:
        cache.fetcher = fetcher = ScriptedFetcher(SHARDS)
        session = Session(cache)
        if way == "hits":
            cache.acquire_many(list(SHARDS))
            cache.release_many(list(SHARDS))
        holds = session.acquire([[refs[number // 64]] for number in range(256)])
        assert len(holds) == 256
        for hold in holds:
            session.wait(hold)
        assert session.held_bytes == 32 << 20
        assert cache.statistics().pinned_entries == 4
        for hold in holds[:255]:
            assert session.claim(hold)
            session.release(hold)
        assert session.held_bytes == 8 << 20
        session.release(holds[255])
        assert session.held_bytes == 0
        assert cache.statistics().pinned_entries == 0
        assert fetcher.num_gets.total() == 4
    check_invariants(directory, at_rest=True)


def test_a_hit_that_was_none_is_taken_back_once_however_many_samples_of_its_window_share_it(cache: Cache) -> None:
    session = Session(cache)
    for hold in session.acquire([[ref] for ref in REFS]):  # a window of hits: misses are expected no more
        session.release(hold)
    holds = session.acquire([REFS[:1]] * 4, for_reading=True)
    assert isinstance(holds[0], ReadHold)
    num_hits = cache.statistics().hits
    Path(session.disk.data_path(REFS[0].key, REFS[0].ext)).unlink()
    assert [session.claim(hold) for hold in holds] == [False] * 4
    assert cache.statistics().hits == num_hits - 1
    cache.acquire_many(URLS[:1])
    cache.release_many(URLS[:1])
