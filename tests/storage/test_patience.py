"""Resumed bodies, timeouts and checksums, against real sockets."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import ObjectChangedError
from sqlstream.storage.base.protocols import Unpack
from sqlstream.storage.fetcher import Fetcher, FetchRequest
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.storage.downloads import Downloads
from tests.storage.raw import RawServer

DATA = bytes(range(256)) * 16_000  # 4 MB
PATH = "/bucket/x.bin"
SOON = 4.0
"""A timeout that expires in a test, and that a request which nobody stalls keeps on a busy machine, too."""
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


def ranges(server: FaultyHttpServer) -> list[str | None]:
    return [request.range for request in server.requests(PATH)]


def test_a_truncated_body_is_resumed_with_its_version(make: Make, server: FaultyHttpServer, url: str) -> None:
    server.script(PATH, CUT)
    downloads = make()
    downloads.submit(url)
    (done,) = downloads.wait_done()
    assert (done.error, done.num_requests, done.num_retries) == (None, 2, 1)
    assert downloads.read("0") == DATA
    assert done.downloaded_bytes == len(DATA)  # nothing came twice
    first, second = server.requests(PATH)
    assert first.range == (None if url.startswith("http") else "bytes=0-")
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
    assert (
        done.num_requests == len(server.requests(PATH)) == (3 if "s3" in url else 2) + (server.requests(PATH)[-1].range is None)
    )


@pytest.mark.parametrize("status", [304, 400, 416, 501])
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
    assert (done.error, len(others)) == (None, done.num_retries)
    assert first.range in (None, "bytes=0-")
    assert done.num_retries == 1
    assert all(other.range not in (None, "bytes=0-") for other in others)
    assert downloads.read("0") == DATA
    assert done.downloaded_bytes == len(DATA)  # nothing came twice


@pytest.mark.parametrize("scheme", ["s3"], indirect=True)
def test_bytes_with_another_digest_are_asked_for_again_once(make: Make, server: FaultyHttpServer, url: str) -> None:
    server.script(PATH, always=FaultyAnswer(fault=Fault.DAMAGE))
    downloads = make(verify_etag=True)
    downloads.submit(url)
    (done,) = downloads.wait_done()
    assert type(done.error) is ObjectChangedError
    assert hashlib.md5(DATA).hexdigest() in str(done.error)
    assert "leave storage_options['verify_etag'] out" in str(done.error)
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


def coded(server_says: bytes) -> Callable[[bytes], bytes]:
    """Return what makes an answer, coded with gzip, whose ETag is the MD5 of `server_says`."""
    head = f'HTTP/1.1 200 OK\r\nETag: "{hashlib.md5(server_says).hexdigest()}"\r\nContent-Encoding: gzip\r\n'
    return lambda body: f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("scheme", ["http"], indirect=True)
@pytest.mark.parametrize("is_of_file", [False, True])
def test_the_etag_of_a_coded_body_is_compared_with_what_is_sent_or_with_what_it_stands_for(
    make: Make, is_of_file: bool
) -> None:
    body, other = gzip.compress(DATA), gzip.compress(DATA[::-1])
    answer = coded(DATA if is_of_file else body)
    downloads = make(verify_etag=True)
    with RawServer(answer(other), answer(body)) as server:
        downloads.submit(server.url)
        (done,) = downloads.wait_done()
    assert (done.error, done.num_requests) == (None, 2)
    assert downloads.read("0") == DATA


@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_etag_of_a_compressed_shard_is_compared_with_the_md5_of_its_bytes(
    make: Make, server: FaultyHttpServer, url: str, is_damaged: bool
) -> None:
    whole, other = gzip.compress(DATA), gzip.compress(DATA[::-1])
    server.objects[PATH], server.etag = other if is_damaged else whole, f'"{hashlib.md5(whole).hexdigest()}"'
    downloads = make(verify_etag=True)
    unpack = FetchRequest(ticket="", url="", fd=-1, granted_bytes=1 << 30, unpack=Unpack("gzip", len(DATA)))
    downloads.submit(url, like=unpack)
    (done,) = downloads.wait_done()
    assert (type(done.error), done.num_requests) == ((ObjectChangedError, 2) if is_damaged else (type(None), 1))
