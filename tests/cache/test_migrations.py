"""Ledgers of earlier versions: upgraded in one transaction, their files untouched; of later versions: refused."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.ledger import schema
from sqlstream.cache.ledger.database import Database
from sqlstream.cache.ledger.ledger import Ledger
from sqlstream.cache.ledger.reports import failures
from sqlstream.cache.ledger.schema import SCHEMA_VERSION
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.errors import MigrationError
from sqlstream.process import locks
from sqlstream.testing.disk import cached_files
from sqlstream.testing.invariants import violations
from tests.cache.actors import Stage
from tests.cache.deaths import DIED, OBJECTS, URLS, filled, opened, read
from tests.cache.old_ledgers import as_version, as_version_1, migrate, version
from tests.cache.session import Session
from tests.processes import in_child


def bodies(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / "data").glob("*/*")}


def test_a_ledger_of_version_1_upgrades_with_its_live_rows_and_keeps_its_files(directory: Path) -> None:
    filled(directory)
    as_version_1(directory)
    pinned, filling, owner = ObjectRef.of(URLS[4]).key, ObjectRef.of("http://nowhere/new.bin").key, "0" * 32
    disk = Disk(directory)
    fd, part = disk.owners.create(owner), disk.create_part(filling)
    os.posix_fallocate(part.fd, 0, 4096)
    with contextlib.closing(sqlite3.connect(directory / "ledger.sqlite")) as old, old:  # as the code of version 1 wrote
        old.execute("INSERT INTO owner VALUES (?, 1, 'h', 1, 'n', NULL, NULL, NULL)", (owner,))
        old.execute("INSERT INTO pin VALUES (?, ?, 1)", (pinned, owner))
        old.execute("INSERT INTO touch VALUES (1000, ?)", (pinned,))
        old.execute("INSERT INTO failure VALUES ('http://nowhere/x', 'gone', 3, 1)")
        insert = "INSERT INTO entry VALUES (?, 'u', NULL, 4096, 'filling', 0, ?, '.bin', NULL, NULL, 0)"
        old.execute(insert, (filling, part.name))
    before = bodies(directory)
    assert len(before) == 4
    with Cache(directory) as cache:
        assert version(directory / "ledger.sqlite") == SCHEMA_VERSION
        assert bodies(directory) == before
        assert violations(directory) == []
        assert cache.clear().kept_pinned_entries == 1
        rows = Session(cache).read("SELECT key, state, part FROM entry ORDER BY state DESC")
        assert rows == [(pinned, "ready", None), (filling, "filling", part.name)]
        ((url, row, step, count),) = [(f.url, f.row, f.step, f.count) for f in failures(Session(cache).ledger)]
        assert (url, row, step, count) == ("http://nowhere/x", None, None, 3)
    disk.remove_part(part.name)
    disk.close_part(part)
    locks.close_descriptor(fd)
    with opened(directory) as cache:
        read(cache, *URLS[:8])
        assert cache.verify() == []
    assert violations(directory, at_rest=True) == []


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_owner_keeps_its_pins_and_its_share_of_the_limit(directory: Path, number: int) -> None:
    filled(directory)
    as_version(directory, number)
    disk = Disk(directory)
    fds = [disk.owners.create(character * 32) for character in "abc"]
    pinned = sorted([ObjectRef.of(URLS[4]).key, bytes(16)])
    with contextlib.closing(sqlite3.connect(directory / "ledger.sqlite")) as old, old:  # as the code of that version wrote
        columns = "id, pid, host, started_at, name, limit_bytes, waiting_tick, waiting_bytes"
        for owner in ("a" * 32, "b" * 32, "c" * 32):
            old.execute(f"INSERT INTO owner ({columns}) VALUES (?, 1, 'h', 1, 'n', 40960, 7, 8)", (owner,))
        rows = [(pinned[0], "b" * 32), (pinned[1], "b" * 32), (pinned[1], "c" * 32)]
        old.executemany("INSERT INTO pin VALUES (?, ?, 1)", rows)
        if number == 3:
            old.execute("UPDATE owner SET is_pinning = 1 WHERE id <> ?", ("a" * 32,))
    database = Database(directory / "ledger.sqlite")
    assert database.read("SELECT * FROM pin ORDER BY owner, key") == rows
    ((*others, pins), *_) = database.read("SELECT * FROM owner ORDER BY id DESC")
    assert others == ["c" * 32, 1, "h", 1, "n", 40960, 7, 8, None]
    assert pins == pinned[1]
    with Ledger(database).transaction() as tx:
        assert tx.pinned() == set(pinned)
        assert tx.pinned(besides="b" * 32) == {pinned[1]}
    assert database.read("SELECT name FROM sqlite_master WHERE name IN ('pin_by_owner', 'old_owner')") == []
    assert Ledger(database).share_bytes(1) == 20480
    assert Ledger(database).share_bytes(3) == 40960 // 3
    database.close()
    for fd in fds:
        locks.close_descriptor(fd)


def test_a_ledger_of_a_later_version_is_refused_and_nothing_of_its_cache_changes(directory: Path) -> None:
    filled(directory)
    with contextlib.closing(sqlite3.connect(directory / "ledger.sqlite")) as later, later:
        later.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
        later.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = {path: path.stat().st_mtime_ns for path in (directory, *directory.rglob("*")) if path.is_file()}
    with pytest.raises(MigrationError, match=rf"schema {SCHEMA_VERSION + 1}.*upgrade sqlstream"):
        Cache(directory)
    after = {path: path.stat().st_mtime_ns for path in before if path.exists()}
    assert after == before
    assert len(cached_files(directory)) == 4


def rows_of(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """What a ledger of version 1 knew, without columns that came later."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        columns = {"entry": "key, url, size, charged_bytes, state, tick", "totals": "*", "stat": "*", "meta": "uuid, tick"}
        return {table: connection.execute(f"SELECT {names} FROM {table}").fetchall() for table, names in columns.items()}


def die_at_every_statement(_: Connection, root: Path, number: int) -> int:
    """Die before each SQL statement of an upgrade in turn, BEGIN and COMMIT among them; returns how many there are."""
    original, path = root / "original", root / "copy" / "ledger.sqlite"
    filled(original)
    as_version(original, number)
    before = rows_of(original / "ledger.sqlite")
    upgrade = schema.upgrade_to_head
    for at in range(1, 1000):
        shutil.rmtree(root / "copy", ignore_errors=True)
        shutil.copytree(original, root / "copy")

        def dying(connection: sqlite3.Connection, at: int = at) -> None:
            statements: list[str] = []

            def note(sql: str) -> None:
                statements.append(sql)
                if len(statements) == at:
                    os._exit(DIED)

            connection.set_trace_callback(note)
            upgrade(connection)
            connection.set_trace_callback(None)

        def work(dying: object = dying) -> None:
            schema.__dict__["upgrade_to_head"] = dying
            Database(path).read("SELECT 1")

        status = in_child(work)
        assert status in (0, DIED), f"at {at}: exit status {status}"
        assert version(path) in ((SCHEMA_VERSION,) if status == 0 else (number, SCHEMA_VERSION)), at
        database = Database(path)
        assert database.read("PRAGMA user_version") == [(SCHEMA_VERSION,)], at
        database.close()
        assert rows_of(path) == before, at
        if status == 0:
            return at - 1
    raise AssertionError("it never gets through")


@pytest.mark.parametrize("number", range(1, SCHEMA_VERSION))
def test_a_death_at_any_statement_of_an_upgrade_leaves_the_old_version_or_the_new(
    memory_path: Path, stage: Stage, number: int
) -> None:
    (num_statements,) = stage.run_all(die_at_every_statement, [(memory_path, number)])
    assert num_statements >= 10


def open_and_read(_: Connection, directory: Path) -> bytes:
    with opened(directory) as cache, cache.pinned(URLS[1]) as path:
        return path.read_bytes()


def test_processes_that_upgrade_at_the_same_time_all_get_through(directory: Path, stage: Stage) -> None:
    filled(directory)
    as_version_1(directory)
    assert stage.run_all(open_and_read, [(directory,)] * 3) == [OBJECTS[URLS[1]]] * 3
    assert version(directory / "ledger.sqlite") == SCHEMA_VERSION
    assert violations(directory, at_rest=True) == []


def test_the_migrations_up_to_each_version_set_its_number(tmp_path: Path) -> None:
    for number in range(1, SCHEMA_VERSION + 1):
        migrate(tmp_path / "ledger.sqlite", f"{number:04d}")
        assert version(tmp_path / "ledger.sqlite") == number


def contents(path: Path) -> tuple[set[tuple[str, ...]], dict[str, list[tuple[object, ...]]]]:
    """The schema of a ledger, as SQLite was told it but for blanks, and its rows but for what is drawn at random."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        schema = {
            tuple("".join(str(word).split()) for word in row)
            for row in connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")
        }
        connection.execute("UPDATE meta SET uuid = ''")
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in tables}
        rows["pragmas"] = [connection.execute(f"PRAGMA {name}").fetchone() for name in ("user_version", "application_id")]
    return schema, rows


def test_a_new_ledger_is_what_the_migrations_make(tmp_path: Path) -> None:
    migrate(tmp_path / "migrated.sqlite", "head")
    database = Database(tmp_path / "ledger.sqlite")
    database.read("SELECT 1")
    database.close()
    assert contents(tmp_path / "ledger.sqlite") == contents(tmp_path / "migrated.sqlite")


def test_a_new_cache_is_made_without_alembic_and_sqlalchemy(tmp_path: Path) -> None:
    """To import them takes longer than all the rest of a first start."""
    script = (
        "import sys; from sqlstream.cache import Cache; Cache(sys.argv[1]).close(); "
        "sys.exit(' '.join({'alembic', 'sqlalchemy'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=500)


def die_at_every_statement_of_a_new_ledger(_: Connection, root: Path) -> int:
    """Die before each SQL statement that makes a ledger in turn; returns how many there are."""
    create = schema.create_at_head
    for at in range(1, 1000):
        shutil.rmtree(root / "cache", ignore_errors=True)

        def work(at: int = at) -> None:
            statements: list[str] = []

            def note(sql: str) -> None:
                statements.append(sql)
                if len(statements) == at:
                    os._exit(DIED)

            def dying(connection: sqlite3.Connection) -> None:
                connection.set_trace_callback(note)
                create(connection)
                connection.set_trace_callback(None)

            schema.__dict__["create_at_head"] = dying
            Cache(root / "cache").close()

        status = in_child(work)
        assert status in (0, DIED), f"at {at}: exit status {status}"
        Cache(root / "cache").close()
        assert violations(root / "cache", at_rest=True) == [], at
        if status == 0:
            return at - 1
    raise AssertionError("it never gets through")


def test_after_a_death_at_any_statement_of_a_new_ledger_the_cache_opens(memory_path: Path, stage: Stage) -> None:
    (num_statements,) = stage.run_all(die_at_every_statement_of_a_new_ledger, [(memory_path,)])
    assert num_statements >= 20
