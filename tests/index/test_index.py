"""Reading: rows by id, positions, forks, pickles, threads."""

from __future__ import annotations

import contextlib
import gc
import mmap
import multiprocessing
import os
import pickle
import re
import sqlite3
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sqlstream.errors import IndexDatabaseError
from sqlstream.index.file import index as reader
from sqlstream.index.file.connection import GuardedConnection, OwnedConnection, connect, reading
from sqlstream.index.file.index import Index
from sqlstream.index.file.writer import IndexWriter
from sqlstream.process import locks
from tests.index.sources import all_rows, build, write_csv

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
QUERY = "SELECT * FROM dataframe WHERE n % 2 = 1 ORDER BY n DESC"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "t.csv", "index,n\n" + "".join(f"k{at},{at}\n" for at in range(10)))


def test_rows_come_in_the_order_asked_with_doubles(path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path)
    assert [row["n"] for row in index.rows([7, 0, 7, 3])] == [7, 0, 7, 3]
    assert index.rows([]) == []
    with pytest.raises(IndexError, match="no row 10: its rows are 0 to 9"):
        index.rows([3, 10])
    with pytest.raises(IndexError, match="no row -1"):
        index.rows(np.array([-1]).tolist())


def test_more_ids_than_sqlite_takes_variables_are_read_in_chunks(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(where: Path, factory: type[OwnedConnection]) -> sqlite3.Connection:
        connection = connect(where, factory)
        connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 3)
        return connection

    index = build(tmp_path, path)
    index.close()
    monkeypatch.setattr(reader, "connect", limited)
    assert [row["n"] for row in index.rows([9, 8, 7, 6, 5, 9])] == [9, 8, 7, 6, 5, 9]


def test_samples_do_not_share_a_list_of_one_row(tmp_path: Path) -> None:
    index = build(tmp_path, write_csv(tmp_path / "t.jsonl", '{"index": 1, "tags": ["a"]}\n'))
    one, two = index.rows([0, 0])
    assert one["tags"] == two["tags"] == ["a"]
    assert one["tags"] is not two["tags"]


def test_positions_are_the_rows_of_the_filter_in_its_order(path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path, sql_query=QUERY)
    assert (len(index), index.num_rows) == (5, 10)
    ids = index.row_ids(np.array([[0, 4], [1, 1]]))
    assert ids.tolist() == [[9, 1], [7, 7]]
    assert ids.dtype == np.int64
    assert isinstance(index._positions(), np.memmap)  # not in memory: 10^9 of them are 8 GB
    for wrong in ([5], [-1]):
        with pytest.raises(IndexError, match=r"not all in \[0, 5\)"):
            index.row_ids(np.array(wrong))


def mapped_bytes(path: Path) -> dict[str, int]:
    """Return resident bytes of each mapping of a file."""
    found = {}
    for block in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        if str(path) in block.partition("\n")[0]:
            found[block.split()[0]] = sum(1024 * int(number) for number in re.findall(r"(?m)^Rss: +(\d+) kB$", block))
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="mappings are looked up in /proc")
def test_a_reader_keeps_no_page_of_the_index_nor_of_many_positions(path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path, sql_query=QUERY)
    all_rows(index)
    assert index.positions_path is not None
    assert not mapped_bytes(index.path)
    assert sum(mapped_bytes(index.positions_path).values()) == mmap.PAGESIZE, "few of them stay"
    index.close()
    index = Index(index.path, selection=index.selection, max_mapped_bytes=0)
    assert index.positions_path is not None
    assert index.row_ids(np.arange(5)).tolist() == [9, 7, 5, 3, 1]
    assert list(mapped_bytes(index.positions_path).values()) == [0]


def test_a_reader_imports_nothing_that_only_builders_and_migrations_need(path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path)
    script = (
        "import sys; from pathlib import Path; import sqlstream.cache, sqlstream.index.build.build as build; "
        "heavy = {'pandas', 'sqlalchemy', 'alembic', 'duckdb'}; "
        "print(build.Index(Path(sys.argv[1])).rows([3])[0]['n'], heavy & {*sys.modules})"
    )
    answer = subprocess.run([sys.executable, "-c", script, str(index.path)], capture_output=True, text=True, check=True)
    assert answer.stdout == "3 set()\n", "each of them is 10 to 30 MB of every worker"


@pytest.mark.parametrize("query", [None, QUERY])
def test_a_pickle_is_small_and_opens_the_same_index(query: str | None, path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path, sql_query=query)
    rows = all_rows(index)
    data = pickle.dumps(index)
    assert len(data) < 1000
    assert all_rows(pickle.loads(data)) == rows


def test_a_forked_child_reads_with_its_own_connection_and_never_closes_the_parents(path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path)
    expected = all_rows(index)
    inherited = index._open
    assert inherited is not None

    def work() -> None:
        assert index._open is None
        assert any(leaked is inherited.connection for leaked in locks._leaked)
        assert all_rows(index) == expected
        index.close()
        gc.collect()

    children = [multiprocessing.get_context("fork").Process(target=work) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert all_rows(index) == expected


def test_threads_read_while_one_closes(path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            for at in range(200):
                assert index.rows([at % 10])[0]["n"] == at % 10
                if at % 50 == 0:
                    index.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_an_index_that_was_removed_is_an_error_with_a_cure(path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path, sql_query=QUERY)
    index.close()
    assert index.positions_path is not None
    index.positions_path.unlink()
    with pytest.raises(IndexDatabaseError, match="built again"):
        index.row_ids(np.array([0]))
    index.path.unlink()
    with pytest.raises(IndexDatabaseError, match="builds it again"):
        index.rows([0])


def test_the_file_cannot_be_written_through_an_index(path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path)
    before = index.path.read_bytes()
    connection = connect(index.path)
    with pytest.raises(sqlite3.OperationalError):
        connection.execute("DELETE FROM rows")
    connection.close()
    assert index.path.read_bytes() == before
    assert sorted(os.listdir(tmp_path / "index")) == [index.path.name]  # no -wal, no -journal


@pytest.mark.parametrize("kind", [OwnedConnection, GuardedConnection])
def test_a_connection_that_is_dropped_without_close_is_closed_under_its_lock(kind: type[OwnedConnection]) -> None:
    """SQLite's mutexes are taken then, too, so a fork waits for it."""
    entered: list[str] = []

    class Lock:
        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *error: object) -> None:
            entered.append("out")

    connection = sqlite3.connect(":memory:", factory=kind)
    connection.calls = types.SimpleNamespace(lock=Lock())  # type: ignore[assignment]  # in the place of a lock
    del connection
    gc.collect()
    assert entered == ["in", "out"]


@pytest.mark.parametrize("use", ["read", "scan", "build"])
def test_a_fork_waits_for_another_thread_that_is_inside_sqlite(use: str, tmp_path: Path) -> None:
    """SQLite's mutexes that the thread holds would be held in the child for ever."""
    index = build(tmp_path, pa.table({"index": ["a"]}))
    inside, forking, told = threading.Event(), threading.Event(), list[str]()

    def in_the_middle() -> None:
        inside.set()
        forking.wait(60)
        time.sleep(0.3)  # a fork that does not wait is over by then
        told.append("read")

    def fork() -> None:
        inside.wait(60)
        forking.set()
        if not (pid := os.fork()):
            os._exit(int(index.rows([0]) != [{"index": "a"}]))
        told.extend(["forked", str(os.waitpid(pid, 0)[1])])

    assert index.rows([0]) == [{"index": "a"}]
    writer = IndexWriter(tmp_path / "grows", "index")
    with contextlib.closing(writer), reading(index.path) as scan:
        connection = {"read": index._opened().connection, "scan": scan, "build": writer.connection}[use]
        connection.create_function("in_the_middle", 0, in_the_middle)
        thread = threading.Thread(target=fork)
        thread.start()
        statement = "SELECT in_the_middle() FROM meta LIMIT 1" if use == "scan" else "SELECT in_the_middle()"
        index.stored(statement) if use == "read" else connection.execute(statement).fetchone()
        thread.join()
    assert told == ["read", "forked", "0"]
    index.close()
