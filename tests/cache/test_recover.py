"""What the dead leave behind; verify and its repairs."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.model.refs import ObjectRef, charged_bytes, object_key
from sqlstream.cache.recovery import recover
from sqlstream.testing.disk import cached_files
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.actors import WAIT_SECONDS, Stage, begin_and_wait, body, is_right, objects, pin_until_told, say
from tests.cache.kit import num_gets
from tests.cache.session import Session

SIZE = 10_000


@pytest.fixture
def urls(server: FaultyHttpServer) -> list[str]:
    server.objects.update(objects([SIZE] * 6))
    return [f"{server.url}/o/{i}.bin" for i in range(6)]


@pytest.fixture
def filled(directory: Path, urls: list[str]) -> Path:
    with Cache(directory) as cache:
        cache.acquire_many(urls)
    return directory


def rename_and_die(_: Connection, directory: Path, url: str) -> None:
    """Die after the file is in data/ and before its row is ready."""
    cache = Cache(directory, limit=1 << 20)
    publish = Disk.publish

    def publish_and_die(*arguments: object) -> None:
        publish(*arguments)  # type: ignore[arg-type]
        os._exit(9)

    Disk.publish = publish_and_die  # type: ignore[method-assign, assignment]
    cache.acquire_many([url])


def test_a_kill_between_rename_and_commit_keeps_the_file(
    server: FaultyHttpServer, directory: Path, urls: list[str], stage: Stage
) -> None:
    actor = stage.start(rename_and_die, directory, urls[0])
    actor.process.join(WAIT_SECONDS)
    assert actor.process.exitcode == 9
    assert list(cached_files(directory).values()) == [SIZE]
    with Cache(directory, limit=1 << 20) as cache:
        with cache.pinned(urls[0]) as path:
            assert path.read_bytes() == server.objects["/o/0.bin"]
        stats = cache.statistics()
        assert (stats.hits, stats.used_bytes, stats.filling_bytes) == (1, charged_bytes(SIZE), 0)
    assert num_gets(server) == 1
    check_invariants(directory, at_rest=True)


def evict_and_die(_: Connection, directory: Path) -> None:
    """Die after a file is gone and before its row is."""
    remove_data = Disk.remove_data

    def remove_and_die(*arguments: object) -> None:
        remove_data(*arguments)  # type: ignore[arg-type]
        os._exit(9)

    Disk.remove_data = remove_and_die  # type: ignore[method-assign, assignment]
    Cache(directory).clear()


def test_a_kill_between_unlink_and_commit_is_not_said_to_be_a_strangers(
    filled: Path, urls: list[str], stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    with Cache(filled) as cache:
        with cache.pinned(urls[0]):
            pass
        actor = stage.start(evict_and_die, filled)
        actor.process.join(WAIT_SECONDS)
        assert (actor.process.exitcode, len(cached_files(filled))) == (9, len(urls) - 1)
        for url in urls:
            with cache.pinned(url) as path:
                assert path.exists()
        assert cache.statistics().quarantined == 0
    assert "another program" not in caplog.text
    check_invariants(filled, at_rest=True)


class _DiedError(Exception):
    """Ends a transaction before its COMMIT."""


def unlink_and_die(cache: Cache, *removed: list[str]) -> None:
    """Remove files, one after the other of `removed`, in a transaction that comes to no COMMIT."""
    session = Session(cache)
    with contextlib.suppress(_DiedError), session.transaction() as tx:
        for urls in removed:
            keys = [object_key(url) for url in urls]
            assert len(recover.remove(tx, session.directory.disk, [*tx.find(keys).values()])) == len(urls)
        raise _DiedError


def test_files_that_one_transaction_removes_in_two_steps_are_uncounted_after_its_death(filled: Path, urls: list[str]) -> None:
    with Cache(filled) as cache:
        unlink_and_die(cache, urls[:2], urls[2:3])
        assert cache.verify() == []
        assert cache.statistics().entries == 3


def test_files_of_a_death_are_uncounted_by_the_next_who_removes_others(filled: Path, urls: list[str]) -> None:
    with Cache(filled) as cache:
        unlink_and_die(cache, urls[:2])
        unlink_and_die(cache, urls[2:3])
        with Session(cache).transaction() as tx:
            recover.remove(tx, Disk(filled), [*tx.find([object_key(urls[3])]).values()])
        assert cache.statistics().entries == 2, "the rows of the three are gone with the fourth"
        assert cache.verify() == []


def test_a_row_that_a_dead_process_pins_and_whose_file_is_gone_goes_as_that_process_is_reaped(
    filled: Path, urls: list[str]
) -> None:
    keys = [object_key(url) for url in urls]
    disk = Disk(filled)
    with Cache(filled) as cache:
        session = Session(cache)
        with session.transaction() as tx:  # its row, and no file that it has locked
            tx.add_owner("0" * 32, pid=1, host="", name="dead", limit_bytes=None)
            tx.set_pins("0" * 32, keys[:2])
        disk.announce_removal(keys[:2])  # an emergency asks no ledger
        assert all(disk.remove_data(key, ".bin") for key in keys[:2])
        check_invariants(filled)
        with session.transaction() as tx:
            recover.remove(tx, disk, [*tx.find(keys[2:3]).values()])
            assert tx.find(keys).keys() == {*keys} - {keys[2]}
            assert {*disk.read_removal()} == {*keys[:3]}, "the note keeps them until they are uncounted"
        with session.transaction() as tx:
            assert recover.reap(tx, disk) == 3
            assert tx.find(keys).keys() == {*keys[3:]}
        assert cache.verify() == []
    check_invariants(filled, at_rest=True)


def test_a_row_that_a_living_process_pins_and_whose_file_is_gone_is_fetched_again(
    server: FaultyHttpServer, filled: Path, urls: list[str], stage: Stage
) -> None:
    reader = stage.start(pin_until_told, filled, 1 << 20, urls[:1])
    reader.hear()
    disk = Disk(filled)
    assert disk.remove_data(object_key(urls[0]), ".bin")
    disk.announce_removal([object_key(urls[0])])
    with Cache(filled) as cache:
        with Session(cache).transaction() as tx:
            assert recover.reap(tx, disk) == 0, "what a living process pins stays counted"
        assert cache.statistics().entries == 6
        with cache.pinned(urls[0]) as path:
            assert path.read_bytes() == server.objects["/o/0.bin"]
        assert cache.verify() == []
    reader.tell()
    reader.process.join(WAIT_SECONDS)
    assert reader.process.exitcode == 0
    check_invariants(filled, at_rest=True)


def test_pins_and_downloads_of_a_killed_process_are_given_back(
    server: FaultyHttpServer, directory: Path, urls: list[str], stage: Stage
) -> None:
    holder = stage.start(pin_until_told, directory, 1 << 20, urls[:3])
    holder.hear()
    with Cache(directory) as cache:
        assert cache.statistics().pinned_entries == 3
        holder.kill()
        assert cache.verify() == []  # the dead are ordinary, and no finding
        stats = cache.statistics()
        assert (stats.pinned_entries, len(stats.owners)) == (0, 0)  # who only looks is no owner
    assert [path.name for path in (directory / "owners").iterdir()] == []
    check_invariants(directory, at_rest=True)


def test_a_part_without_a_row_is_removed_when_nobody_holds_it(filled: Path) -> None:
    disk = Disk(filled)
    dead, live = disk.create_part(bytes(16)), disk.create_part(bytes(16))
    disk.close_part(dead)
    with Cache(filled) as cache:
        assert cache.verify() == []
        assert disk.scan_parts() == [live.name]
    disk.discard_parts([live])


def test_verify_of_a_sound_cache_finds_nothing(filled: Path) -> None:
    with Cache(filled, create=False) as cache:
        assert cache.verify() == []


def damage(directory: Path, kind: str, url: str) -> None:
    disk = Disk(directory)
    path = Path(disk.data_path(object_key(url), ".bin"))
    if kind == "missing file":
        path.unlink()
    elif kind == "wrong size":
        os.truncate(path, 77)
    elif kind == "unknown file":
        stray = Path(disk.data_path(b"\xaa" * 16, ".bin"))
        stray.parent.mkdir(exist_ok=True)
        shutil.copy(path, stray)
    else:
        connection = sqlite3.connect(directory / "ledger.sqlite")
        with connection:
            connection.execute("UPDATE totals SET ready_bytes = ready_bytes + 4096, entries = entries + 1")
        connection.close()


@pytest.mark.parametrize(
    ("kind", "key", "num_bytes", "explanation"),
    [
        ("missing file", None, 12_288, "the ledger has 10000 bytes, but no file is there"),
        ("wrong size", None, 12_288, "the file has 77 bytes instead of 10000: another program changed it"),
        ("unknown file", "aa" * 16, 12_288, "the ledger does not count it"),
        ("wrong totals", "totals", 4096, "the sums say 7 entries, 77824 bytes ready and 0 filling, the rows 6, 73728 and 0"),
    ],
)
def test_verify_explains_each_finding_and_repair_mends_it(
    server: FaultyHttpServer, filled: Path, urls: list[str], kind: str, key: str | None, num_bytes: int, explanation: str
) -> None:
    damage(filled, kind, urls[2])
    with Cache(filled) as cache:
        for _ in range(2):
            (finding,) = cache.verify()
            assert (finding.kind, finding.bytes, finding.repaired) == (kind, num_bytes, False)
            assert finding.key == (key or object_key(urls[2]).hex())
            assert finding.url == (urls[2] if key is None else "")
            assert explanation in finding.explanation
            assert "a repair" in finding.explanation
        (finding,) = cache.verify(repair=True)
        assert finding.repaired
        assert cache.verify() == []
        paths = cache.acquire_many(urls)
        assert [path.read_bytes() for path in paths] == [server.objects[f"/o/{i}.bin"] for i in range(6)]
        cache.release_many(urls)
    check_invariants(filled, at_rest=True)


def test_repair_leaves_a_file_that_somebody_reads(filled: Path, urls: list[str], stage: Stage) -> None:
    holder = stage.start(pin_until_told, filled, None, urls[:1])
    (path,) = holder.hear()
    os.truncate(path, 5)
    with Cache(filled) as cache:
        (finding,) = cache.verify(repair=True)
        assert (finding.kind, finding.repaired) == ("wrong size", False)
        assert "a running process reads it: repair again when that has ended" in finding.explanation
        assert Path(path).exists()
        holder.kill()
        (finding,) = cache.verify(repair=True)
        assert finding.repaired
        assert not Path(path).exists()


def read_again_and_again(connection: Connection, directory: Path, limit: int, urls: list[str]) -> int:
    """Read all URLs until told to stop, always the right bytes, under a limit that evicts; returns how often."""
    num_reads = 0
    with Cache(directory, limit=limit) as cache:
        while not connection.poll():
            for url in urls:
                with cache.pinned(url) as path:
                    assert is_right(path, url)
                num_reads += 1
            if num_reads == len(urls):
                say(connection, "reading")
    return num_reads


def test_repair_mends_while_a_reader_goes_on(filled: Path, urls: list[str], stage: Stage) -> None:
    reader = stage.start(read_again_and_again, filled, 4 * charged_bytes(SIZE), urls)
    assert reader.hear() == "reading"
    disk = Disk(filled)
    with Cache(filled) as cache:
        for number in range(10):
            stray = Path(disk.data_path(bytes([number]) * 16, ".bin"))
            stray.parent.mkdir(exist_ok=True)
            stray.write_bytes(bytes(5000))
            with Session(cache).transaction() as tx:
                tx.connection.execute("UPDATE totals SET entries = entries + 1")
            found = cache.verify(repair=True)
            assert sorted(finding.kind for finding in found) == ["unknown file", "wrong totals"]
            assert all(finding.repaired for finding in found)
            assert cache.verify() == []
    reader.tell()
    assert reader.hear() >= len(urls)
    reader.end()
    check_invariants(filled, at_rest=True)


def test_repair_disturbs_neither_readers_nor_downloads(
    server: FaultyHttpServer, filled: Path, urls: list[str], stage: Stage
) -> None:
    holder = stage.start(pin_until_told, filled, None, urls[:3])
    holder.hear()
    server.objects["/new.bin"] = body("/new.bin", 200_000)
    with Cache(filled) as cache:
        hold = Session(cache).acquire_one([ObjectRef.of(f"{server.url}/new.bin")])
        while not Session(cache).wait(hold, timeout_seconds=0.001):
            assert cache.verify(repair=True) == []
        Session(cache).release(hold)
    holder.tell()
    holder.hear()
    late = stage.start(begin_and_wait, filled, None, f"{server.url}/new.bin")
    assert (late.hear(), late.hear()) == ("asking", True)
    assert len(server.requests("/new.bin")) == 1
