"""Columns of other tables by key: which rows get which values, and what is refused."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import sqlite3
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream.config import JoinOptions, LazyOptions
from sqlstream.errors import ConfigError, SchemaError, SourceChangedError, SourceError
from sqlstream.index.explain import explain
from sqlstream.index.file.index import Index
from tests.index.sources import FolderReader, all_rows, build, make_samples, options, write_csv, write_table

NAN = float("nan")


def joined(tmp_path: Path, src: Any, tables: dict[str, Any], *, on: str = "id", missing: str = "raise", **more: Any) -> Index:
    named = {name: str(table) if isinstance(table, Path) else table for name, table in tables.items()}
    return build(tmp_path, src, join=JoinOptions.of(named, on, missing), **more)


def write(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def test_rows_get_the_columns_of_other_tables_and_keep_their_order(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "t.csv", "id,caption\nc,a bird\na,a cat\nb,a dog\n")
    latents = write(tmp_path / "latents.parquet", id=["a", "b", "c", "d"], latent=[[1.0], [NAN, 2.0], None, []], n=[1, 2, 3, 4])
    scores = write_csv(tmp_path / "s.csv", "score,id\n0.5,b\n0.25,a\nnan,c\n")
    index = joined(tmp_path, source, {"latents": latents, "scores": scores})
    assert [column.name for column in index.columns] == ["id", "caption", "latent", "n", "score"]
    assert str(all_rows(index)) == str(
        [
            {"id": "c", "caption": "a bird", "latent": None, "n": 3, "score": NAN},
            {"id": "a", "caption": "a cat", "latent": [1.0], "n": 1, "score": 0.25},
            {"id": "b", "caption": "a dog", "latent": [NAN, 2.0], "n": 2, "score": 0.5},
        ]
    )
    assert [path.suffix for path in (tmp_path / "index").iterdir()] == [".sqlite"]  # nothing of the joined tables is left


def test_a_name_that_is_taken_comes_after_the_name_of_its_table(tmp_path: Path) -> None:
    source = write_table(tmp_path / "t.jsonl", [{"id": 1, "width": 10, "url": "a"}])
    masks = write_table(tmp_path / "m.jsonl", [{"id": 1, "width": 11, "height": 5}])
    depth = write_table(tmp_path / "d.jsonl", [{"id": 1, "width": 12, "height": 6}])
    (row,) = all_rows(joined(tmp_path, source, {"masks": masks, "depth": depth}))
    assert row == {
        "id": 1,
        "width": 10,
        "url": "a",
        "masks_width": 11,
        "height": 5,
        "depth_width": 12,
        "depth_height": 6,
    }
    clash = write_table(tmp_path / "c.jsonl", [{"id": 1, "width": 1, "masks_width": 2}])
    with pytest.raises(SchemaError, match=r"column 'width' of the joined table 'masks' .* neither that nor 'masks_width'"):
        joined(tmp_path, clash, {"masks": masks})


def test_columns_of_any_name_are_joined(tmp_path: Path) -> None:
    source = write_table(tmp_path / "t.jsonl", [{"id": 1, "URL": "a"}])
    table = write_table(tmp_path / "m.jsonl", [{"url": "b", "row": 7, "": "empty", 'a"b': 1, "__row__": 5, "rows": 6, "id": 1}])
    (row,) = all_rows(joined(tmp_path, source, {"more": table}))
    assert row == {"id": 1, "URL": "a", "url": "b", "row": 7, "": "empty", 'a"b': 1, "more___row__": 5, "rows": 6}


def test_a_key_that_is_a_path_is_compared_as_the_tables_have_it(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "a/t.csv", "url\n1.jpg\n2.jpg\n")
    table = write_csv(tmp_path / "b/l.csv", "v,url\n2,2.jpg\n1,1.jpg\n")
    index = joined(tmp_path, source, {"more": table}, on="url", columns_to_download=("url",))
    assert all_rows(index) == [{"url": str(tmp_path / f"a/{n}.jpg"), "v": n} for n in (1, 2)]


def test_lists_of_paths_start_at_their_own_table(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "a/t.csv", "id,u\n1,x\n2,x\n3,x\n")
    rows: list[dict[str, Any]] = [{"id": 3, "paths": None}, {"id": 1, "paths": ["a", None, "s3://b/c"]}, {"id": 2, "paths": []}]
    (tmp_path / "b").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b/l.parquet")
    index = joined(tmp_path, source, {"more": tmp_path / "b/l.parquet"}, columns_to_download=("paths",))
    assert [row["paths"] for row in all_rows(index)] == [[str(tmp_path / "b/a"), None, "s3://b/c"], [], None]


def test_a_later_file_that_has_the_name_of_a_joined_column_is_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "d/1.jsonl", [{"id": 1}])
    write_table(tmp_path / "d/2.jsonl", [{"id": 2, "width": 3}])
    masks = write_table(tmp_path / "m.jsonl", [{"id": 1, "width": 11}, {"id": 2, "width": 12}])
    with pytest.raises(SchemaError, match=r"d/2.jsonl has a column 'width', and so has a joined table"):
        joined(tmp_path, tmp_path / "d/*.jsonl", {"masks": masks})


def test_a_row_without_a_partner_is_an_error_or_none_or_left_out(tmp_path: Path) -> None:
    source = write_table(tmp_path / "t.jsonl", [{"id": key, "n": n} for n, key in enumerate(["a", None, "x", "b"])])
    table = write_table(
        tmp_path / "l.jsonl", [{"id": "b", "v": 2}, {"id": None, "v": 0}, {"id": None, "v": 0}, {"id": "a", "v": 1}]
    )
    with pytest.raises(
        SourceError, match=r"row 1 of .*t.jsonl has no value in 'id' .*l.jsonl, the joined table 'more'.*'null'.*'drop'"
    ):
        joined(tmp_path, source, {"more": table})
    nulls = joined(tmp_path, source, {"more": table}, missing="null")
    assert [(row["n"], row["v"]) for row in all_rows(nulls)] == [(0, 1), (1, None), (2, None), (3, 2)]
    rest = joined(tmp_path, source, {"more": table}, missing="drop")
    assert [(row["n"], row["v"]) for row in all_rows(rest)] == [(0, 1), (3, 2)]
    first = joined(tmp_path, source, {"more": table}, missing="drop", max_size=1)
    assert [row["n"] for row in all_rows(first)] == [0]
    few = write_table(tmp_path / "f.jsonl", [{"id": "x", "w": 1}])
    with pytest.raises(SourceError, match="has no rows with a partner in every table of join"):
        joined(tmp_path, source, {"more": table, "few": few}, missing="drop")
    only_x = write_table(tmp_path / "x.jsonl", [{"id": "a", "w": 1}, {"id": None, "w": 2}])
    with pytest.raises(SourceError, match=r"row 2 of .*t.jsonl has id='x', which no row has"):
        joined(tmp_path, build_rows(tmp_path, ["a", "a", "x"]), {"more": only_x})


def build_rows(folder: Path, keys: list[str]) -> Path:
    return write_table(folder / "t.jsonl", [{"id": key} for key in keys])


def test_a_key_that_is_twice_in_a_joined_table_is_named_with_both_rows(tmp_path: Path) -> None:
    source = write_table(tmp_path / "t.jsonl", [{"id": 1}])
    write_table(tmp_path / "l/1.jsonl", [{"id": 5}, {"id": 7}])
    write_table(tmp_path / "l/2.jsonl", [{"id": 6}, {"id": 9}, {"id": 7}])
    with pytest.raises(
        SourceError, match=r"row 1 of .*l/1.jsonl and row 2 of .*l/2.jsonl of .*'more' have the same value 7 in 'id'"
    ):
        joined(tmp_path, source, {"more": str(tmp_path / "l/*.jsonl")})


@pytest.mark.parametrize(
    ("own", "theirs", "named"),
    [
        (pa.array([1]), pa.array(["1"]), "is int64 in .*t.parquet and string in .*l.parquet .*'more'"),
        (pa.array(["1"]), pa.array([1], pa.int32()), "is string in .* and int32 in "),
        (pa.array([b"1"]), pa.array(["1"]), "is binary in .* and string in "),
        (pa.array([1.0]), pa.array([1.0]), "values of type double in 'id', which cannot name rows"),
        (pa.array([1]), pa.array([[1]]), "l.parquet has values of type list"),
    ],
)
def test_keys_of_types_that_are_never_equal_are_refused(tmp_path: Path, own: Any, theirs: Any, named: str) -> None:
    source, table = write(tmp_path / "t.parquet", id=own), write(tmp_path / "l.parquet", id=theirs, v=[1])
    with pytest.raises(SchemaError, match=named):
        joined(tmp_path, source, {"more": table}, missing="null")


@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        (pa.array([1, 2], pa.int8()), pa.array([2, 1], pa.uint64())),
        (pa.array([2**64 - 1, 5], pa.uint64()), pa.array([5, 2**64 - 1], pa.uint64())),
        (pa.array(["1", "2"]).dictionary_encode(), pa.array(["2", "1"], pa.large_string())),
        (pa.array([b"1", b"\0"]), pa.array([b"\0", b"1"], pa.large_binary())),
    ],
)
def test_keys_are_compared_whatever_their_width(tmp_path: Path, own: Any, theirs: Any) -> None:
    source, table = write(tmp_path / "t.parquet", id=own), write(tmp_path / "l.parquet", id=theirs, v=["second", "first"])
    assert [row["v"] for row in all_rows(joined(tmp_path, source, {"more": table}))] == ["first", "second"]


@pytest.mark.parametrize("missing", ["raise", "drop"])
def test_moments_of_a_table_whose_files_have_other_units_find_their_partners(missing: str, tmp_path: Path) -> None:
    moments = [dt.datetime(2024, 1, 1, second=second) for second in range(4)]
    files: list[tuple[str, Any, list[dt.datetime]]] = [("a", "ms", moments[:2]), ("b", "us", moments[2:])]
    for name, kind, some in files:
        write(tmp_path / "j" / f"{name}.parquet", id=pa.array(some, pa.timestamp(kind)), at=[at.second for at in some])
    source = pa.table({"id": pa.array(moments, pa.timestamp("us"))})
    rows = all_rows(joined(tmp_path, source, {"j": tmp_path / "j" / "*.parquet"}, missing=missing))
    assert rows == [{"id": at, "at": at.second} for at in moments]
    write(tmp_path / "j" / "c.parquet", id=pa.array(moments[:1], pa.timestamp("us")), at=[9])
    with pytest.raises(SourceError, match=r"have the same value '2024-01-01 00:00:00\.000000' in 'id'"):
        joined(tmp_path, source, {"j": tmp_path / "j" / "*.parquet"})


def test_only_kept_columns_are_joined_and_the_key_need_not_be_kept(tmp_path: Path) -> None:
    source = write_table(tmp_path / "t.jsonl", [{"id": 1, "index": "a", "n": 1}, {"id": 2, "index": "b", "n": 2}])
    table = write_table(tmp_path / "l.jsonl", [{"id": 2, "v": 2, "w": 3}, {"id": 1, "v": 1, "w": 3}])
    index = joined(tmp_path, source, {"more": table}, columns_to_keep=("v",))
    assert all_rows(index) == [{"index": "a", "v": 1}, {"index": "b", "v": 2}]
    assert joined(tmp_path, source, {"more": table}, key_column="v").key_column == "v"


def test_more_rows_than_are_asked_for_together(tmp_path: Path) -> None:
    num = 17_000
    source = write(tmp_path / "t.parquet", id=list(range(num)))
    table = write(tmp_path / "l.parquet", id=list(reversed(range(num))), text=[f"{n:01100}" for n in reversed(range(num))])
    index = joined(tmp_path, source, {"more": table}, where="cast(text AS INTEGER) = id")
    assert len(index) == num


def test_a_changed_table_is_joined_again_and_named(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "t.csv", "id\n1\n")
    table = write_csv(tmp_path / "l.csv", "id,v\n1,1\n")
    first = joined(tmp_path, source, {"more": table})
    assert joined(tmp_path, source, {"more": table}).path == first.path
    other_ways: list[dict[str, Any]] = [{"missing": "null"}, {"tables": {"other": table}}]
    for way in other_ways:
        assert joined(tmp_path, source, **{"tables": {"more": table}, **way}).path != first.path
    write_csv(tmp_path / "l.csv", "id,v\n1,2\n")
    os.utime(table, ns=(1, 1))
    with pytest.raises(SourceChangedError, match=r"l.csv has another version"):
        joined(tmp_path, source, {"more": table}, on_source_change="raise")
    assert all_rows(joined(tmp_path, source, {"more": table})) == [{"id": 1, "v": 2}]


def test_a_source_that_grows_is_joined_with_all_its_files(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "l.csv", "id,v\n1,1\n2,2\n")
    write_csv(tmp_path / "d/1.csv", "id,more_v,v\n1,0,0\n")
    with pytest.raises(SchemaError):
        joined(tmp_path, tmp_path / "d/*.csv", {"more": table})
    write_csv(tmp_path / "d/1.csv", "id,v\n1,0\n")
    assert len(joined(tmp_path, tmp_path / "d/*.csv", {"more": table}, on_source_change="raise")) == 1
    write_csv(tmp_path / "d/2.csv", "id\n2\n")
    grown = joined(tmp_path, tmp_path / "d/*.csv", {"more": table}, on_source_change="raise")
    assert all_rows(grown) == [{"id": 1, "v": 0, "more_v": 1}, {"id": 2, "v": None, "more_v": 2}]
    assert [(count.source[-5:], count.num_kept) for count in explain(grown, "SELECT * FROM dataframe")] == [
        ("1.csv", 1),
        ("2.csv", 1),
    ]


def test_the_content_of_joined_tables_counts_and_not_their_place(tmp_path: Path) -> None:
    found = []
    for place in ("here", "there"):
        source = write_csv(tmp_path / place / "a/t.csv", "id,url\n1,1.jpg\n2,\n")
        table = write_csv(tmp_path / place / "b/l.csv", "id,latent\n2,2.npy\n1,1.npy\n")
        index = joined(tmp_path, source, {"more": table}, columns_to_download=("url", "latent"))
        assert [(row["url"], row["latent"]) for row in all_rows(index)] == [
            (str(tmp_path / place / "a/1.jpg"), str(tmp_path / place / "b/1.npy")),
            (None, str(tmp_path / place / "b/2.npy")),
        ]
        found.append(index.content)
    assert found[0] == found[1] is not None
    write_csv(tmp_path / "there/b/l.csv", "id,latent\n2,2.npy\n1,3.npy\n")
    assert joined(tmp_path, source, {"more": table}, columns_to_download=("url", "latent")).content != found[0]


def test_remote_tables_and_tables_in_memory_are_joined_to_remote_folders(tmp_path: Path) -> None:
    make_samples(tmp_path / "bucket/d", *(f"{n}.jpg" for n in range(20)))
    write(tmp_path / "bucket/l.parquet", index=[str(n) for n in range(1, 20, 2)], v=list(range(1, 20, 2)))
    remote = FolderReader(tmp_path / "bucket")
    extra = [{"index": str(n), "w": n} for n in range(20)]
    tables: dict[str, Any] = {"more": "s3://bucket/l.parquet", "extra": extra}
    given: dict[str, Any] = {"remote": remote, "data_type": "image", "columns_to_download": ("jpg",)}
    index = joined(tmp_path, "s3://bucket/d/", tables, on="index", missing="drop", **given)
    rows = all_rows(index)
    assert sorted((row["index"], row["v"], row["w"]) for row in rows) == sorted((str(n), n, n) for n in range(1, 20, 2))
    assert {index.resolve(str(row["jpg"])) for row in rows} == {f"s3://bucket/d/{n}.jpg" for n in range(1, 20, 2)}
    listed = index.listed(range(len(rows)))
    assert len(listed) == len(rows)  # each row has what the listing says of its own file, not of one that was left out
    etags = {path.stem: str(path.stat().st_mtime_ns) for path in (tmp_path / "bucket/d").iterdir()}
    assert all(etags[str(row["index"])] in listed[at] for at, row in enumerate(rows))


def test_folders_with_metadata_and_several_files_are_joined(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "t.csv", "id\n1\n2\n")
    write_csv(tmp_path / "f/metadata.csv", "file_name,id,caption\nb.jpg,2,two\na.jpg,1,one\n")
    write_table(tmp_path / "h/day=7/t.parquet", [{"id": 2, "v": 2}])
    write_table(tmp_path / "h/day=8/t.parquet", [{"id": 1, "v": 0.5}])
    tables = {"photos": str(tmp_path / "f"), "days": str(tmp_path / "h/*/t.parquet")}
    rows = all_rows(joined(tmp_path, source, tables, columns_to_download=("file_name",)))
    assert rows == [
        {"id": 1, "file_name": str(tmp_path / "f/a.jpg"), "caption": "one", "v": 0.5, "day": 8},
        {"id": 2, "file_name": str(tmp_path / "f/b.jpg"), "caption": "two", "v": 2.0, "day": 7},
    ]


def test_the_result_of_a_database_is_joined(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "x.db")) as db:
        db.executescript("CREATE TABLE t (id, q); INSERT INTO t VALUES (1, 'a'), (2, 'b'), (3, 'c')")
    url, rows = f"sqlite:///{tmp_path}/x.db", ({"id": n, "v": n} for n in (3, 2, 1))
    index = joined(tmp_path, url, {"more": rows}, sql_query="SELECT * FROM t WHERE id > 1", where="v < 3")
    assert all_rows(index) == [{"id": 2, "q": "b", "v": 2}]


def test_what_cannot_be_joined_is_refused(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "t.csv", "id\n1\n")
    (tmp_path / "d").mkdir()
    with pytest.raises(SchemaError, match=r"t.csv has no column 'key', by which tables are joined: it has 'id'"):
        joined(tmp_path, source, {"more": write_csv(tmp_path / "k.csv", "key\n1\n")}, on="key")
    with pytest.raises(SchemaError, match=r"k.csv, which join calls 'more', has no column 'id'"):
        joined(tmp_path, source, {"more": tmp_path / "k.csv"})
    with pytest.raises(ConfigError, match="join has a database as 'more'"):
        joined(tmp_path, source, {"more": "sqlite:///a.db"})
    with pytest.raises(ConfigError, match=r"the table 'more' of join must be a table file, .* a folder with metadata"):
        joined(tmp_path, source, {"more": str(tmp_path / "d")})
    lazy = LazyOptions(chunk_rows=1)
    with pytest.raises(ConfigError, match="lazy_index_chunk_size leaves in their files"):
        options(source, join=JoinOptions.of({"more": "a"}, "id", "raise"), lazy=lazy)


@pytest.mark.parametrize(
    ("tables", "on", "missing", "named"),
    [
        ({"a": "b"}, None, "raise", "on=None names no column"),
        (None, "id", "raise", "on='id' .* join names none"),
        (["b"], "id", "raise", "join=.* is no dict"),
        ({"": "b"}, "id", "raise", "join has the name ''"),
        ({"a": []}, "id", "raise", r"join\['a'\] is empty"),
        ({"a": "b"}, "id", "ignore", "missing='ignore' is unknown: give one of raise, null, drop"),
    ],
)
def test_wrong_options_are_named(tables: Any, on: Any, missing: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        JoinOptions.of(tables, on, missing)


def test_decimals_find_their_partner_in_files_of_other_scales(tmp_path: Path) -> None:
    keys = [Decimal("0.123456789012345678"), Decimal("1.5"), Decimal("12345678901234567.89")]
    source = write(tmp_path / "t.parquet", id=pa.array(keys, pa.decimal256(60, 20)))
    for number, (key, scale) in enumerate(zip(keys, (18, 20, 2), strict=True)):
        write(tmp_path / f"join/{number}.parquet", id=pa.array([key], pa.decimal256(40 + scale, scale)), n=[number])
    index = joined(tmp_path, source, {"more": str(tmp_path / "join/*.parquet")})
    assert [(row["id"], row["n"]) for row in all_rows(index)] == list(zip(keys, range(3), strict=True))
