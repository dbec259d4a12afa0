"""Room for a ledger that cannot be asked: what is removed by files alone, and what is never."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.admin.clear import clear
from sqlstream.cache.files.disk import DataFile, Disk
from sqlstream.cache.files.read_hold import ReadHold
from sqlstream.cache.ledger.reports import Failure
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.recovery import emergency
from sqlstream.cache.recovery.recover import verify
from sqlstream.errors import MissingDependencyError
from sqlstream.testing.faults import SideEffects
from sqlstream.testing.invariants import violations
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.testing.system_calls import sqlite_system_calls
from tests.cache.actors import is_right, objects
from tests.cache.deaths import URLS, opened, read
from tests.cache.session import Session


class FullDisk(Disk):
    """A disk that has never room."""

    def has_room(self, num_bytes: int, num_files: int) -> bool:
        return False


class LargeDisk(FullDisk):
    """Holds 307 200 files, of which one in a hundred is old; nothing of it is on the real disk."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.num_seen = 0
        self.removed: list[bytes] = []

    def scan_data(self, only: str = "") -> Iterator[DataFile]:
        for folder in [only] if only else (f"{number:02x}" for number in range(256)):
            for number in range(1200):
                self.num_seen += 1
                key = bytes.fromhex(folder) + number.to_bytes(15, "big")
                used_at = float(number % 100 != 7)
                yield DataFile(key=key, ext="", size_bytes=1, allocated_bytes=4096, came_at=0.0, used_at=used_at)

    def remove_data(self, key: bytes, ext: str) -> bool:
        self.removed.append(key)
        return True


def test_of_a_large_cache_some_files_are_looked_at_and_the_longest_unused_of_them_go(tmp_path: Path) -> None:
    Cache(tmp_path / "cache", limit=None).close()
    disk = LargeDisk(tmp_path / "cache")
    emergency.give_room(disk)
    assert disk.num_seen < 10_000
    assert len(disk.removed) == 200
    num_old = disk.num_seen // 100
    assert {int.from_bytes(key[1:], "big") % 100 for key in disk.removed[:num_old]} == {7}


def test_the_note_of_removals_never_grows_and_the_next_transaction_empties_it(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as cache:
        session = Session(cache)
        session.flush()
        note = tmp_path / "cache" / "removing"
        size = note.stat().st_size
        disk = LargeDisk(tmp_path / "cache")
        while len(disk.removed) < disk.num_removals_noted():
            emergency.give_room(disk)
            assert len(disk.read_removal()) == len(set(disk.removed))
        emergency.give_room(disk)
        assert note.stat().st_size == size
        session.disk.drop_ballast()
        read(cache, URLS[0])
        assert disk.read_removal() == []
        emergency.give_room(disk)
        assert len(disk.read_removal()) == 200


def test_pinned_and_read_objects_stay_and_the_rows_of_those_that_go_are_uncounted(tmp_path: Path) -> None:
    with FaultyHttpServer(objects([3000] * 8)) as server, Cache(tmp_path / "cache", limit=None) as cache:
        urls = [f"{server.url}/o/{i}.bin" for i in range(8)]
        refs = [ObjectRef.of(url) for url in urls]
        for url in urls[1:]:
            with cache.pinned(url):
                pass
        pinned = cache.hold(refs[:1])
        session = Session(cache)
        read = session.acquire_one(refs[1:2], for_reading=True)
        assert isinstance(read, ReadHold)
        assert session.claim(read)
        session.flush()
        disk = FullDisk(cache.path)
        emergency.give_room(disk, keep=[refs[2].key])
        assert {file.key for file in disk.scan_data()} == {ref.key for ref in refs[:3]}
        emergency.give_room(disk)  # the note of what went first is kept
        assert sorted(file.key for file in disk.scan_data()) == sorted(ref.key for ref in refs[:2])
        assert set(disk.read_removal()) >= {ref.key for ref in refs[2:]}
        for hold in (pinned, read):
            session.release(hold)
        assert cache.verify() == []
        assert cache.statistics().used_bytes == 2 * disk.unit.charge(3000)
        for url in urls:
            with cache.pinned(url) as path:
                assert is_right(path, url)
    assert violations(tmp_path / "cache", at_rest=True) == []


Act = Callable[[Session], None]


def register(session: Session) -> None:
    assert session.primary.register("of a worker", "t.csv", "") is not None


def note_failures(session: Session) -> None:
    session.primary.note_failures([Failure(url=URLS[0], error="gone")])
    assert session.read("SELECT url FROM failure") == [(URLS[0],)]


def clear_all(session: Session) -> None:
    removed = clear(session.ledger, session.disk, dataset=None, older_than_seconds=None, index=False)
    assert (removed.removed_entries, removed.kept_pinned_entries) == (3, 1)


def repair(session: Session) -> None:
    (lost,) = (file for file in session.disk.scan_data() if file.key == ObjectRef.of(URLS[3]).key)
    session.disk.remove_data(lost.key, lost.ext)
    assert [finding.repaired for finding in verify(session.ledger, session.disk, repair=True)] == [True]


def hand_over(session: Session) -> None:
    kept: list[int] = []
    session.hand_over(lambda fd: kept.append(os.dup(fd)))
    assert len(kept) == 1
    os.close(kept[0])


@pytest.mark.parametrize("act", [register, note_failures, clear_all, repair, hand_over])
def test_a_write_of_the_ledger_on_a_full_disk_is_tried_again_once_room_was_made(tmp_path: Path, act: Act) -> None:
    def fail(_: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path / "cache") as cache:
        read(cache, *URLS[:4])
        session = Session(cache)
        pinned = session.acquire_one([ObjectRef.of(URLS[0])])
        session.claim(pinned)
        session.retain(pinned)
        session.flush()
        effects = SideEffects(1, fail, only=frozenset({"write", "pwrite64"}))
        try:
            with sqlite_system_calls(effects.note):
                act(session)
        except MissingDependencyError as error:
            pytest.skip(str(error))
        assert effects.num_seen > 1
