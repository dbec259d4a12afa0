"""`on_cache_error="bypass"`: a cache that fails stops nobody who can read remotely."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.session import AnyHold
from sqlstream.errors import (
    CacheDirectoryError,
    CacheDiskError,
    CacheError,
    CacheFullError,
    ConfigError,
    ObjectNotFoundError,
)
from sqlstream.testing.faults import SideEffects
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.actors import body, objects
from tests.cache.deaths import IMPATIENT, OBJECTS, URLS, sqlite_error
from tests.cache.kit import break_ledger
from tests.cache.session import Session, tuned_cache
from tests.processes import answer_of_forked_child, open_files

LIMIT = 20 * 12_288


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private files go."""
    directory = tmp_path / "private"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def cache(directory: Path, private: Path) -> Iterator[Cache]:
    with opened(directory) as cache:
        yield cache


def opened(directory: Path, effects: SideEffects | None = None) -> Cache:
    cache = Cache(directory, limit=LIMIT, on_cache_error="bypass")
    cache.fetcher = ScriptedFetcher(OBJECTS, before_write=effects.note if effects else len)
    return cache


def files_in(private: Path) -> list[Path]:
    return [path for path in private.rglob("*") if path.is_file()]


def try_the_cache_again(cache: Cache) -> None:
    Session(cache).failover._left_alone_until = 0.0


def read(cache: Cache, urls: Sequence[str]) -> None:
    """Read a few at once, then one by one, as a stream and random access do."""
    paths = cache.acquire_many(urls[:3])
    assert [path.read_bytes() for path in paths] == [OBJECTS[url] for url in urls[:3]]
    cache.release_many(urls[:3])
    for url in urls[3:]:
        with cache.pinned(url) as path:
            assert path.read_bytes() == OBJECTS[url]
            assert path.suffix == ".bin"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=lambda number: errno.errorcode[number])
def test_a_disk_that_fails_from_any_side_effect_on_stops_no_read(directory: Path, private: Path, number: int) -> None:
    """At the n-th side effect, n = 1, 2, … until it gets through."""

    def fail(name: str) -> None:
        if name in ("COMMIT", "PRAGMA"):
            raise sqlite_error(number)
        raise OSError(number, os.strerror(number))

    for at in range(1, 1000):
        shutil.rmtree(directory, ignore_errors=True)
        effects = SideEffects(0, fail, lasts=True)
        with effects.installed():
            cache = tuned_cache(directory, IMPATIENT, limit=LIMIT, on_cache_error="bypass")
            cache.fetcher = ScriptedFetcher(OBJECTS)
            before = effects.num_seen
            effects._at = before + at
            read(cache, URLS[:5])
            got_through = effects.num_seen < before + at
            effects._at = 0  # the disk is mended
            try_the_cache_again(cache)
            read(cache, URLS[2:7])
            cache.close()
        assert files_in(private) == []
        assert open_files(directory) == []
        check_invariants(directory, at_rest=True)
        if got_through:
            break
    assert 10 < at < 999


def put_in_its_place(directory: Path, what: str) -> None:
    """Put something that is no directory where the cache was."""
    if what == "file":
        directory.write_text("")
    elif what == "loop of links":
        directory.symlink_to(directory)
    else:
        directory.symlink_to("a" * 300)


@pytest.mark.parametrize("what", ["file", "loop of links", "link to a name that is too long"])
def test_whatever_takes_the_place_of_the_directory_stops_no_read(
    cache: Cache, directory: Path, private: Path, what: str
) -> None:
    read(cache, URLS[:5])
    away = directory.rename(directory.with_name("away"))
    put_in_its_place(directory, what)
    read(cache, URLS)
    directory.unlink()
    away.rename(directory)
    try_the_cache_again(cache)
    read(cache, URLS)
    cache.close()
    assert files_in(private) == []
    check_invariants(directory, at_rest=True)


@pytest.mark.parametrize("what", ["file", "loop of links", "link to a name that is too long"])
def test_whatever_takes_the_place_of_the_directory_is_an_error_of_the_cache(directory: Path, what: str) -> None:
    with Cache(directory, limit=LIMIT) as cache:
        cache.fetcher = ScriptedFetcher(OBJECTS)
        read(cache, URLS[:5])
        directory.rename(directory.with_name("away"))
        put_in_its_place(directory, what)
        for url in (URLS[0], URLS[9]):
            with pytest.raises(CacheError, match=r"cannot work in|is gone"), cache.pinned(url):
                pass
        with pytest.raises(CacheError, match=r"cannot work in|is gone"):
            cache.statistics()


def test_a_file_in_the_place_of_a_folder_of_objects_stops_no_read(cache: Cache, directory: Path, private: Path) -> None:
    read(cache, URLS[:2])
    folder = next((directory / "data").iterdir())
    away = folder.rename(directory / "away")
    folder.write_bytes(b"")
    read(cache, URLS[:2])
    folder.unlink()
    away.rename(folder)
    try_the_cache_again(cache)
    read(cache, URLS)
    cache.close()
    assert files_in(private) == []
    check_invariants(directory, at_rest=True)


def mend_ledger(cache: Cache) -> None:
    """From now on it is rebuilt from the files."""
    with Session(cache).database._using:
        shutil.rmtree(cache.path / "ledger.sqlite.bad")
        (cache.path / "ledger.sqlite").rmdir()


def test_a_broken_ledger_is_said_once_and_what_is_read_past_the_cache_is_counted(
    cache: Cache, private: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read(cache, URLS[:4])
    break_ledger(cache)
    with caplog.at_level(logging.ERROR):
        read(cache, URLS)
        try_the_cache_again(cache)
        read(cache, URLS)
    assert caplog.text.count("on_cache_error='bypass'") == 1
    assert files_in(private) == []
    mend_ledger(cache)
    try_the_cache_again(cache)
    read(cache, URLS[:4])
    assert cache.statistics().bypassed_objects == 2 * len(URLS)


def test_a_window_is_held_in_private_files_until_each_is_released(cache: Cache, private: Path) -> None:
    break_ledger(cache)
    session = Session(cache)
    refs = [ObjectRef.of(url) for url in URLS]
    holds = session.acquire([[ref] for ref in refs])
    assert len(holds) == len(URLS)
    for hold, ref in zip(holds, refs, strict=True):
        assert session.wait(hold)
        assert session.claim(hold)
        assert cache.path_of(ref, hold).read_bytes() == OBJECTS[ref.url]
    session.release(holds.pop())
    assert len(files_in(private)) == len(URLS) - 1
    del hold
    holds.clear()  # dropped without a release
    assert files_in(private) == []


def test_on_a_full_private_disk_what_is_ahead_makes_room_and_no_object_fails(cache: Cache, private: Path) -> None:
    def write(_url: str) -> None:
        if sum(path.stat().st_size > 0 for path in files_in(private)) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    break_ledger(cache)
    cache.fetcher = ScriptedFetcher(OBJECTS, before_write=write)
    session, refs = Session(cache), [ObjectRef.of(url) for url in URLS]
    for acquired, ref in zip(session.acquire([[ref] for ref in refs]), refs, strict=True):
        assert session.wait(acquired)
        assert acquired.error is None
        hold: AnyHold = acquired
        if not session.claim(hold):  # its room went to one before it
            session.release(hold)
            hold = cache.hold([ref])
        assert cache.path_of(ref, hold).read_bytes() == OBJECTS[ref.url]
        session.release(hold)
    assert len(session.acquire([[ref] for ref in refs])) == 1
    kept = [cache.hold([ref]) for ref in refs[:2]]
    with pytest.raises(CacheDiskError, match="is full: set TMPDIR to a larger disk"):
        cache.hold([refs[2]])
    for one in kept:
        session.release(one)


def test_too_few_descriptors_for_private_files_are_named_with_the_cure(cache: Cache, private: Path) -> None:
    break_ledger(cache)
    read(cache, URLS[:1])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(soft) if number not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[5], hard))
    try:
        with pytest.raises(CacheDiskError, match=r"temporary directory .*Too many open files.*: raise `ulimit -n`$"):
            cache.acquire_many(URLS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    read(cache, URLS)
    assert files_in(private) == []


def test_a_forked_child_removes_no_private_file_of_its_parent(cache: Cache, private: Path) -> None:
    break_ledger(cache)
    with cache.pinned(URLS[0]) as path:

        def act() -> str:
            with cache.pinned(URLS[1]) as other:
                is_right = other.read_bytes() == OBJECTS[URLS[1]]
            cache.close()
            return str(is_right)

        assert answer_of_forked_child(act) == "True"
        assert path.read_bytes() == OBJECTS[URLS[0]]


def test_a_directory_that_is_gone_is_bypassed(cache: Cache) -> None:
    read(cache, URLS[:2])
    shutil.rmtree(cache.path)
    read(cache, URLS)


def test_a_full_cache_is_no_broken_one(directory: Path, private: Path) -> None:
    with Cache(directory, limit=4096, on_cache_error="bypass") as cache:
        cache.fetcher = ScriptedFetcher(OBJECTS)
        with pytest.raises(CacheFullError):
            cache.acquire_many(URLS[:1])


def test_an_object_that_is_not_there_is_missed_past_the_cache_too(cache: Cache, private: Path) -> None:
    break_ledger(cache)
    with pytest.raises(ObjectNotFoundError), cache.pinned("http://nowhere/none.bin"):
        pass
    assert files_in(private) == []


def test_a_directory_that_cannot_be_used_is_stood_in_for(server: FaultyHttpServer, tmp_path: Path, private: Path) -> None:
    server.objects.update(objects([5000]))
    (tmp_path / "file").write_text("not a directory")
    with Cache(tmp_path / "file", on_cache_error="bypass") as cache:
        for _ in range(2):
            with cache.pinned(f"{server.url}/o/0.bin") as path:
                assert path.read_bytes() == body("/o/0.bin", 5000)
                assert path.is_relative_to(private)
        assert cache.statistics().hits == 1
        check_invariants(cache.path)
    assert list(private.iterdir()) == []
    assert (tmp_path / "file").read_text() == "not a directory"
    with pytest.raises(CacheDirectoryError, match="cannot create the cache directory"):
        Cache(tmp_path / "file")


def test_without_a_temporary_directory_a_cache_works_until_it_must_be_bypassed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_directory() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", no_directory)
    with opened(directory) as cache:
        read(cache, URLS[:2])
    with pytest.raises(CacheDiskError, match=r"cannot create .*; and no directory can stand in for it .*: set TMPDIR"):
        opened(Path("/dev/null/cache"))


def test_without_bypass_a_broken_ledger_raises(directory: Path) -> None:
    with Cache(directory) as cache:
        cache.fetcher = ScriptedFetcher(OBJECTS)
        read(cache, URLS[:4])
        break_ledger(cache)
        with pytest.raises(CacheDiskError, match=r"cannot (use|work in)"):
            read(cache, URLS[:4])
        mend_ledger(cache)
        read(cache, URLS[:4])
        assert cache.statistics().hits == 4


def test_an_unknown_word_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="on_cache_error='ignore' is unknown: give one of raise, bypass"):
        Cache(directory, on_cache_error="ignore")
