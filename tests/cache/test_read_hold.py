"""Read holds: no row, no transaction; a lock of the kernel on each file from claim to release."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.acquire.holds import Hold
from sqlstream.cache.acquire.room import evict
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.files.read_hold import KeptLocks, ReadHold, ReadLocks
from sqlstream.cache.ledger.eviction import unpinned_in_order
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.model.tuning import CacheTuning
from sqlstream.cache.recovery import recover
from sqlstream.errors import CacheClosedError, CacheError
from sqlstream.process import locks
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.actors import Stage, say
from tests.cache.kit import descriptors, open_locks
from tests.cache.read_holds import (
    NUM_OBJECTS,
    OBJECTS,
    REFS,
    URLS,
    evict_all,
    opened,
    path_of,
    read_all,
    read_hold,
    read_open,
    sample,
)
from tests.cache.session import Session
from tests.processes import answer_of_forked_child, open_files


@pytest.fixture
def cache(directory: Path) -> Iterator[Cache]:
    with opened(directory) as cache:
        cache.acquire_many(URLS)
        cache.release_many(URLS)
        cache.statistics()
        read_all(cache)  # a window of hits: misses are expected no more
        yield cache
    check_invariants(directory, at_rest=True)


def test_windows_and_single_hits_far_from_the_limit_run_no_transaction_and_are_counted(cache: Cache) -> None:
    session, database = Session(cache), Session(cache).database
    session.stop_background()  # which writes what waits, now and then
    hits, before = cache.statistics().hits, database.num_transactions
    for _ in range(3):
        holds = session.acquire([[ref] for ref in REFS], for_reading=True)
        assert len(holds) == NUM_OBJECTS
        for hold, url in zip(holds, URLS, strict=True):
            assert session.claim(hold)
            assert read_open(hold, hold.refs[0]) == OBJECTS[url]
            session.release(hold)
            session.release(hold)
    for ref in REFS:
        session.release(read_hold(cache, ref))
    assert database.num_transactions == before
    statistics = cache.statistics()
    assert statistics.hits - hits == 4 * NUM_OBJECTS
    assert statistics.pinned_entries == 0
    assert database.num_transactions - before <= 2


def test_a_sample_of_several_objects_holds_each_of_them_once(cache: Cache) -> None:
    hold = read_hold(cache, REFS[0], REFS[1], REFS[0])
    assert list(hold.open_files) == [str(path_of(cache, ref)) for ref in REFS[:2]]
    assert hold.charges == dict.fromkeys([ref.key for ref in REFS[:2]], 4096)
    assert evict_all(cache) == NUM_OBJECTS - 2
    Session(cache).release(hold)
    assert evict_all(cache) == 2


def test_at_every_fill_what_is_all_here_is_read_under_locks_and_nothing_else_is(cache: Cache) -> None:
    session = Session(cache)

    def is_read_hold(*refs: ObjectRef) -> bool:
        session.look_again()
        hold = session.acquire_one(refs, for_reading=True)
        session.wait(hold)
        session.release(hold)
        return hold.is_read_hold

    made = ObjectRef(url="made", key=REFS[0].key, ext=".bin", is_stored_sample=True)
    assert is_read_hold(REFS[0])
    assert not is_read_hold(made)
    assert not is_read_hold(REFS[0], ObjectRef.of("http://nowhere/missing"))
    for limit_bytes in (10 * 4096 * NUM_OBJECTS, 4096 * NUM_OBJECTS * 100 // 95, 4096 * (NUM_OBJECTS + 1)):
        cache.limit_bytes = limit_bytes
        assert is_read_hold(REFS[0])
    session.owner.ask_for_policy(0, "belady")
    assert not is_read_hold(REFS[0])
    session.owner._generation = -1  # as after a transaction that failed: the limit may not be in force
    assert not is_read_hold(REFS[1])


def test_a_file_that_is_read_under_locks_is_evicted_after_it_and_not_before(cache: Cache) -> None:
    hold = read_hold(cache, REFS[0])
    assert evict_all(cache) == NUM_OBJECTS - 1
    assert path_of(cache, REFS[0]).read_bytes() == OBJECTS[URLS[0]]
    check_invariants(cache.path)
    Session(cache).release(hold)
    assert evict_all(cache) == 1
    assert not path_of(cache, REFS[0]).exists()


def test_eviction_goes_past_any_number_of_files_that_are_read(cache: Cache) -> None:
    refs = {ref.key: ref for ref in REFS}
    with Session(cache).transaction() as tx:
        order = [refs[row.key] for row in unpinned_in_order(tx, NUM_OBJECTS)]
    holds = [read_hold(cache, ref) for ref in order[:40]]  # more than eviction looks at first
    with Session(cache).transaction() as tx:
        assert evict(tx, Session(cache).disk, 3 * 4096, at_most=4) == (3 * 4096, 3)
    assert [path_of(cache, ref).exists() for ref in order] == [True] * 40 + [False] * 3 + [True] * (NUM_OBJECTS - 43)
    assert evict_all(cache) == NUM_OBJECTS - 43
    for hold in holds:
        Session(cache).release(hold)
    assert evict_all(cache) == 40


def test_eviction_ends_on_a_disk_that_removes_nothing(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bytes] = []

    def keep(_disk: Disk, key: bytes, _ext: str) -> bool:
        tried.append(key)
        return False

    monkeypatch.setattr(Disk, "remove_data", keep)
    with Session(cache).transaction() as tx:
        assert evict(tx, Session(cache).disk, 4096, at_most=1, max_looked_at=16) == (0, 0)
    assert len(tried) == 4 + 16
    assert len(set(tried)) == 16 < NUM_OBJECTS


def read_under_locks_until_told(connection: Connection, directory: Path) -> None:
    with opened(directory) as cache:
        read_all(cache)
        hold = read_hold(cache, REFS[0])
        say(connection)
        connection.recv()
        assert path_of(cache, REFS[0]).read_bytes() == OBJECTS[URLS[0]]
        Session(cache).release(hold)
        say(connection)
        connection.recv()


def test_room_is_made_beside_a_reader_in_another_process_and_of_its_file_when_it_is_done(cache: Cache, stage: Stage) -> None:
    reader = stage.start(read_under_locks_until_told, cache.path)
    reader.hear()
    assert evict_all(cache) == NUM_OBJECTS - 1
    reader.tell()
    reader.hear()
    assert evict_all(cache) == 1
    reader.tell()
    reader.hear()
    reader.end()


def test_what_a_killed_process_read_under_locks_can_go_at_once(cache: Cache, stage: Stage) -> None:
    reader = stage.start(read_under_locks_until_told, cache.path)
    reader.hear()
    reader.kill()
    assert evict_all(cache) == NUM_OBJECTS


def read_many_under_locks(connection: Connection, directory: Path, seed: int) -> list[str]:
    """Read at random, by read locks however full the cache is, until told that it is enough; return what went wrong."""
    rng = random.Random(seed)
    troubles: list[str] = []
    num_read_holds = 0
    with opened(directory) as cache:
        session = Session(cache)
        read_all(cache)
        say(connection)
        while num_read_holds < 50 or not connection.poll():
            ref = rng.choice(REFS)
            hold = session.acquire_one([ref], for_reading=True)
            session.wait(hold)
            if session.claim(hold):
                data = path_of(cache, ref).read_bytes()
                num_read_holds += hold.is_read_hold
                if data != OBJECTS[ref.url] or os.stat(path_of(cache, ref)).st_nlink != 1:
                    troubles.append(f"{ref.url} was taken from its reader")
            session.release(hold)
    return troubles


def test_readers_lose_nothing_to_somebody_who_clears_all_the_time(cache: Cache, stage: Stage) -> None:
    *readers, victim = [stage.start(read_many_under_locks, cache.path, seed) for seed in range(3)]
    for reader in (*readers, victim):
        reader.hear()
    num_removed = 0
    while num_removed < 2 * NUM_OBJECTS:  # each is downloaded again: on a disk that others sync all the time, some a second
        num_removed += cache.clear().removed_entries
        if victim.process.is_alive():
            victim.kill()
    for reader in readers:
        reader.tell()
    for reader in readers:
        while not reader.connection.poll():
            cache.clear()
        assert reader.hear() == []
        reader.end()


def test_the_ledger_is_asked_once_for_an_object_that_is_read_again_and_again(cache: Cache) -> None:
    session, database = Session(cache), Session(cache).database
    for _ in range(2):
        session.release(read_hold(cache, *REFS[:2]))
    statements: list[str] = []
    main = threading.get_ident()

    def note(statement: str) -> None:
        if threading.get_ident() == main:  # the background looks for who waits, on its own clock
            statements.append(statement)

    database.engine.raw_connection().driver_connection.set_trace_callback(note)  # type: ignore[union-attr]
    num_hits = cache.statistics().hits
    assert statements
    statements.clear()
    for _ in range(5):
        session.release(read_hold(cache, *REFS[:2]))
    assert statements == []
    assert cache.statistics().hits == num_hits + 10


def test_hits_that_are_noted_leave_nothing_to_the_garbage_collector(cache: Cache) -> None:
    session = Session(cache)
    session.release(read_hold(cache, REFS[0]))
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(100):
        session.release(read_hold(cache, REFS[0]))
    assert len(gc.get_objects()) - before < 50


def test_an_object_that_was_read_before_goes_by_rows_once_the_policy_looks_ahead(cache: Cache) -> None:
    session = Session(cache)
    session.release(read_hold(cache, REFS[0]))
    session.owner.ask_for_policy(0, "belady")
    kinds = []
    for _ in range(CacheTuning().num_hits_a_look + 4):
        hold = session.acquire_one([REFS[0]], for_reading=True)
        kinds.append(hold.is_read_hold)
        session.release(hold)
    assert kinds[-4:] == [False] * 4


def test_an_object_that_was_read_before_and_is_gone_or_another_since_is_acquired_by_rows(cache: Cache) -> None:
    session = Session(cache)
    for ref in REFS[:2]:
        session.release(read_hold(cache, ref))
    assert evict_all(cache) == NUM_OBJECTS
    num_hits, num_misses = cache.statistics().hits, cache.statistics().misses
    for ref in REFS[:2]:
        hold = session.acquire_one([ref], for_reading=True)
        assert not session.claim(hold)
        assert sample(cache, ref) == OBJECTS[ref.url]
        cache.statistics()  # what was published is written
        session.release(read_hold(cache, ref))
    statistics = cache.statistics()
    assert (statistics.hits - num_hits, statistics.misses - num_misses) == (2, 2)


def test_a_child_registers_before_it_reads_what_its_parent_has_read(cache: Cache) -> None:
    session = Session(cache)
    session.release(read_hold(cache, REFS[0]))

    def read() -> str:
        first = session.acquire_one(REFS[:1], for_reading=True)
        return f"{type(first).__name__} of owner {session.owner.is_registered}"

    assert answer_of_forked_child(read) == "Hold of owner True"


def test_a_closed_cache_gives_nothing_that_was_read_before(directory: Path, cache: Cache) -> None:
    with opened(directory) as other:
        session = Session(other)
        session.release(read_hold(cache, REFS[0]))
        session.release(read_hold(other, REFS[0]))
        store = session.directory
    store.close()
    with pytest.raises(CacheClosedError, match=r"was closed.*open it again"):
        session.acquire_one(REFS[:1], for_reading=True)


def test_holds_of_one_object_share_its_descriptor_and_each_keeps_it(cache: Cache) -> None:
    session = Session(cache)
    before = open_files(cache.path)
    holds = [read_hold(cache, *REFS[:2]), read_hold(cache, REFS[0])]
    assert len(open_files(cache.path)) == len(before) + 2
    session.release(holds[0])
    assert len(open_files(cache.path)) == len(before) + 1
    assert evict_all(cache) == NUM_OBJECTS - 1
    assert read_open(holds[1], REFS[0]) == OBJECTS[URLS[0]]
    session.release(holds[1])
    assert open_files(cache.path) == before
    assert evict_all(cache) == 1


def test_a_file_that_goes_between_opening_and_locking_it_is_not_taken_for_held(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(cache)
    hold = session.acquire_one(REFS[:1], for_reading=True)
    before = open_files(cache.path)
    locked: list[int] = []

    class Fcntl:
        def __getattr__(self, name: str) -> Any:
            return getattr(fcntl, name)

        def flock(self, fd: int, operation: int) -> None:
            if operation == fcntl.LOCK_SH | fcntl.LOCK_NB and not locked:
                locked.append(fd)
                assert evict_all(cache) == NUM_OBJECTS
            fcntl.flock(fd, operation)

    monkeypatch.setattr("sqlstream.cache.files.read_hold.fcntl", Fcntl())
    assert not session.claim(hold)
    assert locked
    assert open_files(cache.path) == before
    session.release(hold)
    assert sample(cache, REFS[0]) == OBJECTS[URLS[0]]


def test_a_file_that_somebody_is_about_to_remove_is_not_taken_for_held(cache: Cache) -> None:
    num_hits = cache.statistics().hits
    hold = Session(cache).acquire_one(REFS[:1], for_reading=True)
    fd = locks.open_descriptor(path_of(cache, REFS[0]), os.O_RDWR)
    assert locks.try_lock(fd)
    assert not Session(cache).claim(hold)
    assert cache.statistics().hits == num_hits
    locks.close_descriptor(fd)
    assert Session(cache).claim(hold)
    Session(cache).release(hold)


@pytest.mark.parametrize("change", ["cut", "grown", "deleted", "a link", "a directory", "a pipe"])
def test_a_file_changed_behind_our_back_is_found_by_the_claim_and_fetched_again(cache: Cache, change: str) -> None:
    path = path_of(cache, REFS[0])
    before = open_files(cache.path)
    if change in ("cut", "grown"):
        os.truncate(path, 50 if change == "cut" else 5000)
    else:
        path.rename(cache.path / "moved")
    if change == "a link":
        path.symlink_to(cache.path / "moved")
    elif change == "a directory":
        path.mkdir()
    elif change == "a pipe":
        os.mkfifo(path)
    assert sample(cache, REFS[0]) == OBJECTS[URLS[0]]
    cache.statistics()  # what was published is written, and its part closed
    assert open_files(cache.path) == before
    (cache.path / "moved").unlink(missing_ok=True)


def test_clear_repair_quarantine_and_discard_leave_what_is_read_under_locks(cache: Cache) -> None:
    path = path_of(cache, REFS[0])
    hold = read_hold(cache, REFS[0])
    report = cache.clear()
    assert (report.removed_entries, report.kept_pinned_entries, report.kept_pinned_bytes) == (NUM_OBJECTS - 1, 1, 4096)
    os.truncate(path, 50)
    owner, disk = Session(cache).owner, Session(cache).disk
    with pytest.raises(CacheError, match="50 bytes instead of 100, and another process reads it"):
        owner.run(lambda tx: recover.quarantine(tx, disk, REFS[0].key, owner.id))
    (finding,) = cache.verify(repair=True)
    assert (finding.kind, finding.repaired) == ("wrong size", False)
    assert "a running process reads it" in finding.explanation
    assert path.stat().st_size == 50
    Session(cache).release(hold)
    (finding,) = cache.verify(repair=True)
    assert finding.repaired
    assert not path.exists()


def test_a_strange_file_that_is_locked_is_left_by_a_repair(cache: Cache) -> None:
    hold = read_hold(cache, REFS[0])
    with Session(cache).transaction() as tx:
        tx.remove([REFS[0].key])
    assert [finding.repaired for finding in cache.verify(repair=True)] == [False]
    Session(cache).release(hold)
    assert [finding.repaired for finding in cache.verify(repair=True)] == [True]


def test_a_retained_read_hold_is_pinned_by_a_row_before_its_lock_goes(cache: Cache) -> None:
    session = Session(cache)
    hold = read_hold(cache, REFS[0])
    kept = session.retain(hold)
    assert type(kept) is Hold
    assert hold.open_files == {}
    assert cache.statistics().pinned_entries == 1
    assert session.held_bytes == 4096
    assert evict_all(cache) == NUM_OBJECTS - 1
    second = session.retain(hold_again(cache))
    session.release(kept)
    assert cache.statistics().pinned_entries == 1
    session.release(second)
    assert cache.statistics().pinned_entries == 0
    assert evict_all(cache) == 2


def hold_again(cache: Cache) -> ReadHold:
    """A read hold on an object that was evicted meanwhile."""
    assert sample(cache, REFS[1]) == OBJECTS[URLS[1]]
    Session(cache).flush()
    return read_hold(cache, REFS[1])


def test_a_ledger_that_fails_as_a_read_hold_is_retained_leaves_the_lock_or_the_error(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(cache)
    hold = read_hold(cache, REFS[0])

    def fail(work: object) -> None:
        raise CacheError("the ledger fails")

    monkeypatch.setattr(session.owner, "run", fail)
    with pytest.raises(CacheError, match="fails"):
        session.retain(hold)
    assert session.bypassed().retain(hold) is hold
    monkeypatch.undo()
    assert evict_all(cache) == NUM_OBJECTS - 1
    session.release(hold)


def test_a_cache_that_fails_on_the_way_of_locks_is_an_error_or_bypassed(directory: Path) -> None:
    with opened(directory) as cache:
        cache.acquire_many(URLS)
        cache.release_many(URLS)
        read_all(cache)
        session = Session(cache)
        session.release(read_hold(cache, REFS[0]))
        session.stop_background()  # which may write there while it is removed
        shutil.rmtree(directory)
        assert not session.claim(session.acquire_one(REFS[:1], for_reading=True)), "what was said of it before is a hint"
        with pytest.raises(CacheError, match="gone"):
            session.acquire_one(REFS[:1], for_reading=True)
        session = session.bypassed()
        hold = session.acquire_one(REFS[:1], for_reading=True)
        assert session.wait(hold)
        assert session.claim(hold)
        assert cache.path_of(REFS[0], hold).read_bytes() == OBJECTS[URLS[0]]
        session.release(hold)


def test_a_forked_child_gives_back_a_lock_that_a_hold_of_its_parent_had_on_the_file(cache: Cache) -> None:
    _inherited = read_hold(cache, REFS[0])

    def read() -> str:
        datas = [sample(cache, REFS[0]) for _ in range(3)]  # the first one registers the child
        return f"{len(datas)}, {[path for path in open_files(cache.path) if '/data/' in path]}"

    assert answer_of_forked_child(read) == "3, []"


def test_a_forked_child_keeps_no_lock_and_an_inherited_hold_closes_no_file_of_the_child(cache: Cache) -> None:
    hold = read_hold(cache, REFS[0])
    ((number,),) = map(descriptors, hold.open_files.values())
    told, tell = os.pipe()
    heard, say_so = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            mine = os.open(os.devnull, os.O_RDONLY)
            os.dup2(mine, number)  # its number has another file now
            hold.close()
            Session(cache).release(hold)
            os.fstat(number)
            os.write(say_so, b"1")
            os.read(told, 1)
            os._exit(0)
        finally:
            os._exit(1)
    try:
        assert os.read(heard, 1) == b"1"
        assert evict_all(cache) == NUM_OBJECTS - 1  # the parent's lock is as it was
        Session(cache).release(hold)
        assert evict_all(cache) == 1  # and the child, which lives, has none
    finally:
        os.write(tell, b"1")
        assert os.waitpid(child, 0)[1] == 0
        for fd in (told, tell, heard, say_so):
            os.close(fd)


def read_without_descriptors(connection: Connection, directory: Path) -> bool:
    with opened(directory) as cache:
        session = Session(cache)
        read_all(cache)
        holds = session.acquire([REFS[:2]], for_reading=True)
        assert isinstance(holds[0], ReadHold)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        first_free = os.dup(0)
        os.close(first_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + 1, limits[1]))  # one of the two files can be opened
        is_claimed = session.claim(holds[0])
        os.close(os.dup(0))  # and none stays open
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return not is_claimed and sample(cache, REFS[0]) == OBJECTS[URLS[0]]


def test_with_too_few_descriptors_a_read_hold_is_refused_and_the_exact_way_is_left(cache: Cache, stage: Stage) -> None:
    assert stage.run_all(read_without_descriptors, [(cache.path,)]) == [True]


def test_ctrl_c_at_any_moment_of_claim_and_release_leaves_no_lock(cache: Cache) -> None:
    session = Session(cache).of_engine
    session.release(read_hold(cache, *REFS[:2]))
    ready = Session(cache).ledger.find_ready([ref.key for ref in REFS[:2]])
    rows = [ready[ref.key] for ref in REFS[:2]]
    before = open_files(cache.path)
    shared = ReadLocks(Session(cache).disk.data, lambda *_: None, KeptLocks())

    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    def use(hold: ReadHold) -> None:  # by itself: on Python 3.13 a jump back in the body of a `try` is not covered by it
        while not came:  # Python swallows what a handler raises in a finalizer, of whatever library
            session.open(hold)
            session.release(hold)

    num_raised = 0
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(600):
            hold = ReadHold(REFS[:2], rows, shared, {})
            came.clear()
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + number / 6))
                use(hold)
            except KeyboardInterrupt:
                num_raised += 1
            del hold
            if number % 20 == 0:
                assert open_files(cache.path) == before
            assert not open_locks()
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert num_raised > 500
    assert open_files(cache.path) == before
    assert evict_all(cache) == NUM_OBJECTS


def test_what_is_read_under_locks_under_a_limit_that_is_nearly_full_is_evicted_last(directory: Path) -> None:
    """No transaction notes the uses of a read hold; the process that evicts writes its own before it does."""
    new = {f"http://nowhere/new/{i}.bin": bytes(100) for i in range(8)}
    with Cache(directory, limit=4096 * NUM_OBJECTS * 105 // 100) as cache:
        cache.fetcher = fetcher = ScriptedFetcher({**OBJECTS, **new})
        cache.acquire_many(URLS)
        cache.release_many(URLS)
        read_all(cache)
        session = Session(cache)
        session.stop_background()  # which writes what waits, now and then
        before = session.num_transactions
        for ref in [*REFS[32:], *REFS[:8]]:
            session.release(read_hold(cache, ref))
        for hold in session.acquire([[ref] for ref in REFS[8:16]], for_reading=True):
            assert session.claim(hold)
            session.release(hold)
        assert session.num_transactions == before
        for url in new:
            with cache.pinned(url):
                pass
        assert cache.statistics().evictions > 0
        assert all(path_of(cache, ref).exists() for ref in [*REFS[32:], *REFS[:16]])
        assert fetcher.num_gets.total() == NUM_OBJECTS + len(new)
    check_invariants(directory, at_rest=True)
