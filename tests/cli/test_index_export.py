"""`sqlstream index export`, `explain`, `info --ranges`: on real tables and a real S3 server."""

from __future__ import annotations

import csv
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream.testing.servers import LocalS3
from tests.cli.commands import run, run_json

NUM_ROWS = 1000


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    for number in range(2):
        rows = range(number * NUM_ROWS // 2, (number + 1) * NUM_ROWS // 2)
        table = pa.table(
            {
                "index": [f"k{at}" for at in rows],
                "n": list(rows),
                "tags": [[f"t{at % 3}"] for at in rows],
                "none": pa.nulls(len(rows), pa.float64()),
            }
        )
        pq.write_table(table, tmp_path / f"part-{number}.parquet")
    result = run("index", "build", tmp_path / "*.parquet", tmp_path / "cache")
    assert result.returncode == 0, result.stderr
    return tmp_path / "cache"


def exported(dst: Path, out: Path | str, *words: str) -> list[str]:
    files: list[str] = run_json("index", "export", dst, str(out), *words)["files"]
    return files


def column(path: str, name: str) -> list[Any]:
    values: list[Any] = pq.read_table(path)[name].to_pylist()
    return values


def test_an_export_is_the_index_with_its_types_and_row_groups(dst: Path, tmp_path: Path) -> None:
    (path,) = exported(dst, tmp_path / "out.parquet", "--row-group-rows", "300")
    table = pq.read_table(path)
    assert table.schema.field("tags").type == pa.list_(pa.string())
    assert table["n"].to_pylist() == list(range(NUM_ROWS))
    assert table["tags"][4].as_py() == ["t1"]
    metadata = pq.ParquetFile(path).metadata
    assert [metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)] == [300, 300, 300, 100]
    assert sorted(os.listdir(tmp_path)) == ["cache", "out.parquet", "part-0.parquet", "part-1.parquet"]


def test_an_export_is_filtered_and_shuffled(dst: Path, tmp_path: Path) -> None:
    words = ("--sql", "SELECT * FROM dataframe WHERE n < 500 ORDER BY n DESC", "--where", "n % 2 = 0")
    (plain,) = exported(dst, tmp_path / "a.parquet", *words)
    (shuffled,) = exported(dst, tmp_path / "b.parquet", *words, "--shuffle-seed", "3")
    (again,) = exported(dst, tmp_path / "c.parquet", *words, "--shuffle-seed", "3")
    assert column(plain, "n") == list(range(498, -1, -2))
    assert column(shuffled, "n") == column(again, "n") != column(plain, "n")
    assert sorted(column(shuffled, "n")) == sorted(column(plain, "n"))


def test_an_export_with_weights_has_rows_as_often_as_they_weigh(dst: Path, tmp_path: Path) -> None:
    (path,) = exported(
        dst, tmp_path / "w.parquet", "--weights", "CASE WHEN n < 10 THEN 3 WHEN n < 20 THEN 1 ELSE 0 END", "--num-rows", "80"
    )
    counts = Counter(column(path, "n"))
    assert counts == {**dict.fromkeys(range(10), 6), **dict.fromkeys(range(10, 20), 2)}


def test_splits_share_the_rows_by_key(dst: Path, tmp_path: Path) -> None:
    words = ("--split", "val=0.1", "--split", "test=0.2")
    files = exported(dst, tmp_path / "s.parquet", *words, "--shuffle-seed", "1")
    assert [Path(file).name for file in files] == ["s-val.parquet", "s-test.parquet", "s-train.parquet"]
    parts = [set(column(file, "index")) for file in files]
    assert sum(map(len, parts)) == len(set.union(*parts)) == NUM_ROWS
    assert [round(len(part) / NUM_ROWS, 1) for part in parts] == [0.1, 0.2, 0.7]
    fewer = exported(dst, tmp_path / "t.parquet", *words, "--shuffle-seed", "1", "--where", "n < 500")
    for part, file in zip(parts, fewer, strict=True):
        assert set(column(file, "index")) <= part  # a key stays in its split when others come or go


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--split", "val"), "no split"),
        (("--split", "val=2"), "out of range"),
        (("--split", "val=0.1", "--split", "val=0.2"), "--split names 'val' twice"),
        (("--num-rows", "0"), "num-rows=0 is out of range: give 1 or more"),
        (("--split", "a=0.5", "--split", "b=0.5"), "leave something"),
        (("--split", "train=0.5"), "no name"),
        (("--split", "val=0.00001"), "has no row"),
        (("--weights", "0"), "add up to 0"),
        (("--where", "gone > 1"), "no such column"),
        (("--where", "n) UNION ALL SELECT * FROM dataframe WHERE (n"), "not one SQL expression"),
        (("--weights", "1) FROM dataframe UNION ALL SELECT row, (2"), "not one SQL expression"),
        (("--row-group-rows", "0"), "row-group-rows=0"),
    ],
)
def test_an_export_that_cannot_be_leaves_no_file(words: tuple[str, ...], message: str, dst: Path, tmp_path: Path) -> None:
    result = run("index", "export", dst, tmp_path / "out.parquet", *words)
    assert result.returncode == 2
    assert message in result.stderr
    assert not list(tmp_path.glob("out*"))


def test_an_export_goes_to_s3_and_can_be_a_source_again(dst: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalS3() as s3:
        s3.put("bucket/there.txt", b"")
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        (url,) = exported(dst, "s3://bucket/prepared/index.parquet", "--where", "n < 7")
        assert run_json("index", "build", url, tmp_path / "other")["num_rows"] == 7
        missing = run("index", "export", dst, "s3://no-bucket/index.parquet")
        assert missing.returncode == 2
        assert "cannot be written" in missing.stderr


def test_explain_counts_what_a_filter_keeps_of_each_source(dst: Path, tmp_path: Path) -> None:
    found = run_json("index", "explain", dst, "SELECT * FROM dataframe WHERE n >= 400 AND n < 510")
    assert (found["num_rows"], found["num_kept"]) == (NUM_ROWS, 110)
    assert [(Path(s["source"]).name, s["num_rows"], s["num_kept"]) for s in found["sources"]] == [
        ("part-0.parquet", 500, 100),
        ("part-1.parquet", 500, 10),
    ]
    text = run("index", "explain", dst, "SELECT * FROM dataframe WHERE n < 0").stdout
    assert "0 %" in text
    wrong = run("index", "explain", dst, "SELECT n FROM dataframe")
    assert (wrong.returncode, "begin it with SELECT *" in wrong.stderr) == (2, True)
    for value in ("-1", "NULL", "'x'", "n + 100000"):
        wrong = run("index", "explain", dst, f"SELECT {value} AS row FROM dataframe")
        assert wrong.returncode == 2
        assert "gives a column 'row' that holds no row ids: name it differently" in wrong.stderr


def test_info_shows_nulls_and_ranges_when_asked(dst: Path) -> None:
    assert "ranges" not in run_json("index", "info", dst)["indexes"][0]
    (info,) = run_json("index", "info", dst, "--ranges")["indexes"]
    assert {"name": "n", "num_nulls": 0, "least": 0, "greatest": NUM_ROWS - 1} in info["ranges"]
    assert {"name": "none", "num_nulls": NUM_ROWS, "least": None, "greatest": None} in info["ranges"]
    lines = [line.split() for line in run("index", "info", dst, "--ranges").stdout.splitlines()]
    assert ["n", "0", "0", "999"] in lines
    assert next(csv.reader(["index,0,k0,k999"])) in lines


def test_columns_that_a_query_computes_are_exported_and_leave_no_index(dst: Path, tmp_path: Path) -> None:
    out, query = tmp_path / "computed.parquet", "SELECT n, n * 2 AS twice FROM dataframe"
    assert run("index", "export", dst, out, "--sql", query, "--where", "n < 3").returncode == 0
    assert pq.read_table(out).to_pylist() == [{"n": n, "twice": 2 * n} for n in range(3)]
    assert len(run_json("index", "info", dst)["indexes"]) == 1
    keyless = run("index", "export", dst, tmp_path / "split.parquet", "--sql", query, "--split", "val=0.5")
    assert keyless.returncode == 2
    assert "gives no 'index', which is the index column" in keyless.stderr


def test_unsigned_numbers_are_shown_as_numbers(tmp_path: Path) -> None:
    pq.write_table(pa.table({"u": pa.array([3, None, 2**64 - 1], pa.uint64())}), tmp_path / "t.parquet")
    assert run("index", "build", tmp_path / "t.parquet", tmp_path / "c").returncode == 0
    assert run_json("index", "query", tmp_path / "c", "SELECT U, hex(u) AS h FROM dataframe WHERE row <> 0")["rows"] == [
        [None, ""],
        [2**64 - 1, "F" * 16],
    ]
    assert run_json("index", "query", tmp_path / "c", "SELECT max(u), u AS other FROM dataframe")["rows"] == [[2**64 - 1] * 2]
    (info,) = run_json("index", "info", tmp_path / "c", "--ranges")["indexes"]
    assert info["ranges"] == [{"name": "u", "num_nulls": 1, "least": 3, "greatest": 2**64 - 1}]


def test_build_takes_what_a_dataset_takes(tmp_path: Path) -> None:
    for name in ("cat/1.jpg", "dog/1.jpg", "dog/2.jpg"):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_bytes(b"x")
    words = (
        "--data-type",
        "image",
        "--label-column",
        "label",
        "--path-prefix",
        "s3://bucket",
        "--where",
        "label::TEXT = 'dog'",
    )
    built = run_json("index", "build", tmp_path / "d", tmp_path / "cache", *words, "--sql-engine", "duckdb")
    assert (built["num_rows"], built["num_selected"]) == (3, 2)


@pytest.mark.parametrize("extension", ["arrow", "csv", "jsonl"])
def test_an_export_of_another_kind_is_a_source_with_the_same_values(extension: str, dst: Path, tmp_path: Path) -> None:
    (path,) = exported(dst, tmp_path / f"out.{extension}", "--where", "n < 5")
    result = run("index", "build", path, tmp_path / "again")
    assert result.returncode == 0, result.stderr
    document = run_json("index", "query", tmp_path / "again", 'SELECT "index", n, tags, "none" FROM dataframe')
    assert document["rows"] == [[f"k{at}", at, f'["t{at % 3}"]', None] for at in range(5)]


def test_a_column_of_bytes_is_no_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"index": [1], "picture": [[b"x"]]}), tmp_path / "t.parquet")
    assert run("index", "build", tmp_path / "t.parquet", tmp_path / "cache").returncode == 0
    result = run("index", "export", tmp_path / "cache", tmp_path / "out.csv")
    assert result.returncode == 2
    assert "column 'picture' holds bytes, which .csv cannot: write .parquet or .arrow" in result.stderr
    assert not (tmp_path / "out.csv").exists()


def test_an_export_replaces_nothing_unasked_and_writes_no_unknown_kind(dst: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    out.write_text("mine")
    refused = run("index", "export", dst, out)
    assert refused.returncode == 2
    assert f"{out} is there already: add --overwrite" in refused.stderr
    assert out.read_text() == "mine"
    assert run("index", "export", dst, out, "--overwrite").returncode == 0
    assert out.read_text() != "mine"
    unknown = run("index", "export", dst, tmp_path / "out.xls")
    assert unknown.returncode == 2
    assert "out.xls has no extension that an export writes: give one of .parquet, .arrow, .csv, .jsonl" in unknown.stderr


def test_an_export_that_cannot_take_its_name_leaves_nothing_beside_it(dst: Path, tmp_path: Path) -> None:
    (tmp_path / "out.parquet").mkdir()
    result = run("index", "export", dst, tmp_path / "out.parquet", "--overwrite")
    assert (result.returncode, "out.parquet cannot be written" in result.stderr) == (2, True)
    assert sorted(os.listdir(tmp_path)) == ["cache", "out.parquet", "part-0.parquet", "part-1.parquet"]


def test_a_split_takes_no_more_rows_than_it_may(dst: Path, tmp_path: Path) -> None:
    words = ("--split", "val=0.5", "--max-rows", "val=7")
    document = run_json("index", "export", dst, tmp_path / "s.parquet", *words)
    assert document["num_rows"] == [7, NUM_ROWS - 7]
    assert [pq.read_metadata(path).num_rows for path in document["files"]] == document["num_rows"]
    rows = [value for path in document["files"] for value in column(path, "n")]
    assert sorted(rows) == list(range(NUM_ROWS))
    assert "names no split" in run("index", "export", dst, tmp_path / "x.parquet", "--max-rows", "val=7").stderr
