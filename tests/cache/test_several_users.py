"""Several cache objects of one process on one directory: each gives back what it holds, and no more, when it is closed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.session import AnyHold, ObjectRef
from sqlstream.errors import CacheClosedError
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.session import Session

OBJECTS = {f"http://nowhere/o/{i}.bin": bytes([i]) * (100 + i) for i in range(4)}
REFS = [ObjectRef.of(url) for url in OBJECTS]


def scripted_cache(directory: Path, on_cache_error: str = "raise") -> Cache:
    cache = Cache(directory, limit="10mb", on_cache_error=on_cache_error)
    cache.fetcher = ScriptedFetcher(OBJECTS)
    return cache


@pytest.fixture(params=["raise", "bypass"])
def caches(directory: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Cache, Cache]]:
    with scripted_cache(directory, request.param) as closing, scripted_cache(directory) as staying:
        yield closing, staying
    check_invariants(directory, at_rest=True)


def prefetch(cache: Cache) -> list[AnyHold]:
    return list(cache.session.acquire([[ref] for ref in REFS]))


def use(cache: Cache) -> list[AnyHold]:
    holds = [cache.session.wait(hold) for hold in prefetch(cache)]
    assert all(map(cache.session.open, holds))
    return holds


def retain(cache: Cache) -> list[AnyHold]:
    return [cache.session.retain(hold) for hold in use(cache)]


def retain_what_was_locked(cache: Cache) -> list[AnyHold]:
    holds = [cache.session.acquire_one([ref], for_reading=True) for ref in REFS]
    assert all(hold.is_read_hold for hold in holds)
    assert all(map(cache.session.open, holds))
    return [cache.session.retain(hold) for hold in holds]


class SlowlyClosedFetcher(ScriptedFetcher):
    def __init__(self, may_close: threading.Event) -> None:
        super().__init__(OBJECTS)
        self._may_close = may_close

    def close(self) -> None:
        self._may_close.wait()
        super().close()


def wait_closed() -> None:
    """Wait until what the garbage collector found is closed."""
    for thread in threading.enumerate():
        if thread.name == "sqlstream-cache-close":
            thread.join()


@pytest.mark.parametrize("hold_all", [prefetch, use, retain, retain_what_was_locked])
def test_a_closed_cache_pins_nothing_and_the_pins_of_another_stay(
    caches: tuple[Cache, Cache], hold_all: Callable[[Cache], list[AnyHold]]
) -> None:
    closing, staying = caches
    for hold in use(staying):
        staying.session.release(hold)
    staying.session.flush()
    for ref in REFS:
        assert staying.session.stored([ref.key])
    kept = staying.session.acquire_one([REFS[0]])
    assert staying.session.open(kept)
    holds = hold_all(closing)
    assert staying.statistics().pinned_entries == len(REFS)
    closing.close()
    assert staying.statistics().pinned_entries == 1
    assert staying.clear().removed_entries == len(REFS) - 1, "nothing pins them any more"
    assert Path(kept.paths[0]).read_bytes() == OBJECTS[REFS[0].url]
    for hold in holds:
        assert not closing.session.open(hold), "its entry may be gone"
        closing.session.release(hold)
    staying.session.release(kept)
    assert staying.statistics().pinned_entries == 0


def test_the_pins_are_given_back_in_the_ledger_where_other_processes_look(caches: tuple[Cache, Cache]) -> None:
    closing, staying = caches
    paths = closing.acquire_many(list(OBJECTS))
    assert all(path.exists() for path in paths)
    closing.session.flush()
    closing.close()
    assert Session(staying).ledger.pinned_bytes_by_owner() == []


def test_a_cache_that_is_forgotten_gives_its_pins_back_as_one_that_is_closed(directory: Path) -> None:
    with scripted_cache(directory) as staying:
        forgotten = scripted_cache(directory)
        holds = use(forgotten)
        assert staying.statistics().pinned_entries == len(REFS)
        del forgotten
        gc.collect()
        wait_closed()
        assert staying.statistics().pinned_entries == 0
        del holds


def test_a_cache_that_is_forgotten_takes_nothing_of_one_that_is_opened_while_it_is_closed(directory: Path) -> None:
    with Cache(directory, limit="9mb"):
        for _ in range(5):
            may_close = threading.Event()
            forgotten = Cache(directory, limit="8mb")
            forgotten.fetcher = SlowlyClosedFetcher(may_close)
            del forgotten
            with Cache(directory, limit="1mb") as opened:  # which mostly has the address of the other one
                may_close.set()
                wait_closed()
                assert opened.statistics().limit_bytes == 1 << 20


def test_what_another_thread_acquires_while_the_cache_is_closed_is_given_back(
    caches: tuple[Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, staying = caches
    acquirer = Session(staying).directory.acquirer
    acquire, acquire_one = acquirer.acquire, acquirer.acquire_one

    def late(method: Callable[..., object]) -> Callable[..., object]:
        def closed_meanwhile(*args: object) -> object:
            try:
                return method(*args)
            finally:
                closing.close()

        return closed_meanwhile

    monkeypatch.setattr(acquirer, "acquire", late(acquire))
    monkeypatch.setattr(acquirer, "acquire_one", late(acquire_one))
    for ask in (lambda: closing.session.acquire([[ref] for ref in REFS]), lambda: closing.session.acquire_one([REFS[0]])):
        with pytest.raises(CacheClosedError, match=r"was closed.*open it again"):
            ask()
        assert staying.statistics().pinned_entries == 0
