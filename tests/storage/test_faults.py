"""What servers do wrong, against real sockets: right bytes or the right error, never a short file, requests counted exactly."""

from __future__ import annotations

from collections.abc import Iterable, Set
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from sqlstream.config import StorageOptions
from sqlstream.errors import (
    AccessDeniedError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
    TransientStorageError,
)
from sqlstream.storage.fetcher import Fetcher, FetchRequest
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.storage.downloads import PLENTY, Downloads

DATA = bytes(range(256)) * 8000
PATH = "/bucket/x.bin"


def status(code: int, **headers: str) -> FaultyAnswer:
    return FaultyAnswer(fault=Fault.STATUS, status=code, headers=tuple(headers.items()))


RETRIED = {
    "503 twice": [status(503), status(503)],
    "500, 502, 504": [status(500), status(502), status(504)],
    "408": [status(408)],
    "429 at once": [FaultyAnswer(fault=Fault.STATUS, status=429, headers=(("Retry-After", "0"),))],
    "reset before the answer": [FaultyAnswer(fault=Fault.RESET)],
    "reset in the body": [FaultyAnswer(fault=Fault.RESET, after_bytes=1_500_000)],
    "truncated": [FaultyAnswer(fault=Fault.TRUNCATE, after_bytes=1_500_000)],
    "stall before the answer": [FaultyAnswer(fault=Fault.STALL, seconds=600)],
    "stall in the body": [FaultyAnswer(fault=Fault.STALL, after_bytes=1000, seconds=600)],
}
STAYS = {400: StorageError, 401: AccessDeniedError, 403: AccessDeniedError, 404: ObjectNotFoundError, 416: StorageError}


@pytest.fixture(params=["s3", "http"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def both_schemes(cases: Iterable[object], once: Set[object]) -> list[ParameterSet]:
    """Every case with http and s3; those in `once` take the same way with both, and s3 is left to the long run."""
    return [
        pytest.param(scheme, case, marks=[pytest.mark.slow] if scheme == "s3" and case in once else [])
        for case in cases
        for scheme in ("s3", "http")
    ]


@pytest.fixture
def downloads(server: FaultyHttpServer, scheme: str, tmp_path: Path) -> Downloads:
    server.objects[PATH] = DATA
    options = {"anon": True, "endpoint_url": server.url} if scheme == "s3" else {}
    # The timeout expires in some tests, and not for a request that nobody stalls, on a busy machine either.
    fetcher = Fetcher(StorageOptions(storage_options=options, read_timeout_seconds=4.0, num_threads=4))
    return Downloads(fetcher, tmp_path)


@pytest.fixture(autouse=True)
def stopped(downloads: Downloads) -> object:
    yield
    downloads.fetcher.stop()


@pytest.fixture
def url(server: FaultyHttpServer, scheme: str) -> str:
    return f"s3:/{PATH}" if scheme == "s3" else server.url + PATH


@pytest.mark.parametrize(
    ("scheme", "name"), both_schemes(RETRIED, {"408", "429 at once", "500, 502, 504"}), indirect=["scheme"]
)
def test_what_can_pass_is_tried_again_and_counted(downloads: Downloads, server: FaultyHttpServer, url: str, name: str) -> None:
    server.script(PATH, *RETRIED[name])
    downloads.submit(url)
    (done,) = downloads.wait_done()
    assert done.error is None
    assert downloads.read("0")[: done.size_bytes] == DATA
    assert done.num_retries == len(RETRIED[name])
    assert done.num_requests == len(server.requests(PATH)) == len(RETRIED[name]) + 1
    assert done.downloaded_bytes >= done.size_bytes == len(DATA)


@pytest.mark.parametrize(("scheme", "code"), both_schemes(STAYS, {400, 401}), indirect=["scheme"])
def test_what_stays_is_not_tried_again(downloads: Downloads, server: FaultyHttpServer, url: str, code: int) -> None:
    server.script(PATH, always=status(code))
    downloads.submit(url)
    (done,) = downloads.wait_done()
    assert type(done.error) is STAYS[code]
    is_asked_without_range = url.startswith("s3") and code == 416  # an empty object has no byte 0
    assert done.num_requests == len(server.requests(PATH)) == (2 if is_asked_without_range else 1)
    assert done.num_retries == 0


def test_retries_end(downloads: Downloads, server: FaultyHttpServer, url: str) -> None:
    server.script(PATH, always=status(503))
    downloads.submit(url)
    (done,) = downloads.wait_done()
    assert type(done.error) is TransientStorageError
    assert "gave up after 4 tries" in str(done.error)
    assert len(server.requests(PATH)) == done.num_requests == 4


def test_a_slow_body_is_not_a_stall(downloads: Downloads, server: FaultyHttpServer, url: str) -> None:
    server.script(PATH, FaultyAnswer(fault=Fault.DRIP, seconds=0.4))  # 6 s in all, beyond the timeout of one silence
    downloads.submit(url)
    (done,) = downloads.wait_done()
    assert (done.error, done.num_requests) == (None, 1)


def test_a_whole_body_of_another_length_than_expected_is_a_changed_object(
    downloads: Downloads, server: FaultyHttpServer, url: str
) -> None:
    server.script(PATH, always=FaultyAnswer(fault=Fault.WRONG_LENGTH, after_bytes=77))
    downloads.submit(url, like=FetchRequest(ticket="", url="", fd=-1, granted_bytes=PLENTY, expected_bytes=len(DATA)))
    (done,) = downloads.wait_done()
    assert type(done.error) is ObjectChangedError
    assert "has 77 bytes" in str(done.error)
    assert done.num_requests == 1


def test_another_etag_than_expected_is_a_changed_object(downloads: Downloads, url: str) -> None:
    etag = downloads.fetcher.head(url).etag
    like = FetchRequest(ticket="", url="", fd=-1, granted_bytes=PLENTY, expected_etag=etag)
    downloads.submit(url, like=like)
    downloads.submit(url, like=FetchRequest(ticket="", url="", fd=-1, granted_bytes=PLENTY, expected_etag='"other"'))
    same, other = downloads.wait_done()
    assert same.error is None
    assert same.etag == etag
    assert type(other.error) is ObjectChangedError


@pytest.mark.parametrize("scheme", ["http"], indirect=True)
class TestHttpOnly:
    def test_answers_without_the_etag_that_is_expected_are_told_once(
        self, downloads: Downloads, server: FaultyHttpServer, url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        etag = downloads.fetcher.head(url).etag
        server.names_versions = False
        for _ in range(3):
            downloads.submit(url, like=FetchRequest(ticket="", url="", fd=-1, granted_bytes=PLENTY, expected_etag=etag))
        assert [done.error for done in downloads.wait_done()] == [None] * 3
        messages = [record.getMessage() for record in caplog.records if "without an ETag" in record.getMessage()]
        assert len(messages) == 1
        assert messages[0].count(server.url) == 1

    def test_an_answer_without_length_works(self, downloads: Downloads, server: FaultyHttpServer, url: str) -> None:
        server.script(PATH, always=FaultyAnswer(fault=Fault.NO_LENGTH))
        downloads.submit(url)
        (done,) = downloads.wait_done()
        assert (done.error, done.num_requests, len(server.requests(PATH))) == (None, 1, 1)
        assert downloads.read("0") == DATA

    def test_a_compressed_answer_is_decompressed(self, downloads: Downloads, server: FaultyHttpServer, url: str) -> None:
        server.script(PATH, always=FaultyAnswer(fault=Fault.GZIP))
        downloads.submit(url)
        (done,) = downloads.wait_done()
        assert (done.error, done.size_bytes, downloads.read("0") == DATA) == (None, len(DATA), True)
        assert (done.num_requests, done.num_retries, len(server.requests(PATH))) == (1, 0, 1)

    def test_redirects_are_followed(self, downloads: Downloads, server: FaultyHttpServer, url: str) -> None:
        server.script("/moved", always=FaultyAnswer(fault=Fault.REDIRECT, location=url))
        downloads.submit(f"{server.url}/moved", f"{server.url}/moved?signature=1")
        assert sum(done.num_requests for done in downloads.wait_done()) == len(server.requests())
        assert downloads.read("0") == downloads.read("1") == DATA

    def test_a_server_that_ignores_ranges_is_understood(self, downloads: Downloads, server: FaultyHttpServer, url: str) -> None:
        server.script(PATH, always=FaultyAnswer(fault=Fault.NO_RANGES))
        assert downloads.fetcher.get_ranges(url, [(10, 20), (1_000_000, 1_000_010)]) == [DATA[10:20], DATA[1_000_000:1_000_010]]
        assert len(server.requests(PATH)) == 2

    def test_retry_after_is_waited_for(self, downloads: Downloads, server: FaultyHttpServer, url: str) -> None:
        busy = FaultyAnswer(fault=Fault.STATUS, status=429, headers=(("Retry-After", "1"),))
        server.script(PATH, busy, busy)
        downloads.submit(url)
        (done,) = downloads.wait_done()
        assert (done.error, done.num_requests, done.num_retries) == (None, 3, 2)
        assert done.seconds >= done.pause_seconds >= 2.0
        assert len(server.requests(PATH)) == 3

    def test_queries_and_escapes_reach_the_server_as_they_are(self, downloads: Downloads, server: FaultyHttpServer) -> None:
        server.objects["/a b/ü.jpg"] = b"odd"
        downloads.submit(f"{server.url}/a%20b/%C3%BC.jpg", f"{server.url}{PATH}?signature=secret")
        odd, signed = downloads.wait_done()
        assert (odd.error, signed.error) == (None, None)
        assert (odd.num_requests, signed.num_requests) == (1, 1)
        assert downloads.read("0") == b"odd"
        assert downloads.read("1") == DATA

    def test_no_error_shows_a_query_or_a_password(self, downloads: Downloads, server: FaultyHttpServer) -> None:
        port = server.url.rpartition(":")[2]
        server.script(PATH, always=status(403))
        downloads.submit(f"http://me:secret1@127.0.0.1:{port}{PATH}?key=secret2", "http://me:secret1@127.0.0.1:9/x?key=secret2")
        for done in downloads.wait_done():
            assert done.error is not None
            assert "secret" not in str(done.error) + repr(done.error.context)


@pytest.mark.parametrize("scheme", ["http"], indirect=True)
def test_a_hundred_downloads_with_faults_are_all_right(downloads: Downloads, server: FaultyHttpServer) -> None:
    faults = [status(503), FaultyAnswer(fault=Fault.RESET, after_bytes=10), FaultyAnswer(fault=Fault.TRUNCATE, after_bytes=10)]
    for i in range(100):
        server.objects[f"/{i}"] = str(i).encode() * 5000
        if i % 5 == 0:
            server.script(f"/{i}", faults[i % 3])
    downloads.submit(*[f"{server.url}/{i}" for i in range(100)])
    done = downloads.wait_done()
    assert [event.error for event in done] == [None] * 100
    assert all(downloads.read(str(i)) == server.objects[f"/{i}"] for i in range(100))
    assert sum(event.num_requests for event in done) == len(server.requests()) == 120
