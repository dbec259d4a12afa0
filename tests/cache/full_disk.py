"""A cache on a file system that is too small for its limit, until it is full; a program, for a mount namespace of its own.

    unshare --mount python -m tests.cache.full_disk --directory DIR

Prints one JSON document; what it must say is in `test_full_disk.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from sqlstream.cache import Cache
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.errors import CacheDiskError
from sqlstream.testing.invariants import violations
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.actors import is_right, objects
from tests.cache.quotas import as_quota
from tests.cache.session import Session
from tests.cache.storm import mount_tmpfs

DISK_BYTES = 24 << 20
NUM_OF_SIZE = {500_000: 60, 50_000: 600}
"""Objects that take their room before they come, and such as find the disk full when they are written."""
FLOOR_BYTES = 8 << 20


def brings(cache: Cache, url: str) -> bool:
    """Return whether the cache brings the right bytes."""
    with cache.pinned(url) as path:
        return is_right(path, url)


def open_stranger(directory: Path) -> int:
    """Return the descriptor of a file on the same disk that is not the cache's."""
    return os.open(directory / "stranger", os.O_WRONLY | os.O_CREAT, 0o600)


def fill(stranger: int) -> str | None:
    """Write until the disk is full; return what it says then."""
    block = bytes(4096)
    try:
        while True:
            os.write(stranger, block)
    except OSError as error:
        return error.strerror


def open_when_full(directory: Path, size: int, num: int) -> dict[str, object]:
    """Open a cache when its disk has nothing left, not even the ballast: no ledger opens, although all of it may be evicted."""
    with FaultyHttpServer(objects([size] * num)) as server:
        urls = [f"{server.url}/o/{i}.bin" for i in range(num)]
        with Cache(directory, limit=1 << 40, verify_reads="crc") as cache:
            for url in urls[: num // 4]:
                with cache.pinned(url) as path:
                    pass
        with path.open("r+b") as file:
            file.write(b"damage")
        (directory / "ballast").unlink(missing_ok=True)
        fill(stranger := open_stranger(directory.parent))
        with Cache(directory, limit=1 << 40) as cache:
            repairs = [(finding.kind, finding.repaired) for finding in cache.verify(repair=True, deep=True)]
            num_right = sum(brings(cache, url) for url in urls[: num // 2])
            findings = [str(finding) for finding in cache.verify()]
        os.close(stranger)
    troubles = violations(directory, at_rest=True)
    return {"repairs": repairs, "num_right": num_right, "findings": findings, "troubles": troubles}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True, help="an empty directory")
    parser.add_argument("--size", type=int, required=True, help="of each object, in bytes")
    parser.add_argument("--quota", action="store_true", help="it is a quota that is full")
    options = parser.parse_args()
    mount_tmpfs(options.directory, DISK_BYTES)
    with as_quota() if options.quota else contextlib.nullcontext():
        report = fill_and_free(options.directory, options.size, has_statistics=not options.quota)
    json.dump(report, sys.stdout)


def keep_floor(directory: Path, ballast: Path, urls: list[str]) -> dict[str, object]:
    """Read all with a floor, which the limit does not know of either."""
    with Cache(directory, min_free_bytes=FLOOR_BYTES) as other:
        has_ballast = ballast.exists()
        least_free_bytes, num_right = DISK_BYTES, 0
        for url in urls:
            with other.pinned(url) as path:
                num_right += is_right(path, url)
                status = os.statvfs(directory)
                least_free_bytes = min(least_free_bytes, status.f_bavail * status.f_frsize)
    return {"has_ballast": has_ballast, "least_free_bytes": least_free_bytes, "num_right_with_floor": num_right}


def fill_and_free(disk: Path, size: int, *, has_statistics: bool) -> dict[str, object]:
    """Fill the disk, with objects and with a stranger's file, and free it again; return what came of it.

    Args:
        disk: Where it is mounted.
        size: Bytes of each object.
        has_statistics: `statvfs` says what is free.
    """
    num = NUM_OF_SIZE[size]
    directory, ballast = disk / "cache", disk / "cache" / "ballast"
    report: dict[str, object] = {}
    with FaultyHttpServer(objects([size] * num)) as server, Cache(directory, limit=1 << 40) as cache:
        urls = [f"{server.url}/o/{i}.bin" for i in range(num)]
        num_right = 0
        for url in urls:  # more than the disk holds: eviction makes the room that the limit does not ask for
            num_right += brings(cache, url)
        report["num_right"] = num_right
        report["evictions"] = cache.statistics().evictions

        # All of it pinned, and the rest of the disk taken by somebody else: nothing can be freed.
        stranger = open_stranger(disk)
        held = [cache.hold([ObjectRef.of(url)]) for url in urls[-num // 8 :]]
        cache.clear()
        report["stranger"] = fill(stranger)
        try:
            for url in urls[: num * 2 // 3]:  # the first few may find the room that the ballast has left
                held.append(cache.hold([ObjectRef.of(url)]))  # noqa: PERF401 - those before the error are held
        except CacheDiskError as error:
            report["error"] = str(error)
        report["troubles_when_full"] = violations(directory)
        report["pinned_are_there"] = all(cache.path_of(hold.refs[0]).stat().st_size == size for hold in held)

        # Room again: it works without repair.
        os.close(stranger)
        os.unlink(disk / "stranger")
        for hold in held:
            Session(cache).release(hold)
        report["works_again"] = brings(cache, urls[num * 3 // 4])
        report["findings"] = [str(finding) for finding in cache.verify()]
        cache.clear()

        # The ballast is used up, the WAL has given its room back, and the disk is full: evictions need room in the ledger.
        for url in urls[: num // 4]:
            with cache.pinned(url):
                pass
        session = Session(cache)
        session.flush()
        fill(stranger := open_stranger(disk))
        session.disk.drop_ballast()
        session.database.read("PRAGMA wal_checkpoint(TRUNCATE)")
        fill(stranger)
        report["num_right_without_ballast"] = sum(brings(cache, url) for url in urls[num // 4 : num // 2])
        os.close(stranger)
        os.unlink(disk / "stranger")
        cache.clear()

        if has_statistics:
            report |= keep_floor(directory, ballast, urls)
    report["troubles_at_rest"] = violations(directory, at_rest=True)
    report["opened_when_full"] = open_when_full(directory, size, num)
    return report


if __name__ == "__main__":
    main()
