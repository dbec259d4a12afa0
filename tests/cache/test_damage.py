"""Bits that flip in the ledger's files, and files that lie beside it: it heals, or it is one clear error, never a raw one."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.admin.activity import look
from sqlstream.cache.ledger import damage
from sqlstream.cache.ledger.database import Database
from sqlstream.cache.ledger.ledger import Ledger
from sqlstream.cache.ledger.schema import SCHEMA_DIGEST, SCHEMA_VERSION
from sqlstream.cache.model.rows import Reservation
from sqlstream.errors import CacheDamagedError, CacheDirectoryError, CacheDiskError, MigrationError, SqlStreamError
from sqlstream.testing.invariants import violations
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.actors import objects
from tests.cache.deaths import URLS, filled, opened, read

NUM, SIZE = 12, 100
JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
JOURNALS = {
    "empty": b"",
    "garbage": bytes(range(256)) * 4,
    "zeros": bytes(512),
    "hot": JOURNAL_MAGIC + bytes(504),
    "hot with pages": JOURNAL_MAGIC + b"\xff\xff\xff\xff" + bytes(500) + bytes(range(256)) * 40,
}


class Specimen:
    """A filled cache in two states, closed and in use, to be copied and damaged."""

    def __init__(self, root: Path, server: FaultyHttpServer) -> None:
        server.objects.update(objects([SIZE] * NUM))
        self._root, self._server = root, server
        self.urls = [f"{server.url}/o/{i}.bin" for i in range(NUM)]
        with Cache(root / "closed", limit=1 << 20) as cache:
            cache.acquire_many(self.urls)
            cache.release_many(self.urls)
            cache.statistics()
            shutil.copytree(root / "closed", root / "open", ignore=shutil.ignore_patterns("ballast"))
        shutil.rmtree(root / "open/owners")
        (root / "open/owners").mkdir()
        (root / "closed/ballast").unlink()

    def copy(self, state: str = "closed") -> Path:
        directory = self._root / "copy"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(self._root / state, directory)
        return directory

    def use(self, directory: Path) -> None:
        """All that a user does; the bytes must be right."""
        with Cache(directory, limit=1 << 20) as cache:
            for url, path in zip(self.urls, cache.acquire_many(self.urls), strict=True):
                assert path.read_bytes() == self._server.objects[url.removeprefix(self._server.url)]
            cache.release_many(self.urls)
            cache.statistics()
            cache.verify(repair=True)
            cache.clear(older_than_seconds=3600)

    def heals(self, directory: Path) -> list[str]:
        """Use a damaged cache until it works, at most three times; return the errors. What is not ours is raised."""
        errors: list[str] = []
        for _ in range(3):
            with contextlib.suppress(CacheDamagedError, MigrationError, CacheDirectoryError):
                look(directory)
            try:
                self.use(directory)
            except SqlStreamError as error:
                errors.append(str(error))
            else:
                assert violations(directory, at_rest=True) == []
                return errors
        return errors


@pytest.fixture(scope="module")
def specimen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Specimen]:
    with FaultyHttpServer() as server:
        yield Specimen(tmp_path_factory.mktemp("specimen"), server)


def flip(directory: Path, rng: random.Random, part: str) -> str:
    """Change a bit, a byte or a sector of one of the ledger's files; return which."""
    names = [name for name in sorted(os.listdir(directory)) if name.startswith("ledger.sqlite")]
    name = "ledger.sqlite" if part != "anywhere" else rng.choice(names)
    raw = bytearray((directory / name).read_bytes())
    at = rng.randrange(min({"header": 100, "schema": 8192}.get(part, len(raw)), len(raw)))
    how = rng.choice(["bit", "bit", "byte", "sector"])
    if how == "bit":
        raw[at] ^= 1 << rng.randrange(8)
    elif how == "byte":
        raw[at] = rng.randrange(256)
    else:
        raw[at : at + 512] = bytes(len(raw[at : at + 512]))
    (directory / name).write_bytes(raw)
    return f"{how} of {name} at {at}"


@pytest.mark.parametrize("num", [4, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", ["header", "schema", "anywhere"])
def test_a_damaged_ledger_heals_or_is_one_clear_error(specimen: Specimen, part: str, num: int) -> None:
    rng = random.Random(f"{part} {num}")
    for _ in range(num):
        directory = specimen.copy(rng.choice(["closed", "open"]))
        what = flip(directory, rng, part)
        try:
            errors = specimen.heals(directory)
        except Exception as error:
            raise AssertionError(what) from error
        assert len(errors) < 3 or "if no later version has ever been here, it is damaged" in errors[-1], (what, errors)


@pytest.mark.parametrize("at", [18, 19])
@pytest.mark.parametrize("state", ["closed", "open"])
def test_a_ledger_that_sqlite_takes_as_read_only_by_a_flipped_bit_heals(specimen: Specimen, state: str, at: int) -> None:
    directory = specimen.copy(state)
    raw = bytearray((directory / "ledger.sqlite").read_bytes())
    raw[at] ^= 4
    (directory / "ledger.sqlite").write_bytes(raw)
    assert len(specimen.heals(directory)) < 3


@pytest.mark.parametrize("state", ["closed", "open"])
@pytest.mark.parametrize("name", JOURNALS)
def test_a_journal_that_lies_beside_the_ledger_harms_nothing(specimen: Specimen, state: str, name: str) -> None:
    directory = specimen.copy(state)
    (directory / "ledger.sqlite-journal").write_bytes(JOURNALS[name])
    with Cache(directory) as cache:
        assert cache.statistics().entries == NUM
        assert not (directory / "ledger.sqlite-journal").exists()
        assert cache.verify() == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE sqlite_master SET name = 'entrz', tbl_name = 'entrz' WHERE name = 'entry'",
        "UPDATE sqlite_master SET sql = replace(sql, 'ready_bytes - ', 'ready_bytes + ') WHERE name = 'entry_removed'",
        "DELETE FROM sqlite_master WHERE name = 'entry_added'",
        "UPDATE sqlite_master SET type = 'tabke' WHERE name = 'stat'",
        "UPDATE sqlite_master SET sql = 'CREATE TABLE alembik_version (version_num)' WHERE name = 'alembic_version'",
        "DELETE FROM meta",
        "UPDATE meta SET tick = -1",
        "UPDATE meta SET policy = 'LRU'",
        "PRAGMA user_version = 1",
        f"PRAGMA user_version = {SCHEMA_VERSION + 65536}",
        "PRAGMA user_version = -2147483643",
    ],
)
def test_a_ledger_that_cannot_be_ours_is_made_anew_from_the_files(specimen: Specimen, statement: str) -> None:
    directory = specimen.copy()
    with contextlib.closing(sqlite3.connect(directory / "ledger.sqlite", isolation_level=None)) as plain:
        plain.execute("PRAGMA writable_schema=ON")
        plain.execute(statement)
    assert specimen.heals(directory) == []


def test_a_version_that_may_exist_one_day_is_refused_and_both_cures_are_named(specimen: Specimen) -> None:
    directory = specimen.copy()
    with contextlib.closing(sqlite3.connect(directory / "ledger.sqlite")) as plain:
        plain.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 2}")
    with pytest.raises(MigrationError, match=r"upgrade sqlstream, or use another directory .*it is damaged: remove it"):
        Cache(directory)


@pytest.mark.parametrize("name", ["ledger.sqlite", "REBUILD", "removing"])
def test_a_pipe_in_the_place_of_a_file_of_the_cache_is_waited_for_by_no_process(tmp_path: Path, name: str) -> None:
    filled(tmp_path / "cache")
    path = tmp_path / "cache" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with contextlib.suppress(CacheDiskError), opened(tmp_path / "cache") as cache:
        read(cache, *URLS)  # evicts
        assert cache.verify() == []
    if path.is_fifo():
        path.unlink()
    with opened(tmp_path / "cache") as cache:
        read(cache, *URLS)
    assert violations(tmp_path / "cache", at_rest=True) == []


@pytest.mark.parametrize("kind", ["directory", "link"])
@pytest.mark.parametrize("name", ["lock", "gate", "removing"])
def test_another_thing_in_the_place_of_a_file_of_the_cache_is_named_with_its_cure(tmp_path: Path, name: str, kind: str) -> None:
    filled(tmp_path / "cache")
    path = tmp_path / "cache" / name
    path.unlink(missing_ok=True)
    path.mkdir() if kind == "directory" else path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheDiskError, match=rf"{name} is no file .*: remove it"), opened(tmp_path / "cache") as cache:
        read(cache, *URLS)  # evicts
    path.rmdir() if kind == "directory" else path.unlink()
    with opened(tmp_path / "cache") as cache:
        read(cache, *URLS)
    assert violations(tmp_path / "cache", at_rest=True) == []


@pytest.mark.parametrize("kind", ["directory", "other bytes"])
def test_a_damaged_format_names_the_cure_that_keeps_the_cache(tmp_path: Path, kind: str) -> None:
    filled(tmp_path / "cache")
    path = tmp_path / "cache" / "FORMAT"
    path.unlink()
    path.mkdir() if kind == "directory" else path.write_bytes(b"\xff{")
    with pytest.raises(CacheDirectoryError, match=r"FORMAT is .*: remove "):
        opened(tmp_path / "cache")
    path.rmdir() if kind == "directory" else path.unlink()
    with opened(tmp_path / "cache") as cache:
        assert cache.statistics().entries > 0
        assert cache.verify() == []


def test_the_digest_is_that_of_the_newest_schema(tmp_path: Path) -> None:
    database = Database(tmp_path / "ledger.sqlite")
    database.read("SELECT 1")
    database.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as plain:
        assert damage.schema_digest(plain) == SCHEMA_DIGEST


def test_another_program_that_holds_the_ledger_is_named_and_nothing_is_rebuilt(specimen: Specimen) -> None:
    directory = specimen.copy()
    database = Database(directory / "ledger.sqlite", busy_seconds=0.01)
    database.read("SELECT 1")
    with contextlib.closing(sqlite3.connect(directory / "ledger.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(SqlStreamError, match="another program has it locked"), database.write_transaction():
            pass
        other.execute("ROLLBACK")
    assert database.read("SELECT count(*) FROM entry") == [(NUM,)]
    assert not (directory / "ledger.sqlite.bad").exists()
    database.close()


@pytest.mark.parametrize("table", ["entry", "host", "stat", "used"])
def test_a_run_of_zeros_heals_wherever_it_lies_in_a_table(specimen: Specimen, table: str) -> None:
    with contextlib.closing(sqlite3.connect(specimen.copy() / "ledger.sqlite")) as plain:
        page_bytes = plain.execute("PRAGMA page_size").fetchone()[0]
        root = plain.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]
    for at in range((root - 1) * page_bytes, root * page_bytes, 512):
        directory = specimen.copy()
        raw = bytearray((directory / "ledger.sqlite").read_bytes())
        raw[at : at + 512] = bytes(512)
        (directory / "ledger.sqlite").write_bytes(raw)
        assert len(specimen.heals(directory)) < 3, at


def test_a_key_that_the_table_has_and_a_search_does_not_find_is_damage(specimen: Specimen) -> None:
    directory = specimen.copy()
    with contextlib.closing(sqlite3.connect(directory / "ledger.sqlite")) as plain:
        (key,) = plain.execute("SELECT min(key) FROM entry").fetchone()
    database = Database(directory / "ledger.sqlite", refill=lambda _: None)
    with pytest.raises(CacheDamagedError, match=r"UNIQUE constraint failed: entry\.key"), Ledger(database).transaction() as tx:
        tx.reserve([Reservation(key=key, url="", ext="", charged_bytes=4096, part=key.hex())])
    assert database.read("SELECT count(*) FROM entry") == [(0,)], "it was made anew"
    database.close()
