"""What a dataset shows of its rows, and datasets of some of them: they go on alone, on the same cache."""

from __future__ import annotations

import datetime as dt
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError, EmptySelectionError, QueryError, StateError
from sqlstream.index.splits import plan_splits
from sqlstream.transforms.presets import LoadFromDiskTransform
from tests.stream.sources import Photos

NUM = 40
LABELS = ("cat", "dog", "bird")
TABLE = pa.table(
    {
        "index": [f"row-{i}" for i in range(NUM)],
        "score": [i / NUM for i in range(NUM)],
        "Label": [LABELS[i % 3] for i in range(NUM)],
        "day": [dt.date(2024, 1, 1) + dt.timedelta(days=i) for i in range(NUM)],
        "tags": [["x"] * (i % 3) if i % 5 else None for i in range(NUM)],
    }
)
LAZY = {"lazy_index_chunk_size": 8}


def opened(folder: Path, **options: Any) -> StreamingDataset:
    src = folder / "rows.parquet"
    if not src.exists():
        pq.write_table(TABLE, src, row_group_size=8)
    return StreamingDataset(src, folder / "cache", **{"show_progress": False, **options})


def rows_of(dataset: StreamingDataset) -> list[int]:
    """The numbers in the keys of its rows, in its own order."""
    return [int(sample["index"].removeprefix("row-")) for sample in dataset]


def all_of(dataset: StreamingDataset) -> set[int]:
    return set(rows_of(dataset))


# -- looking ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [{}, LAZY], ids=["built", "lazy"])
def test_columns_schema_and_head_are_those_of_the_source(lazy: dict[str, Any], tmp_path: Path) -> None:
    with opened(tmp_path, shuffle_seed=3, **lazy) as dataset:
        assert dataset.columns == tuple(TABLE.schema.names)
        assert dataset.schema.equals(TABLE.schema)
        assert dataset.head().equals(TABLE.slice(0, 5))
        assert dataset.head(12).equals(TABLE.slice(0, 12))
        assert dataset.head(NUM + 1).num_rows == NUM
        with pytest.raises(ConfigError, match="num_rows=0 is out of range"):
            dataset.head(0)
    with opened(tmp_path, where="score >= 0.9", **lazy) as dataset:
        assert dataset.head(2).equals(TABLE.slice(36, 2))
        assert dataset.head(99).equals(TABLE.slice(36))
    with pytest.raises(ConfigError, match="was closed"):
        dataset.head()


def test_columns_are_those_that_a_query_computes(tmp_path: Path) -> None:
    query = 'SELECT "index", score * 40 AS number FROM dataframe WHERE score < 0.1'
    with opened(tmp_path, sql_query=query) as dataset:
        assert dataset.columns == ("index", "number")
        assert dataset.head().to_pylist() == [{"index": f"row-{i}", "number": i} for i in range(4)]
        assert dataset.query("SELECT max(number) AS most FROM dataframe").to_pylist() == [{"most": 3.0}]


def test_a_query_sees_the_rows_with_their_types(tmp_path: Path) -> None:
    with opened(tmp_path) as dataset:
        counts = dataset.query("SELECT label, count(*) AS n FROM dataframe GROUP BY label ORDER BY n DESC, label")
        assert counts.to_pylist() == [{"Label": "cat", "n": 14}, {"Label": "bird", "n": 13}, {"Label": "dog", "n": 13}]
        found = dataset.query("SELECT day, tags, score FROM samples WHERE score BETWEEN 0.1 AND 0.2")
        assert found.equals(TABLE.select(["day", "tags", "score"]).slice(4, 5))
        none = dataset.query("SELECT day, score * 2 AS twice FROM dataframe WHERE score > 2")
        assert (none.num_rows, none.schema.names, none.schema.field("day").type) == (0, ["day", "twice"], pa.date32())


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"sql_query": "SELECT * FROM dataframe ORDER BY score DESC", "max_size": 4}, [39, 38, 37, 36]),
        ({"sql_query": "SELECT * FROM samples WHERE score < 0.5 LIMIT 3", "where": "score > 0"}, [1, 2]),
    ],
    ids=["order and size", "query and where"],
)
def test_a_query_sees_the_selected_rows_alone(options: dict[str, Any], rows: Sequence[int], tmp_path: Path) -> None:
    with opened(tmp_path, **options) as dataset:
        keys = dataset.query('SELECT "index", (SELECT count(*) FROM dataframe) AS n FROM samples').to_pylist()
        assert keys == [{"index": f"row-{row}", "n": len(rows)} for row in rows]


@pytest.mark.parametrize("engine", ["sqlite", "duckdb"])
def test_columns_that_sql_spells_otherwise_have_their_own_names_in_results(engine: str, tmp_path: Path) -> None:
    if engine == "duckdb":
        pytest.importorskip("duckdb")
    rows = pa.table({"row": ["x", "y"], "URL": ["A", "B"], "url": [1, 2], "": [5, 6]})
    computed = "SELECT *, 1 AS one FROM dataframe"
    options: dict[str, Any] = {"columns_to_download": [], "source_options": {"sql_engine": engine}}
    for query in (None, computed):
        with StreamingDataset(rows, tmp_path / "cache", sql_query=query, **options) as dataset:
            named = [*rows.column_names, *(["one"] if query else [])]
            assert dataset.head(1).column_names == list(dataset.columns) == dataset.schema.names == named
            assert dataset.head(1).to_pylist() == [{name: dataset[0][name] for name in named}]
            shown = dataset.query("SELECT * FROM dataframe")
            assert shown.column_names == ["row", "row_1", *named[1:]]  # the number of the row, and the column of that name
            assert [column.to_pylist()[1] for column in shown.columns[:4]] == [1, "y", "B", 2]
            assert dataset.query("SELECT row_1, url_1 FROM dataframe").to_pylist()[0] == {"row": "x", "url": 1}


def test_a_query_on_selected_rows_may_be_any_select(tmp_path: Path) -> None:
    with opened(tmp_path, where="score >= 0.5") as dataset:
        sql = "WITH a AS (SELECT * FROM dataframe) SELECT count(*) AS n, max(a.score) AS most FROM a JOIN samples b USING (row)"
        assert dataset.query(sql).to_pylist() == [{"n": 20, "most": 39 / NUM}]


@pytest.mark.parametrize("options", [{}, {"where": "score >= 0.5"}], ids=["all", "filtered"])
def test_a_query_that_cannot_run_is_named_as_it_was_written(options: dict[str, Any], tmp_path: Path) -> None:
    with opened(tmp_path, **options) as dataset:
        for sql, says in (
            ("SELECT scor FROM dataframe", "the query 'SELECT scor FROM dataframe' does not run: no such column"),
            ("DELETE FROM dataframe", "the query 'DELETE FROM dataframe' is no SELECT"),
            ("SELECT * FROM sqlite_master", "it reads 'sqlite_master'"),
            ("SELECT * FROM rows", "it reads 'rows'"),
            ("SELECT * FROM selected_rows", "no such table: selected_rows"),
            ("SELECT 1) UNION SELECT (2", "a bracket"),
            ("SELECT random() FROM dataframe", "not allowed|depends on the moment"),
        ):
            with pytest.raises(QueryError, match=says):
                dataset.query(sql)
        wrong: Any = 5
        with pytest.raises(ConfigError, match="sql=5 is no text"):
            dataset.query(wrong)
    with opened(tmp_path, **LAZY) as dataset, pytest.raises(ConfigError, match="stay in their files"):
        dataset.query("SELECT count(*) FROM dataframe")


# -- some of the rows ---------------------------------------------------------------------------------------------------


def test_selections_compose_in_the_order_they_are_made(tmp_path: Path) -> None:
    with opened(tmp_path, where="score >= 0.25") as dataset:  # rows 10 to 39
        for some, rows in (
            (dataset.select("score < 0.5"), range(10, 20)),
            (dataset.take(5), range(10, 15)),
            (dataset.take(5).take(9), range(10, 15)),
            (dataset.take(5).select("score >= 0.3"), range(12, 15)),
            (dataset.select("score >= 0.3").take(5), range(12, 17)),
            (dataset.select("score < 0.5 OR score > 0.9").select("label = 'cat'"), [12, 15, 18, 39]),
            (dataset.take(99), range(10, 40)),
        ):
            with some:
                assert rows_of(some) == list(rows)
                assert some.head(99).column("index").to_pylist() == [f"row-{row}" for row in rows]
                assert len(some) == len(rows)
        assert rows_of(dataset) == list(range(10, 40))
    with opened(tmp_path, max_size=6) as dataset, dataset.select("score >= 0.1") as some:
        assert rows_of(some) == [4, 5]


def test_selections_of_a_computed_table_and_of_an_order(tmp_path: Path) -> None:
    query = 'SELECT "index", -score AS minus FROM dataframe WHERE score < 0.5'
    with opened(tmp_path, sql_query=query) as dataset, dataset.select("minus < -0.3").take(3) as some:
        assert rows_of(some) == [13, 14, 15]
        assert some[0]["minus"] == -13 / NUM
    query = "SELECT * FROM dataframe ORDER BY score DESC"
    with opened(tmp_path, sql_query=query) as dataset, dataset.take(10).select("label = 'cat'") as some:
        assert rows_of(some) == [39, 36, 33, 30]


def test_what_keeps_no_row_or_is_no_condition_is_an_error(tmp_path: Path) -> None:
    with opened(tmp_path) as dataset:
        with pytest.raises(EmptySelectionError, match=r"score > 2.* keeps no row"):
            dataset.select("score > 2")
        with pytest.raises(QueryError, match="no such column"):
            dataset.select("scor > 2")
        with pytest.raises(QueryError, match="not one SQL expression"):
            dataset.select("score > 2) OR (1")
        wrong: Any
        for wrong in (0, "3", 1.5, None):
            with pytest.raises(ConfigError, match="num_rows="):
                dataset.take(wrong)
        for wrong in (5, None):
            with pytest.raises(ConfigError, match=f"where={wrong} is no text"):
                dataset.select(wrong)
    with pytest.raises(ConfigError, match="was closed"):
        dataset.take(1)


def test_each_dataset_of_a_cache_is_closed_by_itself(photos: Photos, tmp_path: Path) -> None:
    options: dict[str, Any] = {"columns_to_download": ["image"], "transforms": [LoadFromDiskTransform(["image"])]}
    dataset = StreamingDataset(photos.src, tmp_path / "cache", cache_limit="1gb", show_progress=False, **options)
    some, others = dataset.take(20), dataset.select("score >= 0.5")
    first = some.select("score < 0.1")
    num_requests = len(photos.server.requests())
    assert some[3]["image"] == photos.data(3)
    assert {one.cache.path for one in (some, others, first)} == {tmp_path / "cache"}
    assert first.cache.statistics().limit_bytes == 1 << 30
    some.close()
    assert first[3]["image"] == photos.data(3)
    assert first.cache.statistics().entries == 1
    dataset.close()
    assert [sample["image"] for sample in others] == [photos.data(number) for number in range(60, 120)]
    others.close()
    assert len(first) == 12
    first.close()
    paths = {request.path for request in photos.server.requests()[num_requests:]}
    assert paths == {photos.path(number) for number in (3, *range(60, 120))}, "the table is not read again"


def test_a_selection_has_the_options_of_its_dataset(tmp_path: Path) -> None:
    class Named(StreamingDataset):
        label = "none"

    opened(tmp_path).close()
    dataset = Named(
        tmp_path / "rows.parquet",
        tmp_path / "cache",
        data_type="image",
        name="mine",
        shuffle_seed=-1,
        batch_size=2,
        transforms=[lambda sample: {"index": sample["index"], "twice": 2 * sample["score"]}],
        index_cols_to_keep=["score", "Label"],
        drop_last=True,
        show_progress=False,
    )
    dataset.label = "own"
    with dataset, dataset.select("label = 'cat'").take(7) as some:
        assert (type(some), some.label, some.name, some.data_type) == (Named, "own", "mine", "image")
        assert some.shuffle_seed == dataset.shuffle_seed != -1
        assert some.columns == ("index", "score", "Label")
        assert some[2]["twice"] == 2 * 6 / NUM
        assert len(StreamingDataLoader(some, batch_size=2)) == 3
        with pytest.raises(ConfigError, match="batch_size=2"):
            StreamingDataLoader(some, batch_size=3)


def test_states_and_orders_are_those_of_the_selected_rows(tmp_path: Path) -> None:
    options: dict[str, Any] = {"shuffle_seed": 7, "batch_size": 2}
    with opened(tmp_path, **options) as dataset, dataset.select("score < 0.5") as some:
        whole = rows_of(some)
        assert sorted(whole) == list(range(20)) != whole
        some.set_epoch(1)
        batches = iter(StreamingDataLoader(some, batch_size=2, collate_fn=lambda samples: [s["index"] for s in samples]))
        taken = [next(batches) for _ in range(3)]
        state = some.state_dict()
        with opened(tmp_path, **options) as other, other.select("score < 0.5") as again:
            assert rows_of(again) == whole
            again.load_state_dict(state)
            assert [sample["index"] for sample in again] == [key for batch in batches for key in batch]
        assert len(taken) == 3
        with pytest.raises(StateError):
            dataset.load_state_dict(state)


def test_workers_read_a_selection(tmp_path: Path) -> None:
    with opened(tmp_path, shuffle_seed=1) as dataset, dataset.select("label = 'cat'") as some:
        loader = DataLoader(some, batch_size=None, num_workers=1, multiprocessing_context="fork")
        assert {sample["Label"] for sample in loader} == {"cat"}
        copy = pickle.loads(pickle.dumps(some))
        assert [copy[i]["index"] for i in (0, -1)] == ["row-0", "row-39"]
        copy.close()


def test_weights_go_with_the_selected_rows(tmp_path: Path) -> None:
    with opened(tmp_path, weights="label = 'cat'", shuffle_seed=1) as dataset, dataset.take(9) as some:
        assert sorted(rows_of(some)) == [0, 0, 0, 3, 3, 3, 6, 6, 6]
    array = np.zeros(20)
    array[[1, 15]] = (1, 3)
    options: dict[str, Any] = {"where": "score >= 0.5", "weights": array, "shuffle_seed": 1}
    with opened(tmp_path, **options) as dataset, dataset.select("score >= 0.6").select("label != 'dog'") as some:
        assert all_of(some) == {35}
        assert all_of(dataset) == {21, 35}
    twice = "SELECT * FROM dataframe WHERE score < 0.1 UNION ALL SELECT * FROM dataframe WHERE score < 0.1"
    with opened(tmp_path, sql_query=twice, weights=np.ones(8)) as dataset, pytest.raises(ConfigError, match="more than once"):
        dataset.take(3)


def test_a_lazy_index_filters_before_it_counts(tmp_path: Path) -> None:
    with opened(tmp_path, where="score >= 0.25", **LAZY) as dataset:
        with dataset.select("score < 0.5") as some, some.take(4) as first, dataset.take(3) as three:
            assert rows_of(some) == list(range(10, 20))
            assert rows_of(first) == list(range(10, 14))
            assert (len(some), len(first), rows_of(three)) == (10, 4, [10, 11, 12])
            with pytest.raises(ConfigError, match="filter before take"):
                first.select("score < 0.3")
            with pytest.raises(ConfigError, match="filter before take"):
                first.split(val=0.5)
        parts = dataset.split(val=0.5)
        assert sorted(rows_of(parts["val"]) + rows_of(parts["train"])) == list(range(10, 40))
        with pytest.raises(QueryError, match="cannot filter a lazy index"):
            dataset.select("score > (SELECT avg(score) FROM dataframe)")
        for part in parts.values():
            part.close()


# -- splits -------------------------------------------------------------------------------------------------------------


def splits_of(dataset: StreamingDataset, seed: int = 0, **shares: float) -> dict[str, set[int]]:
    parts = dataset.split(seed=seed, **shares)
    found = {name: all_of(part) for name, part in parts.items()}
    for part in parts.values():
        part.close()
    return found


def test_splits_share_the_rows_and_stay_when_others_come(tmp_path: Path) -> None:
    with opened(tmp_path) as dataset:
        parts = splits_of(dataset, val=0.2, test=0.3)
        assert list(parts) == ["val", "test", "train"]
        assert sorted(row for rows in parts.values() for row in rows) == list(range(NUM))
        assert splits_of(dataset, val=0.2, test=0.3) == parts
        assert splits_of(dataset, val=0.2, seed=1) != splits_of(dataset, val=0.2)
        with dataset.select("score < 0.5") as some:
            assert splits_of(some, val=0.2, test=0.3) == {name: rows & set(range(20)) for name, rows in parts.items()}
    more = TABLE.set_column(0, "index", pa.array([f"row-{i}" for i in range(NUM, 2 * NUM)]))
    pq.write_table(pa.concat_tables([more, TABLE]), tmp_path / "grown.parquet")
    with StreamingDataset(tmp_path / "grown.parquet", tmp_path / "cache", show_progress=False) as dataset:
        grown = splits_of(dataset, val=0.2, test=0.3)
        assert {name: rows & set(range(NUM)) for name, rows in grown.items()} == parts


def test_splits_in_duckdb_share_the_rows(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    with opened(tmp_path, source_options={"sql_engine": "duckdb"}) as dataset:
        parts = dataset.split(val=0.5)
        val = all_of(parts["val"])
        assert val ^ all_of(parts["train"]) == set(range(NUM))
        found = parts["val"].query('SELECT "index", (SELECT count(*) FROM dataframe) AS n FROM samples').to_pylist()
        assert found == [{"index": f"row-{row}", "n": len(val)} for row in sorted(val)]
        for part in parts.values():
            part.close()


def test_splits_that_add_up_to_all_leave_no_rest(tmp_path: Path) -> None:
    with opened(tmp_path) as dataset:
        parts = splits_of(dataset, train=0.7, val=0.2, test=0.1)
        assert list(parts) == ["train", "val", "test"]
        assert sorted(row for rows in parts.values() for row in rows) == list(range(NUM))
        assert splits_of(dataset, all=1) == {"all": set(range(NUM))}


def test_a_split_can_be_split_and_selected(tmp_path: Path) -> None:
    with opened(tmp_path) as dataset:
        parts = dataset.split(val=0.5)
        again = parts["train"].split(val=0.5, seed=1)
        assert all_of(again["train"]) | all_of(again["val"]) == all_of(parts["train"])
        with parts["val"].select("label = 'cat'") as cats:
            assert all_of(cats) == {row for row in all_of(parts["val"]) if row % 3 == 0}
        for part in (*parts.values(), *again.values()):
            part.close()


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ({}, "split\\(\\) has no share"),
        ({"val": 0}, "split val=0 is out of range"),
        ({"val": 1.1}, "split val=1.1 is out of range"),
        ({"val": "0.1"}, "split val='0.1' is out of range"),
        ({"val": True}, "split val=True is out of range"),
        ({"val": float("nan")}, "split val=nan is out of range"),
        ({"val": 0.6, "test": 0.6}, "splits add up to 1.2: give 1 at most"),
        ({"val": 0.1, "train": 0.5}, "splits add up to 0.6 with 'train', which is the rest"),
        ({"a/b": 0.1}, "split 'a/b' is no name"),
    ],
    ids=str,
)
def test_shares_that_make_no_splits_are_named(shares: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_splits(shares)


def test_a_split_without_a_row_is_named_and_leaves_nothing_open(tmp_path: Path) -> None:
    with opened(tmp_path) as dataset:
        with pytest.raises(ConfigError, match="split 'tiny' has none of the 40 rows: give it a larger share than 1e-09"):
            dataset.split(val=0.5, tiny=1e-9)
        wrong: Any
        for wrong in (1.5, "1", True):
            with pytest.raises(ConfigError, match=r"seed=.* is no whole number"):
                dataset.split(val=0.5, seed=wrong)
