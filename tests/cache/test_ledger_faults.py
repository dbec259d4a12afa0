"""The ledger's own file: each system call of SQLite fails, or is the process's last, one after the other."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from sqlstream.errors import MissingDependencyError, SqlStreamError
from sqlstream.testing.faults import SideEffects
from sqlstream.testing.system_calls import sqlite_system_calls
from tests.cache.actors import Stage
from tests.cache.deaths import DIED, URLS, Act, check, clear, download, filled, name_of, opened, read
from tests.processes import in_child, open_files

WRITES = frozenset({"open", "write", "pwrite64", "ftruncate", "unlink"})
READS = frozenset({"read", "pread64"})
PATIENCE_SECONDS = 600.0
"""A hundred attempts or so, a tenth of a second each; a busy machine needs its time."""
pytestmark = pytest.mark.timeout(PATIENCE_SECONDS + 60)
NOT_COUNTED = SideEffects(0, len)  # what the acts note of their own; here only SQLite's calls count


@pytest.fixture(autouse=True)
def _reachable() -> None:
    try:
        with sqlite_system_calls(len):
            pass
    except MissingDependencyError as error:
        pytest.skip(str(error))


def copies(root: Path) -> Iterator[tuple[int, Path]]:
    """A filled cache, again and again, and which attempt it is for."""
    filled(root / "original")
    (root / "original" / "ballast").unlink()  # faster to make than to copy
    for at in range(1, 10_000):
        shutil.rmtree(root / "copy", ignore_errors=True)
        shutil.copytree(root / "original", root / "copy")
        yield at, root / "copy"
    raise AssertionError("it never gets through")


def fail_everywhere(_: Connection, root: Path, act: Act, number: int, lasts: bool, calls: frozenset[str]) -> tuple[int, int]:
    """Let each of the calls in turn fail with an errno; returns how many there are, and how many attempts failed for it."""
    num_errors = 0
    for at, directory in copies(root):

        def fail(name: str) -> None:
            raise OSError(number, os.strerror(number))

        effects = SideEffects(at, fail, lasts=lasts, only=calls)
        with sqlite_system_calls(effects.note):
            try:
                act(directory, NOT_COUNTED)
            except SqlStreamError:
                num_errors += 1
        left = [path for path in open_files(directory) if not path.startswith(f"{directory}/ledger.sqlite")]
        assert left == [], f"{name_of(act)} at {at}: descriptors leak: {left}"
        if calls != READS:  # to SQLite a page that cannot be read is damage: that connection is let go of, never closed
            assert open_files(directory) == [], f"{name_of(act)} at {at}: connections leak"
        found = check(directory, at, name_of(act))
        assert not found, "\n".join(found)
        if effects.num_seen < at:
            return at - 1, num_errors
    raise AssertionError


FAULTS = [(errno.ENOSPC, WRITES), (errno.EIO, WRITES), (errno.EIO, READS), (errno.EMFILE, frozenset({"open"}))]
IN_SHORT_FORM = (errno.ENOSPC, False)  # of those that write, a hundred attempts each


@pytest.mark.parametrize(
    ("number", "calls", "lasts"),
    [
        pytest.param(
            *(number, calls, lasts),
            id=f"{errno.errorcode[number]}-{min(calls)}-{'from then on' if lasts else 'once'}",
            marks=[pytest.mark.slow] if calls == WRITES and (number, lasts) != IN_SHORT_FORM else [],
        )
        for number, calls in FAULTS
        for lasts in (False, True)
    ],
)
def test_a_fault_at_any_system_call_on_the_ledger_ends_in_success_or_a_clear_error_and_leaks_nothing(
    memory_path: Path, stage: Stage, number: int, calls: frozenset[str], lasts: bool
) -> None:
    num_calls, num_errors = stage.start(fail_everywhere, memory_path, download, number, lasts, calls).hear(PATIENCE_SECONDS)
    assert num_calls >= 2
    assert num_errors <= num_calls


def die_everywhere(_: Connection, root: Path, act: Act) -> int:
    """Die before each call that writes, in turn; returns how many there are."""
    for at, directory in copies(root):
        effects = SideEffects(at, lambda name: os._exit(DIED), only=WRITES)

        def work(directory: Path = directory, effects: SideEffects = effects) -> None:
            with sqlite_system_calls(effects.note):
                act(directory, NOT_COUNTED)

        status = in_child(work)
        assert status in (0, DIED), f"{name_of(act)} at {at}: exit status {status}"
        with contextlib.suppress(FileNotFoundError):
            found = check(directory, at, name_of(act))
            assert not found, "\n".join(found)
        if status == 0:
            return at - 1
    raise AssertionError


@pytest.mark.parametrize("act", [download, pytest.param(clear, marks=pytest.mark.slow)], ids=name_of)
def test_a_death_at_any_write_of_sqlite_breaks_no_promise(memory_path: Path, stage: Stage, act: Act) -> None:
    """In the middle of a transaction's frames, of a checkpoint, of the files that come and go with it."""
    num_calls = stage.start(die_everywhere, memory_path, act).hear(PATIENCE_SECONDS)
    assert num_calls >= 5


@pytest.mark.parametrize("at", [2, 9, 40], ids=["empty file", "journal and wal", "tables"])
def test_a_ledger_whose_maker_was_killed_is_made_anew_and_not_called_damaged(
    tmp_path: Path, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> None:
        effects = SideEffects(at, lambda name: os.kill(os.getpid(), signal.SIGKILL), only=WRITES)
        with sqlite_system_calls(effects.note):
            opened(tmp_path / "cache").close()

    (tmp_path / "cache").mkdir()
    evidence = tmp_path / "cache" / "ledger.sqlite.bad"
    assert in_child(make) == -signal.SIGKILL
    assert (tmp_path / "cache" / "ledger.sqlite").exists()
    evidence.write_bytes(b"what was damaged before")
    with opened(tmp_path / "cache") as cache:
        read(cache, *URLS[:2])
        assert cache.verify() == []
    assert caplog.messages == []
    assert evidence.read_bytes() == b"what was damaged before"
    assert not (tmp_path / "cache" / "REBUILD").exists()
