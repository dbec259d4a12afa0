"""A disk that is really full: a small file system of its own, for the objects, the ledger and the ballast alike."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.cache import Cache
from sqlstream.cache.files.disk import LEDGER_ROOM_BYTES, Disk
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.errors import CacheDiskError, MissingDependencyError
from sqlstream.testing.invariants import violations
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.actors import body, objects
from tests.cache.full_disk import FLOOR_BYTES, NUM_OF_SIZE
from tests.cache.kit import UNSHARE, may_mount
from tests.cache.quotas import as_quota
from tests.cache.session import Session
from tests.processes import ROOT


def filled_and_freed(directory: Path, size: int, *options: str) -> dict[str, Any]:
    """Return what `full_disk` reports."""
    if not may_mount():
        pytest.skip("mounting is not allowed here: `unshare --mount --map-root-user mount -t tmpfs …` fails")
    command = [*UNSHARE, sys.executable, "-m", "tests.cache.full_disk", "--directory", str(directory)]
    command += ["--size", str(size), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report.pop("evictions") > 0
    return report


def in_order(size: int) -> dict[str, object]:
    """What a report says of a cache that makes room and loses nothing."""
    num = NUM_OF_SIZE[size]
    return {
        "num_right": num,
        "troubles_when_full": [],
        "pinned_are_there": True,
        "works_again": True,
        "num_right_without_ballast": num // 4,
        "findings": [],
        "troubles_at_rest": [],
        "opened_when_full": {
            "repairs": [["wrong content", True]],
            "num_right": num // 2,
            "findings": [],
            "troubles": [],
        },
    }


@pytest.mark.parametrize("size", NUM_OF_SIZE)
def test_on_a_full_disk_eviction_goes_on_errors_are_clear_and_nothing_is_left_broken(tmp_path: Path, size: int) -> None:
    report = filled_and_freed(tmp_path, size)
    assert report.pop("stranger") == "No space left on device"
    # Whether an object or the ledger, in SQLite's words, meets the end of the disk first goes by the sizes of the moment.
    assert re.search("No space left on device|database or disk is full", report.pop("error"))
    # The floor holds but for the ledger's own pages, and is used up to one object.
    assert FLOOR_BYTES - (1 << 20) <= report.pop("least_free_bytes") < FLOOR_BYTES + 2 * size
    assert report == {**in_order(size), "has_ballast": True, "num_right_with_floor": NUM_OF_SIZE[size]}


@pytest.mark.parametrize("size", NUM_OF_SIZE)
def test_under_a_full_quota_it_is_the_same_though_the_file_system_has_room(tmp_path: Path, size: int) -> None:
    try:
        with as_quota():
            pass
    except MissingDependencyError as error:
        pytest.skip(str(error))
    report = filled_and_freed(tmp_path, size, "--quota")
    assert report.pop("stranger") == "Disk quota exceeded"
    assert re.search("Disk quota exceeded|No space left on device", report.pop("error"))
    assert report == in_order(size)


def test_on_a_disk_that_stays_full_the_half_that_is_needed_last_gives_way(tmp_path: Path, server: FaultyHttpServer) -> None:
    server.objects.update(objects([1000] * 4))
    with Cache(tmp_path / "cache", limit=None) as cache:
        session = Session(cache)
        holds = session.acquire([[ObjectRef.of(f"{server.url}/o/{i}.bin")] for i in range(4)])
        assert all(map(session.wait, holds))
        too_much = 1 << 60
        for revoked in ([False, False, True, True], [False, True, True, True]):
            assert session.directory.downloads.give_way(too_much)
            assert [hold.is_void for hold in holds] == revoked
        assert not session.directory.downloads.give_way(too_much), "the sample that is waited for keeps what it has"
        assert not holds[0].is_void
        session.release(holds[0])
    assert violations(tmp_path / "cache", at_rest=True) == []


def test_a_full_disk_is_told_once(
    tmp_path: Path, server: FaultyHttpServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server.objects.update(objects([1 << 20] * 3))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with Cache(tmp_path / "cache", limit=None) as cache:
        monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=full))
        for i in range(3):
            with pytest.raises(CacheDiskError, match="No space left on device"):
                cache.acquire_many([f"{server.url}/o/{i}.bin"])
    assert caplog.text.count("evicting to go on") == 1


def test_what_is_fetched_ahead_gives_way_to_a_sample_that_is_acquired_after_it_and_never_the_reverse(
    tmp_path: Path, server: FaultyHttpServer
) -> None:
    """A sample whose download had to give way is acquired again, behind those that come later: it revoked itself for ever."""
    server.objects.update(objects([1000] * 4))
    with Cache(tmp_path / "cache", limit=None) as cache:
        session = Session(cache)
        ahead = session.acquire([[ObjectRef.of(f"{server.url}/o/{i}.bin")] for i in range(1, 4)])
        needed = session.acquire_one([ObjectRef.of(f"{server.url}/o/0.bin")])
        assert all(map(session.wait, [*ahead, needed]))
        num_revoked = []
        while session.directory.downloads.give_way(1 << 60):
            num_revoked.append(sum(hold.is_void for hold in ahead))
        assert num_revoked == [2, 3]
        assert not needed.is_void
        session.release(needed)
    assert violations(tmp_path / "cache", at_rest=True) == []


NUM_STREAMED, NUM_IN_A_BATCH = 200, 8


def content_of(sample: dict[str, Any]) -> dict[str, Any]:
    """Read the file of a sample."""
    return {"row": sample["row"], "data": Path(sample["file"]).read_bytes()}


def as_they_are(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Collate to a list."""
    return samples


def mounted(tmp_path: Path, options: str) -> Path:
    """Return a small file system, which the caller unmounts."""
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", mount], capture_output=True, check=False).returncode:
        pytest.skip("needs root, to mount a tmpfs")
    return mount


def test_objects_leave_the_ledger_its_room_under_a_quota_too(tmp_path: Path) -> None:
    """They took it: SQLite could write nothing any more, no download could be counted as ended, and no file be evicted."""
    mount = mounted(tmp_path, "size=24m")
    try:
        disk = Disk(mount / "cache")
        disk.open(create=True)
        part = disk.create_part(b"\1" * 16)
        disk.allocate(part, 1 << 20)
        os.pwrite(part.fd, b"written", 0)
        disk.drop_ballast()
        too_much = disk.free_bytes() + (1 << 20) - LEDGER_ROOM_BYTES // 2
        with as_quota():
            with pytest.raises(OSError, match=f"beside {LEDGER_ROOM_BYTES} bytes for the ledger"):
                disk.allocate(part, too_much)
            assert os.fstat(part.fd).st_size == 1 << 20
            assert os.pread(part.fd, 7, 0) == b"written"
            disk.allocate(part, too_much - LEDGER_ROOM_BYTES)
        disk.discard_parts([part])
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True)


@pytest.mark.parametrize(
    ("options", "size", "num_workers", "is_quota"),
    [
        ("size=64m,nr_inodes=90", 100, 0, False),
        ("size=64m,nr_inodes=90", 100, 2, False),
        ("size=24m", 500_000, 0, False),
        ("size=24m", 500_000, 2, False),
        ("size=64m,nr_inodes=90", 100, 2, True),
        ("size=24m", 500_000, 0, True),
        ("size=24m", 500_000, 2, True),
    ],
    ids=[
        *("inodes-alone", "inodes-2-workers", "bytes-alone", "bytes-2-workers"),
        *("inodes-quota-2-workers", "bytes-quota-alone", "bytes-quota-2-workers"),
    ],
)
def test_what_is_fetched_ahead_gives_way_on_a_disk_that_has_less_room_than_the_window(
    tmp_path: Path, server: FaultyHttpServer, options: str, size: int, num_workers: int, is_quota: bool
) -> None:
    mount = mounted(tmp_path, options)
    server.objects.update(objects([size] * NUM_STREAMED))
    table = tmp_path / "t.csv"
    table.write_text("row,file\n" + "".join(f"{row},{server.url}/o/{row}.bin\n" for row in range(NUM_STREAMED)))
    try:
        with (
            as_quota() if is_quota else contextlib.nullcontext(),
            StreamingDataset(
                f"{table}",
                f"{mount}/cache",
                columns_to_download=["file"],
                transforms=[content_of],
                cache_limit=None,
                on_error="raise",
            ) as dataset,
        ):
            loader = StreamingDataLoader(
                dataset, batch_size=NUM_IN_A_BATCH, num_workers=num_workers, collate_fn=as_they_are, drop_last=False
            )
            samples = [sample for batch in loader for sample in batch]
        assert violations(mount / "cache", at_rest=True) == []
        assert sorted(sample["row"] for sample in samples) == list(range(NUM_STREAMED))
        assert all(sample["data"] == body(f"/o/{sample['row']}.bin", size) for sample in samples)
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True)
