"""Streams of a mixture that give nothing: filters keep no row, which a lazy index finds out on the way, or a share is tiny."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream import MixedDataset, Stream
from sqlstream.errors import ConfigError, EmptySelectionError
from tests.stream.mixtures import MixedJob, streams_of

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

NO_ROW = "the filter .*score > 2.* keeps no row of .*groups.parquet: loosen it"


def streams(folder: Path) -> dict[str, Stream]:
    if not (folder / "groups.parquet").exists():
        pq.write_table(pa.table({"score": [i / 60 for i in range(60)]}), folder / "groups.parquet", row_group_size=6)
    lazy: dict[str, Any] = {"where": "score > 2", "lazy_index_chunk_size": 6, "show_progress": False}
    return {"lazy": Stream(folder / "groups.parquet", folder / "cache", **lazy), "av": streams_of(folder)["av"]}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_is_found_to_have_no_row_when_it_is_drawn(num_workers: int, tmp_path: Path) -> None:
    weights = [(0, {"lazy": 0, "av": 1}), (2, {"lazy": 1, "av": 1})]
    made = MixedJob(tmp_path, 1, num_workers, 4, lambda: streams(tmp_path), weights=weights, epoch_size=40)
    with made as job, pytest.raises(EmptySelectionError, match=NO_ROW):
        job.epoch()


def test_a_stream_that_is_known_to_have_no_row_may_pause_alone(tmp_path: Path) -> None:
    given: dict[str, Any] = {"epoch_size": 8}
    with MixedDataset(streams(tmp_path), [1, 1], **given) as dataset, pytest.raises(EmptySelectionError, match=NO_ROW):
        list(dataset)  # all chunks are counted now
    with pytest.raises(ConfigError, match="streams 'lazy' have no row, but a weight above 0"):
        MixedDataset(streams(tmp_path), [1, 1], **given)
    with MixedDataset(streams(tmp_path), [0, 1], **given) as dataset:
        assert {sample["__stream__"] for sample in dataset} == {"av"}
        dataset.reweight({"lazy": 1, "av": 1})
        with pytest.raises(EmptySelectionError, match=NO_ROW):
            list(dataset)


def test_an_iteration_without_end_over_no_row_names_the_filter(tmp_path: Path) -> None:
    stream = streams(tmp_path)["lazy"]
    with stream.open(None, None) as dataset, pytest.raises(EmptySelectionError, match=NO_ROW):
        list(dataset)
    endless = Stream(stream.src, stream.dst, infinite_iteration=True, **stream.options)
    with endless.open(None, None) as dataset, pytest.raises(ConfigError, match="0 samples has no step: loosen the filter"):
        list(dataset)


def test_a_proportion_of_which_nothing_is_left_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = streams_of(tmp_path)
    for stream, proportion in zip(given.values(), (0.995, 0.004, 0.0), strict=True):
        stream.proportion = proportion
    with MixedDataset(given) as dataset:
        assert dataset.weights == {"web": 72, "code": 0, "av": 0}
    assert "streams 'code' never come: their proportion of an epoch of 72 samples, rounded, is none" in caplog.text
    caplog.clear()
    with MixedDataset(given, epoch_size=1000) as dataset:
        assert dataset.weights == {"web": 996, "code": 4, "av": 0}
    assert not caplog.text
