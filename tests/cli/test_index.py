"""`sqlstream index`, on real tables and a real S3 server."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream import StreamingDataset
from sqlstream.testing.servers import LocalS3
from tests.cli.commands import run, run_json
from tests.stream.shards import samples, tar_of

ROWS = [("a", "red circle", 0.5), ("b", "blue, square", 0.9), ("c", "größer \x1b[2J", 0.1)]


@pytest.fixture
def src(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("index", "caption", "score"), *ROWS])
    return path


@pytest.fixture
def dst(tmp_path: Path, src: Path) -> Path:
    result = run("index", "build", src, tmp_path / "cache")
    assert result.returncode == 0, result.stderr
    return tmp_path / "cache"


def test_build_makes_an_index_that_the_next_build_finds(tmp_path: Path, src: Path) -> None:
    first = run_json("index", "build", src, tmp_path / "cache")
    assert first["num_rows"] == first["num_selected"] == 3
    assert [column["name"] for column in first["columns"]] == ["index", "caption", "score"]
    inode = Path(first["path"]).stat().st_ino
    assert run_json("index", "build", src, tmp_path / "cache") == first
    assert Path(first["path"]).stat().st_ino == inode


def test_build_makes_a_directory_that_the_cache_commands_take(dst: Path) -> None:
    stats = run_json("cache", "stats", dst)
    assert stats["entries"] == 0
    assert stats["index_bytes"] > 0
    cleared = run_json("cache", "clear", dst, "--index", "--yes")
    assert cleared["removed_index_files"] == 1
    assert run("index", "info", dst).returncode == 2


def test_build_with_sql_selects_rows(tmp_path: Path, src: Path) -> None:
    words = ("--sql", "SELECT * FROM dataframe WHERE score > 0.3", "--key-column", "index")
    built = run_json("index", "build", src, tmp_path / "cache", *words)
    assert (built["num_rows"], built["num_selected"]) == (3, 2)
    assert "2 selected of 3" in run("index", "info", tmp_path / "cache").stdout


def test_build_joins_tables_by_a_column(tmp_path: Path, src: Path) -> None:
    (tmp_path / "more.csv").write_text("n,index,score\n1,a,7\n3,c,9\n")
    words = ("--join", f"more={tmp_path / 'more.csv'}", "--on", "index")
    failed = run("index", "build", src, tmp_path / "cache", *words)
    assert failed.returncode == 2
    assert "row 1 of" in failed.stderr
    assert "--missing null" in failed.stderr
    built = run_json("index", "build", src, tmp_path / "cache", *words, "--missing", "drop", "--where", "more_score > 7")
    assert (built["num_rows"], built["num_selected"]) == (2, 1)
    assert [column["name"] for column in built["columns"]] == ["index", "caption", "score", "n", "more_score"]
    assert [source["url"] for source in built["sources"]] == [str(src)]
    (join,) = built["joined"]
    assert (join["name"], join["columns"]) == ("more", ["n", "more_score"])
    assert [source["url"] for source in join["sources"]] == [str(tmp_path / "more.csv")]
    shown = run("index", "info", tmp_path / "cache").stdout
    assert f"more: {tmp_path / 'more.csv'}, for n, more_score" in shown
    wrong = run("index", "build", src, tmp_path / "cache", "--join", "more.csv", "--on", "index")
    assert "--join more.csv is no NAME=TABLE" in wrong.stderr


def test_build_reads_a_remote_parquet_with_credentials_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"id": [1, 2], "image": ["x.jpg", "y.jpg"]}), tmp_path / "t.parquet")
    with LocalS3() as s3:
        url = s3.put("bucket/t.parquet", (tmp_path / "t.parquet").read_bytes())
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        built = run_json("index", "build", url, tmp_path / "cache", "--key-column", "id", "--download", "image")
    assert (built["src"], built["key_column"], built["num_rows"]) == (url, "id", 2)


def test_build_of_a_directory_takes_the_data_type(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    for name in ("a.jpg", "a.txt", "b.jpg"):
        (tmp_path / "samples" / name).write_bytes(b"x")
    built = run_json("index", "build", tmp_path / "samples", tmp_path / "cache", "--data-type", "image")
    assert built["num_rows"] == 2
    assert {"jpg", "txt"} <= {column["name"] for column in built["columns"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--key-column", "nope"], "'nope'"),
        (["--download", "nope"], "'nope'"),
        (["--sql", "DELETE FROM dataframe"], "DELETE"),
    ],
)
def test_build_tells_in_one_line_what_is_wrong(tmp_path: Path, src: Path, words: list[str], message: str) -> None:
    result = run("index", "build", src, tmp_path / "cache", *words)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_info_tells_source_rows_and_columns(dst: Path, src: Path) -> None:
    text = run("index", "info", dst).stdout
    assert str(src) in text
    assert "caption (string)" in text
    info = run_json("index", "info", dst)["indexes"]
    assert [found["num_rows"] for found in info] == [3]
    assert info[0]["sources"][0]["size_bytes"] == src.stat().st_size


def test_info_where_no_index_is_names_the_cure(tmp_path: Path) -> None:
    result = run("index", "info", tmp_path / "nothing")
    assert result.returncode == 2
    assert "sqlstream index build" in result.stderr
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("command", ["info", "verify"])
def test_a_source_in_place_of_a_directory_is_named_without_its_password(command: str) -> None:
    done = run("index", command, "postgresql://me:geheim@127.0.0.1/db")
    assert done.returncode == 2
    assert "postgresql://127.0.0.1/db holds no index" in done.stderr
    assert "geheim" not in done.stderr


def test_query_prints_a_table_json_or_csv(dst: Path) -> None:
    sql = 'SELECT "index", caption, score FROM dataframe ORDER BY score DESC'
    assert run_json("index", "query", dst, sql) == {
        "columns": ["index", "caption", "score"],
        "rows": [list(row) for row in sorted(ROWS, key=lambda row: -row[2])],
    }
    lines = run("index", "query", dst, sql, "--csv").stdout.splitlines()
    assert list(csv.reader(lines)) == [
        ["index", "caption", "score"],
        *([*r[:2], str(r[2])] for r in (ROWS[1], ROWS[0], ROWS[2])),
    ]
    table = run("index", "query", dst, sql).stdout.splitlines()
    assert table[0].split() == ["index", "caption", "score"]
    assert table[1] == "b      blue, square      0.9"
    assert "\x1b" not in "".join(table)


def test_query_shows_what_json_and_terminals_lack(dst: Path) -> None:
    result = run("index", "query", dst, "SELECT x'00ff' AS bytes, 9e999 AS infinite, NULL AS absent", "--json")
    assert json.loads(result.stdout, parse_constant=pytest.fail)["rows"] == [["00ff", "inf", None]]


@pytest.mark.parametrize(
    "sql", ["DROP TABLE rows", "SELECT nope FROM dataframe", "SELECT load_extension('x')", "SELECT 1; SELECT 2"]
)
def test_query_that_may_not_or_cannot_run_is_one_line(dst: Path, sql: str) -> None:
    result = run("index", "query", dst, sql)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "query" in result.stderr


def test_query_of_several_indexes_asks_which_one(dst: Path, src: Path) -> None:
    run_json("index", "build", src, dst, "--key-column", "caption", "--download", "caption")
    asked = run("index", "query", dst, "SELECT count(*) FROM dataframe")
    assert asked.returncode == 2
    fingerprints = [info["fingerprint"] for info in run_json("index", "info", dst)["indexes"]]
    assert len(fingerprints) == 2
    assert all(fingerprint in asked.stderr for fingerprint in fingerprints)
    chosen = run_json("index", "query", dst, "SELECT count(*) AS n FROM dataframe", "--index", fingerprints[1][:12])
    assert chosen["rows"] == [[3]]
    wrong = run("index", "query", dst, "SELECT 1", "--index", "zz")
    assert (wrong.returncode, "--index='zz' fits 0 of them" in wrong.stderr) == (2, True)


def test_query_refuses_two_formats_at_once(dst: Path) -> None:
    result = run("index", "query", dst, "SELECT 1", "--csv", "--json")
    assert result.returncode == 2
    assert "--csv and --json" in result.stderr


def test_verify_finds_damage_anywhere_and_removes_it_when_asked(dst: Path, src: Path) -> None:
    assert "all 1 index files are as they were written" in run("index", "verify", dst).stdout
    (path,) = (dst / "index").glob("*.sqlite")
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    (dst / "index" / f"{'0' * 32}.sqlite").symlink_to(path)
    found = run("index", "verify", dst)
    assert (found.returncode, "its checksum is another one" in found.stdout) == (1, True)
    document = json.loads(run("index", "verify", dst, "--repair", "--json").stdout)
    assert [(Path(one["path"]).name, one["repaired"]) for one in document["findings"]] == [
        (f"{'0' * 32}.sqlite", False),
        (path.name, True),
    ]
    assert (document["num_files"], document["num_left"], path.exists()) == (2, 1, False)
    (dst / "index" / f"{'0' * 32}.sqlite").unlink()
    assert run_json("index", "build", src, dst)["num_rows"] == 3
    assert run("index", "verify", dst).returncode == 0


def test_verify_reads_files_of_versions_without_checksums(dst: Path) -> None:
    (path,) = (dst / "index").glob("*.sqlite")
    data = bytearray(path.read_bytes())
    data[60:64] = bytes(4)
    path.write_bytes(data)
    assert run("index", "verify", dst).returncode == 0
    page = data[4096:8192]
    data[4096:8192] = page[::-1]
    path.write_bytes(data)
    assert run("index", "verify", dst).returncode == 1


def test_build_takes_what_a_dataset_takes(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes("index|name\n1|größer\n".encode("latin-1"))
    words = ("--delimiter", "|", "--encoding", "latin-1", "--download", "image", "--allow-missing-columns")
    built = run_json("index", "build", tmp_path / "t.csv", tmp_path / "cache", *words)
    assert built["num_rows"] == 1
    document = run_json("index", "query", tmp_path / "cache", "SELECT name FROM dataframe")
    assert document["rows"] == [["größer"]]


def test_a_lazy_build_is_what_a_lazy_dataset_opens(tmp_path: Path) -> None:
    pq.write_table(pa.table({"index": list(range(10))}), tmp_path / "t.parquet")
    built = run_json("index", "build", tmp_path / "t.parquet", tmp_path / "cache", "--lazy", "5")
    assert built["is_lazy"]
    with StreamingDataset(tmp_path / "t.parquet", tmp_path / "cache", lazy_index_chunk_size=5) as dataset:
        assert dataset.index.path == Path(built["path"])


def test_errors_of_build_name_its_options(tmp_path: Path, src: Path) -> None:
    result = run("index", "build", src, tmp_path / "cache", "--download", "image")
    assert result.returncode == 2
    assert "--download names 'image'" in result.stderr
    assert "--allow-missing-columns" in result.stderr
    assert "columns_to_download" not in result.stderr
    for words in (("--damaged-shards", "skip"), ("--label-column", "label"), ("--index-members", "txt")):
        result = run("index", "build", src, tmp_path / "cache", *words)
        assert result.returncode == 2
        assert result.stderr.startswith(f"sqlstream: {words[0]}")


def test_build_runs_commands_only_where_that_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(tar_of(samples(0, 4)))
    command = f"pipe:echo run >> {tmp_path}/runs; cat {tmp_path}/s.tar"
    refused = run("index", "build", command, str(tmp_path / "cache"))
    assert refused.returncode != 0
    assert not (tmp_path / "runs").exists()
    assert "--allow-pipes" in refused.stderr
    built = run_json("index", "build", command, str(tmp_path / "cache"), "--allow-pipes")
    assert built["num_rows"] == 4
    with StreamingDataset(command, tmp_path / "cache", source_options={"allow_pipes": True}, show_progress=False) as dataset:
        assert len(dataset) == 4
    assert (tmp_path / "runs").read_text() == "run\n", "the dataset has found the index"
