"""Bytes made here and put into the cache: under its limit, whole or absent, whatever dies in between."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.acquire.put import Memory, PutItem, Putter
from sqlstream.cache.model.refs import STORED_SAMPLE_EXTENSION, ObjectRef, charged_bytes, object_key
from sqlstream.storage.fetcher import FetchDone, FetchEvent, FetchRequest
from sqlstream.testing.faults import SideEffects
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.actors import Stage, body
from tests.cache.deaths import LIMIT, URLS, die_everywhere, fail_everywhere, filled, opened, read
from tests.cache.session import Session


def item(name: str, size_bytes: int = 5000) -> PutItem:
    ref = ObjectRef(url=f"made {name}", key=object_key(f"made:{name}"), ext=STORED_SAMPLE_EXTENSION, size_bytes=size_bytes)
    return PutItem(ref=ref, data=body(name, size_bytes))


def path_of(cache: Cache, item: PutItem) -> Path:
    return cache.path_of(item.ref)


def putter_of(cache: Cache) -> Putter:
    return Session(cache).putter


def wanted(item: PutItem) -> ObjectRef:
    return ObjectRef(url=item.ref.url, key=item.ref.key, ext=item.ref.ext, is_stored_sample=True)


def test_many_items_cost_two_transactions_and_count_what_they_take(directory: Path) -> None:
    items = [item(str(i), 1000 * i) for i in range(1, 33)]
    with Cache(directory, limit="1gb") as cache:
        putter = putter_of(cache)
        cache.statistics()
        before = Session(cache).num_transactions
        assert putter.put(items) is None
        Session(cache).owner.flush()
        assert Session(cache).num_transactions - before <= 2
        assert [path_of(cache, one).read_bytes() for one in items] == [one.data for one in items]
        statistics = cache.statistics()
        assert statistics.used_bytes == sum(charged_bytes(len(one.data)) for one in items)
        assert (statistics.pinned_entries, statistics.stored_samples, statistics.unstored_samples) == (0, 32, 0)
        assert putter.put(items) is None, "they are here already"
        assert cache.statistics().entries == 32
        assert cache.verify() == []
    check_invariants(directory, at_rest=True)


def test_what_is_larger_than_the_limit_is_refused_and_the_others_are_stored(directory: Path) -> None:
    with Cache(directory, limit=40_000) as cache:
        reason = putter_of(cache).put([item("a"), item("large", 50_000), item("b")])
        assert reason is not None
        assert "made large" in reason
        assert "limit is 40000 bytes" in reason
        assert (cache.statistics().stored_samples, cache.statistics().unstored_samples) == (2, 1)
    check_invariants(directory, at_rest=True)


def test_a_put_evicts_what_is_not_used_and_waits_for_nobody(directory: Path) -> None:
    with opened(directory) as cache:
        read(cache, *URLS[:5])  # full
        cache.acquire_many(URLS[:5])
        reason = putter_of(cache).put([item("a")])
        assert reason is not None
        assert reason.startswith("no room for 8192 bytes now")
        cache.release_many(URLS[:5])
        assert putter_of(cache).put([item("a")]) is None
        assert cache.statistics().used_bytes <= LIMIT
    check_invariants(directory, at_rest=True)


def test_a_hold_on_what_must_be_here_is_void_when_it_is_not_and_nothing_is_fetched(directory: Path) -> None:
    with Cache(directory, limit="1mb") as cache:
        cache.fetcher = ScriptedFetcher({})
        session = Session(cache)
        made, absent = item("made"), item("absent")
        putter_of(cache).put([made])
        holds = session.acquire([[wanted(absent)], [wanted(made)]])
        assert [hold.is_void for hold in holds] == [True, False]
        assert [session.claim(hold) for hold in holds] == [False, True]
        assert cache.statistics().pinned_entries == 1
        assert putter_of(cache).discard(made.ref)
        for hold in holds:
            session.release(hold)
        assert session.acquire_one([wanted(made)]).is_void
        assert cache.fetcher.num_gets == {}
        assert cache.statistics().entries == 0
    check_invariants(directory, at_rest=True)


def test_what_others_read_is_not_discarded(directory: Path) -> None:
    with Cache(directory, limit="1mb") as cache:
        made = item("made")
        putter_of(cache).put([made])
        with Session(cache).transaction() as tx:
            tx.add_owner("somebody else", pid=1, host="", name="", limit_bytes=None)
            tx.set_pins("somebody else", [made.ref.key])
        assert not putter_of(cache).discard(made.ref)
        assert path_of(cache, made).exists()


def store(directory: Path, effects: SideEffects) -> None:
    with opened(directory) as cache:  # full: room is made first
        putter = putter_of(cache)
        putter.put([item("a"), item("b", 9000)])
        putter.put([item("b", 9000), item("c", 100)])


def test_a_death_at_any_side_effect_of_a_put_breaks_no_promise(tmp_path: Path, stage: Stage) -> None:
    (num_effects,) = stage.run_all(die_everywhere, [(tmp_path, filled, store)])
    assert num_effects >= 15


@pytest.mark.parametrize(("number", "lasts"), [(errno.ENOSPC, True), (errno.EIO, False)], ids=["full disk", "one fault"])
def test_a_fault_at_any_side_effect_of_a_put_leaks_nothing(tmp_path: Path, stage: Stage, number: int, lasts: bool) -> None:
    ((num_effects, _),) = stage.run_all(fail_everywhere, [(tmp_path, store, number, lasts)])
    assert num_effects >= 10


def test_bytes_are_right_after_every_put(directory: Path) -> None:
    with opened(directory) as cache:
        putter = putter_of(cache)
        for number in range(40):
            made = item(str(number), 3000 + 100 * number)
            assert putter.put([made]) is None
            assert path_of(cache, made).read_bytes() == made.data
            read(cache, URLS[number % len(URLS)])
        assert cache.statistics().used_bytes <= LIMIT
    check_invariants(directory, at_rest=True)


def test_what_cannot_be_written_is_named_without_credentials_and_with_the_cure() -> None:
    key, events = bytes(16), list[FetchEvent]()
    with open("/dev/full", "wb", buffering=0) as full:
        request = FetchRequest(f"{key.hex()}.x", "https://me:secret@host/x.tar.zst", full.fileno(), 4096)
        Memory({key: b"data"}).submit([request], events.extend)
    (done,) = events
    assert isinstance(done, FetchDone)
    assert str(done.error).startswith("cannot write https://host/x.tar.zst to the cache (No space left on device): free space")
