"""What names a sample: a column that was asked for, `index` where it can, else the number of the row."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream.errors import ConfigError, SchemaError, SourceError
from sqlstream.index.export import ExportOptions, export
from sqlstream.index.file.index import Index
from sqlstream.index.info import describe, list_indexes
from sqlstream.index.weights import open_weights
from tests.index.lazily import open_lazily, rows_of
from tests.index.sources import all_rows, build, make_samples, write_csv

UNNAMED = "url,n\na.jpg,1\nb.jpg,2\na.jpg,3\n"
TWICE = "index,n\na,1\nb,2\na,3\n,4\n"


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


def test_a_table_without_the_column_index_is_named_by_row_numbers(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    index = build(tmp_path, write_csv(tmp_path / "t.csv", UNNAMED))
    assert index.key_column is None
    assert pickle.loads(pickle.dumps(index)).key_column is None
    assert [row["url"] for row in all_rows(index)] == ["a.jpg", "b.jpg", "a.jpg"]
    assert describe(index.path).key_column is None
    assert log.messages == []


@pytest.mark.parametrize(("text", "problem"), [(TWICE, "rows? "), ("index,n\na,1\n,2\n", "row 1 has no value")])
def test_a_column_index_that_cannot_name_rows_is_said_and_left(
    text: str, problem: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    path = write_csv(tmp_path / "t.csv", text)
    for number in range(2):
        assert build(tmp_path, path).key_column is None
        assert len(log.messages) == number + 1
        assert "so samples are named by the numbers of their rows" in log.messages[-1]
    with pytest.raises(SourceError, match=f"{problem}.*leave that out"):
        build(tmp_path, path, key_column="index")


@pytest.mark.parametrize("is_first", [True, False])
def test_a_column_that_was_asked_for_must_be_there_whoever_built_the_index(is_first: bool, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", UNNAMED)
    if is_first:
        build(tmp_path, path)
    for name in ("index", "row", ""):
        with pytest.raises(SchemaError, match=rf"t\.csv has no index column '{name}': it has 'url', 'n'.* leave that out"):
            build(tmp_path, path, key_column=name)
    with pytest.raises(SchemaError, match="has no index column 'index'"):
        build(tmp_path, path, key_column="index", where="n > 1")
    assert build(tmp_path, path, key_column="n").key_column == "n"
    assert build(tmp_path, path).key_column is None


def test_a_filter_that_leaves_good_keys_keeps_them(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    path = write_csv(tmp_path / "t.csv", TWICE)
    for _ in range(2):  # found again
        assert build(tmp_path, path, where="n BETWEEN 2 AND 3").key_column == "index"
    assert log.messages == []
    for where, problem in (("n < 4", "rows 0 and 2, which the query selects,"), ("n > 1", "row 3, which the query selects,")):
        index = build(tmp_path, path, where=where)
        assert index.key_column is None
        assert problem in log.messages[-1]
        assert pickle.loads(pickle.dumps(index)).key_column is None
        with pytest.raises(SourceError, match=problem):
            build(tmp_path, path, where=where, key_column="index")
    listed = {info.query: info.key_column for info in list_indexes(tmp_path / "index")}
    assert list(listed.values()).count("index") == 1


NAMED = "index,url,n\na,a.jpg,1\nb,b.jpg,2\nc,a.jpg,3\n"
QUERIES: list[tuple[str, str, str | None]] = [
    (UNNAMED, "SELECT n FROM dataframe", None),
    (UNNAMED, "SELECT row, n FROM dataframe", None),
    (UNNAMED, 'SELECT row AS "index", * FROM dataframe', "index"),
    (UNNAMED, 'SELECT url || n AS "index", url FROM dataframe', "index"),
    (UNNAMED, 'SELECT url AS "index" FROM dataframe', None),
    (UNNAMED, "SELECT min(n) AS n, url FROM dataframe GROUP BY url", None),
    (NAMED, "SELECT n FROM dataframe", None),
    (NAMED, "SELECT index, n + 1 AS m FROM dataframe", "index"),
    (NAMED, "SELECT upper(index) AS index, n FROM dataframe", "index"),
    (NAMED, "SELECT url AS index, n FROM dataframe", None),
]


@pytest.mark.parametrize(("text", "query", "key"), QUERIES)
def test_a_query_may_compute_the_key_or_drop_it(text: str, query: str, key: str | None, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", text)
    for _ in range(2):  # found again
        assert build(tmp_path, path, sql_query=query).key_column == key
    if key is None:
        with pytest.raises(SourceError, match="'index'"):
            build(tmp_path, path, sql_query=query, key_column="index")
    else:
        assert build(tmp_path, path, sql_query=query, key_column=key).key_column == key


def test_a_key_that_was_asked_for_may_be_computed(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", UNNAMED)
    index = build(tmp_path, path, sql_query="SELECT url || n AS id, n FROM dataframe", key_column="id")
    assert (index.key_column, all_rows(index)[2]["id"]) == ("id", "a.jpg3")
    with pytest.raises(SourceError, match=r"rows 0 and 2 have the same value 'a\.jpg' in the index column 'id'"):
        build(tmp_path, path, sql_query="SELECT url AS id FROM dataframe", key_column="id")
    with pytest.raises(SchemaError, match="gives no 'id', which is the index column"):
        build(tmp_path, path, sql_query="SELECT url FROM dataframe", key_column="id")


def test_a_file_without_the_column_leaves_all_rows_to_their_numbers(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    write_csv(tmp_path / "d/1.csv", "index,n\na,1\n")
    assert build(tmp_path, tmp_path / "d/*.csv").key_column == "index"
    write_csv(tmp_path / "d/2.csv", "n\n2\n")
    index = build(tmp_path, tmp_path / "d/*.csv")  # it has grown
    assert (index.key_column, [row["index"] for row in all_rows(index)]) == (None, ["a", None])
    assert "row 1 has no value in the index column 'index'" in log.text
    with pytest.raises(SourceError, match="row 1 has no value"):
        build(tmp_path, tmp_path / "d/*.csv", key_column="index")
    write_csv(tmp_path / "e/1.csv", "n\n1\n")
    assert build(tmp_path, tmp_path / "e/*.csv").key_column is None
    write_csv(tmp_path / "e/2.csv", "index,n\na,2\n")
    grown = build(tmp_path, tmp_path / "e/*.csv")
    assert (grown.key_column, [row["n"] for row in all_rows(grown)]) == (None, [1, 2])


def test_a_lazy_index_needs_no_key_either(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    pq.write_table(pa.table({"n": range(10)}), tmp_path / "d/1.parquet")
    index = open_lazily(tmp_path, tmp_path / "d/1.parquet", where="n > 3")
    assert index.key_column is None
    assert [row["n"] for row in rows_of(index)] == [*range(4, 10)]
    with pytest.raises(SchemaError, match="no index column 'index'"):
        open_lazily(tmp_path, tmp_path / "d/1.parquet", key_column="index")
    pq.write_table(pa.table({"index": ["a"], "n": [10]}), tmp_path / "d/2.parquet")
    assert open_lazily(tmp_path, tmp_path / "d/2.parquet").key_column == "index"
    assert open_lazily(tmp_path, str(tmp_path / "d/*.parquet")).key_column is None


def test_folders_have_keys_of_their_own(tmp_path: Path) -> None:
    make_samples(tmp_path / "photos", "a.jpg", "b.jpg")
    assert build(tmp_path, tmp_path / "photos", data_type="image").key_column == "index"
    write_csv(make_samples(tmp_path / "hf", "a.jpg") / "metadata.csv", "file_name\na.jpg\n")
    assert build(tmp_path, tmp_path / "hf").key_column == "index"
    mixed = build(tmp_path, [tmp_path / "hf", write_csv(tmp_path / "t.csv", UNNAMED)])
    assert mixed.key_column is None
    with pytest.raises(ConfigError, match="is always 'index'"):
        build(tmp_path, tmp_path / "photos", data_type="image", key_column="id")


@pytest.mark.parametrize("src", [[{"n": 1}, {"n": 2}], pa.table({"n": [1, 2]})], ids=["dicts", "arrow"])
def test_tables_in_memory_need_no_key(src: Any, tmp_path: Path) -> None:
    assert build(tmp_path, src).key_column is None


def test_weights_and_splits_of_rows_without_keys(tmp_path: Path) -> None:
    index = build(tmp_path, pa.table({"n": range(400)}))
    with pytest.raises(ConfigError, match=r"row 0 has -1: weights are finite"):
        open_weights(index, "n - 1", index.path.parent)
    (tmp_path / "out").mkdir()

    def split(of: Index) -> set[int]:
        files = export(of, ExportOptions(splits={"val": 0.2}, seed=1), tmp_path / "out")
        return set(pq.read_table(files["val"].path)["n"].to_numpy().tolist())

    everything = split(index)
    assert 40 < len(everything) < 120
    assert split(build(tmp_path, pa.table({"n": range(400)}), where="n < 200")) == {n for n in everything if n < 200}
