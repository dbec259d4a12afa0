"""Samples of a table that has no column for names: downloads, failures, stored samples and states go on with row numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream import StreamingDataset
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.transforms.presets import CacheTransform
from tests.stream.kit import Decode, num_decoded
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
