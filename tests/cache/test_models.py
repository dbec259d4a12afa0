"""The models describe what the migrations create."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from sqlstream.cache.ledger.database import APPLICATION_ID, SCHEMA_VERSION, Database
from sqlstream.cache.ledger.tables import Base


def test_models_equal_the_migrations(tmp_path: Path) -> None:
    database = Database(tmp_path / "ledger.sqlite")
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), Base.metadata) == []
    database.close()


def test_every_table_is_strict_and_has_the_clustering_that_its_model_says(tmp_path: Path) -> None:
    database = Database(tmp_path / "ledger.sqlite")
    tables = {
        row[1]: row for row in database.read("PRAGMA table_list") if row[0] == "main" and not row[1].startswith("sqlite_")
    }
    assert tables.pop("pin")[2] == "view"
    assert set(tables) - {"alembic_version"} == set(Base.metadata.tables)
    for name, model in Base.metadata.tables.items():
        _, _, kind, _, without_rowid, strict = tables[name]
        assert (kind, bool(strict)) == ("table", True), name
        assert bool(without_rowid) == (model.dialect_options["sqlite"]["with_rowid"] is False), name
    database.close()


def test_totals_are_kept_by_three_triggers_on_entry(tmp_path: Path) -> None:
    database = Database(tmp_path / "ledger.sqlite")
    triggers = database.read("SELECT name, tbl_name FROM sqlite_master WHERE type = 'trigger' ORDER BY name")
    assert triggers == [("entry_added", "entry"), ("entry_charged", "entry"), ("entry_removed", "entry")]
    columns = "key, url, size, charged_bytes, state, tick, part, ext, created_at"
    insert = f"INSERT INTO entry ({columns}) VALUES (?, 'u', 1, ?, ?, 0, ?, '', 0)"
    with database.write_transaction() as connection:
        connection.execute(insert, (b"a" * 16, 4096, "ready", None))
        connection.execute(insert, (b"b" * 16, 8192, "filling", "p"))
    assert database.read("SELECT entries, ready_bytes, filling_bytes FROM totals") == [(2, 4096, 8192)]
    with database.write_transaction() as connection:
        connection.execute("UPDATE entry SET state = 'ready', part = NULL, charged_bytes = 4096 WHERE state = 'filling'")
    assert database.read("SELECT entries, ready_bytes, filling_bytes FROM totals") == [(2, 8192, 0)]
    with database.write_transaction() as connection:
        connection.execute("DELETE FROM entry")
    assert database.read("SELECT entries, ready_bytes, filling_bytes FROM totals") == [(0, 0, 0)]
    database.close()


@pytest.mark.parametrize("num_pins", [0, 1, 255, 256, 257, 1000])
def test_pins_are_shown_as_rows(tmp_path: Path, num_pins: int) -> None:
    database = Database(tmp_path / "ledger.sqlite")
    pins = {name: [f"{name}{i:015d}".encode() for i in range(num_pins)] for name in "ab"}
    with database.write_transaction() as connection:
        insert = "INSERT INTO owner (id, pid, host, started_at, name, pins) VALUES (?, 1, '', 1, '', ?)"
        connection.executemany(insert, [(name, b"".join(keys)) for name, keys in pins.items()])
        connection.execute(insert, ("c", b""))
    rows = database.read("SELECT key, owner FROM pin")
    assert len(rows) == 2 * num_pins
    assert set(rows) == {(key, name) for name, keys in pins.items() for key in keys}
    database.close()


def test_the_header_tells_what_the_file_is(tmp_path: Path) -> None:
    database = Database(tmp_path / "ledger.sqlite")
    assert database.read("PRAGMA application_id") == [(APPLICATION_ID,)]
    assert database.read("PRAGMA user_version") == [(SCHEMA_VERSION,)]
    database.close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as plain:
        assert plain.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    plain.close()
