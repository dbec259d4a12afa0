"""Who goes first: each policy's own order, hit rates beside exact simulations, what a hit costs, who has a say."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstream.cache import Cache
from sqlstream.cache.model.policies import POLICIES
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.errors import ConfigError
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.actors import Stage, say
from tests.cache.session import Session
from tests.cache.simulations import OBJECT_BYTES, belady_hits, epochs, ledger_hits, lru_hits, next_uses_of


def opened(directory: Path, capacity: int, policy: str | None) -> Cache:
    cache = Cache(directory, limit=capacity * OBJECT_BYTES, eviction_policy=policy)
    cache.fetcher = ScriptedFetcher({f"http://nowhere/{name}": bytes(OBJECT_BYTES) for name in "abcdefghij"})
    return cache


def refs_of(names: str) -> list[ObjectRef]:
    return [ObjectRef.of(f"http://nowhere/{name}", size_bytes=OBJECT_BYTES) for name in names]


def read(cache: Cache, refs: Sequence[ObjectRef], next_uses: Sequence[int | None] = ()) -> None:
    """Read objects one after the other, as the engine does: acquired, waited for, claimed, released."""
    session = Session(cache)
    for ref, next_use in zip(refs, next_uses or [None] * len(refs), strict=True):
        hold = session.acquire_one([ref], next_use)
        session.wait(hold)
        session.release(hold)
    session.owner.flush()


def names_in(cache: Cache) -> str:
    return "".join(sorted(row[0][-1] for row in Session(cache).read("SELECT url FROM entry")))


@pytest.mark.parametrize(
    ("policy", "reads", "left"),
    [
        ("lru", "abcda", "adf"),
        ("fifo", "abcda", "cdf"),
        ("lfu", "abcdaacc", "acf"),
        ("belady", "abcd", "bdf"),
    ],
)
def test_each_policy_has_its_own_order(directory: Path, policy: str, reads: str, left: str) -> None:
    next_uses = {"a": 100, "b": 20, "c": 200, "d": 30, "f": 10}
    with opened(directory, 4, policy) as cache:
        read(cache, refs_of(reads + "f"), [next_uses[name] for name in reads + "f"])
        assert names_in(cache) == left  # two of the four went: down to 95 % of the limit
        check_invariants(directory)


@pytest.mark.parametrize("for_reading", [False, True], ids=["by rows", "by locks"])
@pytest.mark.parametrize("share", [30, 60])
def test_lru_downloads_what_exact_lru_must_within_one_percent(directory: Path, share: int, for_reading: bool) -> None:
    order, capacity = epochs(400, 2), 400 * share // 100
    exact, real = (
        len(order) - lru_hits(order, capacity),
        len(order) - ledger_hits(directory, order, capacity, "lru", for_reading=for_reading),
    )
    assert real <= 1.01 * exact, f"{real} downloads, exact LRU makes {exact}"


def test_belady_downloads_fewer_than_lru_and_nearly_as_few_as_can_be(directory: Path) -> None:
    order, capacity = epochs(400, 2), 120
    exact = belady_hits(order, capacity)
    real = ledger_hits(directory, order, capacity, "belady")
    assert lru_hits(order, capacity) < 0.3 * real
    assert 0.8 * exact <= real <= exact, f"{real} hits, exact Belady {exact}"  # windows of 16 and 5 % of room stay free


def test_belady_without_a_forecast_is_lru(tmp_path: Path) -> None:
    order = epochs(150, 2)
    lru = ledger_hits(tmp_path / "lru", order, 90, "lru")
    assert ledger_hits(tmp_path / "belady", order, 90, "belady", has_forecast=False) == lru


def test_the_naive_simulations_are_right() -> None:
    order = [0, 1, 2, 0, 1, 3, 0, 3, 1, 2, 1]
    assert next_uses_of(order) == [3, 3, 7, 3, 4, 2, None, None, 2, None, None]
    assert lru_hits(order, 3) == 6
    assert lru_hits(order, 100) == belady_hits(order, 100) == len(order) - len(set(order))


def most_hits(order: Sequence[int], cached: frozenset[int], capacity: int) -> int:
    """The best that any cache can do in which what is read must stay: all choices tried."""
    if not order:
        return 0
    row, rest = order[0], order[1:]
    if row in cached:
        return 1 + most_hits(rest, cached, capacity)
    if len(cached) < capacity:
        return most_hits(rest, cached | {row}, capacity)
    return max(most_hits(rest, cached - {victim} | {row}, capacity) for victim in cached)


@given(order=st.lists(st.integers(0, 4), max_size=9), capacity=st.integers(1, 3))
def test_the_naive_belady_is_the_best_that_can_be(order: list[int], capacity: int) -> None:
    assert belady_hits(order, capacity) == most_hits(order, frozenset(), capacity)


def test_belady_forgets_forecasts_that_passed_by(directory: Path) -> None:
    """A reader that stopped has left urgent forecasts behind: its objects must not stay for ever."""
    with opened(directory, 4, "belady") as cache:
        read(cache, refs_of("abc"), [5, 5, 5])
        for _ in range(4):
            read(cache, refs_of("defg"), [4, 4, 4, 4])
        assert not set("abc") & set(names_in(cache))


# -- what a hit costs -----------------------------------------------------------------------------------------------------


def statements(cache: Cache, refs: Sequence[ObjectRef], next_uses: Sequence[int | None] | None = None) -> list[str]:
    """The SQL that acquiring and giving back one window takes."""
    seen: list[str] = []
    database = Session(cache).database
    database.read("SELECT 1")
    assert database._connection is not None
    database._connection.set_trace_callback(seen.append)
    session = Session(cache)
    for hold in session.acquire([[ref] for ref in refs], next_uses):
        session.release(hold)
    session.owner.flush()
    database._connection.set_trace_callback(None)
    return seen


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hit_writes_no_entry_whatever_the_policy(directory: Path, policy: str) -> None:
    with opened(directory, 8, policy) as cache:
        read(cache, refs_of("abcdef"))
        seen = statements(cache, refs_of("abcdef"), [1] * 6)
        assert not [sql for sql in seen if "UPDATE entry" in sql or "INTO entry" in sql]
        num_touches = sum("INTO touch" in sql for sql in seen)
        assert num_touches == (0 if policy == "fifo" else 1)  # one row for the window


def test_nothing_is_touched_far_from_the_limit(directory: Path) -> None:
    with opened(directory, 13, "lru") as cache:
        read(cache, refs_of("abcdef"))  # 6 of 13
        tick = Session(cache).read("SELECT tick FROM meta")
        for _ in range(3):
            assert not [sql for sql in statements(cache, refs_of("abcdef")) if "touch" in sql]
        assert Session(cache).read("SELECT tick FROM meta") == tick
        read(cache, refs_of("g"))  # 7 of 13: more than half
        assert sum("INTO touch" in sql for sql in statements(cache, refs_of("abcdef"))) == 1


# -- who has a say --------------------------------------------------------------------------------------------------------


def test_a_policy_is_a_property_of_the_directory(directory: Path) -> None:
    with Cache(directory) as cache:
        assert cache.policy.name == cache.statistics().eviction_policy == "lru"
    with Cache(directory, eviction_policy="lfu") as cache:
        assert cache.policy.name == "lfu"
        assert pickle.loads(pickle.dumps(cache))._arguments["eviction_policy"] == "lfu"
    with Cache(directory) as cache:  # who names none takes what is there
        assert cache.policy.name == "lfu"
    with pytest.raises(ConfigError, match="eviction_policy='best' is unknown: give one of lru, fifo, lfu, belady"):
        Cache(directory, eviction_policy="best")


def keep_open(connection: Connection, directory: Path, policy: str | None) -> str:
    with Cache(directory, eviction_policy=policy) as cache:
        say(connection, cache.policy.name)
        connection.recv()
        return cache.policy.name


def test_a_living_process_that_holds_to_a_policy_keeps_it(
    directory: Path, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    holder = stage.start(keep_open, directory, "belady")
    assert holder.hear() == "belady"
    with caplog.at_level(logging.WARNING), Cache(directory, eviction_policy="fifo") as cache:
        assert cache.policy.name == "belady"
    assert "evicts by belady" in caplog.text
    assert "eviction_policy='fifo' takes effect when" in caplog.text
    holder.kill()  # a dead one has no say
    with Cache(directory, eviction_policy="fifo") as cache:
        assert cache.policy.name == "fifo"


def test_who_names_no_policy_has_no_say(directory: Path, stage: Stage) -> None:
    onlooker = stage.start(keep_open, directory, None)
    assert onlooker.hear() == "lru"
    with Cache(directory, eviction_policy="lfu") as cache:
        assert cache.policy.name == "lfu"
        onlooker.tell()
        assert onlooker.hear() == "lfu"
    onlooker.end()


def test_a_policy_that_a_closed_cache_asked_for_may_be_changed_while_its_process_goes_on(
    directory: Path, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    with Cache(directory) as cache:
        for policy in ("lfu", "fifo"):
            with Cache(directory, eviction_policy=policy):
                assert cache.policy.name == policy
        other = stage.start(keep_open, directory, "belady")
        assert other.hear() == cache.policy.name == "belady"
        other.tell()
        other.end()
    assert not caplog.messages


def test_a_policy_stays_until_the_last_cache_that_asked_for_it_is_closed(directory: Path) -> None:
    with Cache(directory, eviction_policy="lfu") as last:
        Cache(directory, eviction_policy="lfu").close()
        with Cache(directory, eviction_policy="fifo"):
            assert last.policy.name == "lfu"


def test_a_rebuilt_ledger_has_the_policy_that_the_living_ask_for(directory: Path) -> None:
    with opened(directory, 8, "belady") as cache:
        read(cache, refs_of("abc"), [1, 2, 3])
        generation = Session(cache).database.generation
        for path in directory.glob("ledger.sqlite*"):
            path.unlink()
        read(cache, refs_of("d"), [4])
        assert Session(cache).database.generation > generation
        assert cache.policy.name == "belady"
        assert cache.statistics().entries == 4
        check_invariants(directory)


@pytest.mark.parametrize(("before", "after"), [("belady", "lru"), ("lfu", "lru"), ("belady", "lfu"), ("lfu", "belady")])
def test_a_change_of_policy_forgets_ranks_as_room_is_made_and_keeps_recency(directory: Path, before: str, after: str) -> None:
    with opened(directory, 8, before) as cache:
        read(cache, refs_of("abcdef"), [1, 2, 3, 4, 5, 6])
        statements(cache, refs_of("ab"), [50, 60])
        assert Session(cache).read("SELECT count(rank) FROM entry") == [(6,)]
    with opened(directory, 8, after) as cache:
        read(cache, refs_of("ghij"), [1] * 4)
        left = set(names_in(cache))
        assert left >= set("ghij")
        if after != "lfu":  # what was needed latest counts as used least
            assert set("ab") <= left <= set("abefghij")  # a and b were used after c and d
            old = "SELECT url FROM entry WHERE rank IS NOT NULL AND url NOT GLOB '*[ghij]'"
            assert Session(cache).read(old) == []
        check_invariants(directory)
