"""fsspec: file system objects, requests counted, schemes that only it knows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.registry import _registry
from fsspec.utils import infer_storage_options

from sqlstream.config import StorageOptions
from sqlstream.errors import ConfigError, ObjectChangedError, ObjectNotFoundError, StorageError, TransientStorageError
from sqlstream.storage.backends.fsspec.storage import FsspecStorage
from sqlstream.storage.backends.resolve import Resolver
from sqlstream.storage.base.protocols import read_ranges
from sqlstream.storage.base.retry import RetryPolicy
from sqlstream.storage.fetcher import FetchDone, Fetcher, FetchEvent, FetchRequest
from sqlstream.storage.worker.transfer import Transfer, TransferContext
from sqlstream.storage.worker.workers import Lane, Workers, WorkPermit
from sqlstream.testing.servers import FaultyHttpServer, LocalS3
from tests.storage.downloads import Downloads

BLOCK = 8 << 20


@pytest.fixture
def fetchers() -> Iterator[list[Fetcher]]:
    made: list[Fetcher] = []
    yield made
    for fetcher in made:
        fetcher.stop()


def test_a_file_system_object_reads_every_remote_url(tmp_path: Path, fetchers: list[Fetcher]) -> None:
    (tmp_path / "root" / "bucket").mkdir(parents=True)
    (tmp_path / "root" / "bucket" / "x").write_bytes(b"from the directory")
    file_system = DirFileSystem(path=str(tmp_path / "root"), fs=fsspec.filesystem("file"))
    fetcher = Fetcher(StorageOptions(storage_options={"filesystem": file_system}))
    fetchers.append(fetcher)
    assert fetcher.head("dir://bucket/x").size_bytes == 18
    fetcher.download("dir://bucket/x", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"from the directory"
    assert fetcher.get_ranges("dir://bucket/x", [(5, 8)]) == [b"the"]
    with pytest.raises(ObjectNotFoundError):
        fetcher.head("dir://bucket/nope")


def test_a_scheme_that_is_not_known_is_an_error_with_the_cures(fetchers: list[Fetcher]) -> None:
    fetchers.append(Fetcher(StorageOptions()))
    with pytest.raises(ConfigError, match=r"s4://b/x.csv: .*'?s4'?; correct the scheme.*providers=\{'s4': 'module:function'\}"):
        fetchers[0].head("s4://b/x.csv")


def test_an_s3fs_object_works_as_its_options_do(s3: LocalS3, tmp_path: Path, fetchers: list[Fetcher]) -> None:
    url = s3.put("filesystem/x", b"12345")
    file_system = fsspec.filesystem("s3", skip_instance_cache=True, **s3.storage_options)
    fetcher = Fetcher(StorageOptions(storage_options={"filesystem": file_system}))
    fetchers.append(fetcher)
    fetcher.download(url, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"12345"
    assert [info.url for info in fetcher.list("s3://filesystem/")] == [url]


def test_what_is_no_file_system_is_refused(fetchers: list[Fetcher]) -> None:
    fetchers.append(Fetcher(StorageOptions(storage_options={"filesystem": "s3"})))
    with pytest.raises(ConfigError, match="is a str: give an fsspec file system"):
        fetchers[0].head("s3://bucket/x")


@pytest.mark.parametrize(("num_bytes", "num_requests"), [(10, 2), (BLOCK, 2), (BLOCK + 1, 4), (2 * BLOCK + 5, 5)])
def test_requests_of_s3fs_are_counted_exactly(
    s3: LocalS3, tmp_path: Path, fetchers: list[Fetcher], num_bytes: int, num_requests: int
) -> None:
    """A head, a range for each block, and a head more when there were several."""
    url = s3.put(f"counted/{num_bytes}", b"x" * num_bytes)
    fetchers.append(Fetcher(StorageOptions(storage_options={"backend": "fsspec", **s3.storage_options})))
    downloads = Downloads(fetchers[0], tmp_path)
    downloads.submit(url)
    (done,) = downloads.wait_done()
    assert (done.error, downloads.read("0") == b"x" * num_bytes) == (None, True)
    seen = [request for request in s3.requests() if request.path == f"/counted/{num_bytes}" and request.method != "PUT"]
    assert done.num_requests == len(seen) == num_requests


def test_requests_of_fsspec_http_are_counted_exactly(server: FaultyHttpServer, tmp_path: Path, fetchers: list[Fetcher]) -> None:
    server.objects["/x"] = b"x" * 1000
    fetchers.append(Fetcher(StorageOptions(storage_options={"filesystem": fsspec.filesystem("http")})))
    downloads = Downloads(fetchers[0], tmp_path)
    downloads.submit(f"{server.url}/x")
    (done,) = downloads.wait_done()
    assert (done.error, done.num_requests, len(server.requests("/x"))) == (None, 2, 2)


class Changing(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """One object, which is another one from the `num_calls`-th call on."""

    protocol = "changing"
    cachable = False

    def __init__(self, *versions: bytes, num_calls: int) -> None:
        super().__init__()
        self.versions, self.num_calls = versions, num_calls

    def _version(self) -> bytes:
        self.num_calls -= 1
        return self.versions[self.num_calls < 0]

    def info(self, path: str, **_: object) -> dict[str, object]:
        data = self._version()
        return {"name": path, "type": "file", "size": len(data), "ETag": data[:1].decode()}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        return self._version()[start:end]


class Exiting(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system that ends its program, as one that is not logged in."""

    protocol = "exiting"

    def info(self, path: str, **_: object) -> dict[str, object]:
        raise SystemExit(1)


def test_a_file_system_that_calls_exit_is_an_error_and_not_waited_for(tmp_path: Path, fetchers: list[Fetcher]) -> None:
    fetchers.append(Fetcher(StorageOptions(storage_options={"filesystem": Exiting()})))
    with pytest.raises(StorageError, match="unexpected SystemExit in the helper process"):
        fetchers[0].head("exiting://x")
    downloads = Downloads(fetchers[0], tmp_path)
    downloads.submit("exiting://x")
    (done,) = downloads.wait_done()
    assert "unexpected SystemExit" in str(done.error)


def read_changing(*versions: bytes, num_calls: int, stop: int | None = None, etag: str | None = None) -> bytes:
    file_system = Changing(*versions, num_calls=num_calls)
    storage = FsspecStorage(StorageOptions(storage_options={"filesystem": file_system}))
    return b"".join(bytes(chunk) for chunk in storage.get("changing://x", stop=stop, etag=etag).chunks())


def test_a_longer_object_is_not_cut_to_the_length_of_the_one_before_it() -> None:
    with pytest.raises(TransientStorageError, match="6 bytes arrived, 5 were promised"):
        read_changing(b"a" * 5, b"b" * 10, num_calls=1)
    assert read_changing(b"a" * 5, b"b" * 5, num_calls=1) == b"b" * 5, "whole, and of one version"


def test_a_part_of_a_named_version_is_of_that_version_when_it_comes_in_one_block() -> None:
    with pytest.raises(ObjectChangedError, match="changed while it was read"):
        read_changing(b"a" * 10, b"b" * 10, num_calls=1, stop=5, etag="a")
    assert read_changing(b"a" * 10, num_calls=9, stop=5, etag="a") == b"a" * 5


@pytest.mark.parametrize("num_calls", [1, 2, 3, 4])
def test_ranges_of_an_object_that_is_replaced_between_two_calls_are_of_one_version(num_calls: int) -> None:
    file_system = Changing(b"a" * 400_000, b"b" * 400_000, num_calls=num_calls)
    storage = FsspecStorage(StorageOptions(storage_options={"filesystem": file_system}))
    with pytest.raises(ObjectChangedError):
        read_ranges(storage, "changing://x", [(0, 5), (390_000, 390_005)])


@pytest.mark.parametrize("span", [(0, 5), (2, 7), (5, 10)])
def test_a_span_of_an_object_that_is_replaced_before_its_bytes_come_is_refused(tmp_path: Path, span: tuple[int, int]) -> None:
    """By another one of the same size: only the look at its end shows it."""
    file_system = Changing(b"a" * 10, b"b" * 10, num_calls=1)
    done: list[FetchEvent] = []
    context = TransferContext(
        resolver=Resolver(StorageOptions(storage_options={"filesystem": file_system})),
        policy=RetryPolicy(num_retries=0),
        report=done.append,
        observe=lambda _: None,
    )
    fd = os.open(tmp_path / "x", os.O_WRONLY | os.O_CREAT)
    request = FetchRequest(ticket="1", url="changing://x", fd=fd, granted_bytes=100, span=span, expected_etag="a")
    Transfer(request, fd, context).run(WorkPermit(Workers(), Lane(1)))
    assert isinstance(done[0], FetchDone)
    assert isinstance(done[0].error, ObjectChangedError)


def test_a_local_file_that_grew_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a" * 5)
    stream = FsspecStorage(StorageOptions()).get(str(path))
    path.write_bytes(b"b" * 10)
    with pytest.raises(TransientStorageError, match="6 bytes arrived, 5 were promised"):
        list(stream.chunks())


class Hosted(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The files of a host, as fsspec reads them over SFTP; each holds its own path."""

    protocol = "hosted"
    cachable = False
    files = ("/d/a.txt", "/d/b?x=1.txt", "/d/b", "/d/c#1.txt", "/d/e%20.txt")

    def __init__(self, host: str, **of_connection: object) -> None:
        super().__init__(**of_connection)
        assert not of_connection.keys() - {"port", "username"}, f"connect() got an unexpected keyword argument {of_connection}"
        self.host = host

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str("/" + infer_storage_options(path.lstrip("/"))["path"].lstrip("/")).rstrip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, object]:
        return {key: value for key, value in infer_storage_options(path).items() if key not in ("path", "protocol")}

    def info(self, path: str, **_: object) -> dict[str, object]:
        path = self._strip_protocol(path)
        if path not in self.files:
            raise FileNotFoundError(path)
        return {"name": path, "type": "file", "size": len(path), "mtime": datetime(2024, 1, 1, tzinfo=UTC)}

    def find(self, path: str, **_: object) -> dict[str, dict[str, object]]:
        return {file: self.info(file) for file in self.files if file.startswith(path)}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        return self._strip_protocol(path).encode()[start:end]


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> FsspecStorage:
    monkeypatch.setitem(_registry, "hosted", Hosted)
    return FsspecStorage(StorageOptions())


@pytest.mark.parametrize("file", Hosted.files)
def test_a_host_is_asked_for_the_very_name(hosted: FsspecStorage, file: str) -> None:
    stream = hosted.get(f"hosted://me@h:22{file}")
    assert b"".join(bytes(chunk) for chunk in stream.chunks()).decode() == file


def test_a_name_that_a_file_system_would_take_for_another_one_is_refused(hosted: FsspecStorage) -> None:
    with pytest.raises(StorageError, match=r"would ask for '/d\?x=1', which is another object"):
        hosted.get("hosted://h/d/?x=1")


def test_what_is_listed_has_the_host_of_the_prefix(hosted: FsspecStorage) -> None:
    for prefix in ("hosted://me@h:22/d/", "hosted://h/d/"):
        listed = [info.url for info in hosted.list(prefix)]
        assert listed == sorted(f"{prefix}{file.removeprefix('/d/')}" for file in Hosted.files if file.startswith("/d/"))
        assert [info.url for info in hosted.list(prefix, after=listed[1])] == listed[2:]


def test_a_time_of_whole_seconds_notices_a_change_and_joins_no_parts(hosted: FsspecStorage) -> None:
    info = hosted.head("hosted://h/d/a.txt")
    assert info.version is not None
    assert not info.has_version("2024-01-01 00:00:01+00:00")
    assert (info.strong_etag, info.is_surely(info)) == (None, False)


class Ending(Hosted):
    """A host that ends each connection after its second call."""

    protocol = "ending"
    cachable = True

    def __init__(self, host: str, **of_connection: object) -> None:
        super().__init__(host, **of_connection)
        self.num_calls = 0

    def info(self, path: str, **options: object) -> dict[str, object]:
        self.num_calls += 1
        if self.num_calls > 2:
            raise OSError("Socket is closed")
        return super().info(path, **options)


def test_a_file_system_whose_connection_ended_is_made_anew_for_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_registry, "ending", Ending)
    storage = FsspecStorage(StorageOptions())
    for _ in range(3):
        for _ in range(2):
            assert storage.head("ending://h/d/a.txt").size_bytes == len("/d/a.txt")
        with pytest.raises(TransientStorageError, match="Socket is closed"):
            storage.head("ending://h/d/a.txt")
    storage.forget()
