"""The facade: statistics, clear, forks, closing, pickles, interrupts."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import resource
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.acquire import outcomes
from sqlstream.cache.acquire.holds import Hold
from sqlstream.cache.directory import _stores
from sqlstream.cache.model.refs import ObjectRef, charged_bytes
from sqlstream.cache.model.tuning import CacheTuning
from sqlstream.errors import (
    CacheDirectoryError,
    CacheDiskError,
    CacheFullError,
    ConfigError,
    ObjectNotFoundError,
    StorageError,
)
from sqlstream.storage.fetcher import FetchDone, FetchRequest, Sink
from sqlstream.testing.disk import cached_files
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.cache.actors import WAIT_SECONDS, Stage, body, objects, read_in_threads
from tests.cache.kit import num_gets, wait_for_gets
from tests.cache.session import Session, tuned_cache
from tests.interrupts import interrupted
from tests.processes import answer_of_forked_child, open_files

NUM, SIZE = 20, 10_000


@pytest.fixture
def urls(server: FaultyHttpServer) -> list[str]:
    server.objects.update(objects([SIZE] * NUM))
    return [f"{server.url}/o/{i}.bin" for i in range(NUM)]


@pytest.fixture
def tuning() -> CacheTuning:
    """Times and thresholds of the cache; a test may have others."""
    return CacheTuning()


@pytest.fixture
def cache(directory: Path, tuning: CacheTuning) -> Iterator[Cache]:
    with tuned_cache(directory, tuning, limit=1 << 20) as cache:
        yield cache


def children() -> list[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return sorted(int(pid) for task in tasks for pid in task.read_text().split())


def test_statistics_equal_the_disk_and_the_server(
    cache: Cache, server: FaultyHttpServer, urls: list[str], directory: Path
) -> None:
    cache.acquire_many(urls[:5])
    cache.acquire_many(urls[3:8])
    with pytest.raises(ObjectNotFoundError):
        cache.acquire_many([f"{server.url}/none"])
    stats = cache.statistics()
    assert stats.used_bytes == sum(map(charged_bytes, cached_files(directory).values())) == 8 * 12_288
    assert (stats.entries, stats.pinned_entries, stats.filling_bytes, stats.failures) == (8, 8, 0, 1)
    assert (stats.hits, stats.misses) == (2, 9)
    assert stats.requests == num_gets(server) == 9
    assert stats.downloaded_bytes == 8 * SIZE
    assert stats.limit_bytes == 1 << 20
    assert [(owner.pid, owner.pinned_entries) for owner in stats.owners] == [(os.getpid(), 8)]
    cache.release_many(urls[:5])
    cache.release_many(urls[3:8])
    assert cache.statistics().pinned_entries == 0


def test_a_local_path_is_read_in_place(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for mine in (str(tmp_path / "mine.txt"), tmp_path / "mine.txt"):
        with cache.pinned(mine) as path:
            assert [path] == cache.acquire_many([mine]) == [tmp_path / "mine.txt"]
    with pytest.raises(ConfigError, match=r"b'/mine' is no URL and no path: give a text or a Path"), cache.pinned(b"/mine"):  # type: ignore[arg-type]  # refused
        pass
    assert cache.statistics().entries == 0
    with pytest.raises(ObjectNotFoundError, match=r"none\.txt"):
        cache.acquire_many([str(tmp_path / "none.txt")])


def test_urls_may_come_once_and_are_no_single_text(cache: Cache, urls: list[str]) -> None:
    paths = cache.acquire_many(url for url in urls[:3])
    assert [path.exists() for path in paths] == [True] * 3
    for call in (cache.acquire_many, cache.release_many):
        with pytest.raises(ConfigError, match=r"o/0.bin' is a single text: give a list of URLs"):
            call(urls[0])
    assert cache.statistics().pinned_entries == 3
    cache.release_many(iter(urls[:3]))
    assert cache.statistics().pinned_entries == 0


@pytest.mark.parametrize("name", ["caf\udce9", "\udce9?x=1", "\udce9@x"])
def test_a_url_with_bytes_that_are_no_utf8_says_how_to_spell_them(cache: Cache, name: str) -> None:
    with pytest.raises(StorageError, match=r"udce9.* holds bytes that are no UTF-8: spell them as escapes, such as %E9"):
        cache.acquire_many([f"http://127.0.0.1/{name}"])


def test_an_object_under_two_urls_stays_until_both_are_released(cache: Cache, urls: list[str]) -> None:
    signed = [f"{urls[0]}?GoogleAccessId=1&Expires=2&Signature={i}" for i in range(2)]
    first, second = cache.acquire_many(signed)
    assert first == second
    cache.release_many(signed[:1])
    assert cache.clear().kept_pinned_entries == 1
    assert second.exists()
    cache.release_many(signed[1:])
    assert cache.clear().removed_entries == 1


def test_many_objects_are_acquired_with_few_descriptors(directory: Path, server: FaultyHttpServer) -> None:
    num = 700
    server.objects.update(objects([100] * num))
    urls = [f"{server.url}/o/{i}.bin" for i in range(num)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Cache(directory, limit="1gb") as cache:
        cache.acquire_many(urls[:1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 300, hard))
        try:
            paths = cache.acquire_many(urls)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [path.read_bytes() for path in paths] == [body(f"/o/{i}.bin", 100) for i in range(num)]
        assert cache.statistics().pinned_entries == cache.clear().kept_pinned_entries == num
        cache.release_many(urls)
        cache.release_many(urls[:1])
        assert cache.clear().removed_entries == num
        server.objects.pop("/o/650.bin")
        with pytest.raises(ObjectNotFoundError):
            cache.acquire_many(urls)  # all or none
        assert cache.statistics().pinned_entries == 0
        wait_for_gets(server, 2 * num)  # closing the cache cancels what is not asked for yet
    assert num_gets(server) == 2 * num


def test_many_objects_that_do_not_fit_together_are_refused(directory: Path, server: FaultyHttpServer) -> None:
    server.objects.update(objects([100] * 300))
    with Cache(directory, limit=200 * 4096) as cache:
        with pytest.raises(CacheFullError, match="cache limit is 819200 bytes"):
            cache.acquire_many([f"{server.url}/o/{i}.bin" for i in range(300)])
        assert cache.statistics().pinned_entries == 0


def test_clear_takes_everything_but_what_is_pinned_and_says_so(cache: Cache, urls: list[str], directory: Path) -> None:
    cache.acquire_many(urls)
    cache.release_many(urls[5:])
    report = cache.clear()
    assert (report.removed_entries, report.removed_bytes) == (NUM - 5, (NUM - 5) * 12_288)
    assert (report.kept_pinned_entries, report.kept_pinned_bytes) == (5, 5 * 12_288)
    assert len(cached_files(directory)) == 5
    cache.release_many(urls[:5])
    assert cache.clear().removed_entries == 5
    assert cache.clear().removed_entries == 0


def test_clear_keeps_a_download_on_its_way(cache: Cache, server: FaultyHttpServer, urls: list[str]) -> None:
    server.script("/o/0.bin", FaultyAnswer(fault=Fault.HOLD, gate=(gate := threading.Event())))
    read: list[bytes] = []
    thread = threading.Thread(target=lambda: read.append(cache.acquire_many(urls[:1])[0].read_bytes()))
    thread.start()
    while not server.requests("/o/0.bin"):
        time.sleep(0.001)
    assert cache.clear().kept_filling_entries == 1
    gate.set()
    thread.join()
    assert read == [body("/o/0.bin", SIZE)]
    assert num_gets(server) == 1


def test_clear_by_dataset_and_by_age(cache: Cache, urls: list[str]) -> None:
    cache.acquire_many(urls[:4])
    cache.release_many(urls[:4])
    with Session(cache).transaction() as tx:
        mine = tx.add_dataset("mine", "s", "f")
        tx.connection.execute("UPDATE entry SET dataset = ? WHERE url = ?", (mine, urls[0]))
    with pytest.raises(ConfigError, match="no dataset 'other' in this cache: it has mine"):
        cache.clear(dataset="other")
    assert cache.clear(dataset="mine", older_than_seconds=3600).removed_entries == 0
    assert cache.clear(dataset="mine").removed_entries == 1
    with Session(cache).transaction() as tx:
        tx.connection.execute("UPDATE entry SET created_at = created_at - 7200 WHERE url = ?", (urls[1],))
        tx.connection.execute("UPDATE used SET at = at - 7200")
    assert cache.clear(older_than_seconds=3600).removed_entries == 1


@pytest.mark.usefixtures("starts_anew")
def test_closing_leaves_no_thread_process_descriptor_or_owner(directory: Path, urls: list[str]) -> None:
    with Cache(directory, limit=1 << 20) as cache:
        cache.acquire_many(urls)
    gc.collect()
    threads, processes = {thread.name for thread in threading.enumerate()}, set(children())
    for _ in range(3):
        with Cache(directory, limit=1 << 20) as cache:
            cache.clear()
            cache.acquire_many(urls)
            assert set(children()) - processes == {cache.fetcher.helper_pid}
    ours = {thread.name for thread in threading.enumerate() if thread.name.startswith("sqlstream")}
    assert ours == {name for name in threads if name.startswith("sqlstream")} == set()
    assert open_files(directory) == []
    assert set(children()) <= processes  # what earlier tests left may have ended meanwhile
    assert list((directory / "owners").iterdir()) == []
    assert not _stores


@pytest.mark.usefixtures("starts_anew")
def test_closing_in_the_middle_of_downloads_ends_them_and_who_waits(
    server: FaultyHttpServer, directory: Path, urls: list[str]
) -> None:
    server.script("/o/0.bin", always=FaultyAnswer(fault=Fault.STALL, after_bytes=100, seconds=60))
    cache = Cache(directory, limit=1 << 20)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            cache.acquire_many(urls[:1])
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not server.requests("/o/0.bin"):
        time.sleep(0.01)
    helper = cache.fetcher.helper_pid
    assert helper in children()
    cache.close()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    assert "closed" in str(errors[0])
    assert helper not in children()
    check_invariants(directory, at_rest=True)


@pytest.mark.usefixtures("starts_anew")
def test_a_cache_that_is_dropped_closes_by_itself(directory: Path, urls: list[str]) -> None:
    cache = Cache(directory)
    cache.acquire_many(urls)
    helper = cache.fetcher.helper_pid
    assert helper in children()
    cache.__dict__["itself"] = cache  # only the garbage collector finds it
    del cache
    gc.collect()
    deadline = time.monotonic() + WAIT_SECONDS
    while _stores or helper in children():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for thread in threading.enumerate():  # it is no store of ours any more before the last of it is given back
        if thread.name == "sqlstream-cache-close":
            thread.join()
    check_invariants(directory, at_rest=True)


def test_two_caches_of_one_directory_share_one_store_and_the_last_closes_it(directory: Path, urls: list[str]) -> None:
    first, second = Cache(directory, limit=200_000), Cache(directory, limit=100_000)
    assert Session(first).directory is Session(second).directory
    with first.pinned(urls[0]):
        assert first.statistics().limit_bytes == 100_000
        second.close()
        assert first.statistics().limit_bytes == 200_000
        assert first.statistics().pinned_entries == 1
    first.close()
    assert not _stores


@pytest.mark.parametrize("tuning", [CacheTuning(room_timeout_seconds=0.2)], ids=["impatient"])
def test_the_limit_may_be_changed_at_any_time(cache: Cache, urls: list[str]) -> None:
    cache.acquire_many(urls[:10])
    cache.limit_bytes = 4 * 12_288  # below what is pinned: nothing is taken from anybody, and nothing more comes in
    with pytest.raises(CacheFullError, match=r"no room for .* under the cache limit of 49152 bytes"):
        cache.acquire_many(urls[10:11])
    cache.release_many(urls[:10])
    with cache.pinned(urls[11]):
        assert cache.statistics().used_bytes <= 4 * 12_288
    cache.limit_bytes = None
    cache.acquire_many(urls)
    assert cache.statistics().used_bytes == NUM * 12_288


def test_a_closed_cache_says_so(directory: Path, urls: list[str]) -> None:
    cache = Cache(directory)
    cache.close()
    cache.close()
    with pytest.raises(ConfigError, match="closed"):
        cache.acquire_many(urls)


def test_a_cache_pickles_as_its_path_and_options(cache: Cache, urls: list[str]) -> None:
    cache.acquire_many(urls[:1])
    with pickle.loads(pickle.dumps(cache)) as copy:
        assert (copy.path, Session(copy).directory) == (cache.path, Session(cache).directory)
        with copy.pinned(urls[0]) as path:
            assert path.exists()
    assert cache.statistics().pinned_entries == 1


def use_pickled(_: Connection, pickled: bytes, url: str) -> tuple[bytes, int]:
    with pickle.loads(pickled) as cache, cache.pinned(url) as path:
        return path.read_bytes(), cache.statistics().limit_bytes


def test_a_pickled_cache_opens_in_another_process(cache: Cache, urls: list[str], stage: Stage) -> None:
    assert stage.run_all(use_pickled, [(pickle.dumps(cache), urls[0])]) == [(body("/o/0.bin", SIZE), 1 << 20)]


def test_a_forked_child_with_inherited_pins_releases_nothing_of_its_parent(cache: Cache, urls: list[str]) -> None:
    cache.acquire_many(urls[:3])

    def act() -> str:
        cache.release_many(urls[:3])  # the parent's handles: without effect
        with cache.pinned(urls[4]) as path:
            right = path.read_bytes() == body("/o/4.bin", SIZE)
        stats = cache.statistics()
        cache.close()
        return f"{right} {stats.pinned_entries} {len(stats.owners)}"

    assert answer_of_forked_child(act) == "True 3 2"
    assert cache.statistics().pinned_entries == 3
    assert cache.clear().kept_pinned_entries == 3
    cache.release_many(urls[:3])
    assert cache.statistics().pinned_entries == 0
    check_invariants(cache.path)


def test_forks_in_the_middle_of_downloads_and_transactions_never_hang(
    server: FaultyHttpServer, cache: Cache, urls: list[str]
) -> None:
    for i in range(0, NUM, 5):
        server.script(f"/o/{i}.bin", always=FaultyAnswer(fault=Fault.DRIP, seconds=0.002))
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            for url in urls[:10]:
                with cache.pinned(url):
                    pass
            cache.clear()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for i in range(25):

            def act(i: int = i) -> str:
                with cache.pinned(urls[i % NUM]) as path:
                    right = path.read_bytes() == body(f"/o/{i % NUM}.bin", SIZE)
                if i % 2:
                    cache.close()  # and otherwise dies with everything open
                return str(right)

            assert answer_of_forked_child(act) == "True"
    finally:
        stop.set()
        thread.join()
    assert Session(cache).read("PRAGMA integrity_check") == [("ok",)]
    check_invariants(cache.path)


DISK_FOR_ALL = pytest.mark.parametrize("tuning", [CacheTuning(allocate_from_bytes=0)], ids=["disk for small ones, too"])
"""Small objects, too, take their room on the disk before they come."""


@pytest.fixture
def full_at_first(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A disk on which the first write of each object fails; gives the tickets of all downloads, in the order of asking."""
    tickets: list[str] = []
    submit = cache.fetcher.submit

    def full(requests: Sequence[FetchRequest], sink: Sink) -> None:
        new = [request for request in requests if request.ticket not in tickets]
        tickets.extend(request.ticket for request in requests)
        submit([request for request in requests if request not in new], sink)
        error = StorageError("writing it to disk failed", errno=errno.ENOSPC)
        if new:
            sink([FetchDone(ticket=request.ticket, error=error) for request in new])

    monkeypatch.setattr(cache.fetcher, "submit", full)
    return tickets


@DISK_FOR_ALL
def test_a_full_disk_gives_the_clear_error_and_leaks_nothing(
    cache: Cache, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.acquire_many(urls[:10])
    cache.release_many(urls[:10])
    cache.statistics()
    files = set(open_files(cache.path))

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CacheDiskError, match=r"o/15\.bin.*No space left on device.*Free space"):
            cache.acquire_many(urls[15:16])
        stats = cache.statistics()
        assert stats.evictions > 0  # it tried to make space
        assert (stats.filling_bytes, stats.pinned_entries) == (0, 0)
        check_invariants(cache.path)
    assert set(open_files(cache.path)) == files
    with cache.pinned(urls[15]) as path:
        assert path.read_bytes() == body("/o/15.bin", SIZE)


@DISK_FOR_ALL
def test_a_full_disk_that_eviction_frees_is_not_noticed(cache: Cache, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cache.acquire_many(urls[:10])
    cache.release_many(urls[:10])
    allocate = os.posix_fallocate
    calls: list[int] = []

    def full_at_first(fd: int, offset: int, length: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full_at_first)
    with cache.pinned(urls[15]) as path:
        assert path.read_bytes() == body("/o/15.bin", SIZE)
    assert cache.statistics().evictions > 0


@pytest.mark.parametrize(
    ("tuning", "num_large"), [(CacheTuning(), 0), (CacheTuning(allocate_from_bytes=12_288), 2)], ids=["small", "large"]
)
def test_a_small_object_takes_no_room_before_it_comes_and_a_large_one_does(
    cache: Cache, num_large: int, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.acquire_many(urls[:3])  # from now on sizes are guessed
    lengths: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda _fd, _offset, length: lengths.append(length))
    cache.acquire_many(urls[3:5])
    assert lengths == [charged_bytes(int(SIZE * outcomes.GUESS_MARGIN))] * num_large


def test_a_write_that_finds_the_disk_full_takes_its_room_first_the_second_time(
    cache: Cache, urls: list[str], full_at_first: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = os.posix_fallocate
    lengths: list[int] = []

    def counted(fd: int, offset: int, length: int) -> None:
        lengths.append(length)
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", counted)
    with cache.pinned(urls[0]) as path:
        assert path.read_bytes() == body("/o/0.bin", SIZE)
        assert path.stat().st_blocks * 512 <= charged_bytes(SIZE)
    assert len(full_at_first) == 2
    assert len(set(full_at_first)) == len(lengths) == 1
    assert cache.statistics().failures == 0


@pytest.mark.usefixtures("full_at_first")
def test_a_write_that_finds_the_disk_full_for_good_gives_the_clear_error(
    cache: Cache, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CacheDiskError, match=r"o/15\.bin.*No space left on device.*Free space"):
        cache.acquire_many(urls[15:16])
    stats = cache.statistics()
    assert (stats.filling_bytes, stats.pinned_entries, stats.failures) == (0, 0, 1)
    check_invariants(cache.path)


def acquire_under_interrupts(_: Connection, directory: Path, urls: list[str]) -> tuple[int, int]:
    cache = Cache(directory, limit=8 * 12_288)
    names = iter(range(1 << 30))

    def use() -> None:
        i = next(names)
        with cache.pinned(urls[i % NUM]) as path:
            assert path.stat().st_size == SIZE
        cache.acquire_many(urls[:3])
        cache.release_many(urls[:3])

    for seed in range(6):
        interrupted(use, 15, within_seconds=0.02, seed=seed)
        for url in urls[:3]:  # what the interrupted caller knows to be its own, it gives back
            while cache._holds.get(url):
                cache.release_many([url])
        gc.collect()
        Session(cache).collect()
        Session(cache).owner.flush()
        deadline = time.monotonic() + WAIT_SECONDS
        while Session(cache).downloads.leads and time.monotonic() < deadline:
            time.sleep(0.01)
        stats = cache.statistics()
        assert (stats.pinned_entries, stats.filling_bytes) == (0, 0), stats
    num_calls = next(names)
    cache.close()
    return num_calls, len(os.listdir(directory / "owners"))


def test_ctrl_c_in_the_middle_of_acquire_leaves_no_pin_and_no_row(directory: Path, urls: list[str], stage: Stage) -> None:
    ((num_calls, num_owners),) = stage.run_all(acquire_under_interrupts, [(directory, urls)])
    assert num_calls > 50
    assert num_owners == 0
    check_invariants(directory, at_rest=True)


def remove(directory: Path) -> None:
    """Take the directory away at once: file by file, the cache would write between two of them."""
    directory.rename(directory.with_name("removed"))
    shutil.rmtree(directory.with_name("removed"))


def test_a_directory_that_is_removed_under_a_cache_is_named(directory: Path, urls: list[str]) -> None:
    cache = Cache(directory, limit=1 << 20)
    cache.acquire_many(urls[:2])
    remove(directory)
    with pytest.raises(CacheDirectoryError, match="is gone"):
        cache.acquire_many(urls[2:4])
    cache.close()
    assert open_files(directory.parent) == []
    assert not _stores


def test_a_directory_that_is_replaced_under_a_cache_is_used_anew(directory: Path, urls: list[str], stage: Stage) -> None:
    with Cache(directory, limit=1 << 20) as cache:
        cache.acquire_many(urls[:2])
        remove(directory)
        assert stage.run_all(read_in_threads, [(directory, 1 << 20, urls[:3], 1)]) == [3]
        with cache.pinned(urls[2]) as path:
            assert path.read_bytes() == body("/o/2.bin", SIZE)
        cache.release_many(urls[:2])
        assert len(cache.statistics().owners) == 1
    check_invariants(directory, at_rest=True)


def test_nothing_is_made_in_a_strangers_directory_that_takes_the_place_of_a_cache(directory: Path, urls: list[str]) -> None:
    with Cache(directory, limit=1 << 20) as cache:
        with cache.pinned(urls[0]):
            pass
        remove(directory)
        directory.mkdir()
        (directory / "data").mkdir()
        for url in urls[:2]:
            with pytest.raises(CacheDirectoryError, match="is gone"), cache.pinned(url):
                pass
        with pytest.raises(CacheDirectoryError, match="is gone"):
            cache.statistics()
    assert [path.name for path in directory.iterdir()] == ["data"]


def stream(cache: Cache, urls: list[str], window: int) -> int:
    """Read all URLs as the engine does: half a window ahead, released one by one; return the transactions per 1000 samples."""
    session = Session(cache)
    refs = [ObjectRef.of(url) for url in urls]
    before = Session(cache).num_transactions
    ahead: list[Hold] = []
    position = 0
    for _ in refs:
        if len(ahead) <= window // 2:
            wanted = refs[position : position + window - len(ahead)]
            ahead += session.acquire([[ref] for ref in wanted])
            position += len(wanted)
        hold = ahead.pop(0)
        session.wait(hold)
        assert session.claim(hold)
        session.release(hold)
    return 1000 * (Session(cache).num_transactions - before) // len(urls)


def test_transactions_for_1000_samples_are_few_because_publishing_and_releasing_are_batched(
    server: FaultyHttpServer, directory: Path
) -> None:
    server.objects.update(objects([2000] * 1000, prefix="/many"))
    urls = [f"{server.url}/many/{i}.bin" for i in range(1000)]
    with Cache(directory, limit=1 << 30) as cache:
        assert stream(cache, urls, 64) <= 200  # all misses
        assert cache.statistics().misses == 1000
        assert stream(cache, urls, 64) <= 60  # all hits
        assert cache.statistics().hits == 1000
