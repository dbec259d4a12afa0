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
from sqlstream.errors import AccessDeniedError, ObjectNotFoundError, StorageError
from sqlstream.index.build import open_index
from sqlstream.index.store import Index
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


def open_remote(src: str, directory: Path, storage: StorageOptions, data_type: str | None = None) -> Index:
    fetcher = Fetcher(storage)
    try:
        return open_index(options(src, data_type=data_type), directory, fetcher, show_progress=False)
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
    assert all_rows(samples) == [{"index": str(at), "jpg": f"{at}.jpg", "txt": "0.txt" if at == 0 else None} for at in range(3)]
    assert samples.resolve("1.jpg") == "s3://bucket/samples/1.jpg"
    assert samples.row_ids(np.array([2])).tolist() == [2]
    with pytest.raises(ObjectNotFoundError, match=r"s3://bucket/gone\.csv does not exist"):
        open_remote("s3://bucket/gone.csv", tmp_path, storage)


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
