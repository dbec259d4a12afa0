"""Indexes of real servers, read by the real helper process."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import AccessDeniedError, ObjectNotFoundError, SourceChangedError, StorageError
from sqlstream.index.build.build import open_index
from sqlstream.index.file.index import Index
from sqlstream.storage.base.identity import Identity
from sqlstream.storage.fetcher import Fetcher
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer, LocalS3
from tests.index.sources import all_rows, options


@pytest.fixture(scope="module")
def s3() -> Iterator[LocalS3]:
    with LocalS3() as server:
        for at in range(3):
            server.put(f"bucket/table/part-{at}.parquet", parquet(at))
            server.put(f"bucket/samples/{at}.jpg", b"image")
        server.put("bucket/samples/0.txt", b"caption")
        yield server


def parquet(key: int) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"index": [key], "url": [f"x/{key}.jpg"]}), file)
    return file.getvalue()


def open_remote(
    src: str, directory: Path, storage: StorageOptions, data_type: str | None = None, on_source_change: str = "rebuild"
) -> Index:
    fetcher = Fetcher(storage)
    try:
        asked = options(src, data_type=data_type, on_source_change=on_source_change)
        return open_index(asked, directory, fetcher, show_progress=False, identity=Identity(storage))
    finally:
        fetcher.stop()


def test_tables_and_samples_of_a_bucket_are_indexed(s3: LocalS3, tmp_path: Path) -> None:
    storage = StorageOptions(storage_options=s3.storage_options)
    table = open_remote("s3://bucket/table/*.parquet", tmp_path, storage)
    assert [row["index"] for row in all_rows(table)] == [0, 1, 2]
    assert table.resolve("x/1.jpg") == "s3://bucket/table/x/1.jpg"
    before = s3.gets_by_url()
    assert open_remote("s3://bucket/table/*.parquet", tmp_path, storage).fingerprint == table.fingerprint
    assert s3.gets_by_url() == before  # listed again, not read again
    samples = open_remote("s3://bucket/samples/", tmp_path, storage, "image")
    assert all_rows(samples) == [
        {"index": str(at), "jpg": f"{at}.jpg", "txt": "0.txt" if at == 0 else None, "image": f"{at}.jpg"} for at in range(3)
    ]
    assert samples.resolve("1.jpg") == "s3://bucket/samples/1.jpg"
    assert samples.row_ids(np.array([2])).tolist() == [2]
    with pytest.raises(ObjectNotFoundError, match=r"s3://bucket/gone\.csv does not exist"):
        open_remote("s3://bucket/gone.csv", tmp_path, storage)


def test_a_table_of_another_endpoint_is_no_new_version_of_this_one(tmp_path: Path) -> None:
    with LocalS3() as production, LocalS3() as staging:
        for key, server in enumerate((production, staging)):
            server.put("bucket/t.parquet", parquet(key))
        for _ in range(2):
            for key, server in enumerate((production, staging)):
                storage = StorageOptions(storage_options=server.storage_options)
                index = open_remote("s3://bucket/t.parquet", tmp_path, storage, on_source_change="raise")
                assert [row["index"] for row in all_rows(index)] == [key]
        staging.put("bucket/t.parquet", parquet(7))
        with pytest.raises(SourceChangedError, match="another version"):
            open_remote("s3://bucket/t.parquet", tmp_path, storage, on_source_change="raise")


def test_a_list_of_paths_on_a_web_server_is_indexed(tmp_path: Path) -> None:
    with FaultyHttpServer({"/d/list.txt": b"a.csv\nb.csv\n", "/d/a.csv": b"index\n1\n", "/d/b.csv": b"index\n2\n"}) as server:
        index = open_remote(f"{server.url}/d/list.txt", tmp_path, StorageOptions())
        assert [row["index"] for row in all_rows(index)] == [1, 2]
        assert index.resolve("x.jpg") == f"{server.url}/d/x.jpg"
        server.script("/d/a.csv", always=FaultyAnswer(fault=Fault.STATUS, status=403))
        with pytest.raises(AccessDeniedError, match="may not be read"):
            open_remote(f"{server.url}/d/a.csv", tmp_path, StorageOptions())
        with pytest.raises(StorageError, match="no listing"):
            open_remote(f"{server.url}/d/*.csv", tmp_path, StorageOptions())


@pytest.mark.parametrize("last_modified", ["Mon, 01 Jan 2024 00:00:00 GMT", None], ids=["time", "nothing"])
def test_a_table_without_etags_that_is_replaced_at_its_size_is_indexed_again(last_modified: str | None, tmp_path: Path) -> None:
    with FaultyHttpServer({"/t.csv": b"index\n1\n"}) as server:
        server.names_versions, server.last_modified = False, last_modified
        for _ in range(2):
            assert [row["index"] for row in all_rows(open_remote(f"{server.url}/t.csv", tmp_path, StorageOptions()))] == [1]
        server.objects["/t.csv"] = b"index\n2\n"
        if last_modified is not None:
            server.last_modified = "Tue, 02 Jan 2024 00:00:00 GMT"
        assert [row["index"] for row in all_rows(open_remote(f"{server.url}/t.csv", tmp_path, StorageOptions()))] == [2]


def test_one_url_at_two_endpoints_is_two_tables(tmp_path: Path) -> None:
    with FaultyHttpServer() as one, FaultyHttpServer() as two:
        for key, server in enumerate((one, two)):
            server.objects["/data/t.csv"] = b"index\n%d\n" % key
            server.names_versions = False
            storage = StorageOptions(storage_options={"endpoint_url": server.url, "anon": True, "region": "us-east-1"})
            index = open_remote("s3://data/t.csv", tmp_path, storage)
            assert [row["index"] for row in all_rows(index)] == [key]
