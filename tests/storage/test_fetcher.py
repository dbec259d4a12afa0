from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import (
    ConfigError,
    FetchCancelledError,
    MissingDependencyError,
    ObjectNotFoundError,
    StorageError,
)
from sqlstream.storage.fetcher import Fetcher, FetchEvent, FetchRequest, GrantNeeded
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer, LocalS3
from tests.storage.downloads import Downloads, granted, wait_for_size

DATA = bytes(range(256)) * 16_000  # 4 MB


@pytest.fixture
def downloads(fetcher: Fetcher, tmp_path: Path) -> Downloads:
    return Downloads(fetcher, tmp_path)


def test_head_list_and_download_read_s3(s3: LocalS3, tmp_path: Path) -> None:
    urls = [s3.put(f"reader/d/{i:04}.txt", str(i).encode()) for i in range(3)]
    fetcher = Fetcher(StorageOptions(storage_options=s3.storage_options))
    try:
        assert fetcher.head(urls[2]).size_bytes == 1
        assert [info.url for info in fetcher.list("s3://reader/d/")] == urls
        info = fetcher.download(urls[1], tmp_path / "x")
        assert ((tmp_path / "x").read_bytes(), info.size_bytes) == (b"1", 1)
        assert s3.num_gets(urls[1]) == 1
    finally:
        fetcher.stop()


def test_upload_stores_a_file_whole_and_a_web_address_is_refused(s3: LocalS3, tmp_path: Path) -> None:
    s3.put("uploads/x", b"")
    (tmp_path / "file").write_bytes(DATA)
    with contextlib.closing(Fetcher(StorageOptions(storage_options=s3.storage_options, num_retries=0))) as fetcher:
        for url in ("s3://uploads/a b.bin", str(tmp_path / "folder" / "copy")):
            fetcher.upload(tmp_path / "file", url)
            fetcher.download(url, tmp_path / "back")
            assert (tmp_path / "back").read_bytes() == DATA
        assert sorted(os.listdir(tmp_path / "folder")) == ["copy"]
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1/x can only be read"):
            fetcher.upload(tmp_path / "file", "http://127.0.0.1:1/x")
        with pytest.raises(ObjectNotFoundError, match="no-such-bucket"):
            fetcher.upload(tmp_path / "file", "s3://no-such-bucket/x")


def test_local_paths_work_too(fetcher: Fetcher, tmp_path: Path) -> None:
    for i in range(2100):
        (tmp_path / f"{i:04}").write_bytes(b"x" * (i % 5))
    assert len(list(fetcher.list(f"{tmp_path}/"))) == 2100
    assert fetcher.head(str(tmp_path / "0004")).size_bytes == 4
    assert fetcher.head((tmp_path / "0004").as_uri()).size_bytes == 4
    fetcher.download(str(tmp_path / "0004"), tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"xxxx"


def test_a_listing_that_is_left_early_does_not_disturb(fetcher: Fetcher, tmp_path: Path) -> None:
    for i in range(1200):
        (tmp_path / f"{i:04}").touch()
    assert next(iter(fetcher.list(f"{tmp_path}/"))).url.endswith("0000")
    assert fetcher.head(str(tmp_path / "0001")).size_bytes == 0
    assert fetcher.num_pending == 0


def test_a_failed_download_leaves_no_file(fetcher: Fetcher, server: FaultyHttpServer, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError):
        fetcher.download(f"{server.url}/nope", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_retry_that_finds_less_does_not_leave_the_tail_of_the_first_try(server: FaultyHttpServer, tmp_path: Path) -> None:
    fetcher = Fetcher(StorageOptions(read_timeout_seconds=4.0))
    server.objects["/x"] = DATA
    server.script("/x", FaultyAnswer(fault=Fault.STALL, after_bytes=2_000_000, seconds=60))
    downloads = Downloads(fetcher, tmp_path)
    downloads.submit(f"{server.url}/x")
    wait_for_size(tmp_path / "0", 1_000_000)
    server.objects["/x"] = DATA[:10]  # another version: what came of the first is of no use
    (done,) = downloads.wait_done()
    assert (done.error, done.size_bytes, downloads.read("0")[:10]) == (None, 10, DATA[:10])
    fetcher.stop()


class TestGrants:
    def test_an_object_of_known_size_asks_before_its_first_byte(self, downloads: Downloads, server: FaultyHttpServer) -> None:
        server.objects["/x"] = DATA
        downloads.submit(f"{server.url}/x", like=granted(1000))
        assert downloads.wait_grants(1) == [GrantNeeded(ticket="0", size_bytes=len(DATA))]
        assert downloads.read("0") == b""
        downloads.fetcher.grant("0", 2000)  # too little: asks again
        assert downloads.wait_grants(2)[1].size_bytes == len(DATA)
        assert downloads.read("0") == b""
        downloads.fetcher.grant("0", len(DATA))
        (done,) = downloads.wait_done()
        assert (done.error, done.size_bytes, done.num_requests) == (None, len(DATA), 1)
        assert downloads.read("0") == DATA

    def test_an_object_of_unknown_size_never_passes_its_grant(self, downloads: Downloads, server: FaultyHttpServer) -> None:
        server.objects["/x"] = DATA
        server.script("/x", always=FaultyAnswer(fault=Fault.NO_LENGTH))
        downloads.submit(f"{server.url}/x", like=granted(0))
        limit = 0
        for step in range(1, 5):
            assert downloads.wait_grants(step)[-1] == GrantNeeded(ticket="0", size_bytes=None)
            assert len(downloads.read("0")) == limit
            limit += 1_000_001
            downloads.fetcher.grant("0", limit)
        downloads.wait_grants(5)
        downloads.fetcher.grant("0", len(DATA))
        (done,) = downloads.wait_done()
        assert (done.error, done.size_bytes) == (None, len(DATA))
        assert downloads.read("0") == DATA

    def test_an_object_that_fits_its_grant_exactly_does_not_ask(self, downloads: Downloads, server: FaultyHttpServer) -> None:
        server.objects["/x"] = DATA
        downloads.submit(f"{server.url}/x", like=granted(len(DATA)))
        assert downloads.wait_done()[0].error is None
        assert len(downloads.events) == 1

    def test_a_download_that_waits_for_room_can_be_cancelled(self, downloads: Downloads, server: FaultyHttpServer) -> None:
        server.objects["/x"] = DATA
        downloads.submit(f"{server.url}/x", like=granted(0))
        downloads.wait_grants(1)
        downloads.fetcher.cancel(["0"])
        assert type(downloads.wait_done()[0].error) is FetchCancelledError
        assert downloads.read("0") == b""


class TestCancel:
    def test_a_silent_server_does_not_delay_it_and_the_descriptor_is_closed(
        self, downloads: Downloads, server: FaultyHttpServer, tmp_path: Path
    ) -> None:
        server.objects["/x"] = DATA
        server.script("/x", FaultyAnswer(fault=Fault.STALL, after_bytes=1_200_000, seconds=60))
        downloads.submit(f"{server.url}/x")
        wait_for_size(tmp_path / "0", 1_000_000)
        assert num_open_copies(downloads.fetcher, tmp_path / "0") == 1
        downloads.fetcher.cancel(["0"])
        (done,) = downloads.wait_done()
        assert type(done.error) is FetchCancelledError
        assert num_open_copies(downloads.fetcher, tmp_path / "0") == 0

    def test_what_waits_in_the_queue_is_cancelled_too(self, downloads: Downloads, server: FaultyHttpServer) -> None:
        server.script("/x", always=FaultyAnswer(fault=Fault.STALL, seconds=60))
        server.objects["/x"] = DATA
        downloads.submit(*[f"{server.url}/x"] * 300)
        downloads.fetcher.cancel([str(i) for i in range(300)])
        assert {type(done.error) for done in downloads.wait_done()} == {FetchCancelledError}
        assert downloads.fetcher.num_pending == 0

    def test_unknown_tickets_are_ignored_beside_a_download(self, downloads: Downloads, server: FaultyHttpServer) -> None:
        server.objects["/x"] = DATA
        downloads.submit(f"{server.url}/x", like=granted(1 << 20))
        downloads.wait_grants(1)
        pid = downloads.fetcher.helper_pid
        downloads.fetcher.cancel(["nope"])
        downloads.fetcher.grant("nope", 1)
        downloads.fetcher.grant("0", len(DATA))
        (done,) = downloads.wait_done()
        assert (done.error, downloads.read("0")) == (None, DATA)
        assert {event.ticket for event in downloads.events} == {"0"}
        assert downloads.fetcher.helper_pid == pid


def test_more_downloads_than_one_frame_holds_descriptors(downloads: Downloads, server: FaultyHttpServer) -> None:
    server.objects |= {f"/{i}": str(i).encode() for i in range(450)}
    downloads.submit(*[f"{server.url}/{i}" for i in range(450)])
    assert {done.error for done in downloads.wait_done()} == {None}
    assert all(downloads.read(str(i)) == str(i).encode() for i in range(450))
    assert downloads.num_calls < 450  # events come in batches


def test_many_threads_share_one_helper(fetcher: Fetcher, server: FaultyHttpServer, tmp_path: Path) -> None:
    server.objects |= {f"/{i}": str(i).encode() * 1000 for i in range(40)}
    pids = set()

    def work(i: int) -> None:
        fetcher.download(f"{server.url}/{i}", tmp_path / str(i))
        pids.add(fetcher.helper_pid)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pids) == 1
    assert all((tmp_path / str(i)).read_bytes() == server.objects[f"/{i}"] for i in range(40))


def test_a_ticket_cannot_be_used_twice_at_once(downloads: Downloads, server: FaultyHttpServer, tmp_path: Path) -> None:
    server.objects["/x"] = DATA
    downloads.submit(f"{server.url}/x", like=granted(0))
    with (tmp_path / "other").open("wb") as file:
        request = FetchRequest(ticket="0", url=f"{server.url}/x", fd=file.fileno(), granted_bytes=1)
        with pytest.raises(ValueError, match="'0'"):
            downloads.fetcher.submit([request], downloads.sink)
    downloads.fetcher.cancel(["0"])
    downloads.wait_done()


def test_a_full_disk_is_told_by_its_errno(downloads: Downloads, server: FaultyHttpServer) -> None:
    server.objects["/x"] = b"data"
    results: list[FetchEvent] = []
    over = threading.Event()

    def sink(events: Sequence[FetchEvent]) -> None:
        results.extend(events)
        over.set()

    with Path("/dev/full").open("wb", buffering=0) as file:
        request = FetchRequest(ticket="full", url=f"{server.url}/x", fd=file.fileno(), granted_bytes=10)
        downloads.fetcher.submit([request], sink)
        assert over.wait(300)
    error = results[0].error if not isinstance(results[0], GrantNeeded) else None
    assert isinstance(error, StorageError)
    assert error.context["errno"] == 28
    assert len(server.requests()) == 1  # not tried again: the network is not to blame


def test_a_sink_that_raises_is_logged_and_the_next_download_works(
    fetcher: Fetcher, server: FaultyHttpServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.objects["/x"] = DATA
    raised = threading.Event()

    def bad_sink(events: Sequence[FetchEvent]) -> None:
        raised.set()
        raise RuntimeError("from the sink")

    with (tmp_path / "y").open("wb") as file:
        fetcher.submit([FetchRequest(ticket="t", url=f"{server.url}/x", fd=file.fileno(), granted_bytes=1 << 30)], bad_sink)
        assert raised.wait(300)
    fetcher.download(f"{server.url}/x", tmp_path / "x")
    assert "from the sink" in caplog.text


def test_warnings_of_the_helper_arrive_in_our_logging(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 is asked for the bucket's region, behind a proxy that is not there."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    fetcher = Fetcher(StorageOptions(storage_options={"anon": True, "proxy_url": "http://127.0.0.1:9"}, num_retries=0))
    with caplog.at_level(logging.WARNING), pytest.raises(StorageError):
        fetcher.download("s3://bucket/x", tmp_path / "x")
    fetcher.stop()
    (record,) = (record for record in caplog.records if record.name == "sqlstream.storage.backends.http_pools")
    assert record.levelname == "WARNING"
    assert "storage_options['region']" in record.getMessage()


@pytest.mark.parametrize(
    ("options", "url", "kind", "text"),
    [
        ({"acess_key": "typo"}, "s3://b/k", ConfigError, "acess_key"),
        ({"backend": "fsspec", "no_such": 1}, "s3://b/k", ConfigError, "no_such"),
        ({}, "nosuchscheme://b/k", ConfigError, "nosuchscheme"),
        ({}, "sftp://h/k", MissingDependencyError, "paramiko"),
    ],
)
def test_wrong_options_and_missing_packages_are_named(
    options: dict[str, object], url: str, kind: type[Exception], text: str
) -> None:
    fetcher = Fetcher(StorageOptions(storage_options=options))
    try:
        with pytest.raises(kind, match=text):
            fetcher.head(url)
    finally:
        fetcher.stop()


def test_an_unknown_backend_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="'boto'"):
        StorageOptions(storage_options={"backend": "boto"})


def test_a_pickled_fetcher_is_its_options(fetcher: Fetcher, server: FaultyHttpServer) -> None:
    server.objects["/x"] = b"1"
    fetcher.head(f"{server.url}/x")
    copy: Fetcher = pickle.loads(pickle.dumps(fetcher))
    assert copy.helper_pid is None
    assert copy.head(f"{server.url}/x").size_bytes == 1
    assert copy.is_running
    copy.stop()
    assert copy.helper_pid is None


def num_open_copies(fetcher: Fetcher, path: Path) -> int:
    """How often the helper has the file open."""
    directory = Path(f"/proc/{fetcher.helper_pid}/fd")
    found = 0
    for fd in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += os.readlink(fd) == str(path)
    return found
