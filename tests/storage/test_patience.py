"""Resumed bodies, timeouts, races and checksums, against real sockets."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import ObjectChangedError, TransientStorageError
from sqlstream.storage.base import ObjectInfo, ObjectStream
from sqlstream.storage.fetcher import Fetcher, FetchRequest
from sqlstream.storage.hedge import RacedStream
from sqlstream.storage.retry import Tally
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.storage.downloads import PLENTY, Downloads

DATA = bytes(range(256)) * 16_000  # 4 MB
PATH = "/bucket/x.bin"
SOON = 4.0
"""A timeout that expires in a test, and that a request which nobody stalls keeps on a busy machine, too."""
PATIENCE_SECONDS = 300.0
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
        made.append(Fetcher(StorageOptions(storage_options={**where, **options}, num_threads=4)))
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
    server.script(PATH, FaultyAnswer(fault=Fault.STALL, after_bytes=2_500_000, seconds=600))
    downloads = make(read_timeout=SOON)
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
    server.script(PATH, FaultyAnswer(fault=Fault.DRIP, seconds=0.7))  # 10.5 s, never silent for the read timeout
    downloads = make(timeout=SOON)
    downloads.submit(url)
    (done,) = downloads.wait_done()
    first, *others = server.requests(PATH)
    assert (done.error, first.range, len(others)) == (None, None, done.num_retries)
    assert done.num_retries == 1
    assert all(other.range not in (None, "bytes=0-") for other in others)
    assert downloads.read("0") == DATA
    assert done.downloaded_bytes == len(DATA)  # nothing came twice


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
    server.script(PATH, *[FaultyAnswer(fault=Fault.STALL, seconds=600)] * 4)
    downloads = make(read_timeout=600)
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
    server.script(PATH, FaultyAnswer(fault=Fault.HOLD, after_bytes=1000, gate=(gate := threading.Event())))
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
    gate.set()
    thread.join()
    assert len(failed) == 1
    assert "412" in str(failed[0])


class TestHedging:
    """Races may begin for slow machines' sake too, so requests are compared with what the server saw, not with a number."""

    @pytest.mark.parametrize("after_bytes", [None, 1000, 2_500_000])
    def test_a_request_that_hangs_is_raced_by_a_second_one(
        self, make: Make, server: FaultyHttpServer, url: str, after_bytes: int | None
    ) -> None:
        """Before its answer, or in the middle of it: then for the rest, of the same version."""
        downloads = make(hedge_factor=5, read_timeout=600)
        downloads.submit(*[url] * 24)
        downloads.wait_done()
        num_before = len(server.requests(PATH))
        server.script(PATH, FaultyAnswer(fault=Fault.STALL, after_bytes=after_bytes, seconds=600))
        downloads.submit(url)
        (done,) = downloads.wait_done("24")
        assert (done.error, done.num_retries) == (None, 0)
        assert done.num_requests >= 2
        assert downloads.read("24")[: done.size_bytes] == DATA
        wait_until(lambda: len(server.requests(PATH)) == sum(done.num_requests for done in downloads.wait_done()))
        resumed = [request for request in server.requests(PATH)[num_before:] if request.range]
        assert resumed or after_bytes != 2_500_000
        assert {request.headers["if-match"] for request in resumed} <= {f'"{hashlib.md5(DATA).hexdigest()}"'}

    def test_it_is_off_by_default(self, make: Make, server: FaultyHttpServer, url: str) -> None:
        downloads = make(read_timeout=SOON)
        downloads.submit(*[url] * 24)
        downloads.wait_done()
        server.script(PATH, FaultyAnswer(fault=Fault.STALL, seconds=600))
        downloads.submit(url)
        (done,) = downloads.wait_done("24")
        assert done.num_retries == 1  # the timeout ended it, no second request


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Answer:
    """An answer that hangs before the end of its body until its gate is open, and says whether it was closed."""

    num_extra_requests = 0

    def __init__(self, body: bytes, *, start: int = 0, etag: str = '"1"', hangs: bool = False) -> None:
        self.info, self.start = ObjectInfo(url="x", size_bytes=4, etag=etag), start
        self.body = body
        self.gate, self.closed = threading.Event(), threading.Event()
        if not hangs:
            self.gate.set()

    def chunks(self) -> Iterator[memoryview]:
        yield memoryview(self.body[:2])
        assert self.gate.wait(PATIENCE_SECONDS)
        if self.body[2:]:
            yield memoryview(self.body[2:])

    def close(self) -> None:
        self.closed.set()


class Server:
    """Opens answers: the first one, then the second one; or raises what is an error."""

    def __init__(self, *answers: Answer | Exception, gate: threading.Event | None = None) -> None:
        self._answers = list(answers)
        self._gate = gate
        self.asked: list[tuple[int, str | None]] = []

    def open_at(self, start: int, etag: str | None) -> ObjectStream:
        self.asked.append((start, etag))
        answer = self._answers[min(len(self.asked), len(self._answers)) - 1]
        if len(self.asked) == 1 and self._gate is not None:
            assert self._gate.wait(PATIENCE_SECONDS)
        if isinstance(answer, Exception):
            raise answer
        return answer


def raced(server: Server, tally: Tally, *, answer: float = PATIENCE_SECONDS, silence: float = PATIENCE_SECONDS) -> RacedStream:
    return RacedStream(server.open_at, 0, None, tally, answer_seconds=answer, silence_seconds=silence)


class TestRace:
    def test_the_late_answer_is_closed(self) -> None:
        late, fast, gate, tally = Answer(b"late"), Answer(b"fast"), threading.Event(), Tally()
        stream = raced(Server(late, fast, gate=gate), tally, answer=0.02)
        assert b"".join(stream.chunks()) == b"fast"
        assert tally.num_requests == 1
        gate.set()
        assert late.closed.wait(PATIENCE_SECONDS)
        stream.close()
        assert fast.closed.wait(PATIENCE_SECONDS)

    @pytest.mark.parametrize("second", [Answer(b"cd", start=2), Answer(b"abcd")], ids=["range", "ignored range"])
    def test_a_body_that_hangs_is_brought_to_its_end_by_the_second_request(self, second: Answer) -> None:
        first, tally = Answer(b"abcd", hangs=True), Tally()
        server = Server(first, second)
        parts = raced(server, tally, silence=0.5).chunks()
        assert [bytes(part) for part in parts] == [b"ab", b"cd"]
        assert server.asked == [(0, None), (2, '"1"')]
        assert tally.num_requests == 1
        first.gate.set()
        assert first.closed.wait(PATIENCE_SECONDS)

    @pytest.mark.parametrize("second", [Answer(b"xy", start=2, etag='"2"'), TransientStorageError("second")], ids=type)
    def test_a_second_request_that_fails_or_finds_another_version_does_not_count(self, second: Answer | Exception) -> None:
        first, tally = Answer(b"abcd", hangs=True), Tally()
        parts = raced(Server(first, second), tally, silence=0.5).chunks()
        assert bytes(next(parts)) == b"ab"
        threading.Timer(1.0, first.gate.set).start()
        assert [bytes(part) for part in parts] == [b"cd"]

    def test_a_version_without_a_name_is_not_raced_in_the_middle(self) -> None:
        first, tally = Answer(b"abcd", etag='W/"1"', hangs=True), Tally()
        server = Server(first)
        parts = raced(server, tally, silence=0.2).chunks()
        assert bytes(next(parts)) == b"ab"
        threading.Timer(0.5, first.gate.set).start()
        assert [bytes(part) for part in parts] == [b"cd"]
        assert (2, None) not in server.asked

    def test_when_both_fail_an_error_comes_out(self) -> None:
        server = Server(TransientStorageError("first"))
        with pytest.raises(TransientStorageError, match="first"):
            raced(server, Tally())
        gate = threading.Event()
        threading.Timer(0.5, gate.set).start()
        with pytest.raises(TransientStorageError, match=r"first|second"):
            raced(Server(TransientStorageError("first"), TransientStorageError("second"), gate=gate), Tally(), answer=0.02)
