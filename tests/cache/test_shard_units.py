"""A shard is in a cache whole, or by members, never both: what is there wins over what is wished."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.acquire.room import MAX_EVICTIONS
from sqlstream.cache.session import AnyHold, ChosenUnit, ObjectParts, ObjectRef, ShardWish
from sqlstream.config import ShardUnit
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.kit import open_locks
from tests.cache.session import Session

MEMBER_BYTES, NUM_MEMBERS = 5000, 2 * MAX_EVICTIONS + 3
DATA = bytes(number % 251 for number in range(MEMBER_BYTES * NUM_MEMBERS))
SPANS = [(start, start + MEMBER_BYTES) for start in range(0, len(DATA), MEMBER_BYTES)]
WISH = ShardWish(1, "all of it", 0)
MEMBERS, WHOLE = (ChosenUnit(unit, "it was wished") for unit in (ShardUnit.MEMBERS, ShardUnit.WHOLE))


@pytest.fixture
def shard() -> Iterator[ObjectParts]:
    with FaultyHttpServer({"/s.tar": DATA, "/t.tar": DATA}) as server:
        yield ObjectParts(f"{server.url}/s.tar", len(DATA))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with Cache(tmp_path / "cache", limit="10mb") as cache:
        yield cache
        check_invariants(cache.path)


def held(cache: Cache, group: Sequence[ObjectRef]) -> AnyHold:
    """A hold in use on the objects of one sample."""
    session = Session(cache)
    while True:  # its leader may die meanwhile
        hold = session.acquire_one(group)
        assert session.wait(hold)
        assert hold.error is None
        if session.claim(hold):
            return hold
        session.release(hold)


def bring(cache: Cache, group: Sequence[ObjectRef]) -> list[tuple[int, int] | None]:
    """Read the objects of one sample, compare them, and return which bytes of the shard each of them is."""
    hold = held(cache, group)
    spans = [ref.span for ref in hold.refs]
    for path, span in zip(hold.paths, spans, strict=True):
        assert span is not None
        assert Path(path).read_bytes() == DATA[slice(*span)]
    Session(cache).release(hold)
    Session(cache).flush()
    return spans


def units(cache: Cache) -> tuple[int, int]:
    """How many members and whole shards the ledger has."""
    rows = Session(cache).read("SELECT count(shard), count(*) - count(shard) FROM entry")
    return rows[0]


def test_a_whole_shard_serves_its_members(cache: Cache, shard: ObjectParts) -> None:
    assert bring(cache, [shard.whole((SPANS[0],))]) == [(0, len(DATA))]
    assert bring(cache, [shard.member(SPANS[1]), shard.member(SPANS[2])]) == [(0, len(DATA))] * 2
    assert units(cache) == (0, 1)


def test_a_shard_on_its_way_whole_serves_its_members(cache: Cache, shard: ObjectParts) -> None:
    session = Session(cache)
    whole, members = session.acquire([[shard.whole()], [shard.member(SPANS[5])]])
    assert members.refs == [shard.whole()]
    for hold in (whole, members):
        session.wait(hold)
        session.release(hold)
    assert units(cache) == (0, 1)


def test_members_that_are_used_are_read_in_place_of_the_whole(cache: Cache, shard: ObjectParts) -> None:
    hold = held(cache, [shard.member(SPANS[0])])
    assert bring(cache, [shard.whole((SPANS[0], SPANS[7]))]) == [SPANS[0], SPANS[7]]
    assert units(cache) == (2, 0)
    Session(cache).release(hold)
    assert bring(cache, [shard.whole((SPANS[0], SPANS[7]))]) == [(0, len(DATA))]
    assert units(cache) == (0, 1)


def test_members_that_are_read_under_a_lock_stay(cache: Cache, shard: ObjectParts) -> None:
    bring(cache, [shard.member(SPANS[0])])
    session = Session(cache)
    hold = session.acquire_one([shard.member(SPANS[0])], for_reading=True)
    assert hold.is_read_hold
    assert session.claim(hold)
    assert bring(cache, [shard.whole((SPANS[0], SPANS[7]))]) == [SPANS[0], SPANS[7]]
    session.release(hold)


def test_members_on_their_way_are_read_in_place_of_the_whole(cache: Cache, shard: ObjectParts) -> None:
    session = Session(cache)
    member, whole = session.acquire([[shard.member(SPANS[3])], [shard.whole((SPANS[3],))]])
    assert whole.refs == [shard.member(SPANS[3])]
    for hold in (member, whole):
        session.wait(hold)
        session.release(hold)
    assert units(cache) == (1, 0)


def test_the_transaction_that_reserves_the_whole_evicts_members_that_nobody_uses(cache: Cache, shard: ObjectParts) -> None:
    for span in SPANS:
        bring(cache, [shard.member(span)])
    assert units(cache) == (NUM_MEMBERS, 0)
    assert bring(cache, [shard.whole((SPANS[0],))]) == [(0, len(DATA))]
    assert units(cache) == (0, 1)
    assert cache.statistics().evictions == NUM_MEMBERS


def test_a_member_whose_leader_died_is_in_nobodys_way(cache: Cache, shard: ObjectParts) -> None:
    program = (
        "import os, sys\n"
        "from sqlstream.cache import Cache\n"
        "from sqlstream.cache.session import ObjectParts\n"
        "cache = Cache(sys.argv[1])\n"
        "cache.session.acquire([[ObjectParts(sys.argv[2], int(sys.argv[3])).member((0, 5000))]])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", program, cache.path, shard.whole().url, str(len(DATA))], check=False)
    assert bring(cache, [shard.whole((SPANS[0],))])[0] in [(0, len(DATA)), SPANS[0]]  # its helper may have fetched it
    assert bring(cache, [shard.whole((SPANS[0],))]) == [(0, len(DATA))]


def read_under_locks(cache: Cache, shard: ObjectParts) -> None:
    """Read a sample of a whole shard that is there, without a row of the ledger."""
    session = Session(cache)
    hold = session.acquire_one([shard.whole((SPANS[0],))], for_reading=True)
    assert hold.is_read_hold
    assert session.claim(hold)
    session.release(hold)


def test_a_whole_shard_stays_open_from_sample_to_sample_until_what_was_read_is_written_off(
    cache: Cache, shard: ObjectParts
) -> None:
    bring(cache, [shard.whole((SPANS[0],))])
    assert open_locks() == []
    read_under_locks(cache, shard)
    before = [*map(id, open_locks())]
    assert len(before) == 1
    read_under_locks(cache, shard)
    assert [*map(id, open_locks())] == before
    Session(cache).flush()
    assert open_locks() == []


def test_open_shards_make_room_for_this_process_and_for_others(shard: ObjectParts, tmp_path: Path) -> None:
    other = shard.whole().url.replace("s.tar", "t.tar")
    program = (
        "import sys\n"
        "from sqlstream.cache import Cache\n"
        "with Cache(sys.argv[1]) as cache, cache.pinned(sys.argv[2]) as path:\n"
        "    print(path.stat().st_size)\n"
    )
    with Cache(tmp_path / "cache", limit=len(DATA) + 8192) as cache:
        bring(cache, [shard.whole((SPANS[0],))])
        read_under_locks(cache, shard)
        command = [sys.executable, "-c", program, str(cache.path), other]
        assert int(subprocess.check_output(command)) == len(DATA)
        bring(cache, [shard.whole((SPANS[0],))])
        read_under_locks(cache, shard)
        with cache.pinned(other) as path:
            assert path.read_bytes() == DATA
        check_invariants(cache.path)


def test_spans_of_files_that_are_no_shards_have_no_unit(cache: Cache, shard: ObjectParts) -> None:
    assert bring(cache, [shard.part(SPANS[0])]) == [SPANS[0]]
    assert bring(cache, [shard.whole((SPANS[0],))]) == [(0, len(DATA))]
    assert units(cache) == (0, 2)


def test_who_opens_the_epoch_first_chooses_for_all(cache: Cache, tmp_path: Path) -> None:
    session = cache.session
    assert session.shard_unit(WISH, lambda limit: MEMBERS if limit == 10 << 20 else WHOLE) == MEMBERS
    assert session.shard_unit(WISH, lambda _: WHOLE) == MEMBERS
    assert session.shard_unit(WISH._replace(epoch=1), lambda _: WHOLE) == WHOLE
    assert session.shard_unit(WISH._replace(wish="half of it"), lambda _: WHOLE) == WHOLE
    program = (
        "import sys\n"
        "from sqlstream.cache import Cache\n"
        "from tests.cache.test_shard_units import MEMBERS, WISH\n"
        "with Cache(sys.argv[1]) as cache:\n"
        "    print(cache.session.shard_unit(WISH._replace(epoch=1), lambda _: MEMBERS).unit.value)\n"
        "    print(cache.session.shard_unit(WISH._replace(epoch=2), lambda _: MEMBERS).unit.value)\n"
    )
    command = [sys.executable, "-c", program, str(cache.path)]
    assert subprocess.check_output(command, text=True).split() == ["whole", "members"]
    assert session.shard_unit(WISH._replace(epoch=2), lambda _: WHOLE) == WHOLE, "who had chosen is dead"


def test_statistics_show_what_was_chosen_and_why(cache: Cache) -> None:
    dataset = cache.session.register("pictures", "s3://b/", "f")
    assert dataset is not None
    cache.session.shard_unit(ShardWish(dataset, "all of it", 3), lambda _: WHOLE)
    found = cache.statistics().shard_units
    assert [(some.dataset, some.epoch, some.unit, some.reason) for some in found] == [("pictures", 3, "whole", "it was wished")]


def test_a_whole_whose_members_are_in_use_is_not_there_for_who_knows_none_of_them(cache: Cache, shard: ObjectParts) -> None:
    hold = held(cache, [shard.member(SPANS[0])])
    assert list(Session(cache).acquire([[shard.whole()]])) == []
    Session(cache).release(hold)
    Session(cache).flush()
    assert bring(cache, [shard.whole()]) == [(0, len(DATA))]


def test_members_that_cannot_be_here_together_fail_at_once_with_what_they_need(tmp_path: Path, shard: ObjectParts) -> None:
    with Cache(tmp_path / "small", limit=2 * 8192) as cache:
        hold = Session(cache).acquire_one([shard.member(span) for span in SPANS[:3]])
        assert "needs 24576 bytes on disk, the cache limit is 16384 bytes" in str(hold.error)
        Session(cache).release(hold)
        assert bring(cache, [shard.member(span) for span in SPANS[:2]]) == SPANS[:2]
