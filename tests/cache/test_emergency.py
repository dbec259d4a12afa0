"""Room for a ledger that cannot be asked: what is removed by files alone, and what is never."""

from __future__ import annotations

from pathlib import Path

from sqlstream.cache import Cache
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.files.read_hold import ReadHold
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.recovery import emergency
from sqlstream.testing.invariants import violations
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.actors import is_right, objects
from tests.cache.session import Session


class FullDisk(Disk):
    """A disk that has never room."""

    def has_room(self, num_bytes: int, num_files: int) -> bool:
        return False


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
