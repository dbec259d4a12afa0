"""A part of an object, as a lazy index asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import ObjectChangedError, StorageError
from sqlstream.storage.fetcher import FetchDone, Fetcher, FetchRequest
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer, LocalS3
from tests.storage.downloads import Downloads
from tests.storage.raw import RawServer

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


@pytest.mark.parametrize("span", [SPAN, (len(DATA) - 100, len(DATA)), (0, len(DATA) - 1000)], ids=["middle", "end", "start"])
@pytest.mark.parametrize("now", [len(DATA) - 500, len(DATA) + 500, 1000])
@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_a_span_of_an_object_of_another_size_is_refused_without_another_try(
    downloads: Downloads, server: FaultyHttpServer, span: tuple[int, int], now: int, ignores_ranges: bool
) -> None:
    server.objects["/x"] = (DATA + DATA)[:now]
    url, request = f"{server.url}/x", ask(span)._replace(whole_bytes=len(DATA))
    if ignores_ranges:
        server.script("/x", *[FaultyAnswer(fault=Fault.NO_RANGES)] * 2)
    assert isinstance(bring(downloads, url, request).error, ObjectChangedError)
    assert len(server.requests("/x")) == 1
    with pytest.raises(ObjectChangedError, match=f"has .* {len(DATA)} .*rebuild the index"):
        downloads.fetcher.get_ranges(url, [span], len(DATA))
    if span[1] <= now:
        assert downloads.fetcher.get_ranges(url, [span], now) == [server.objects["/x"][slice(*span)]]


@pytest.mark.parametrize("options", [{}, {"backend": "fsspec"}], ids=["obstore", "fsspec"])
def test_a_span_of_an_object_that_was_replaced_in_s3_or_on_disk_is_refused(
    options: dict[str, str], s3: LocalS3, tmp_path: Path
) -> None:
    downloads = Downloads(Fetcher(StorageOptions(storage_options={**s3.storage_options, **options})), tmp_path)
    (tmp_path / "source").write_bytes(DATA[:2_000_000])
    for url in (s3.put("spans/replaced", DATA[:2_000_000]), str(tmp_path / "source")):
        for span in ((0, 1000), (2_000_001, 2_000_100), (1_999_000, 2_000_100)):
            done = bring(downloads, url, ask(span)._replace(whole_bytes=len(DATA)))
            assert isinstance(done.error, ObjectChangedError), (span, done)
            with pytest.raises(ObjectChangedError):
                downloads.fetcher.get_ranges(url, [span], len(DATA))
    downloads.fetcher.stop()


def test_a_span_of_another_version_or_beyond_the_end_is_refused(downloads: Downloads, server: FaultyHttpServer) -> None:
    server.objects["/x"] = DATA
    assert isinstance(bring(downloads, f"{server.url}/x", ask(etag='"other"')).error, ObjectChangedError)
    done = bring(downloads, f"{server.url}/x", ask((0, len(DATA) + 1)))
    assert isinstance(done.error, StorageError)


def test_a_span_that_came_whole_with_something_behind_it_is_asked_for_anew(downloads: Downloads, tmp_path: Path) -> None:
    def answer(request: str) -> bytes:
        assert "range: bytes=3-6\r\n" in request.lower()  # not for the nothing that is left of it
        head = b'HTTP/1.1 206 P\r\nETag: "1"\r\nContent-Length: 4\r\nContent-Range: bytes 3-6/10\r\n\r\n'
        return head + (b"wxyz" if len(server.requests) > 1 else b"wxyz and more")

    with RawServer(always=answer) as server:
        assert bring(downloads, server.url, ask((3, 7))).error is None
        assert len(server.requests) == 2
    assert (tmp_path / "0").read_bytes() == b"wxyz"


def test_a_span_waits_for_its_grant(downloads: Downloads, server: FaultyHttpServer) -> None:
    server.objects["/x"] = DATA
    downloads.submit(f"{server.url}/x", like=ask(granted_bytes=4096))
    (need,) = downloads.wait_grants(1)
    assert need.size_bytes == SPAN[1] - SPAN[0]
    downloads.fetcher.grant("0", SPAN[1] - SPAN[0])
    assert downloads.wait_done("0")[0].error is None
