"""A cache whose process dies, or whose disk fails, at its n-th side effect, n = 1, 2, … until it gets through."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

from sqlstream.cache import Cache
from sqlstream.cache.model.tuning import CacheTuning
from sqlstream.errors import SqlStreamError
from sqlstream.testing.faults import SideEffects
from sqlstream.testing.invariants import violations
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.actors import body
from tests.cache.session import tuned_cache
from tests.processes import in_child, open_files

DIED = 77
IMPATIENT = CacheTuning(room_timeout_seconds=0.2, full_disk_pauses_seconds=(0.0,))
"""No other process gives room back."""
SIZE, LIMIT = 10_000, 5 * 12_288
URLS = [f"http://nowhere/o/{i}.bin" for i in range(12)]
OBJECTS = {url: body(f"/o/{i}.bin", SIZE + 100 * i) for i, url in enumerate(URLS)}


def opened(directory: Path, before_write: Callable[[str], object] = len) -> Cache:
    cache = tuned_cache(directory, IMPATIENT, limit=LIMIT)
    cache.fetcher = ScriptedFetcher(OBJECTS, before_write=before_write)
    return cache


def read(cache: Cache, *urls: str) -> None:
    for url in urls:
        with cache.pinned(url) as path:
            assert path.read_bytes() == OBJECTS[url]


def filled(directory: Path) -> None:
    with opened(directory) as cache:
        read(cache, *URLS[:5])


def download(directory: Path, effects: SideEffects) -> None:
    with opened(directory, effects.note) as cache:
        cache.acquire_many(URLS[5:7])  # reserve, evict, download, publish
        cache.statistics()
        cache.release_many(URLS[5:7])


def clear(directory: Path, effects: SideEffects) -> None:
    with opened(directory) as cache:
        cache.clear()


Prepare: TypeAlias = Callable[[Path], None]
Act: TypeAlias = Callable[[Path, SideEffects], None]


def name_of(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", "")


def check(directory: Path, at: int, name: str) -> list[str]:
    """What is broken, at rest and after one more use by somebody else."""
    found = violations(directory, at_rest=True) if (directory / "ledger.sqlite").exists() else []
    with opened(directory) as cache:
        read(cache, *URLS[:8])
        found += [f"verify: {finding}" for finding in cache.verify()]
    return [f"{name} at {at}: {line}" for line in (*found, *violations(directory, at_rest=True))]


def die_everywhere(_: Connection, root: Path, prepare: Prepare, act: Act) -> int:
    """Die before each side effect in turn; returns how many there are."""
    prepare(root / "original")
    for at in range(1, 10_000):
        directory = root / "copy"
        shutil.rmtree(directory, ignore_errors=True)
        if (root / "original").exists():
            shutil.copytree(root / "original", directory)
        effects = SideEffects(at, lambda name: os._exit(DIED))

        def work(directory: Path = directory, effects: SideEffects = effects) -> None:
            with effects.installed():
                act(directory, effects)

        status = in_child(work)
        assert status in (0, DIED), f"{name_of(act)} at {at}: exit status {status}"
        status_of_check = in_child(lambda: _assert_sound(directory, at, name_of(act)))  # noqa: B023  # called at once
        assert status_of_check == 0, f"{name_of(act)} at {at}: see standard error"
        if status == 0:
            return at - 1
    raise AssertionError("it never gets through")


def _assert_sound(directory: Path, at: int, name: str) -> None:
    found = check(directory, at, name)
    assert not found, "\n".join(found)


def fail_everywhere(_: Connection, root: Path, act: Act, number: int, lasts: bool) -> tuple[int, int]:
    """Let each side effect in turn fail with an errno; returns how many there are, and how many calls failed for it."""
    filled(root / "original")
    num_errors = 0
    for at in range(1, 10_000):
        directory = root / "copy"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(root / "original", directory)

        def fail(name: str) -> None:
            if name in ("COMMIT", "PRAGMA"):
                raise sqlite_error(number)
            raise OSError(number, os.strerror(number))

        effects = SideEffects(at, fail, lasts=lasts)
        with effects.installed():
            try:
                act(directory, effects)
            except SqlStreamError:
                num_errors += 1
            except OSError as error:
                assert error.errno == number  # noqa: PT017  # a call of ours that the directory's creation or closing makes
                num_errors += 1
        assert open_files(directory) == [], f"{name_of(act)} at {at}: descriptors leak"
        found = check(directory, at, name_of(act))
        assert not found, "\n".join(found)
        if effects.num_seen < at:
            return at - 1, num_errors
    raise AssertionError("it never gets through")


def sqlite_error(number: int) -> sqlite3.OperationalError:
    """What SQLite says when a write of its own meets this errno."""
    error = sqlite3.OperationalError(os.strerror(number))
    error.sqlite_errorcode = sqlite3.SQLITE_FULL if number == errno.ENOSPC else sqlite3.SQLITE_IOERR
    return error
