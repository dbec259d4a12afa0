"""A child dies, or the disk fails, at its n-th side effect, n = 1, 2, … until it gets through; the promises hold after each."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

import pytest

from sqlstream.cache import Cache
from sqlstream.errors import SqlStreamError
from sqlstream.testing.faults import SideEffects
from sqlstream.testing.invariants import violations
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.actors import Stage, body
from tests.cache.old_ledgers import as_version_1
from tests.cache.session import Session
from tests.cache.test_cache import open_files

DIED = 77
SIZE, LIMIT = 10_000, 5 * 12_288
URLS = [f"http://nowhere/o/{i}.bin" for i in range(12)]
OBJECTS = {url: body(f"/o/{i}.bin", SIZE + 100 * i) for i, url in enumerate(URLS)}


def opened(directory: Path, before_write: Callable[[str], object] = len) -> Cache:
    cache = Cache(directory, limit=LIMIT)
    cache.fetcher = ScriptedFetcher(OBJECTS, before_write=before_write)
    Session(cache).room_timeout_seconds = 0.2  # nobody else is there to give room back
    return cache


def read(cache: Cache, *urls: str) -> None:
    for url in urls:
        with cache.pinned(url) as path:
            assert path.read_bytes() == OBJECTS[url]


# Each prepares a directory, then says what runs under faults.


def nothing(directory: Path) -> None:
    """The directory is not even there."""


def filled(directory: Path) -> None:
    with opened(directory) as cache:
        read(cache, *URLS[:5])


def bare(directory: Path) -> None:
    """The ledger was deleted: migrations, and a rebuild, are due."""
    filled(directory)
    (directory / "ledger.sqlite").unlink()


def ruined(directory: Path) -> None:
    filled(directory)
    (directory / "ledger.sqlite").write_bytes(os.urandom(50_000))


def old(directory: Path) -> None:
    """The ledger is of version 1: an upgrade is due."""
    filled(directory)
    as_version_1(directory)


def restarted(directory: Path) -> None:
    filled(directory)
    connection = sqlite3.connect(directory / "ledger.sqlite")
    with connection:
        connection.execute("UPDATE meta SET boot_id = 'x', tick = tick + 1")
    connection.close()


def create(directory: Path, effects: SideEffects) -> None:
    opened(directory).close()


def download(directory: Path, effects: SideEffects) -> None:
    with opened(directory, effects.note) as cache:
        cache.acquire_many(URLS[5:7])  # reserve, evict, download, publish
        cache.statistics()
        cache.release_many(URLS[5:7])


def stream(directory: Path, effects: SideEffects) -> None:
    with opened(directory, effects.note) as cache:
        read(cache, *URLS[3:10], *URLS[:2])


def clear(directory: Path, effects: SideEffects) -> None:
    with opened(directory) as cache:
        cache.clear()


def verify(directory: Path, effects: SideEffects) -> None:
    with opened(directory) as cache:
        cache.verify(repair=True)


Prepare: TypeAlias = Callable[[Path], None]
Act: TypeAlias = Callable[[Path, SideEffects], None]


def name_of(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", "")


SCENES: list[tuple[Prepare, Act]] = [
    (nothing, create),
    (filled, download),
    (filled, stream),
    (filled, clear),
    (bare, verify),
    (ruined, download),
    (restarted, download),
    (old, download),
]
IDS = [f"{name_of(prepare)}-{name_of(act)}" for prepare, act in SCENES]


def in_child(work: Callable[[], None]) -> int:
    """The exit status of a forked child that does `work`; 0 when it got through."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            try:
                work()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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


@pytest.mark.parametrize(("prepare", "act"), SCENES, ids=IDS)
def test_a_death_at_any_side_effect_breaks_no_promise(memory_path: Path, stage: Stage, prepare: Prepare, act: Act) -> None:
    (num_effects,) = stage.run_all(die_everywhere, [(memory_path, prepare, act)])
    assert num_effects >= 5


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


@pytest.mark.parametrize("act", [download, clear], ids=name_of)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EMFILE], ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
def test_a_fault_at_any_side_effect_ends_in_success_or_a_clear_error_and_leaks_nothing(
    memory_path: Path, stage: Stage, act: Act, number: int, lasts: bool
) -> None:
    ((num_effects, num_errors),) = stage.run_all(fail_everywhere, [(memory_path, act, number, lasts)])
    assert num_effects >= 5
    assert num_errors <= num_effects
