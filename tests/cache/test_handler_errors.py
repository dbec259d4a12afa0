"""What a signal handler raises comes out as it is, also an error that a disk might give: the `TimeoutError` of an alarm."""

from __future__ import annotations

import errno
import gc
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sqlstream import StreamingDataset
from sqlstream.cache import Cache
from sqlstream.cache.files.disk import Part, changed_files
from sqlstream.cache.ledger.database import Database
from sqlstream.cache.ledger.write_lock import WriteLock
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.private_files import PrivateFilesSession
from sqlstream.process import locks
from sqlstream.storage.fetcher import FetchEvent, FetchRequest, Sink
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.kit import acquire_hits, open_locks, read_pinned
from tests.cache.session import Session
from tests.handlers import handler, raised_everywhere
from tests.processes import open_files
from tests.stream.kit import num_decoded, opened
from tests.stream.sources import Photos, check_bytes, make_photos

ERRORS = pytest.mark.parametrize("error", [TimeoutError, FileNotFoundError])


@pytest.fixture
def photos(tmp_path: Path) -> Iterator[Photos]:
    with FaultyHttpServer() as server:
        yield make_photos(server, tmp_path, num=4)


def pinned_in(cache: Cache) -> list[bytes]:
    Session(cache).collect()
    return Session(cache).pinned_keys


@ERRORS
@pytest.mark.parametrize("inside", ["claim", "lock", pytest.param(None, marks=pytest.mark.slow)])
def test_of_an_access(photos: Photos, tmp_path: Path, error: type[Exception], inside: str | None) -> None:
    with StreamingDataset(
        photos.src, dst=tmp_path / "dst", columns_to_download=["image"], transforms=[check_bytes], cache_limit="10mb"
    ) as dataset:
        assert dataset[3]["is_right"]
        dataset.cache.statistics()  # what was published is written: it is read under locks from here on
        for nth in raised_everywhere(error, inside, lambda: dataset[3]):
            assert not open_locks()
            gc.collect()
            assert pinned_in(dataset.cache) == [], nth
        assert dataset[3]["is_right"]
    check_invariants(tmp_path / "dst", at_rest=True)
    assert open_files(tmp_path) == []


@ERRORS
@pytest.mark.parametrize("work", [acquire_hits, read_pinned])
@pytest.mark.parametrize(
    "inside", ["write_transaction", "_transaction", "changed_files", pytest.param(None, marks=pytest.mark.slow)]
)
def test_of_acquiring_and_releasing(
    tmp_path: Path, work: Callable[[Cache, list[str]], None], error: type[Exception], inside: str | None
) -> None:
    urls = [f"s3://bucket/{number}" for number in range(3)]
    with Cache(tmp_path / "dst", limit="10mb") as cache:
        cache.fetcher = ScriptedFetcher(dict.fromkeys(urls, b"bytes"))
        for _ in range(2):  # files that have come are closed with the next transaction
            acquire_hits(cache, urls)
        cache.rest()
        files = len(open_files(tmp_path))
        for nth in raised_everywhere(error, inside, lambda: work(cache, urls)):
            if pinned_in(cache):  # it came when they were acquired
                cache.release_many(urls)
            cache.rest()
            assert pinned_in(cache) == [], nth
            assert len(open_files(tmp_path)) == files
    check_invariants(tmp_path / "dst", at_rest=True)
    assert open_files(tmp_path) == []


def test_changed_files_are_those_that_the_disk_names(tmp_path: Path) -> None:
    with Cache(tmp_path / "dst", limit="10mb") as cache:
        disk, rows = Session(cache).disk, [(bytes([number] * 16), 1, 4096, ".bin") for number in range(2)]
        for _ in raised_everywhere(FileNotFoundError, "changed_files", lambda: changed_files(disk, rows)):
            assert changed_files(disk, rows) == [row[0] for row in rows]


@ERRORS
@pytest.mark.parametrize("inside", ["read", "decode_sample", "_decode"])
def test_of_a_stored_sample(photos: Photos, tmp_path: Path, error: type[Exception], inside: str) -> None:
    with opened(photos, tmp_path) as dataset:
        assert len(list(dataset)) == photos.num
        for _ in raised_everywhere(error, inside, lambda: list(dataset)):
            assert num_decoded(tmp_path / "log") == photos.num
    check_invariants(tmp_path / "cache", at_rest=True)
    assert open_files(tmp_path) == []


@ERRORS
@pytest.mark.parametrize("is_known", [False, True], ids=["new", "known"])
def test_of_the_wait_for_another_process(tmp_path: Path, error: type[Exception], is_known: bool) -> None:
    database, other = Database(tmp_path / "ledger.sqlite"), WriteLock(tmp_path)

    def fail() -> None:
        raise error

    if is_known:
        database.read("SELECT 1")
    assert other.take()
    try:
        with handler(fail), pytest.raises(error) as raised, locks.uninterrupted():  # noqa: PT012 - the wait begins with it
            signal.raise_signal(signal.SIGUSR1)
            with database.write_transaction():
                pass
        assert raised.type is error
    finally:
        other.leave()
        other.close()
    assert database.read("SELECT 1") == [(1,)]
    database.close()
    assert open_files(tmp_path) == []


@ERRORS
@pytest.mark.parametrize("inside", ["_bring", "_file"])
def test_of_a_read_past_the_cache(tmp_path: Path, error: type[Exception], inside: str) -> None:
    refs = [ObjectRef.of(f"s3://bucket/{number}") for number in range(2)]
    session = PrivateFilesSession(ScriptedFetcher({ref.url: b"bytes" for ref in refs}))
    session.directory = str(tmp_path / "private")
    files = len(open_files(tmp_path))
    for nth in raised_everywhere(error, inside, lambda: session.acquire([refs])):
        assert len(open_files(tmp_path)) == files, nth


class Together(ScriptedFetcher):
    """Tells of all downloads at once, as what stores samples does."""

    def submit(self, requests: Sequence[FetchRequest], sink: Sink) -> None:
        events: list[FetchEvent] = []
        super().submit(requests, events.extend)
        sink(events)


@pytest.mark.parametrize("error", [TimeoutError, FileNotFoundError, KeyboardInterrupt])
def test_of_the_room_that_is_made_for_what_came_onto_a_full_disk(
    tmp_path: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = [ObjectRef.of(f"s3://bucket/{number}") for number in range(3)]
    names = [ref.key for ref in refs]
    with Cache(tmp_path / "dst", limit="10mb") as cache:
        fetcher, other = Together({ref.url: b"bytes" for ref in refs}), WriteLock(tmp_path / "dst")
        cache.fetcher, publish = fetcher, Session(cache).disk.publish

        def publish_on_full_disk(part: Part, key: bytes, ext: str, size_bytes: int) -> None:
            if key == names[1]:
                assert other.take()  # who makes room must wait, and lets signals through
                signal.raise_signal(signal.SIGUSR1)
                raise OSError(errno.ENOSPC, "no space left")
            publish(part, key, ext, size_bytes)

        def fail() -> None:
            other.leave()
            raise error

        monkeypatch.setattr(Session(cache).disk, "publish", publish_on_full_disk)
        with handler(fail), pytest.raises(error):
            Session(cache).acquire([refs])
        other.close()
        gc.collect()
        assert pinned_in(cache) == []
        assert cache.verify() == []
        monkeypatch.undo()
        for ref in refs:
            with cache.pinned(ref.url) as path:
                assert path.read_bytes() == b"bytes"
        assert [fetcher.num_gets[ref.url] for ref in refs] == [1, 2, 2]
    check_invariants(tmp_path / "dst", at_rest=True)
    assert open_files(tmp_path) == []
