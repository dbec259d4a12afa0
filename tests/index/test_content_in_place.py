"""Columns of content in Parquet files: what is one, what the index file has of them, and where a row's content is."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream.config import JoinOptions
from sqlstream.errors import QueryError, SchemaError, SourceChangedError
from sqlstream.index.build.content import RowGroupIndex
from sqlstream.index.build.parquet.row_groups import content_columns
from sqlstream.index.export import ExportOptions, export
from sqlstream.index.file.index import Index
from sqlstream.index.info import describe
from sqlstream.storage.base.protocols import ObjectInfo
from tests.index.sources import FolderReader, all_rows, build, write_table

GROUP_ROWS, NUM_ROWS, BYTES = 10, 40, 60_000
PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def picture(number: int) -> bytes:
    return random.Random(number).randbytes(BYTES)


def table(first: int = 0, num_rows: int = NUM_ROWS) -> pa.Table:
    ids = range(first, first + num_rows)
    images = pa.array([{"bytes": picture(number), "path": f"{number}.jpg"} for number in ids], PICTURE)
    return pa.table({"index": [f"key-{number}" for number in ids], "n": ids, "image": images})


def write(path: Path, rows: pa.Table | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table() if rows is None else rows, path, row_group_size=GROUP_ROWS, compression="none")
    return path


def content_of(index: Index, row_ids: list[int]) -> list[Any]:
    """The content of rows of a local source; "value" where the index file has it."""
    assert isinstance(index, RowGroupIndex)
    found: list[Any] = []
    for chunk, row in index.chunks_of(row_ids).tolist():
        found.append("value" if chunk < 0 else index.read(chunk, [], ["image"]).column("image")[row].as_py())
    return found


def numbers(index: Index, row_ids: list[int]) -> list[int]:
    """Which rows of the source their content is of, by their paths."""
    return [int(content["path"].removesuffix(".jpg")) for content in content_of(index, row_ids)]


def feature(kind: str) -> dict[str, str]:
    return {"_type": kind}


@pytest.mark.parametrize(
    ("column", "features", "named", "is_content"),
    [
        (pa.array([{"bytes": b"x", "path": None}], PICTURE), None, (), True),
        (pa.array([{"path": None, "bytes": b"x"}], pa.struct([PICTURE[1], PICTURE[0]])), None, (), True),
        (pa.array([{"bytes": None, "path": "x"}], PICTURE), None, ("c",), False),
        (pa.array([{"bytes": None, "path": "x"}, None], PICTURE), {"c": feature("Image")}, (), False),
        (pa.array([{"bytes": 1, "path": "x"}]), None, ("c",), False),
        (pa.array([{"bytes": b"x", "path": "x", "n": 1}]), None, ("c",), False),
        (pa.array([b"x"]), None, (), False),
        (pa.array([b"x"]), None, ("c",), True),
        (pa.array([b"x"], pa.large_binary()), {"c": feature("Audio")}, (), True),
        (pa.array([b"x"]), {"c": feature("Value"), "d": feature("Image")}, (), False),
        (pa.array([b"x"]), {"c": "Image"}, (), False),
        (pa.array([b"x"]), "no features", (), False),
        (pa.array(["x"]), {"c": feature("Image")}, ("c",), False),
        (pa.array([[b"x"]]), {"c": [feature("Image")]}, ("c",), False),
    ],
)
def test_which_columns_hold_content(
    column: Any, features: Any, named: tuple[str, ...], is_content: bool, tmp_path: Path
) -> None:
    rows = pa.table({"c.bytes": ["another column"] * len(column), "c": column})
    if features is not None:
        rows = rows.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(rows, tmp_path / "t.parquet")
    assert content_columns(pq.read_metadata(tmp_path / "t.parquet"), named) == (("c",) if is_content else ())


def test_the_index_has_all_but_the_content_and_asks_for_all_but_that(tmp_path: Path) -> None:
    write(tmp_path / "bucket/year=2024/t.parquet")
    remote = FolderReader(tmp_path / "bucket")
    index = build(tmp_path, "s3://bucket/**/*.parquet", remote)
    assert index.path.stat().st_size < 100_000
    assert remote.num_bytes < 300_000 < NUM_ROWS * BYTES / 6
    assert remote.count["download"] == 0
    assert [column.name for column in index.columns] == ["index", "n", "image", "year"]
    assert [column.name for column in index.sql_columns] == ["index", "n", "year"]
    assert index.rows([7]) == [{"index": "key-7", "n": 7, "image": None, "year": 2024}]
    assert [column.name for column in describe(index.path).columns if column.is_in_place] == ["image"]
    again = pickle.loads(pickle.dumps(build(tmp_path, "s3://bucket/**/*.parquet", remote)))
    (span,) = again.place_of(2, ["image"]).spans
    assert GROUP_ROWS * BYTES < span[1] - span[0] < 1.01 * GROUP_ROWS * BYTES


def test_a_small_remote_file_comes_with_one_request(tmp_path: Path) -> None:
    write(tmp_path / "bucket/t.parquet", table(num_rows=5))
    remote = FolderReader(tmp_path / "bucket")
    index = build(tmp_path, "s3://bucket/t.parquet", remote)
    assert remote.count == {"head": 1, "download": 1}
    assert isinstance(index, RowGroupIndex)


def test_a_remote_file_that_changes_while_it_is_indexed_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "bucket/t.parquet")

    class Changing(FolderReader):
        def head(self, url: str) -> ObjectInfo:
            if self.count["head"] == 1:  # it is asked for again once all is read
                os.utime(path, ns=(1, 1))
            return super().head(url)

    with pytest.raises(SourceChangedError, match=r"t\.parquet changed while it was indexed"):
        build(tmp_path, "s3://bucket/t.parquet", Changing(tmp_path / "bucket"))


def test_files_differ_in_what_they_have_of_a_column(tmp_path: Path) -> None:
    write(tmp_path / "d/1.parquet", table(0, 15))
    pq.write_table(table(15, 5).set_column(2, "image", pa.nulls(5, PICTURE)), tmp_path / "d/2.parquet")
    pq.write_table(table(20, 5).drop_columns(["image"]), tmp_path / "d/3.parquet")
    write(tmp_path / "d/4.parquet", pa.table({"image": table(25, 15)["image"]}))
    index = build(tmp_path, tmp_path / "d/*.parquet")
    assert len(index) == 40
    assert numbers(index, [0, 14, 25, 39]) == [0, 14, 25, 39]
    assert content_of(index, [15, 24]) == ["value", "value"]
    assert index.rows([30]) == [{"index": None, "n": None, "image": None}]


def test_other_sources_in_a_list_keep_their_values(tmp_path: Path) -> None:
    with pa.ipc.new_file(str(tmp_path / "t.arrow"), table().schema) as arrow:
        arrow.write_table(table(0, 3))
    index = build(tmp_path, [str(tmp_path / "t.arrow"), str(write(tmp_path / "t.parquet", table(3, 12)))])
    assert content_of(index, [0, 2]) == ["value", "value"]
    assert index.rows([2])[0]["image"] == {"bytes": picture(2), "path": "2.jpg"}
    assert numbers(index, [3, 14]) == [3, 14]
    assert not isinstance(build(tmp_path, tmp_path / "t.arrow"), RowGroupIndex)


def test_rows_that_a_join_leaves_out_do_not_shift_content(tmp_path: Path) -> None:
    write(tmp_path / "t.parquet")
    write(tmp_path / "u.parquet", table(40, 10))
    write_table(tmp_path / "scores.csv", [{"n": number, "score": number} for number in range(0, 50, 3)])
    join = JoinOptions.of({"scores": str(tmp_path / "scores.csv")}, "n", "drop")
    index = build(tmp_path, [str(tmp_path / "t.parquet"), str(tmp_path / "u.parquet")], join=join)
    assert numbers(index, list(range(len(index)))) == [row["n"] for row in all_rows(index)] == list(range(0, 50, 3))
    computed = build(
        tmp_path,
        [str(tmp_path / "t.parquet"), str(tmp_path / "u.parquet")],
        join=join,
        sql_query="SELECT *, n * 2 AS twice FROM dataframe WHERE n > 20",
    )
    rows = all_rows(computed)
    assert numbers(computed, list(range(len(rows)))) == [row["n"] for row in rows]
    assert rows[0]["twice"] == 42


@pytest.mark.parametrize(
    "query",
    ["SELECT * FROM dataframe WHERE image IS NOT NULL", "SELECT n, image FROM dataframe", "SELECT image.path FROM samples"],
)
def test_a_query_that_names_content_is_refused(query: str, tmp_path: Path) -> None:
    with pytest.raises(QueryError, match=r"image.*the content of 'image' stays in its files, where no query reads it"):
        build(tmp_path, write(tmp_path / "t.parquet"), sql_query=query)


def test_a_query_that_computes_columns_keeps_the_content_of_its_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet")
    query = "SELECT *, n + 100 AS m FROM dataframe WHERE n % 7 = 3 ORDER BY n DESC"
    index = build(tmp_path, path, sql_query=query, columns_to_download=("image",))
    rows = all_rows(index)
    assert [row["m"] for row in rows] == [138, 131, 124, 117, 110, 103]
    assert numbers(index, list(range(len(rows)))) == [row["n"] for row in rows]
    assert build(tmp_path, path, sql_query=query, columns_to_download=("image",)).content == index.content
    with pytest.raises(SchemaError, match="gives no 'image', whose content stays in its files: begin it with 'SELECT"):
        build(tmp_path, path, sql_query="SELECT n FROM dataframe", columns_to_download=("image",))


def test_duckdb_sees_no_content_either(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    path = write(tmp_path / "t.parquet")
    with pytest.raises(QueryError, match="the content of 'image' stays in its files, where no query reads it"):
        build(tmp_path, path, sql_query="SELECT n, image FROM dataframe", sql_engine="duckdb")
    index = build(tmp_path, path, sql_query="SELECT *, n + 100 AS m FROM dataframe WHERE n % 7 = 3", sql_engine="duckdb")
    assert numbers(index, [0, 1]) == [3, 10]


def test_a_query_may_put_another_column_in_the_place_of_content(tmp_path: Path) -> None:
    index = build(tmp_path, write(tmp_path / "t.parquet"), sql_query="SELECT *, n || '.png' AS image FROM dataframe")
    assert index.rows([3])[0]["image"] == "3.png"
    assert not isinstance(index, RowGroupIndex)


def test_content_that_is_a_key_or_is_not_kept_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet")
    assert not isinstance(build(tmp_path, path, columns_to_keep=("n",)), RowGroupIndex)
    assert isinstance(build(tmp_path, path, columns_to_keep=("n", "image")), RowGroupIndex)
    keys = write(tmp_path / "k.parquet", pa.table({"key": [b"a", b"b"]}))
    index = build(tmp_path, keys, key_column="key", columns_to_download=("key",))
    assert [row["key"] for row in all_rows(index)] == [b"a", b"b"]


def test_row_groups_that_no_process_should_hold_are_copied_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "sqlstream"):
        index = build(tmp_path, write(tmp_path / "t.parquet"), largest_content_bytes=GROUP_ROWS * BYTES)
    assert "its bytes are copied into the index; write it with smaller row groups" in caplog.text
    assert index.rows([3])[0]["image"] == {"bytes": picture(3), "path": "3.jpg"}


def test_an_index_grows_also_from_one_that_has_copies(tmp_path: Path) -> None:
    write(tmp_path / "d/1.parquet", table(0, 12))
    before = build(tmp_path, tmp_path / "d/*.parquet", largest_content_bytes=0)  # as earlier versions
    assert build(tmp_path, tmp_path / "d/*.parquet").path == before.path, "it is as good"
    assert not isinstance(before, RowGroupIndex)
    write(tmp_path / "d/2.parquet", table(12, 12))
    second = build(tmp_path, tmp_path / "d/*.parquet")
    assert second.rows([11])[0]["image"] == {"bytes": picture(11), "path": "11.jpg"}
    assert content_of(second, [11]) == ["value"]
    assert numbers(second, [12, 23]) == [12, 23]


def test_an_index_with_content_in_place_grows(tmp_path: Path) -> None:
    write(tmp_path / "d/1.parquet", table(0, 12))
    first = build(tmp_path, tmp_path / "d/*.parquet")
    write(tmp_path / "d/2.parquet", table(12, 12))
    second = build(tmp_path, tmp_path / "d/*.parquet")
    assert numbers(second, [0, 11, 12, 23]) == [0, 11, 12, 23]
    assert first.content != second.content
    assert second.content == build(tmp_path, f"{tmp_path}/d/**/*.parquet").content


def test_earlier_versions_do_not_take_it_for_theirs(tmp_path: Path) -> None:
    """They compare the layout, and go on from what has their lineage."""
    index, plain = (
        build(tmp_path, write(tmp_path / "t.parquet")),
        build(tmp_path, write(tmp_path / "p.parquet", table().select([1]))),
    )
    assert (index.meta["layout"], plain.meta.get("layout")) == ("content in place", None)


def test_an_export_says_that_it_has_no_content(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = build(tmp_path, write(tmp_path / "t.parquet"))
    with caplog.at_level(logging.WARNING, "sqlstream"):
        written = export(index, ExportOptions(extension=".parquet", row_group_rows=100), tmp_path)
    assert "the content of 'image' stays in the files" in caplog.text
    assert pq.read_table(written[""].path).schema.names == ["index", "n"]


def test_the_digest_tells_content_apart_by_footers(tmp_path: Path) -> None:
    here, there = (build(tmp_path, write(tmp_path / place / "t.parquet")).content for place in ("here", "there"))
    other = table().set_column(2, "image", pa.array([{"bytes": picture(99), "path": None}] * NUM_ROWS, PICTURE))
    assert here == there is not None
    assert build(tmp_path, write(tmp_path / "other/t.parquet", other)).content != here


def test_places_of_many_rows_are_found_at_once(tmp_path: Path) -> None:
    index = build(tmp_path, write(tmp_path / "t.parquet"))
    assert isinstance(index, RowGroupIndex)
    found = index.chunks_of(np.arange(NUM_ROWS).tolist())  # [n, 2]
    assert found[:, 0].tolist() == [row // GROUP_ROWS for row in range(NUM_ROWS)]
    assert found[:, 1].tolist() == [row % GROUP_ROWS for row in range(NUM_ROWS)]
    assert index.chunks_of([]).shape == (0, 2)
