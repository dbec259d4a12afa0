"""fsspec: file system objects, requests counted, schemes that only it knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem

from sqlstream.config import StorageOptions
from sqlstream.errors import ConfigError, ObjectNotFoundError
from sqlstream.storage.fetcher import Fetcher
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
