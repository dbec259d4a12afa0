"""A part of an object, as a lazy index asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import ObjectChangedError, StorageError
from sqlstream.storage.fetcher import FetchDone, Fetcher, FetchRequest
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer, LocalS3
from tests.storage.downloads import Downloads

DATA = bytes(range(256)) * 16_000  # 4 MB
SPAN = (1_000_003, 3_000_017)


def ask(span: tuple[int, int] = SPAN, etag: str | None = None, granted_bytes: int = 1 << 40) -> FetchRequest:
    return FetchRequest(ticket="", url="", fd=-1, granted_bytes=granted_bytes, span=span, expected_etag=etag)


def bring(downloads: Downloads, url: str, request: FetchRequest) -> FetchDone:
    downloads.submit(url, like=request)
    return downloads.wait_done()[-1]


@pytest.fixture
def downloads(fetcher: Fetcher, tmp_path: Path) -> Downloads:
    return Downloads(fetcher, tmp_path)


def test_only_the_bytes_of_a_span_come_and_lie_at_the_start_of_the_file(
    downloads: Downloads, server: FaultyHttpServer, tmp_path: Path
) -> None:
    server.objects["/x"] = DATA
    etag = downloads.fetcher.head(f"{server.url}/x").etag
    done = bring(downloads, f"{server.url}/x", ask(etag=etag))
    assert (done.error, done.size_bytes) == (None, SPAN[1] - SPAN[0])
    assert done.downloaded_bytes == done.size_bytes
    assert (tmp_path / "0").read_bytes() == DATA[slice(*SPAN)]
    assert [request.range for request in server.requests("/x") if request.method == "GET"] == ["bytes=1000003-3000016"]


def test_a_span_comes_from_s3_and_from_local_files_too(fetcher: Fetcher, s3: LocalS3, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(DATA)
    local = Downloads(fetcher, tmp_path)
    assert bring(local, str(tmp_path / "source"), ask()).error is None
    assert (tmp_path / "0").read_bytes() == DATA[slice(*SPAN)]
    remote = Downloads(Fetcher(StorageOptions(storage_options=s3.storage_options)), tmp_path / "s3")
    (tmp_path / "s3").mkdir()
    assert bring(remote, s3.put("spans/x", DATA), ask()).error is None
    assert (tmp_path / "s3" / "0").read_bytes() == DATA[slice(*SPAN)]
    remote.fetcher.stop()


@pytest.mark.parametrize(
    "answer",
    [
        FaultyAnswer(fault=Fault.NO_RANGES),
        FaultyAnswer(fault=Fault.STATUS, status=503),
        FaultyAnswer(fault=Fault.RESET, after_bytes=1_500_000),
        FaultyAnswer(fault=Fault.TRUNCATE, after_bytes=1_500_000),
    ],
    ids=lambda answer: answer.fault.value,
)
def test_a_span_is_right_whatever_the_server_does(
    downloads: Downloads, server: FaultyHttpServer, tmp_path: Path, answer: FaultyAnswer
) -> None:
    server.objects["/x"] = DATA
    server.script("/x", answer)
    assert bring(downloads, f"{server.url}/x", ask()).error is None
    assert (tmp_path / "0").read_bytes()[: SPAN[1] - SPAN[0]] == DATA[slice(*SPAN)]


def test_a_span_of_another_version_or_beyond_the_end_is_refused(downloads: Downloads, server: FaultyHttpServer) -> None:
    server.objects["/x"] = DATA
    assert isinstance(bring(downloads, f"{server.url}/x", ask(etag='"other"')).error, ObjectChangedError)
    done = bring(downloads, f"{server.url}/x", ask((0, len(DATA) + 1)))
    assert isinstance(done.error, StorageError)


def test_a_span_waits_for_its_grant(downloads: Downloads, server: FaultyHttpServer) -> None:
    server.objects["/x"] = DATA
    downloads.submit(f"{server.url}/x", like=ask(granted_bytes=4096))
    (need,) = downloads.wait_grants(1)
    assert need.size_bytes == SPAN[1] - SPAN[0]
    downloads.fetcher.grant("0", SPAN[1] - SPAN[0])
    assert downloads.wait_done("0")[0].error is None
