"""Samples of a table that has no column for names: downloads, failures, stored samples and states go on with row numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream import StreamingDataset
from sqlstream.errors import SourceError
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.transforms.presets import CacheTransform
from sqlstream.write import MdsWriter
from tests.stream.kit import Decode, num_decoded
from tests.stream.shards import tar_of
from tests.stream.sources import Photos, make_photos


@pytest.fixture
def unnamed(server: FaultyHttpServer, tmp_path: Path) -> Photos:
    photos = make_photos(server, tmp_path, 12)
    table = pq.read_table(tmp_path / "index.parquet").drop_columns(["index"])
    pq.write_table(table, tmp_path / "index.parquet", row_group_size=4)
    server.objects["/photos/index.parquet"] = (tmp_path / "index.parquet").read_bytes()
    return photos


def opened(photos: Photos, cache: Path, **options: Any) -> StreamingDataset:
    given = {"columns_to_download": ["image"], "shuffle_seed": 3, "show_progress": False, "cache_limit": None, **options}
    return StreamingDataset(photos.src, cache, **given)


@pytest.mark.parametrize("lazy", [{}, {"lazy_index_chunk_size": 4}], ids=["built", "lazy"])
def test_the_key_of_a_sample_is_its_row_number(lazy: dict[str, Any], unnamed: Photos, tmp_path: Path) -> None:
    with opened(unnamed, tmp_path / "cache", **lazy) as dataset:
        samples = [(sample["__sample_key__"], sample["__row__"], Path(sample["image"]).read_bytes()) for sample in dataset]
        assert sorted(samples) == sorted((str(row), row, unnamed.data(row)) for row in range(12))
        iterator = iter(dataset)
        first, state = [next(iterator)["__row__"] for _ in range(5)], dataset.state_dict()
        rest = [sample["__row__"] for sample in iterator]
    with opened(unnamed, tmp_path / "other", **lazy) as again:
        again.load_state_dict(json.loads(json.dumps(state)))
        assert [sample["__row__"] for sample in again] == rest
    assert len(first + rest) == 12


def test_failures_and_stored_samples_are_named_by_row_numbers(unnamed: Photos, tmp_path: Path) -> None:
    del unnamed.server.objects[unnamed.path(4)]
    transforms = [CacheTransform("decoded", [Decode(tmp_path / "log")])]
    for _ in range(2):
        with opened(unnamed, tmp_path / "cache", transforms=transforms, where="row < 5", on_error="skip") as dataset:
            assert sorted(sample["__sample_key__"] for sample in dataset) == ["0", "1", "2", "3"]
            assert {(failure.row, failure.url) for failure in dataset.failures()} == {(4, unnamed.server.url + unnamed.path(4))}
    assert num_decoded(tmp_path / "log") == 4


def test_a_column_index_of_a_lazy_index_names_rows_as_far_as_it_has_values(tmp_path: Path) -> None:
    pq.write_table(pa.table({"index": ["a", None]}), tmp_path / "t.parquet")
    with StreamingDataset(tmp_path / "t.parquet", tmp_path / "cache", lazy_index_chunk_size=4, show_progress=False) as dataset:
        assert [sample["__sample_key__"] for sample in dataset] == ["a", "1"]


def write_mds(folder: Path) -> str:
    with MdsWriter(out=str(folder), columns={"index": "int", "n": "int"}) as writer:
        for number in range(6):
            writer.write({"index": 10 + number, "n": number})
    return str(folder)


def write_tar(folder: Path) -> str:
    folder.mkdir()
    (folder / "a.tar").write_bytes(tar_of([(key, {"index": b"%d" % (10 + number)}) for number, key in enumerate("uvwxyz")]))
    return str(folder / "a.tar")


@pytest.mark.parametrize("lazy", [{}, {"lazy_index_chunk_size": 4}], ids=["built", "lazy"])
@pytest.mark.parametrize(("write", "names"), [(write_mds, list("012345")), (write_tar, list("uvwxyz"))])
def test_content_of_shards_names_samples_where_it_is_made_a_column(
    write: Callable[[Path], str], names: list[str], lazy: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    src = write(tmp_path / "shards")
    for where in (None, "__shard__ = 0"):
        with StreamingDataset(src, tmp_path / "cache", where=where, show_progress=False, **lazy) as dataset:
            assert [sample["__sample_key__"] for sample in dataset] == names
    assert "index column" not in caplog.text
    named = {"index_col_name": "index", "show_progress": False, **lazy}
    with pytest.raises(SourceError, match=r"content of the shards.*\{'index_members': \['index'\]\} makes values of it"):
        StreamingDataset(src, tmp_path / "cache", **named)
    with StreamingDataset(src, tmp_path / "cache", **named, source_options={"index_members": ["index"]}) as dataset:
        assert [(sample["__sample_key__"], sample["index"]) for sample in dataset] == [(str(n), n) for n in range(10, 16)]
