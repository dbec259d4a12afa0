"""The one write lock: order, exclusion, damage, versions, forks, interrupts."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import pytest

from sqlstream.cache.ledger import database as db
from sqlstream.cache.ledger import schema
from sqlstream.cache.ledger.database import Database
from sqlstream.errors import CacheDamagedError, CacheDirectoryError, CacheDiskError, MigrationError
from sqlstream.process.lock_wait import lock_blocking
from tests.cache.actors import Stage
from tests.interrupts import interrupted
from tests.processes import answer_of_forked_child


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def count(database: Database) -> int:
    return int(database.read("SELECT count(*) FROM stat")[0][0])


def add(database: Database, name: str) -> None:
    with database.write_transaction() as connection:
        connection.execute("INSERT INTO stat VALUES (?, 1)", (name,))


def test_a_transaction_commits_and_an_exception_rolls_it_back(path: Path) -> None:
    database = Database(path)
    add(database, "kept")
    with pytest.raises(sqlite3.IntegrityError):
        add(database, "kept")
    assert database.read("SELECT * FROM stat") == [("kept", 1)]
    assert database.num_transactions == 1
    database.close()


def test_writers_of_two_databases_on_one_file_exclude_each_other(path: Path) -> None:
    first, second = Database(path), Database(path)
    inside: list[str] = []

    def write(database: Database, name: str) -> None:
        for i in range(20):
            with database.write_transaction() as connection:
                inside.append(name)
                connection.execute("INSERT INTO stat VALUES (?, 1)", (f"{name}{i}",))
                assert len(inside) == 1
                inside.pop()

    thread = threading.Thread(target=write, args=(second, "b"))
    thread.start()
    write(first, "a")
    thread.join()
    assert count(first) == 40
    first.close()
    second.close()


def test_a_newer_schema_is_refused_and_left_untouched_to_its_last_byte(path: Path) -> None:
    with contextlib.closing(Database(path)) as database:
        database.read("SELECT 1")
    with sqlite3.connect(path) as plain:
        plain.execute(f"PRAGMA user_version = {schema.SCHEMA_VERSION + 1}")
    plain.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    plain.close()
    before, when = path.read_bytes(), path.stat().st_mtime_ns
    with pytest.raises(MigrationError, match=f"schema {schema.SCHEMA_VERSION + 1}.*upgrade sqlstream"):
        Database(path).read("SELECT 1")
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, when)


def test_a_process_whose_ledger_a_newer_version_has_upgraded_writes_nothing_more(path: Path) -> None:
    database = Database(path)
    add(database, "before")
    with sqlite3.connect(path) as newer:
        newer.execute(f"PRAGMA user_version = {schema.SCHEMA_VERSION + 1}")
    newer.close()
    with pytest.raises(MigrationError, match="was upgraded by a newer sqlstream while this process used it: restart"):
        add(database, "after")
    assert database.read("SELECT name FROM stat") == [("before",)]
    database.close()


def test_a_file_that_is_replaced_is_noticed_at_the_write_lock(path: Path) -> None:
    database, other = Database(path), Database(path)
    add(database, "old")
    generation = database.generation
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    add(other, "new")
    add(database, "newer")
    assert database.generation == generation + 1
    assert sorted(database.read("SELECT name FROM stat")) == [("new",), ("newer",)]
    database.close()
    other.close()


def test_a_directory_that_is_gone_is_named(path: Path) -> None:
    database = Database(path)
    add(database, "x")
    shutil.rmtree(path.parent)
    with pytest.raises(CacheDirectoryError, match=f"{path.parent} is gone"):
        add(database, "y")
    database.close()


def read_all(database: Database) -> None:
    try:
        database.read("SELECT * FROM stat ORDER BY value")
    finally:
        database.close()


@pytest.mark.parametrize("damage", ["header", "page", "truncated", "garbage"])
def test_a_damaged_file_is_named_and_rebuilt_by_the_next_use(path: Path, damage: str) -> None:
    refilled: list[int] = []
    database = Database(path, refill=lambda connection: refilled.append(connection.total_changes))
    for i in range(200):
        add(database, f"name {i}")
    database.close()
    raw = bytearray(path.read_bytes())
    if damage == "header":
        raw[:16] = bytes(16)
    elif damage == "page":
        raw[4096:] = os.urandom(len(raw) - 4096)
    elif damage == "truncated":
        del raw[len(raw) // 2 :]
    else:
        raw[:] = os.urandom(len(raw))
    path.write_bytes(raw)
    with pytest.raises(CacheDamagedError, match="is damaged"):
        read_all(Database(path))
    with pytest.raises(CacheDamagedError), database.write_transaction() as connection:
        connection.execute("SELECT * FROM stat ORDER BY value").fetchall()
    assert count(database) == 0
    assert len(refilled) == 2  # the first time when it was new: files may have been there before it
    assert not (path.parent / "REBUILD").exists()
    add(database, "again")
    database.close()


def test_an_interrupted_rebuild_starts_again(path: Path) -> None:
    def fail(_: sqlite3.Connection) -> None:
        raise EOFError

    add(first := Database(path), "lost")
    first.close()
    path.write_bytes(b"no database" * 1000)
    first = Database(path, refill=fail)
    with pytest.raises(CacheDamagedError):
        add(first, "x")
    for _ in range(2):
        with pytest.raises(EOFError):
            count(first)
    first.close()
    assert (path.parent / "REBUILD").exists()
    calls: list[int] = []
    second = Database(path, refill=lambda _: calls.append(1))  # as another process would
    assert count(second) == 0
    assert calls == [1]
    second.close()


def test_the_wal_stays_small(path: Path) -> None:
    database = Database(path)
    for i in range(60):
        with database.write_transaction() as connection:
            connection.execute("INSERT INTO failure VALUES (?, ?, 1, 1, NULL, NULL)", (f"{i}", "x" * 200_000))
        assert os.stat(f"{path}-wal").st_size < db.WAL_LIMIT_BYTES + 1_000_000
    database.close()


@pytest.mark.parametrize("is_told", [False, True], ids=["by statistics", "by the one that opens it"])
def test_the_wal_of_a_disk_that_is_nearly_full_stays_smaller(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, is_told: bool
) -> None:
    """Objects are evicted for what it takes there."""
    database = Database(path, is_short=lambda: is_told)
    database.read("SELECT 1")
    if not is_told:
        status = Mock(f_bavail=1, f_frsize=4096, f_files=1 << 20, f_favail=1 << 20)
        monkeypatch.setattr(os, "statvfs", lambda _: status)
    for i in range(20):
        with database.write_transaction() as connection:
            connection.execute("INSERT INTO failure VALUES (?, ?, 1, 1, NULL, NULL)", (f"{i}", "x" * 200_000))
        assert os.stat(f"{path}-wal").st_size < 1_500_000
    database.close()


def test_a_full_disk_is_named_and_the_next_transaction_finds_what_was_freed(path: Path) -> None:
    database = Database(path, on_full=lambda: None)
    freed: list[int] = []
    database = Database(path, on_full=lambda: freed.append(1))
    database.read("SELECT 1")
    with database.write_transaction() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(CacheDiskError, match=r"full.*free space"), database.write_transaction() as connection:
        connection.execute("INSERT INTO failure VALUES ('u', ?, 1, 1, NULL, NULL)", ("x" * 100_000,))
    assert freed == [1]
    with database.write_transaction() as connection:
        connection.execute("PRAGMA max_page_count = 100000")
        connection.execute("INSERT INTO failure VALUES ('u', ?, 1, 1, NULL, NULL)", ("x" * 100_000,))
    database.close()


def test_a_forked_child_opens_its_own_connection_and_harms_nothing(path: Path) -> None:
    database = Database(path)
    add(database, "parent")

    def write_in_child() -> str:
        add(database, "child")
        return str(count(database))

    assert answer_of_forked_child(write_in_child) == "2"
    add(database, "parent again")
    assert count(database) == 3
    assert database.read("PRAGMA integrity_check") == [("ok",)]
    database.close()


def forked(work: Callable[[], object]) -> int:
    """Return the process id of a child that works and ends."""
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    return pid


@pytest.mark.parametrize("opens_first", [True, False], ids=["opened before", "opened after"])
def test_a_child_keeps_what_it_writes_when_its_parent_closes_and_others_open_the_ledger(path: Path, opens_first: bool) -> None:
    """SQLite tells the child that it has the locks, which are its parent's: the WAL was removed under it."""
    database = Database(path)
    add(database, "before")
    (opened, say_opened), (go, say_go) = os.pipe(), os.pipe()

    def write_around_the_close() -> None:
        if opens_first:
            add(database, "child, while the parent has it open")
        os.write(say_opened, b"x")
        os.read(go, 1)
        add(database, "child, after the parent closed it")
        database.read("PRAGMA wal_checkpoint(TRUNCATE)")
        database.close()

    pid = forked(write_around_the_close)
    os.read(opened, 1)
    database.close()
    add(database, "parent, which opened it again")
    database.close()
    os.write(say_go, b"x")
    assert os.waitpid(pid, 0)[1] == 0
    for fd in (opened, say_opened, go, say_go):
        os.close(fd)
    names = {name for (name,) in database.read("SELECT name FROM stat")}
    database.close()
    assert len(names) == 3 + opens_first, names
    assert database.read("PRAGMA integrity_check") == [("ok",)]
    database.close()
    assert not path.with_name(f"{path.name}-wal").exists(), "the last one removes it"


def test_a_fork_without_hooks_is_noticed_by_the_process_id(path: Path) -> None:
    """A C library forks so; simulated: the hooks of `os.fork` are what a child of `posix_spawn`-less C code never runs."""
    script = f"""
import ctypes, os
from pathlib import Path
from sqlstream.cache.ledger.database import Database
database = Database(Path({str(path)!r}))
with database.write_transaction() as connection:
    connection.execute("INSERT INTO stat VALUES ('parent', 1)")
pid = ctypes.PyDLL(None).fork()
if pid == 0:
    with database.write_transaction() as connection:
        connection.execute("INSERT INTO stat VALUES ('child', 1)")
    os._exit(0)
os.waitpid(pid, 0)
with database.write_transaction() as connection:
    connection.execute("INSERT INTO stat VALUES ('parent again', 1)")
    count = connection.execute("SELECT count(*) FROM stat").fetchone()[0]
    print(count, connection.execute("PRAGMA integrity_check").fetchone())
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout.strip() == "3 ('ok',)", result.stderr


def test_forks_while_another_thread_is_in_a_transaction_never_hang(path: Path) -> None:
    database = Database(path)
    stop = threading.Event()

    def write() -> None:
        i = 0
        while not stop.is_set():
            i += 1
            add(database, f"parent {i}")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for i in range(50):

            def write_in_child(i: int = i) -> str:
                add(database, f"child {i}")
                return "written"

            assert answer_of_forked_child(write_in_child) == "written"
    finally:
        stop.set()
        thread.join()
    assert database.read("SELECT count(*) FROM stat WHERE name LIKE 'child %'") == [(50,)]
    assert database.read("PRAGMA integrity_check") == [("ok",)]
    database.close()


def test_ctrl_c_takes_effect_after_the_transaction(path: Path) -> None:
    database = Database(path)
    steps: list[str] = []

    def write() -> None:
        with database.write_transaction() as connection:
            connection.execute("INSERT INTO stat VALUES ('whole', 1)")
            os.kill(os.getpid(), signal.SIGINT)
            steps.append("went on")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert steps == ["went on"]
    assert count(database) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    database.close()


def test_ctrl_c_ends_the_wait_at_the_write_lock(path: Path) -> None:
    database = Database(path)
    add(database, "x")
    fd = os.open(path.parent / "lock", os.O_RDWR)
    lock_blocking(fd)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))

    def wait_at_the_write_lock() -> None:
        timer.start()  # not before: an early one would end the tests
        add(database, "y")

    with pytest.raises(KeyboardInterrupt):
        wait_at_the_write_lock()
    timer.join()
    os.close(fd)
    add(database, "z")
    assert sorted(database.read("SELECT name FROM stat")) == [("x",), ("z",)]
    database.close()


def write_under_interrupts(_: Connection, path: Path) -> None:
    database, other = Database(path), Database(path)
    add(database, "first")
    names = itertools.count()
    num_calls = 0
    for seed in range(20):
        num_calls += interrupted(lambda: add(database, f"name {next(names)}"), 10, within_seconds=0.002, seed=seed)
        add(other, f"other {seed}")  # whoever else wants in, gets in
    assert num_calls - 200 <= count(other) - 21 <= num_calls
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_storm_of_ctrl_c_leaves_no_lock_behind(path: Path) -> None:
    with Stage() as stage:
        stage.run_all(write_under_interrupts, [(path,)])
