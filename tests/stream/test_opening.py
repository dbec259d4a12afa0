"""What a dataset takes for a row's number, for several, for a seed and other options; and what it says of itself."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError, StateError, UnknownLengthError
from sqlstream.stream.maps import EpochBatches
from tests.storage.raw import RawServer
from tests.stream.tables import make_table


def test_a_row_is_asked_for_by_a_whole_number_of_any_kind(tmp_path: Path) -> None:
    with StreamingDataset(make_table(tmp_path, 8), tmp_path / "cache", show_progress=False) as dataset:
        number: Any
        for number in (True, np.int64(1), np.uint8(1), np.array(1), torch.tensor(1), -7):
            assert dataset[number]["__row__"] == 1
        wrong: Any
        for wrong in (1.5, 1.0, np.float64(1), torch.tensor(1.0), "1", None, (1,), [1.5], [0, "1"], np.array([1.0])):
            with pytest.raises(TypeError, match=r"dataset\[.*a row is a whole number"):
                dataset[wrong]


def test_several_rows_are_asked_for_by_a_slice_or_a_list(tmp_path: Path) -> None:
    with StreamingDataset(make_table(tmp_path, 8), tmp_path / "cache", show_progress=False) as dataset:
        some: Any
        for some, rows in (
            (slice(0, 3), [0, 1, 2]),
            (slice(None, None, -3), [7, 4, 1]),
            (slice(-2, 99), [6, 7]),
            (slice(3, 3), []),
            ([1, -1, 1], [1, 7, 1]),
            ([], []),
            (range(2, 4), [2, 3]),
            (np.array([5, 0]), [5, 0]),
            (torch.tensor([5, 0]), [5, 0]),
        ):
            assert [sample["__row__"] for sample in dataset[some]] == rows
        with pytest.raises(IndexError, match="index 8 is out of range"):
            dataset[[0, 8]]


def test_a_slice_of_a_lazy_index_counts_no_more_than_it_needs(tmp_path: Path) -> None:
    options: dict[str, Any] = {"lazy_index_chunk_size": 2, "where": "score >= 0.5", "show_progress": False}
    pq.write_table(pq.read_table(make_table(tmp_path, 8)), tmp_path / "groups.parquet", row_group_size=2)
    with StreamingDataset(tmp_path / "groups.parquet", tmp_path / "cache", **options) as dataset:
        with pytest.raises(UnknownLengthError):
            dataset[-2:]
        assert [sample["__row__"] for sample in dataset[1:2]] == [5]
        assert dataset.index.known_length is None
        assert [sample["__row__"] for sample in dataset[2:99]] == [6, 7]
        assert [sample["__row__"] for sample in dataset[-2:]] == [6, 7]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("image", r"dataset\['image'\]: a row is a whole number, not str; .* dataset\[0\]\['image'\]"),
        ([True, False], "True and False are no numbers of rows"),
        (np.array([True, False]), "True and False are no numbers of rows"),
        (torch.tensor([True, False]), "True and False are no numbers of rows"),
        (slice("a", 3), r"dataset\['a':3\]: the bounds of a slice are whole numbers"),
        (slice(0, 1.5), r"dataset\[0:1.5\]: the bounds of a slice are whole numbers"),
    ],
    ids=str,
)
def test_what_is_no_row_is_named(tmp_path: Path, wrong: Any, says: str) -> None:
    dataset = StreamingDataset(make_table(tmp_path, 8), tmp_path / "cache", show_progress=False)
    with dataset, pytest.raises(TypeError, match=says):
        dataset[wrong]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"columns_to_download": 5}, r"columns_to_download=5 is no list: give a list of column names"),
        ({"columns_to_download": ["a", 5]}, r"columns_to_download holds 5, which is no text"),
        ({"index_cols_to_keep": "a"}, r"index_cols_to_keep='a' is a text: give a list of column names, \['a'\]"),
        ({"allowed_roots": "/tmp"}, r"allowed_roots='/tmp' is a text: give a list of local directories and URL prefixes"),
        ({"where": 5}, r"where=5 is no text"),
        ({"sql_query": ["SELECT"]}, r"sql_query=\['SELECT'\] is no text"),
        ({"max_failure_ratio": "0.1"}, r"max_failure_ratio='0.1' is no number"),
        ({"max_failure_ratio": float("nan")}, r"max_failure_ratio=nan is out of range"),
        ({"dst": 5}, r"the cache directory 5 is no path"),
        ({"dst": "\ud800"}, r"the cache directory '.ud800' is the name of no file"),
        ({"dst": ""}, r"the cache directory '' is empty"),
        ({"eviction_policy": ["lru"]}, r"eviction_policy=\['lru'\] is unknown: give one of lru, fifo, lfu, belady"),
        ({"verify_reads": np.array([1, 2])}, r"verify_reads=array.* is unknown: give one of"),
        ({"prefetch": np.array([1, 2])}, r"prefetch=array.* is no whole number"),
        *(
            ({name: value}, rf"{name}={re.escape(repr(value))} is no bool: give True or False")
            for name in (
                "allow_missing_columns",
                "none_to_empty_str",
                "print_exceptions",
                "print_traceback",
                "seed_transforms",
                "show_progress",
                "drop_last",
                "infinite_iteration",
                "unaligned_worker_index",
            )
            for value in ("false", b"x", ["x"], None)
        ),
    ],
    ids=str,
)
def test_an_option_of_another_type_is_named(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        StreamingDataset(make_table(tmp_path, 8), **{"dst": tmp_path / "cache", "show_progress": False, **options})


def test_a_dataset_says_what_it_is_and_reads_nothing_for_it(tmp_path: Path) -> None:
    src = make_table(tmp_path, 8)
    options: dict[str, Any] = {"where": "score >= 0.5", "shuffle_seed": 3, "name": "rows", "show_progress": False}
    with StreamingDataset(src, tmp_path / "cache", **options) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=2)
        rows = f"4 of 8 rows of {src}; columns index, score"
        assert repr(dataset.index) == f"Index({rows})"
        assert repr(dataset) == f"StreamingDataset(rows: {rows}; shuffle_seed=3; cache {tmp_path / 'cache'})"
        assert repr(loader) == f"StreamingDataLoader({dataset!r}, batch_size=2, num_workers=0)"
        assert repr(dataset.cache) == f"Cache('{tmp_path / 'cache'}', limit=AS_IT_IS)"
    path = dataset.index.path
    shutil.rmtree(tmp_path / "cache")
    assert repr(dataset.index) == f"Index({path}, which is not open)"
    assert repr(dataset).endswith(f"cache {tmp_path / 'cache'}; closed)")
    assert repr(dataset.cache) == f"Cache('{tmp_path / 'cache'}', limit=AS_IT_IS, closed)"
    assert not (tmp_path / "cache").exists()


def test_a_lazy_dataset_says_what_it_is_without_counting(tmp_path: Path) -> None:
    options: dict[str, Any] = {"lazy_index_chunk_size": 2, "name": "rows", "show_progress": False}
    src = make_table(tmp_path, 8)
    with StreamingDataset(src, tmp_path / "cache", where="score >= 0.5", **options) as dataset:
        assert repr(dataset.index) == f"LazyIndex(rows where (score >= 0.5) (lazy) of {src}; columns index, score)"
        assert dataset.index.known_length is None
    with StreamingDataset(src, tmp_path / "cache", **options) as dataset:
        assert f"StreamingDataset(rows: rows (lazy) of {src}; columns index, score; cache" in repr(dataset)
        with dataset.take(3) as some:
            assert repr(some.index) == f"LazyIndex(first 3 rows (lazy) of {src}; columns index, score)"
            assert [sample["__row__"] for sample in some] == [0, 1, 2]


@pytest.mark.parametrize("seed", [1.5, "42", True, [1]], ids=str)
def test_a_seed_that_is_no_number_is_named(tmp_path: Path, seed: Any) -> None:
    with pytest.raises(ConfigError, match=r"shuffle_seed=.* is no whole number"):
        StreamingDataset(make_table(tmp_path, 8), tmp_path / "cache", shuffle_seed=seed)


@pytest.mark.parametrize("wrong", [1.5, "2", None, [1], True], ids=str)
def test_a_count_that_is_no_whole_number_is_named(tmp_path: Path, wrong: Any) -> None:
    with StreamingDataset(make_table(tmp_path, 8), tmp_path / "cache", show_progress=False) as dataset:
        with pytest.raises(ConfigError, match=r"epoch=.* is no whole number"):
            dataset.set_epoch(wrong)
        with pytest.raises(ConfigError, match=r"sample_in_epoch=.* is no whole number"):
            dataset.set_progress(0, wrong)
        with pytest.raises(ConfigError, match=r"batch_size=.* is no whole number"):
            dataset.num_steps(wrong)
        with pytest.raises(ConfigError, match=r"batch_size=.* is no whole number"):
            EpochBatches(dataset, wrong)
        if wrong is not None:
            with pytest.raises(ConfigError, match=r"batch_size=.* is no whole number"):
                StreamingDataLoader(dataset, batch_size=wrong)
            with pytest.raises(ConfigError, match=r"epoch_size=.* is no whole number"):
                StreamingDataset(make_table(tmp_path, 8), tmp_path / "cache", show_progress=False, epoch_size=wrong)
        with pytest.raises(ConfigError, match=r"epoch=9223372036854775807 is out of range"):
            dataset.set_epoch(2**63 - 1)
        dataset.set_epoch(np.int64(3))  # type: ignore[arg-type]  # as numbers come out of numpy
        assert dataset.epoch == 3


def test_rows_of_the_program_are_read_by_it_and_not_sent_to_its_workers(tmp_path: Path) -> None:
    num_calls = 0

    def rows() -> Iterator[dict[str, object]]:
        nonlocal num_calls
        num_calls += 1
        for at in range(6):
            yield {"index": at, "even": at % 2 == 0}

    options: dict[str, Any] = {"show_progress": False, "shuffle_seed": 3}
    join: dict[str, Any] = {"join": {"more": lambda: [{"index": at, "square": at * at} for at in range(6)]}, "on": "index"}
    for src, more in ((rows, {}), (rows(), {}), ([rows, [{"index": 6, "even": True}]], {}), (rows, join)):
        with StreamingDataset(src, tmp_path / "cache", **options, **more) as dataset, dataset.select("even") as some:
            for one in (dataset, some):
                again = pickle.loads(pickle.dumps(one))  # a function of this test cannot be
                assert [sample["index"] for sample in again[:]] == [sample["index"] for sample in one[:]]
                again.close()
            assert not more or [sample["square"] for sample in some[:]] == [0, 4, 16]
    assert num_calls == 4


def test_a_state_goes_on_with_the_same_rows_from_a_function(tmp_path: Path) -> None:
    table = pq.read_table(make_table(tmp_path, 8))
    options: dict[str, Any] = {"show_progress": False, "shuffle_seed": 3}
    with StreamingDataset(table, tmp_path / "cache", **options) as dataset:
        samples = iter(dataset)
        next(samples)
        state, expected = dataset.state_dict(), [sample["__row__"] for sample in samples]
    with StreamingDataset(lambda: iter(table.to_batches(3)), tmp_path / "cache", **options) as dataset:
        dataset.load_state_dict(state)
        assert [sample["__row__"] for sample in dataset] == expected
    with (
        StreamingDataset(lambda: table.to_batches(3)[1:], tmp_path / "cache", **options) as dataset,
        pytest.raises(StateError, match=r"number of rows .it was 8, and is 5"),
    ):
        dataset.load_state_dict(state)


@pytest.mark.parametrize("head", ['ETag: W/"v"\r\nContent-Length: 8', 'ETag: "v"', 'ETag: "v"\r\nContent-Length: 0', "X: 1"])
def test_a_table_is_read_from_a_server_whose_answers_to_head_say_less_than_those_to_get(tmp_path: Path, head: str) -> None:
    def answer(request: str) -> bytes:
        if request.startswith("HEAD"):
            return f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode()
        return b'HTTP/1.1 200 OK\r\nETag: "v"\r\nContent-Length: 8\r\n\r\nnum\n1\n2\n'

    with RawServer(always=answer) as server:
        url = f"{server.url}.csv"
        with StreamingDataset(url, tmp_path / "cache", num_downloading_retries=0, show_progress=False) as dataset:
            assert [sample["num"] for sample in dataset] == [1, 2]
