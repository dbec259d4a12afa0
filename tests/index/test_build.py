"""Building: once, by one process, whole or not at all; what is refused before the first sample."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import pickle
import re
import signal
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from sqlstream.errors import ConfigError, IndexDatabaseError, SchemaError, SourceChangedError, SourceError, StorageError
from sqlstream.index.build import build as build_module
from sqlstream.index.file import writer as writer_module
from sqlstream.index.file.index import Index
from sqlstream.index.file.workplace import workplace
from sqlstream.index.file.writer import IndexWriter
from sqlstream.index.info import list_indexes
from sqlstream.index.sources.base.base import BATCH_ROWS
from sqlstream.process import locks
from sqlstream.storage.base.protocols import DownloadRoom, ObjectInfo
from tests.index.kills import kill_at
from tests.index.sources import FolderReader, all_rows, build, write_csv
from tests.processes import in_child

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
FILTER = "SELECT * FROM dataframe WHERE n >= 2"
QUERY = f"{FILTER} ORDER BY n DESC"


def numbers(path: Path, count: int = 10) -> Path:
    """Write a CSV of `count` rows."""
    return write_csv(path, "index,n\n" + "".join(f"k{at},{at}\n" for at in range(count)))


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by one a finished index file."""
    finished: list[int] = []
    finish = IndexWriter.finish

    def counted(self: IndexWriter, *args: Any) -> None:
        finish(self, *args)
        finished.append(self.num_rows)

    monkeypatch.setattr(IndexWriter, "finish", counted)
    return finished


def test_a_second_run_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, builds = numbers(tmp_path / "t.csv"), count_builds(monkeypatch)
    for _ in range(3):
        assert len(build(tmp_path, path)) == 10
        assert len(build(tmp_path, path, sql_query=QUERY)) == 8
        assert len(build(tmp_path, path, sql_query="SELECT index, n * 2 AS m FROM dataframe")) == 10
    assert builds == [10, 10]  # the rows, and the computed table; positions need no file of rows


def test_a_changed_source_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, builds = numbers(tmp_path / "t.csv"), count_builds(monkeypatch)
    first = build(tmp_path, path)
    numbers(path, 11)
    second = build(tmp_path, path)
    assert builds == [10, 11]
    assert first.fingerprint != second.fingerprint
    assert len(all_rows(first)) == 10  # the old file is still there for who has it


@pytest.mark.parametrize(
    "changes",
    [
        {"columns_to_keep": ("n",)},
        {"max_size": 3},
        {"sql_query": QUERY},
        {"key_column": "n"},
        {"columns_to_download": ("n",)},
        {"sql_query": QUERY, "max_size": 3},
    ],
    ids=str,
)
def test_what_changes_the_samples_changes_the_fingerprint(changes: dict[str, Any], tmp_path: Path) -> None:
    path = numbers(tmp_path / "t.csv")
    assert build(tmp_path, path).fingerprint != build(tmp_path, path, **changes).fingerprint


def test_several_processes_build_once(tmp_path: Path) -> None:
    path = numbers(tmp_path / "t.csv", 1000)
    (tmp_path / "index").mkdir()
    log = tmp_path / "builds"
    barrier = multiprocessing.get_context("fork").Barrier(4)

    def work() -> None:
        finish = IndexWriter.finish

        def slow(self: IndexWriter, *args: Any) -> None:
            with log.open("a") as file:
                file.write("x")
            time.sleep(0.3)  # the others arrive meanwhile
            finish(self, *args)

        IndexWriter.finish = slow  # type: ignore[assignment, method-assign]  # in this child only
        barrier.wait()
        index = build(tmp_path, path, sql_query=QUERY)
        assert [row["n"] for row in all_rows(index)] == list(range(999, 1, -1))

    processes = [multiprocessing.get_context("fork").Process(target=work) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert log.read_text() == "x"


def test_who_waits_for_another_builder_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = numbers(tmp_path / "t.csv")
    name = build(tmp_path, path).path
    name.unlink()
    fd = locks.open_descriptor(name.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
    assert locks.try_lock(fd)
    waiter = threading.Thread(target=build, args=(tmp_path, path))
    with caplog.at_level(logging.INFO):
        waiter.start()
        while not caplog.records:
            time.sleep(0.01)
        assert not name.exists()
        locks.close_descriptor(fd)
        waiter.join()
    assert "another process builds the index" in caplog.text
    assert max(record.levelno for record in caplog.records) == logging.INFO, "a healthy start logs no warning"
    assert name.exists()


class Terminal(io.StringIO):
    """A terminal, as far as bars look."""

    def isatty(self) -> bool:
        return True


def test_who_waits_for_another_builder_sees_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with workplace(tmp_path, "key") as place:
        place.temporary().write_bytes(bytes(3_000_000))
        waiter = threading.Thread(target=lambda: workplace(tmp_path, "key", show_progress=True, look_seconds=0.001).__enter__())
        waiter.start()
        while "3.00MB" not in terminal.getvalue():
            time.sleep(0.01)
        assert "waiting for the index that another process builds" in terminal.getvalue()
    waiter.join()


@pytest.mark.parametrize("query", [None, FILTER, "SELECT index, n + 1 AS m FROM dataframe"])
def test_a_builder_killed_anywhere_leaves_nothing_that_opens_and_the_next_one_builds(query: str | None, tmp_path: Path) -> None:
    path = numbers(tmp_path / "t.csv")
    directory = tmp_path / "index"
    number, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        number += 1
        for left in directory.glob("*"):
            left.unlink()

        def work(number: int = number) -> None:
            directory.mkdir(exist_ok=True)
            kill_at(number, directory)
            build(tmp_path, path, sql_query=query)

        code = in_child(work)
        directory.mkdir(exist_ok=True)
        for found in list_indexes(directory):  # what has a final name is whole
            assert len(Index(Path(found.path)).rows(range(found.num_rows))) == 10
        assert len(build(tmp_path, path, sql_query=query)) == (8 if query == FILTER else 10)
        assert not [name for name in os.listdir(directory) if name.endswith((".tmp", ".lock"))]
    assert code == 0
    assert number > 5  # the hook did see side effects


def test_a_builder_killed_between_two_batches_leaves_no_index(tmp_path: Path) -> None:
    num_rows = BATCH_ROWS + 1
    path = numbers(tmp_path / "t.csv", num_rows)

    def work() -> None:
        write, calls = IndexWriter.write_values, iter(range(100))

        def deadly(self: IndexWriter, *args: Any) -> None:
            write(self, *args)
            if next(calls) == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        IndexWriter.write_values = deadly  # type: ignore[assignment, method-assign]  # in this child only
        build(tmp_path, path)

    assert in_child(work) == -signal.SIGKILL
    left = os.listdir(tmp_path / "index")
    assert [name for name in left if name.endswith(".tmp")]
    assert not [name for name in left if name.endswith(".sqlite")]
    other = numbers(tmp_path / "other.csv")
    build(tmp_path, other)  # another index: what the dead one left goes all the same
    assert len(os.listdir(tmp_path / "index")) == 1
    assert len(build(tmp_path, path)) == num_rows


def test_a_living_builder_is_not_swept(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    directory.mkdir()
    fd = locks.open_descriptor(directory / "00ff.lock", os.O_RDWR | os.O_CREAT)
    assert locks.try_lock(fd)
    part = directory / "00ff.1.part.tmp"
    part.touch()
    build(tmp_path, numbers(tmp_path / "t.csv"))
    assert part.exists()
    locks.close_descriptor(fd)
    build(tmp_path, numbers(tmp_path / "t2.csv"))
    assert not part.exists()


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", "index,n\n1,2\n2,3,4\n")
    with pytest.raises(SourceError):
        build(tmp_path, path)
    assert os.listdir(tmp_path / "index") == []


def test_a_remote_file_that_changes_between_head_and_download_is_refused(tmp_path: Path) -> None:
    numbers(tmp_path / "t.csv")

    class Changing(FolderReader):
        def download(self, url: str, path: Path, room: DownloadRoom | None = None) -> ObjectInfo:
            numbers(tmp_path / "t.csv", 99)
            return super().download(url, path, room)

    with pytest.raises(SourceChangedError, match="wait until its writer is done"):
        build(tmp_path, "s3://bucket/t.csv", Changing(tmp_path))


def test_credentials_never_reach_the_file_but_relative_paths_keep_them(tmp_path: Path) -> None:
    numbers(tmp_path / "d/t.csv")
    (tmp_path / "d/list.txt").write_text("t.csv\n")
    for name in ("t.csv", "list.txt"):
        index = build(tmp_path, f"s3://me:geheim@bucket/d/{name}", FolderReader(tmp_path, "s3://me:geheim@bucket"))
        assert index.resolve("x.jpg") == "s3://me:geheim@bucket/d/x.jpg"
        assert pickle.loads(pickle.dumps(index)).resolve("x.jpg") == index.resolve("x.jpg")
        assert index.src == f"s3://bucket/d/{name}"
    for file in (tmp_path / "index").iterdir():
        assert b"geheim" not in file.read_bytes()


KEYS = [
    ("index,n\na,1\nb,2\na,3\n", r"rows 0 and 2 have the same value 'a' in the index column 'index'"),
    ("index,n\na,1\n,2\n", r"row 1 has no value in the index column 'index'"),
    ("id,n\na,1\n", r"has no index column 'index': it has 'id', 'n'"),
]


@pytest.mark.parametrize(("text", "message"), KEYS)
def test_keys_must_be_there_and_differ(text: str, message: str, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", text)
    with pytest.raises(SourceError, match=message):
        build(tmp_path, path, key_column="index")
    with pytest.raises(SourceError, match=message):  # the second run says it again
        build(tmp_path, path, key_column="index")


def test_keys_over_files_are_compared_and_a_number_is_not_its_text(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", "index\n1\n2\n")
    write_csv(tmp_path / "b.csv", "index\n3\n2\n")
    with pytest.raises(SourceError, match="rows 1 and 3 have the same value 2"):
        build(tmp_path, tmp_path / "*.csv", key_column="index")


def test_a_filter_may_choose_among_bad_keys(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", "index,n\na,1\nb,2\na,3\n,4\n")
    assert len(build(tmp_path, path, sql_query="SELECT * FROM dataframe WHERE n BETWEEN 2 AND 3")) == 2
    with pytest.raises(SourceError, match="rows 0 and 2, which the query selects, have the same value 'a'"):
        build(tmp_path, path, key_column="index", sql_query="SELECT * FROM dataframe WHERE n < 4")
    with pytest.raises(SourceError, match="row 3, which the query selects, has no value"):
        build(tmp_path, path, key_column="index", sql_query="SELECT * FROM dataframe WHERE n > 1")
    with pytest.raises(SourceError, match="rows 0 and 1 have the same value 'a'"):
        build(tmp_path, path, key_column="index", sql_query="SELECT index, n*2 AS m FROM dataframe WHERE index = 'a'")


@pytest.mark.parametrize("option", ["columns_to_download", "columns_to_keep"])
def test_a_column_that_is_not_there_is_an_error_or_reads_as_none(option: str, tmp_path: Path) -> None:
    path = numbers(tmp_path / "t.csv", 1)
    changes: dict[str, Any] = {option: ("gone",)}
    with pytest.raises(SchemaError, match=r"names 'gone', but .*t\.csv has no such column: it has 'index'"):
        build(tmp_path, path, **changes)
    index = build(tmp_path, path, **changes, allow_missing_columns=True)
    assert all_rows(index)[0]["gone"] is None


def test_only_kept_columns_are_in_the_index(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", "a,b,index,url\n1,2,3,x\n")
    index = build(tmp_path, path, columns_to_keep=("b",), columns_to_download=("url",))
    assert all_rows(index) == [{"b": 2, "index": 3, "url": "x"}]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json", "parquet", "arrow"])
def test_rows_of_a_file_that_has_none_of_the_kept_columns_are_rows(kind: str, tmp_path: Path) -> None:
    tables: dict[str, dict[str, list[Any]]] = {
        "a": {"a": [1, 2], "b": ["x", "y"]},
        "b": {"b": ["z"], "c": [3]},
        "c": {"a": [4], "b": ["w"]},
    }
    for name, columns in tables.items():
        write_as(tmp_path / f"d/{name}.{kind}", columns)
    files = tmp_path / f"d/*.{kind}"
    few = build(tmp_path, files, columns_to_keep=("a",))
    assert [row["a"] for row in all_rows(few)] == [1, 2, None, 4]
    assert [row["a"] for row in all_rows(build(tmp_path, files, columns_to_keep=("a",), max_size=3))] == [1, 2, None]
    last = build(tmp_path, [str(tmp_path / f"d/{name}.{kind}") for name in "bca"], columns_to_keep=("a",))
    assert [row["a"] for row in all_rows(last)] == [None, 4, 1, 2]
    assert len(build(tmp_path, files, columns_to_keep=())) == 4
    with pytest.raises(SchemaError, match=r"index_cols_to_keep names 'gone', .* it has 'a', 'b', "):
        build(tmp_path, files, columns_to_keep=("gone",))
    absent = build(tmp_path, files, columns_to_keep=("gone",), allow_missing_columns=True)
    assert [row["gone"] for row in all_rows(absent)] == [None] * 4


def write_as(path: Path, columns: dict[str, list[Any]]) -> None:
    """Write a table in the format of its name."""
    path.parent.mkdir(exist_ok=True)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    match path.suffix:
        case ".csv":
            lines = [",".join(columns), *(",".join(map(str, row.values())) for row in rows)]
            path.write_text("\n".join(lines) + "\n")
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(rows))
        case ".parquet":
            pq.write_table(pa.table(columns), path)
        case ".arrow":
            feather.write_feather(pa.table(columns), path, compression="uncompressed")


def test_max_size_stops_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = count_builds(monkeypatch)
    numbers(tmp_path / "d/a.csv", 10)
    write_csv(tmp_path / "d/b.csv", "broken\n")
    assert [row["n"] for row in all_rows(build(tmp_path, tmp_path / "d/*.csv", max_size=3))] == [0, 1, 2]
    assert builds == [3]
    with pytest.raises(ConfigError, match="max_size=0"):
        build(tmp_path, tmp_path / "d/*.csv", max_size=0)


def test_a_file_that_is_no_database_is_built_again_and_another_programs_database_is_refused(tmp_path: Path) -> None:
    path = numbers(tmp_path / "t.csv")
    index = build(tmp_path, path)
    name, there = index.path, index.rows(range(10))
    index.close()
    name.write_bytes(b"garbage" * 1000)
    index = build(tmp_path, path)
    assert index.rows(range(10)) == there
    index.close()
    name.unlink()
    sqlite3.connect(name).execute("CREATE TABLE x (y)").connection.close()
    with pytest.raises(IndexDatabaseError, match="no sqlstream index"):
        build(tmp_path, path)


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    path = numbers(tmp_path / "t.csv")
    base_index = build(tmp_path, path)
    selected = build(tmp_path, path, sql_query=QUERY)
    first, second = list_indexes(tmp_path / "index")
    assert (first.fingerprint, first.num_rows, first.num_selected, first.query) == (base_index.fingerprint, 10, 10, None)
    assert (second.fingerprint, second.num_rows, second.num_selected, second.query) == (selected.fingerprint, 10, 8, QUERY)
    assert second.size_bytes == first.size_bytes + 128 + 8 * 8 + 12  # header, row ids, checksum
    assert [(c.name, c.type) for c in first.columns] == [("index", "string"), ("n", "int64")]
    assert first.sources[0].url == first.src == str(path)
    assert first.sources[0].size_bytes == path.stat().st_size
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*", first.created_at)
    assert base_index.path.read_bytes()[68:72] == b"sqsi"


def test_a_progress_bar_counts_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    class Bar:
        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, count: int) -> None:
            counted.append(count)

    monkeypatch.setattr(build_module, "progress", lambda *_: Bar())
    build(tmp_path, numbers(tmp_path / "t.csv", 20_000))
    assert sum(counted) == 20_000
    assert len(counted) > 1


def test_rows_go_into_the_file_in_bounded_statements(tmp_path: Path) -> None:
    wide = ",".join(f"c{at}" for at in range(500))
    path = write_csv(tmp_path / "t.csv", f"index,{wide}\n" + "".join(f"k{at},{wide}\n" for at in range(300)))
    index = build(tmp_path, path)
    assert len(all_rows(index)) == 300
    assert np.array_equal(index.row_ids(np.arange(300)), np.arange(300))
    assert writer_module._ROWS_A_STATEMENT * 501 > 32_766  # else this tests nothing


def test_where_a_second_thread_does_not_start_arrow_which_would_wait_for_ever_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(StorageError, match=r"read .*numbers\.csv \(can't start new thread\): raise `ulimit -u`"):
        build(tmp_path, numbers(tmp_path / "numbers.csv"))
    assert not started[0].is_alive()
    monkeypatch.undo()
    assert len(all_rows(build(tmp_path, numbers(tmp_path / "numbers.csv")))) == 10


def test_a_table_of_very_many_columns_is_begun_at_once(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(1900)]
    begun = time.process_time()
    index = build(tmp_path, pa.table({name: pa.array([1, None], pa.int64()) for name in names}))
    assert time.process_time() - begun < 3, "10 s of a statement for each column, which reads the schema anew"
    assert all_rows(index)[1] == dict.fromkeys(names)


def test_columns_may_come_before_and_behind_the_first_row(tmp_path: Path) -> None:
    empty, first = pa.table({"a": pa.array([], pa.int64())}), pa.table({"B": [1.5], "b": ["x"], "a": [None]})
    index = build(tmp_path, [empty, first, empty, pa.table({"c": [True], "d": [b"y"], "a": [2]})])
    rows = [{name: row[name] for name in row if name != "__source__"} for row in all_rows(index)]
    assert rows == [
        {"a": None, "B": 1.5, "b": "x", "c": None, "d": None},
        {"a": 2, "B": None, "b": None, "c": True, "d": b"y"},
    ]
