"""What many tests of the cache do and count."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time
from pathlib import Path

from sqlstream.cache import Cache
from sqlstream.cache.files import read_hold
from sqlstream.cache.files.read_hold import ReadLock
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.actors import WAIT_SECONDS
from tests.cache.session import Session


def acquire_hits(cache: Cache, urls: list[str]) -> None:
    cache.acquire_many(urls[:3])
    cache.release_many(urls[:3])


def read_pinned(cache: Cache, urls: list[str]) -> None:
    with cache.pinned(urls[0]) as path:
        path.read_bytes()


def descriptors(lock: ReadLock) -> list[int]:
    return [owner.fileno() for owner in lock.owners]


def open_locks() -> list[ReadLock]:
    """Return the read locks of this process that have their file open."""
    locks = [reference() for reference in list(read_hold._locks.values())]
    return [lock for lock in locks if lock is not None and lock.owners]


def num_gets(server: FaultyHttpServer, path: str | None = None) -> int:
    return sum(request.method == "GET" for request in server.requests(path))


def wait_for_gets(server: FaultyHttpServer, number: int) -> None:
    """Wait until so many objects were asked for: an error comes while others are still on their way."""
    deadline = time.monotonic() + WAIT_SECONDS
    while num_gets(server) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_download(server: FaultyHttpServer, directory: Path, path: str) -> None:
    """Wait until an object is on its way: asked for, its room taken."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (server.requests(path) and any(map(os.path.getsize, (directory / "part").glob("*")))):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def destroy(directory: Path) -> None:
    """Write rubbish over the ledger, in place: its users notice by reading it."""
    for name in ("ledger.sqlite", "ledger.sqlite-wal"):
        path = directory / name
        if path.exists():
            with open(path, "r+b") as file:
                file.write(os.urandom(path.stat().st_size))


def break_ledger(cache: Cache) -> None:
    """Make the ledger a directory that cannot even be moved aside: it can be neither opened nor rebuilt."""
    database = Session(cache).database
    database.close()
    with database._using:  # no thread of the cache looks meanwhile
        for suffix in ("", "-wal", "-shm"):
            (cache.path / f"ledger.sqlite{suffix}").unlink(missing_ok=True)
        (cache.path / "ledger.sqlite").mkdir()
        (cache.path / "ledger.sqlite.bad/foreign").mkdir(parents=True)


UNSHARE = ["unshare", "--mount", "--map-root-user"]
"""A mount namespace of its own, for root and, where user namespaces are allowed, for everybody."""


@functools.cache
def may_mount() -> bool:
    """Whether a program of ours may mount a tmpfs that no other process sees."""
    if shutil.which("unshare") is None:
        return False
    probe = [*UNSHARE, "mount", "-t", "tmpfs", "probe", "/mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0
