"""How far ahead is acquired: by samples and by bytes, seen from the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.config import SampleOptions
from sqlstream.stream.engine.slots import PlannedSample, Recipe
from sqlstream.stream.engine.window import FIRST_WIDTH, Window
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.session import Session

NUM_OBJECTS = 300
SIZE_BYTES = 4096


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer({f"/{i}": b"x" * SIZE_BYTES for i in range(NUM_OBJECTS)}) as server:
        yield server


def slot_of(number: int, ref: ObjectRef, cache: Cache) -> PlannedSample:
    recipe = cast(Recipe, SimpleNamespace(session=cache.session))  # no sample is made
    return PlannedSample(0, number, row_id=number, sample={}, refs={"file": ref}, recipe=recipe, wanted=(ref,))


def slots(server: FaultyHttpServer, cache: Cache) -> Iterator[PlannedSample]:
    for i in range(NUM_OBJECTS):
        yield slot_of(i, ObjectRef.of(f"{server.url}/{i}"), cache)


def opened(server: FaultyHttpServer, cache: Cache, prefetch_bytes: int) -> Window:
    options = SampleOptions(prefetch=256, prefetch_bytes=prefetch_bytes)
    return Window(slots(server, cache), options, foresees=False, for_reading=bool)


def take(window: Window, cache: Cache) -> None:
    """Use the next slot as the engine does."""
    slot = window.pop(None)
    assert slot is not None
    assert slot.hold is not None
    Session(cache).wait(slot.hold)
    assert slot.hold.error is None
    assert Session(cache).claim(slot.hold)
    window.give_back(slot)


def test_no_more_bytes_are_acquired_ahead_than_allowed(server: FaultyHttpServer, tmp_path: Path) -> None:
    num_ahead = 20
    with Cache(tmp_path / "cache") as cache:
        window = opened(server, cache, num_ahead * SIZE_BYTES)
        for num_taken in range(1, 200):
            take(window, cache)
            assert len(server.requests()) <= max(FIRST_WIDTH, num_taken + num_ahead)
        window.close()


def test_no_more_bytes_are_acquired_ahead_where_each_sample_is_used_as_it_comes(
    server: FaultyHttpServer, tmp_path: Path
) -> None:
    num_ahead = 20
    gates = [threading.Event() for _ in range(NUM_OBJECTS)]
    for i, gate in enumerate(gates):
        server.script(f"/{i}", FaultyAnswer(fault=Fault.HOLD, after_bytes=0, gate=gate))
    with Cache(tmp_path / "cache") as cache:
        window = opened(server, cache, num_ahead * SIZE_BYTES)
        try:
            for num_taken, gate in enumerate(gates[:150], start=1):  # no object is here before its sample is taken
                gate.set()
                take(window, cache)
                assert cache.statistics().entries <= max(FIRST_WIDTH, num_taken + num_ahead)
        finally:
            for gate in gates:
                gate.set()
        window.close()


def test_an_object_larger_than_what_may_be_ahead_still_comes(server: FaultyHttpServer, tmp_path: Path) -> None:
    with Cache(tmp_path / "cache") as cache:
        window = opened(server, cache, 1)
        for _ in range(FIRST_WIDTH + 5):
            take(window, cache)
        assert len(server.requests()) == FIRST_WIDTH + 5
        window.close()


def test_the_window_grows_with_what_is_used_of_it(server: FaultyHttpServer, tmp_path: Path) -> None:
    with Cache(tmp_path / "cache") as cache:
        window = opened(server, cache, 1 << 30)
        take(window, cache)
        assert len(server.requests()) <= FIRST_WIDTH
        for _ in range(FIRST_WIDTH // 2):
            take(window, cache)
        deadline = time.monotonic() + 300
        while len(server.requests()) < 5 * FIRST_WIDTH // 2:  # half a window used, and one of twice the width behind it
            assert time.monotonic() < deadline
            time.sleep(0.01)
        window.close()


def test_samples_that_share_entries_are_acquired_ahead_as_far_as_their_distinct_bytes_allow(tmp_path: Path) -> None:
    """256 samples of 4 shards of 8 MiB: all of them are planned, where 40 MB may be ahead and the limit is 100 MB."""
    shards = {f"http://nowhere/shard/{i}.tar": bytes(8 << 20) for i in range(4)}
    refs = [ObjectRef.of(url) for url in shards]
    with Cache(tmp_path / "cache", limit=100_000_000) as cache:
        planned = (slot_of(number, refs[number // 64], cache) for number in range(256))
        cache.fetcher = fetcher = ScriptedFetcher(shards)
        options = SampleOptions(prefetch=256, prefetch_bytes=40_000_000)
        window = Window(planned, options, foresees=False, for_reading=bool)
        most = 0
        for _ in range(256):
            take(window, cache)
            most = max(most, Session(cache).holdings.num_revocable)
            assert Session(cache).held_bytes <= 32 << 20
        assert most >= 128  # it doubles from 64 on; by the bytes of each sample by itself, no more than 4 would be ahead
        assert fetcher.num_gets.total() == 4
        window.close()
