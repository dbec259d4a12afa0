"""Acquiring: one download for everybody, takeovers, waiting for room, files changed behind our back."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.model.refs import ObjectRef, charged_bytes
from sqlstream.cache.model.tuning import CacheTuning
from sqlstream.errors import CacheDiskError, CacheFullError, ConfigError, ObjectNotFoundError
from sqlstream.storage.fetcher import FetchRequest, GrantNeeded, Sink
from sqlstream.testing.disk import DiskWatch, cached_files
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.actors import (
    WAIT_SECONDS,
    Stage,
    begin_and_wait,
    body,
    objects,
    pin_until_told,
    prefetch_and_sleep,
    read_in_threads,
)
from tests.cache.kit import num_gets, wait_for_download
from tests.cache.session import Session, tuned_cache


def test_four_processes_of_four_threads_ask_for_one_cold_object_and_it_is_requested_once(
    server: FaultyHttpServer, directory: Path, stage: Stage
) -> None:
    server.objects.update(objects([300_000]))
    server.script("/o/0.bin", FaultyAnswer(fault=Fault.DRIP, seconds=0.02))
    results = stage.run_all(read_in_threads, [(directory, None, [f"{server.url}/o/0.bin"], 4)] * 4)
    assert results == [4] * 4
    assert num_gets(server) == 1
    check_invariants(directory, at_rest=True)


def test_a_killed_leader_is_followed_by_a_waiter_with_exactly_one_more_request(
    server: FaultyHttpServer, directory: Path, stage: Stage
) -> None:
    server.objects.update(objects([400_000]))
    url = f"{server.url}/o/0.bin"
    server.script("/o/0.bin", FaultyAnswer(fault=Fault.STALL, after_bytes=50_000, seconds=600))
    leader = stage.start(begin_and_wait, directory, None, url)
    assert leader.hear() == "asking"
    wait_for_download(server, directory, "/o/0.bin")
    waiters = [stage.start(begin_and_wait, directory, None, url) for _ in range(2)]
    for waiter in waiters:
        assert waiter.hear() == "asking"
    leader.kill()
    assert [waiter.hear() for waiter in waiters] == [True, True]
    for waiter in waiters:
        waiter.end()
    assert num_gets(server) == 2
    check_invariants(directory, at_rest=True)


def test_a_stopped_leader_is_waited_for_and_others_go_on(server: FaultyHttpServer, directory: Path, stage: Stage) -> None:
    server.objects.update(objects([400_000, 1000]))
    server.script("/o/0.bin", FaultyAnswer(fault=Fault.HOLD, after_bytes=50_000, gate=(gate := threading.Event())))
    leader = stage.start(begin_and_wait, directory, None, f"{server.url}/o/0.bin")
    assert leader.hear() == "asking"
    wait_for_download(server, directory, "/o/0.bin")
    leader.stop_outside_the_write_lock(directory)
    with Cache(directory) as cache:
        with cache.pinned(f"{server.url}/o/1.bin") as path:
            assert path.read_bytes() == body("/o/1.bin", 1000)
        hold = Session(cache).acquire_one([ObjectRef.of(f"{server.url}/o/0.bin")])
        assert not Session(cache).wait(hold, timeout_seconds=0.5)
        os.kill(leader.pid, signal.SIGCONT)
        gate.set()
        assert Session(cache).wait(hold, timeout_seconds=WAIT_SECONDS)
        assert hold.error is None
        Session(cache).release(hold)
    assert leader.hear() is True
    leader.end()
    assert num_gets(server, "/o/0.bin") == 1
    check_invariants(directory, at_rest=True)


def test_the_limit_holds_while_threads_and_processes_download(server: FaultyHttpServer, directory: Path, stage: Stage) -> None:
    sizes = [1000 + 7919 * i % 40_000 for i in range(60)]
    server.objects.update(objects(sizes))
    urls = [f"{server.url}/o/{i}.bin" for i in range(60)]
    limit = 16 * charged_bytes(41_000)
    with DiskWatch(directory) as watch:
        assert stage.run_all(read_in_threads, [(directory, limit, urls, 4)] * 3) == [240] * 3
    assert watch.num_looks > 20
    assert 0 < watch.highest_bytes <= limit
    check_invariants(directory, at_rest=True)


def test_workers_that_prefetch_and_sleep_never_block_each_other(
    server: FaultyHttpServer, directory: Path, stage: Stage
) -> None:
    """8 processes, a limit of 8 times the largest: whoever sleeps on prefetched pins gives them back (L8)."""
    sizes = [3000 + 9973 * i % 60_000 for i in range(24)]
    server.objects.update(objects(sizes))
    urls = [f"{server.url}/o/{i}.bin" for i in range(24)]
    limit = 8 * charged_bytes(max(sizes))
    with DiskWatch(directory) as watch:
        results = stage.run_all(prefetch_and_sleep, [(directory, limit, urls, seed) for seed in range(8)])
    assert results == [sum(sizes)] * 8
    assert watch.highest_bytes <= limit
    check_invariants(directory, at_rest=True)


def test_an_object_larger_than_the_limit_fails_at_once_and_is_named(server: FaultyHttpServer, directory: Path) -> None:
    server.objects.update(objects([100_000]))
    url = f"{server.url}/o/0.bin"
    with Cache(directory, limit=100_000 - 1) as cache:
        with pytest.raises(CacheFullError, match=rf"{url} needs 102400 bytes on disk, the cache limit is 99999 bytes"):
            cache.acquire_many([url])
        assert cache.statistics().used_bytes == 0
        check_invariants(directory)
    check_invariants(directory, at_rest=True)


def test_a_known_size_larger_than_the_limit_is_never_asked_for(server: FaultyHttpServer, directory: Path) -> None:
    with Cache(directory, limit=10_000) as cache:
        ref = ObjectRef.of(f"{server.url}/o/0.bin", size_bytes=20_000)
        with pytest.raises(CacheFullError, match="needs 20480 bytes"):
            cache.hold([ref])
    assert server.requests() == []


def test_objects_of_one_sample_whose_sizes_are_unknown_are_not_refused_for_a_guess(
    server: FaultyHttpServer, directory: Path
) -> None:
    server.objects.update(objects([5000] * 4))
    urls = [f"{server.url}/o/{i}.bin" for i in range(4)]
    with Cache(directory, limit=4 * 8192) as cache:  # a first guess is 80 KB
        for path, url in zip(cache.acquire_many(urls), urls, strict=True):
            assert path.read_bytes() == server.objects[url.removeprefix(server.url)]
    check_invariants(directory, at_rest=True)


def test_an_unknown_length_beyond_the_first_reservation_is_extended(server: FaultyHttpServer, directory: Path) -> None:
    server.objects.update(objects([3_000_000]))
    server.script("/o/0.bin", always=FaultyAnswer(fault=Fault.NO_LENGTH))
    limit = 3_100_000  # less than one step of 8 MiB, enough for the object
    with Cache(directory, limit=limit) as cache, DiskWatch(directory) as watch:
        with cache.pinned(f"{server.url}/o/0.bin") as path:
            assert path.read_bytes() == server.objects["/o/0.bin"]
        assert cache.statistics().used_bytes == charged_bytes(3_000_000)
    assert watch.highest_bytes <= limit
    check_invariants(directory, at_rest=True)


def test_an_unknown_length_beyond_the_limit_fails_with_the_clear_error(server: FaultyHttpServer, directory: Path) -> None:
    server.objects.update(objects([3_000_000]))
    server.script("/o/0.bin", always=FaultyAnswer(fault=Fault.NO_LENGTH))
    with Cache(directory, limit=2_000_000) as cache, DiskWatch(directory) as watch:
        with pytest.raises(CacheFullError, match="the cache limit is 2000000 bytes"):
            cache.acquire_many([f"{server.url}/o/0.bin"])
        assert cache.statistics().filling_bytes == 0
    assert watch.highest_bytes <= 2_000_000
    check_invariants(directory, at_rest=True)


class LongerThanAnnounced(ScriptedFetcher):
    """A client whose body goes on behind the size that was announced."""

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        super().__init__(objects)
        self.grants: list[int] = []

    def grant(self, ticket: str, granted_bytes: int) -> None:
        self.grants.append(granted_bytes)
        super().grant(ticket, granted_bytes)

    def submit(self, requests: Sequence[FetchRequest], sink: Sink) -> None:
        for request in requests:
            sink([GrantNeeded(ticket=request.ticket, size_bytes=1)])
        super().submit(requests, sink)


def test_a_body_that_is_longer_than_announced_gets_room_and_never_waits_for_ever(directory: Path) -> None:
    url = "http://nowhere/x"
    with Cache(directory, limit=2_000_000) as cache:
        cache.fetcher = fetcher = LongerThanAnnounced({url: bytes(100)})
        with cache.pinned(url):
            assert min(fetcher.grants, default=0) > 100_000
    check_invariants(directory, at_rest=True)


def test_two_downloads_that_must_extend_under_a_tight_limit_both_finish(
    server: FaultyHttpServer, directory: Path, stage: Stage
) -> None:
    server.objects.update(objects([1_500_000, 1_500_000]))
    for i in range(2):
        server.script(f"/o/{i}.bin", always=FaultyAnswer(fault=Fault.NO_LENGTH))
    limit = 2_000_000  # for one of them
    with DiskWatch(directory) as watch:
        arguments = [(directory, limit, [f"{server.url}/o/{i}.bin"], 1) for i in range(2)]
        assert stage.run_all(read_in_threads, arguments) == [1, 1]
    assert watch.highest_bytes <= limit
    check_invariants(directory, at_rest=True)


def test_waiting_for_room_ends_when_another_process_gives_back(server: FaultyHttpServer, directory: Path, stage: Stage) -> None:
    server.objects.update(objects([50_000, 50_000]))
    limit = charged_bytes(50_000)
    holder = stage.start(pin_until_told, directory, limit, [f"{server.url}/o/0.bin"])
    holder.hear()
    waiter = stage.start(begin_and_wait, directory, limit, f"{server.url}/o/1.bin")
    waiter.hear()
    assert not waiter.connection.poll(0.5)
    holder.tell()
    assert waiter.hear() is True
    check_invariants(directory)


def test_without_room_in_time_the_error_names_who_pins_how_much(server: FaultyHttpServer, directory: Path) -> None:
    server.objects.update(objects([50_000, 50_000]))
    impatient = CacheTuning(room_timeout_seconds=0.3)
    with tuned_cache(directory, impatient, limit=charged_bytes(50_000)) as cache, cache.pinned(f"{server.url}/o/0.bin"):
        with pytest.raises(CacheFullError, match=rf"pinned by .*\(pid {os.getpid()}\): 53248 bytes"):
            cache.acquire_many([f"{server.url}/o/1.bin"])
        assert Session(cache).ledger.waiting_owners() == []


@pytest.mark.parametrize("act", ["delete", "truncate", "grow", "symlink", "directory"])
def test_a_file_changed_behind_our_back_is_fetched_again(
    server: FaultyHttpServer, directory: Path, tmp_path: Path, act: str
) -> None:
    server.objects.update(objects([5000]))
    url = f"{server.url}/o/0.bin"
    with Cache(directory, limit=100_000) as cache:
        with cache.pinned(url) as path:
            pass
        if act == "truncate":
            os.truncate(path, 100)
        elif act == "grow":
            os.truncate(path, 6000)
        else:
            path.unlink()
        if act == "symlink":
            (tmp_path / "elsewhere").write_bytes(bytes(5000))
            path.symlink_to(tmp_path / "elsewhere")
        elif act == "directory":
            path.mkdir()
        with cache.pinned(url) as path:
            assert path.read_bytes() == server.objects["/o/0.bin"]
            assert not path.is_symlink()
        assert num_gets(server) == 2
        assert cache.verify() == []
    check_invariants(directory, at_rest=True)


def test_the_same_object_asked_twice_by_two_threads_is_one_download(server: FaultyHttpServer, directory: Path) -> None:
    server.objects.update(objects([200_000]))
    url = f"{server.url}/o/0.bin"
    server.script("/o/0.bin", FaultyAnswer(fault=Fault.DRIP, seconds=0.01))
    with Cache(directory) as cache:
        right: list[bool] = []

        def read() -> None:
            with cache.pinned(url) as path:
                right.append(path.read_bytes() == server.objects["/o/0.bin"])

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert right == [True] * 8
        assert cache.statistics().pinned_entries == 0
    assert num_gets(server) == 1


def test_an_object_that_is_not_there_fails_alone_and_is_counted(server: FaultyHttpServer, directory: Path) -> None:
    server.objects.update(objects([1000]))
    with Cache(directory, limit=1 << 20) as cache:
        session = Session(cache)
        refs = [ObjectRef.of(f"{server.url}/o/{name}.bin") for name in ("0", "none")]
        there, absent = session.acquire([[ref] for ref in refs])
        for hold in (there, absent):
            session.wait(hold)
        assert there.error is None
        assert isinstance(absent.error, ObjectNotFoundError)
        for hold in (there, absent):
            session.release(hold)
        stats = cache.statistics()
        assert (stats.entries, stats.failures, stats.filling_bytes) == (1, 1, 0)
    check_invariants(directory, at_rest=True)


def test_releasing_what_was_not_acquired_is_an_error(directory: Path) -> None:
    with Cache(directory) as cache, pytest.raises(ConfigError, match="not acquired"):
        cache.release_many(["http://127.0.0.1/x"])


def test_files_without_room_are_kept_and_all_of_them_is_refused_together(server: FaultyHttpServer, directory: Path) -> None:
    server.objects.update(objects([10_000] * 10))
    refs = [ObjectRef.of(f"{server.url}/o/{i}.bin", size_bytes=10_000) for i in range(10)]
    with Cache(directory, limit=4 * 12_288) as cache:
        with pytest.raises(CacheFullError, match="and the 9 objects needed with it"):
            cache.hold(refs)
        holds = Session(cache).acquire([[ref] for ref in refs])
        assert len(holds) == 4  # the longest prefix that fits
        for hold in holds:
            Session(cache).wait(hold)
            Session(cache).release(hold)
    assert len(cached_files(directory)) == 4
    check_invariants(directory, at_rest=True)


def test_a_folder_that_is_removed_under_a_download_is_named_and_made_again(directory: Path) -> None:
    url = "http://nowhere/x.bin"
    fetcher = ScriptedFetcher({url: b"content"})
    with Cache(directory, limit="1mb") as cache:
        cache.fetcher = fetcher
        fetcher.holds_back = True
        hold = cache.session.acquire_one([ObjectRef.of(url)])
        shutil.rmtree(directory / "part")
        fetcher.deliver(url)
        hold = cache.session.wait(hold)
        assert isinstance(hold.error, CacheDiskError)
        assert re.search("No such file or directory. A folder of the cache was removed", str(hold.error))
        cache.session.release(hold)
        fetcher.holds_back = False
        with cache.pinned(url) as path:
            assert path.read_bytes() == b"content"
    check_invariants(directory, at_rest=True)
