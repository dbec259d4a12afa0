"""`min_free_bytes`: so much of the file system stays free, whoever fills it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.model.tuning import CacheTuning
from sqlstream.cache.recovery.free_space import FreeSpace
from sqlstream.errors import CacheDiskError, CacheFullError, ConfigError
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.actors import body
from tests.cache.session import Session, tuned_cache

SIZE, CHARGE = 10_000, 12_288
CAPACITY, FLOOR = 20 * CHARGE, 5 * CHARGE
OBJECTS = {f"http://nowhere/o/{i}.bin": body(f"/o/{i}.bin", SIZE) for i in range(40)}
URLS = list(OBJECTS)


class FileSystem:
    """A small file system, that the cache's disk is made to believe in; it notes how little was ever free."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.foreign_bytes = 0
        """What others have there."""
        self.least_free_bytes = CAPACITY

    def free_bytes(self) -> int:
        files = [path for name in ("data", "part") for path in (self._directory / name).rglob("*") if path.is_file()]
        return CAPACITY - self.foreign_bytes - sum(path.stat().st_blocks * 512 for path in files)

    def look(self, _: str = "") -> None:
        self.least_free_bytes = min(self.least_free_bytes, self.free_bytes())


@pytest.fixture
def file_system(directory: Path) -> FileSystem:
    return FileSystem(directory)


IMPATIENT = pytest.mark.parametrize("tuning", [CacheTuning(room_timeout_seconds=0.3)], ids=["impatient"])


@pytest.fixture
def tuning() -> CacheTuning:
    """Times and thresholds of the cache; a test may have others."""
    return CacheTuning()


@pytest.fixture
def cache(directory: Path, tuning: CacheTuning, file_system: FileSystem, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    with tuned_cache(directory, tuning, limit=None, min_free_bytes=FLOOR) as cache:  # else half of what is free
        monkeypatch.setattr(Session(cache).disk, "free_bytes", file_system.free_bytes)
        cache.fetcher = ScriptedFetcher(OBJECTS, before_write=file_system.look)
        yield cache
    check_invariants(directory, at_rest=True)


def read(cache: Cache, *urls: str) -> None:
    for url in urls:
        with cache.pinned(url) as path:
            assert path.read_bytes() == OBJECTS[url]


def test_reading_more_than_the_file_system_holds_evicts_and_leaves_the_floor_free(
    cache: Cache, file_system: FileSystem
) -> None:
    read(cache, *URLS, *URLS)
    file_system.look()
    assert file_system.least_free_bytes >= FLOOR
    assert cache.statistics().evictions >= 2 * len(URLS) - 15
    assert cache.statistics().used_bytes <= CAPACITY - FLOOR


def test_a_window_counts_what_is_reserved_and_not_yet_allocated(cache: Cache, file_system: FileSystem) -> None:
    read(cache, *URLS[:15])
    session = Session(cache)
    refs = [ObjectRef.of(url, size_bytes=SIZE) for url in URLS[20:]]
    holds = session.acquire([[ref] for ref in refs])
    assert len(holds) == 15  # all that the floor leaves; what was here went for it
    for hold in holds:
        assert session.wait(hold)
        session.release(hold)
    file_system.look()
    assert file_system.least_free_bytes >= FLOOR


def test_each_sample_of_a_window_is_judged_by_an_account_that_has_those_before_it(
    cache: Cache, file_system: FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(cache)
    session.flush()
    asked: list[int] = []

    def free_bytes() -> int:
        connection = session.database._connection
        assert connection is not None
        if connection.in_transaction:  # on the thread that reserves, whose own rows it sees
            asked.append(connection.execute("SELECT filling_bytes FROM totals").fetchone()[0])
        return file_system.free_bytes()

    monkeypatch.setattr(session.disk, "free_bytes", free_bytes)
    holds = session.acquire([[ObjectRef.of(url, size_bytes=SIZE)] for url in URLS[:4]])
    assert len(asked) == 8  # can it ever fit, whatever is reserved, and does it now
    assert asked[1::2] == [0, CHARGE, 2 * CHARGE, 3 * CHARGE]
    for hold in holds:
        assert session.wait(hold)
        session.release(hold)


def test_what_others_write_is_made_room_for(cache: Cache, file_system: FileSystem) -> None:
    read(cache, *URLS[:15])
    file_system.foreign_bytes = 10 * CHARGE
    read(cache, *URLS[15:17])
    assert cache.statistics().used_bytes <= 5 * CHARGE
    assert file_system.free_bytes() >= FLOOR


@IMPATIENT
def test_without_enough_to_give_up_the_error_names_file_system_free_and_wanted_bytes(
    cache: Cache, file_system: FileSystem
) -> None:
    read(cache, URLS[0])
    file_system.foreign_bytes = 16 * CHARGE
    with pytest.raises(CacheFullError) as raised:
        read(cache, URLS[1])
    text = str(raised.value)
    assert f"{URLS[1]} needs 4096 bytes on disk" in text  # at least: its size is not known
    assert f"file system of {cache.path} has {3 * CHARGE} bytes free, of which min_free_bytes={FLOOR} must stay" in text
    assert cache.statistics().filling_bytes == 0
    read(cache, URLS[0])  # what is here is read


@IMPATIENT
def test_what_is_pinned_is_waited_for_and_then_named(cache: Cache, file_system: FileSystem) -> None:
    cache.acquire_many(URLS[:15])
    with pytest.raises(CacheFullError, match=rf"min_free_bytes={FLOOR} must stay; pinned by .*: {15 * CHARGE} bytes"):
        read(cache, URLS[20])
    cache.release_many(URLS[:15])
    read(cache, URLS[20])


def test_the_largest_floor_of_a_process_holds_while_its_cache_is_open(cache: Cache, file_system: FileSystem) -> None:
    with Cache(cache.path, min_free_bytes=10 * CHARGE) as other:
        assert Session(other).directory is Session(cache).directory
        read(cache, *URLS)
        assert file_system.free_bytes() >= 10 * CHARGE
    read(cache, *URLS)
    assert FLOOR <= file_system.free_bytes() < 10 * CHARGE


@pytest.fixture
def cache_that_was_full(cache: Cache, file_system: FileSystem) -> Cache:
    """No floor; the file system was found full when the cache had fifteen objects there."""
    session = Session(cache)
    session.directory.downloads.free_space.ask(cache._user, 0)
    read(cache, *URLS[:15])
    file_system.foreign_bytes = 5 * CHARGE
    session.owner.run(session.directory.downloads.free_space.note_full)
    return cache


def test_what_the_cache_had_on_a_full_disk_is_a_limit_until_others_leave_room(
    cache_that_was_full: Cache, file_system: FileSystem
) -> None:
    cache = cache_that_was_full
    read(cache, *URLS[15:])
    assert cache.statistics().used_bytes <= 15 * CHARGE
    file_system.foreign_bytes = 2 * CHARGE
    read(cache, *URLS)
    assert 17 * CHARGE <= cache.statistics().used_bytes <= 18 * CHARGE


@pytest.mark.parametrize(("full_seconds", "missing_bytes"), [(60.0, CHARGE), (0.0, 0)], ids=["at first", "after a while"])
def test_a_disk_that_was_full_is_tried_again_after_a_while(cache: Cache, full_seconds: float, missing_bytes: int) -> None:
    read(cache, *URLS[:15])
    session = Session(cache)
    free_space = FreeSpace(session.disk, full_seconds)
    session.owner.run(free_space.note_full)
    assert session.owner.run(lambda tx: free_space.missing_bytes(tx, CHARGE)) == missing_bytes
    assert free_space.is_bounded == (missing_bytes > 0)


@IMPATIENT
def test_an_error_says_that_the_disk_was_found_full(cache_that_was_full: Cache) -> None:
    cache_that_was_full.acquire_many(URLS[:15])
    with pytest.raises(CacheFullError, match="bytes free, and it was found full; pinned by "):
        read(cache_that_was_full, URLS[20])
    cache_that_was_full.release_many(URLS[:15])


@pytest.mark.parametrize("floor", [0, FLOOR])
@pytest.mark.parametrize("size_bytes", [None, 30 * CHARGE], ids=["of unknown size", "of known size"])
def test_for_an_object_that_the_disk_can_never_hold_nothing_is_evicted(
    cache: Cache, file_system: FileSystem, size_bytes: int | None, floor: int
) -> None:
    session = Session(cache)
    session.directory.downloads.free_space.ask(cache._user, floor)
    cache.fetcher = ScriptedFetcher(OBJECTS | {"http://nowhere/large.bin": bytes(30 * CHARGE)})
    read(cache, *URLS[:10])
    hold = session.acquire_one([ObjectRef.of("http://nowhere/large.bin", size_bytes=size_bytes)])
    cache.session.wait(hold)
    assert isinstance(hold.error, CacheFullError if floor else CacheDiskError)
    assert f"large.bin needs {30 * CHARGE} bytes on disk: the " in str(hold.error)
    assert "the whole cache is too little to give up. Free space there, or " in str(hold.error)
    session.release(hold)
    statistics = cache.statistics()
    assert (statistics.entries, statistics.evictions) == (10, 0)


def test_a_floor_that_is_no_size_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="min_free_bytes='much' is not a size"):
        Cache(directory, min_free_bytes="much")
