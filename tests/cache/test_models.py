"""The models describe what the migrations create."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from sqlstream.cache.ledger import queries
from sqlstream.cache.ledger.database import Database
from sqlstream.cache.ledger.schema import APPLICATION_ID, SCHEMA_VERSION
from sqlstream.cache.ledger.tables import Base, DatasetModel, MetaModel


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


def test_reports_see_no_limit_as_none_and_null_where_a_column_allows_it(tmp_path: Path) -> None:
    database = Database(tmp_path / "ledger.sqlite")
    with database.write_transaction() as connection:
        assert queries.meta(connection) == {"limit_bytes": None, "policy": "lru"}
        connection.execute("UPDATE meta SET limit_bytes = ?", (2**63 - 1,))
        assert queries.meta(connection)["limit_bytes"] is None
        connection.execute("UPDATE meta SET limit_bytes = 4096")
        assert queries.meta(connection)["limit_bytes"] == 4096
        assert queries.read(connection, sqlalchemy.select(MetaModel.limit_bytes, MetaModel.uses)) == [
            {"limit_bytes": 4096, "uses": 0}
        ]
    database.close()


def test_a_report_counts_pins_and_objects_on_their_way_of_one_dataset_or_of_all(tmp_path: Path) -> None:
    database = Database(tmp_path / "ledger.sqlite")
    columns = "key, url, size, charged_bytes, state, tick, part, ext, created_at, dataset"
    rows = [
        (b"a" * 16, "u", 1, 4096, "ready", 0, None, "", 0, 1),
        (b"b" * 16, "v", 1, 8192, "ready", 0, None, "", 0, 2),
        (b"c" * 16, "w", None, 4096, "filling", 0, "p", "", 0, 2),
    ]
    with database.write_transaction() as connection:
        connection.executemany(
            "INSERT INTO dataset (id, name, src, fingerprint, last_used) VALUES (?, ?, 's', 'f', 0)", [(1, "one"), (2, "two")]
        )
        connection.executemany(f"INSERT INTO entry ({columns}) VALUES ({', '.join('?' * 10)})", rows)
        insert = "INSERT INTO owner (id, pid, host, started_at, name, pins) VALUES (?, 1, 'h', 1, 'n', ?)"
        connection.executemany(insert, [("x", b"a" * 16 + b"b" * 16), ("y", b"b" * 16 + b"c" * 16), ("z", b"")])
        assert queries.pinned(connection) == {"entries": 3, "bytes": 16384}
        assert queries.ready_and_pinned(connection, None) == {"entries": 2, "bytes": 12288}
        assert queries.ready_and_pinned(connection, 2) == {"entries": 1, "bytes": 8192}
        assert (queries.num_filling(connection, None), queries.num_filling(connection, 1)) == (1, 0)
        assert [(row["id"], row["pinned_entries"], row["pinned_bytes"]) for row in queries.owners(connection)] == [
            ("x", 2, 12288),
            ("y", 2, 12288),
            ("z", 0, 0),
        ]
        assert [(row["name"], row["entries"], row["bytes"]) for row in queries.datasets(connection)] == [
            ("one", 1, 4096),
            ("two", 2, 12288),
        ]
    database.close()


def test_a_value_of_another_type_than_its_column_is_damage(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "x.sqlite") as connection:
        connection.execute("CREATE TABLE dataset (id, name, src)")  # as a damaged page shows it: STRICT is not checked by reads
        connection.execute("INSERT INTO dataset VALUES (1, NULL, 's')")
        with pytest.raises(sqlite3.DatabaseError, match="not as it was written") as caught:
            queries.read(connection, sqlalchemy.select(DatasetModel.id, DatasetModel.name))
        assert caught.value.sqlite_errorcode == sqlite3.SQLITE_CORRUPT
        assert queries.read(connection, sqlalchemy.select(DatasetModel.id, DatasetModel.src)) == [{"id": 1, "src": "s"}]
    connection.close()
