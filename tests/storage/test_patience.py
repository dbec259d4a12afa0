"""Resumed bodies, timeouts, races and checksums, against real sockets."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import ObjectChangedError, TransientStorageError
from sqlstream.storage.base import ObjectInfo, ObjectStream
from sqlstream.storage.fetcher import Fetcher, FetchRequest
from sqlstream.storage.hedge import first_of
from sqlstream.storage.retry import Tally
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.storage.downloads import PLENTY, Downloads

DATA = bytes(range(256)) * 16_000  # 4 MB
PATH = "/bucket/x.bin"
CUT = FaultyAnswer(fault=Fault.TRUNCATE, after_bytes=2_500_000)
Make = Callable[..., Downloads]


@pytest.fixture(params=["s3", "http"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(server: FaultyHttpServer, scheme: str) -> str:
    server.objects[PATH] = DATA
    return f"s3:/{PATH}" if scheme == "s3" else server.url + PATH


@pytest.fixture
def make(server: FaultyHttpServer, scheme: str, tmp_path: Path) -> Iterator[Make]:
    """Makes downloads with storage options of a test."""
    made: list[Fetcher] = []

    def make(**options: object) -> Downloads:
        where: dict[str, object] = {"anon": True, "endpoint_url": server.url} if scheme == "s3" else {}
        made.append(Fetcher(StorageOptions(storage_options={"read_timeout": 1.0, **where, **options}, num_threads=4)))
        return Downloads(made[-1], tmp_path)

    yield make
    for fetcher in made:
        fetcher.stop()


def like(**expected: str) -> FetchRequest:
    return FetchRequest(ticket="", url="", fd=-1, granted_bytes=PLENTY, **expected)  # type: ignore[arg-type]  # text fields


def ranges(server: FaultyHttpServer) -> list[str | None]:
    return [request.range for request in server.requests(PATH)]


def test_a_truncated_body_is_resumed_with_its_version(make: Make, server: FaultyHttpServer, url: str) -> None:
    server.script(PATH, CUT)
    downloads = make()
    downloads.submit(url, like=like(expected_hash=f"sha256:{hashlib.sha256(DATA).hexdigest()}"))
    (done,) = downloads.wait_done()
    assert (done.error, done.num_requests, done.num_retries) == (None, 2, 1)
    assert downloads.read("0") == DATA
    assert done.downloaded_bytes == len(DATA)  # nothing came twice
    first, second = server.requests(PATH)
    assert first.range is None
    assert second.range is not None
    assert second.headers["if-match"] == f'"{hashlib.md5(DATA).hexdigest()}"'


def test_a_server_that_ignores_the_range_of_a_resumption_is_read_from_the_start(
    make: Make, server: FaultyHttpServer, url: str
) -> None:
    server.script(PATH, CUT, always=FaultyAnswer(fault=Fault.NO_RANGES))
    downloads = make(verify_etag=True)
    downloads.submit(url)
    (done,) = downloads.wait_done()
    assert (done.error, done.num_retries) == (None, 1)
    assert downloads.read("0") == DATA
    assert done.num_requests == len(server.requests(PATH)) <= 3


@pytest.mark.parametrize("status", [400, 416, 501])
def test_a_server_that_refuses_to_resume_is_read_from_the_start(
    make: Make, server: FaultyHttpServer, url: str, status: int
) -> None:
    server.script(PATH, CUT, FaultyAnswer(fault=Fault.STATUS, status=status))
    downloads = make()
    downloads.submit(url)
    (done,) = downloads.wait_done()
    assert (done.error, done.num_requests, len(ranges(server))) == (None, 3, 3)
    assert downloads.read("0") == DATA


def test_an_object_that_changed_in_the_middle_is_read_whole_anew(make: Make, server: FaultyHttpServer, url: str) -> None:
    server.script(PATH, FaultyAnswer(fault=Fault.STALL, after_bytes=2_500_000, seconds=60))
    downloads = make()
    downloads.submit(url)
    while not server.requests(PATH):
        threading.Event().wait(0.01)
    server.objects[PATH] = DATA[::-1]
    (done,) = downloads.wait_done()
    assert (done.error, downloads.read("0") == DATA[::-1]) == (None, True)
    assert done.num_requests == 3  # cut off, refused with 412, whole


def test_a_large_object_may_break_off_more_often_than_there_are_retries(make: Make, server: FaultyHttpServer, url: str) -> None:
    """Each try brings it further; a try that brings nothing counts."""
    server.objects[PATH] = DATA * 4
    server.script(PATH, always=CUT)
    downloads = make()
    downloads.submit(url)
    (done,) = downloads.wait_done()
    assert done.error is None
    assert downloads.read("0") == DATA * 4
    assert done.num_retries > 3


def test_a_server_that_drips_for_ever_is_given_up_and_what_came_is_kept(make: Make, server: FaultyHttpServer, url: str) -> None:
    server.script(PATH, FaultyAnswer(fault=Fault.DRIP, seconds=0.3))  # 4.8 s, never silent for the read timeout
    downloads = make(timeout=1.5)
    downloads.submit(url)
    (done,) = downloads.wait_done()
    assert (done.error, done.num_retries) == (None, 1)
    assert downloads.read("0") == DATA
    assert done.seconds < 4


@pytest.mark.parametrize("scheme", ["s3"], indirect=True)
def test_bytes_with_another_digest_are_asked_for_again_once(make: Make, server: FaultyHttpServer, url: str) -> None:
    server.script(PATH)
    downloads = make()
    downloads.submit(url, like=like(expected_hash="md5:" + "0" * 32))
    (done,) = downloads.wait_done()
    assert type(done.error) is ObjectChangedError
    assert hashlib.md5(DATA).hexdigest() in str(done.error)
    assert done.num_requests == len(server.requests(PATH)) == 2


@pytest.mark.parametrize("scheme", ["s3"], indirect=True)
def test_the_etag_is_compared_with_the_md5_when_asked_for(make: Make, server: FaultyHttpServer, url: str) -> None:
    downloads = make(verify_etag=True)
    server.script(PATH, FaultyAnswer(fault=Fault.DAMAGE))
    downloads.submit(url)
    (done,) = downloads.wait_done()
    assert (done.error, done.num_requests) == (None, 2)
    assert downloads.read("0") == DATA


@pytest.mark.parametrize("scheme", ["s3"], indirect=True)
def test_without_being_asked_nothing_is_hashed(make: Make, server: FaultyHttpServer, url: str) -> None:
    server.script(PATH, FaultyAnswer(fault=Fault.DAMAGE))
    downloads = make()
    downloads.submit(url)
    assert downloads.wait_done()[0].num_requests == 1
    assert downloads.read("0") != DATA


def test_requests_bytes_and_pauses_are_counted_for_their_host(
    make: Make, server: FaultyHttpServer, url: str, scheme: str
) -> None:
    server.script(PATH, FaultyAnswer(fault=Fault.STATUS, status=503))
    downloads = make()
    downloads.submit(url)
    (done,) = downloads.wait_done()
    assert done.host == ("s3://bucket" if scheme == "s3" else server.url)
    assert (done.num_requests, done.num_retries, done.downloaded_bytes) == (2, 1, len(DATA))
    assert 0 < done.pause_seconds <= done.seconds


@pytest.mark.parametrize("scheme", ["s3"], indirect=True)
def test_waiting_for_room_takes_no_thread_from_others(make: Make, server: FaultyHttpServer, url: str) -> None:
    """More downloads wait for a grant than there are threads; another one still comes through."""
    downloads = make()
    downloads.submit(*[url] * 12, like=FetchRequest(ticket="", url="", fd=-1, granted_bytes=0))
    downloads.wait_grants(12)
    downloads.submit(url)
    assert downloads.wait_done("12")[0].error is None
    downloads.fetcher.cancel([str(i) for i in range(12)])
    downloads.wait_done()


@pytest.mark.parametrize("scheme", ["s3"], indirect=True)
def test_cancelled_downloads_in_a_silent_network_take_no_thread_from_others(
    make: Make, server: FaultyHttpServer, url: str
) -> None:
    server.script(PATH, *[FaultyAnswer(fault=Fault.STALL, seconds=60)] * 4)
    downloads = make(read_timeout=60)
    downloads.submit(*[url] * 4)
    while len(server.requests(PATH)) < 4:
        threading.Event().wait(0.01)
    downloads.fetcher.cancel(["0", "1", "2", "3"])
    downloads.submit(url)
    assert downloads.wait_done("4")[0].error is None
    downloads.wait_done()


def test_ranges_of_one_object_come_with_few_requests(make: Make, server: FaultyHttpServer, url: str) -> None:
    fetcher = make().fetcher
    wanted = [(3_000_000, 3_000_100), (10, 20), (100, 200), (150, 160), (0, 0)]
    assert fetcher.get_ranges(url, wanted) == [DATA[start:stop] for start, stop in wanted]
    assert ranges(server) == ["bytes=10-199", "bytes=3000000-3000099"]


def test_an_object_that_changes_between_two_ranges_is_an_error(make: Make, server: FaultyHttpServer, url: str) -> None:
    server.script(PATH, FaultyAnswer(fault=Fault.DRIP, seconds=0.03))
    fetcher = make().fetcher
    failed: list[Exception] = []

    def read() -> None:
        try:
            fetcher.get_ranges(url, [(0, 2_000_000), (3_000_000, 3_000_100)])
        except ObjectChangedError as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    while not server.requests(PATH):
        threading.Event().wait(0.005)
    server.objects[PATH] = DATA[::-1]
    thread.join()
    assert len(failed) == 1
    assert "412" in str(failed[0])


@pytest.mark.parametrize("scheme", ["http"], indirect=True)
class TestHedging:
    def test_a_request_that_hangs_is_raced_by_a_second_one(self, make: Make, server: FaultyHttpServer, url: str) -> None:
        downloads = make(hedge_factor=5, read_timeout=30)
        downloads.submit(*[url] * 24)
        downloads.wait_done()
        server.script(PATH, FaultyAnswer(fault=Fault.STALL, seconds=20))
        downloads.submit(url)
        (done,) = downloads.wait_done("24")
        assert (done.error, done.num_requests, done.num_retries) == (None, 2, 0)
        assert done.seconds < 10
        assert len(server.requests(PATH)) == 26

    def test_it_is_off_by_default(self, make: Make, server: FaultyHttpServer, url: str) -> None:
        downloads = make()
        downloads.submit(*[url] * 24)
        downloads.wait_done()
        server.script(PATH, FaultyAnswer(fault=Fault.STALL, seconds=0.5))
        downloads.submit(url)
        (done,) = downloads.wait_done("24")
        assert done.num_retries == 1  # the stall ended it, no second request


class Answer:
    """An answer that says whether it was closed."""

    info, start, num_extra_requests = ObjectInfo(url="x", size_bytes=0, etag=None), 0, 0

    def __init__(self) -> None:
        self.closed = threading.Event()

    def chunks(self) -> Iterator[memoryview]:
        yield from ()

    def close(self) -> None:
        self.closed.set()


class TestRace:
    def test_the_late_answer_is_closed(self) -> None:
        late, gate, answers, tally = Answer(), threading.Event(), [Answer()], Tally()

        def slow_then_fast() -> ObjectStream:
            if tally.num_requests == 0:
                gate.wait(20)
                return late
            return answers[0]

        assert first_of(slow_then_fast, 0.05, tally) is answers[0]
        gate.set()
        assert late.closed.wait(20)
        assert not answers[0].closed.is_set()
        assert tally.num_requests == 1

    def test_an_error_counts_only_when_both_fail(self) -> None:
        gate, good, tally = threading.Event(), Answer(), Tally()

        def good_then_bad() -> ObjectStream:
            if tally.num_requests == 0:
                gate.wait(20)
                return good
            gate.set()
            raise TransientStorageError("second")

        assert first_of(good_then_bad, 0.05, tally) is good

        def bad() -> ObjectStream:
            raise TransientStorageError("first")

        with pytest.raises(TransientStorageError, match="first"):
            first_of(bad, 5, Tally())
