"""`sqlstream cache top`, on a real terminal and off one, beside processes that download."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.admin.activity import CacheActivity, look
from sqlstream.cache.ledger.write_lock import WriteLock
from sqlstream.errors import CacheDamagedError, MigrationError
from sqlstream.process import locks
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.cache.actors import Actor, Stage, begin_and_wait, body, pin_until_told
from tests.cli.commands import run, run_json
from tests.processes import ROOT

SIZE, STALLS_AT, LIMIT = 1_000_000, 400_000, 1 << 24
WAIT_SECONDS = 300.0


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    """`/slow.bin` stops coming after some bytes; `/quick.bin` does not."""
    with FaultyHttpServer({f"/{name}.bin": body(f"/{name}.bin", SIZE) for name in ("slow", "quick")}) as server:
        server.script("/slow.bin", always=FaultyAnswer(fault=Fault.STALL, after_bytes=STALLS_AT, seconds=300))
        yield server


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


def seen(directory: Path, *, least_received: int) -> CacheActivity:
    """A look that sees one download, as far as it comes."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if (directory / "ledger.sqlite").exists():
            activity = look(directory)
            if activity.downloads and activity.downloads[0].received_bytes >= least_received:
                return activity
        time.sleep(0.01)
    raise AssertionError("no download is seen")


@pytest.fixture
def downloader(tmp_path: Path, server: FaultyHttpServer, stage: Stage) -> Actor:
    """A process in the middle of a download into `tmp_path / "cache"`."""
    actor = stage.start(begin_and_wait, tmp_path / "cache", LIMIT, f"{server.url}/slow.bin")
    assert actor.hear() == "asking"
    seen(tmp_path / "cache", least_received=STALLS_AT // 2)
    return actor


def test_a_look_sees_who_downloads_what_and_how_far(tmp_path: Path, server: FaultyHttpServer, downloader: Actor) -> None:
    activity = look(tmp_path / "cache")
    (download,) = activity.downloads
    assert download.url == f"{server.url}/slow.bin"
    assert download.pid == downloader.pid
    assert STALLS_AT // 2 <= download.received_bytes < SIZE <= download.reserved_bytes == activity.filling_bytes
    (owner,) = activity.owners
    assert (owner.pid, owner.pinned_entries, owner.is_alive, owner.limit_bytes) == (downloader.pid, 1, True, LIMIT)
    assert (activity.entries, activity.pinned_entries, activity.limit_bytes) == (1, 1, LIMIT)


def test_off_a_terminal_it_prints_one_look_and_ends(tmp_path: Path, server: FaultyHttpServer, downloader: Actor) -> None:
    for words in ([], ["--once"]):
        shown = run("cache", "top", tmp_path / "cache", *words)
        assert shown.returncode == 0, shown.stderr
        assert "\x1b" not in shown.stdout
        (line,) = [line for line in shown.stdout.splitlines() if f"{server.url}/slow.bin" in line]
        assert line.split()[0] == str(downloader.pid)
        assert re.search(r"\[#+\.+\] \d+ %", line)


def test_as_json_it_is_one_document_with_every_field_of_the_activity(tmp_path: Path, downloader: Actor) -> None:
    document = run_json("cache", "top", tmp_path / "cache")
    assert set(document) == set(CacheActivity.__dataclass_fields__)
    assert [download["pid"] for download in document["downloads"]] == [downloader.pid]
    assert [owner["pid"] for owner in document["owners"]] == [downloader.pid]


def test_a_look_waits_at_no_door(tmp_path: Path, downloader: Actor) -> None:
    lock = WriteLock(tmp_path / "cache")
    with locks.fork_guard():
        assert lock.take()  # as a process does that is stopped inside
        try:
            assert run_json("cache", "top", tmp_path / "cache")["entries"] == 1
        finally:
            lock.leave()
            lock.close()


def test_a_look_at_a_cache_at_rest_changes_no_file(tmp_path: Path, server: FaultyHttpServer) -> None:
    with Cache(tmp_path, limit=LIMIT) as cache, cache.pinned(f"{server.url}/quick.bin"):
        pass

    def files() -> dict[str, tuple[int, int]]:
        paths = (path for path in tmp_path.rglob("*") if path.is_file())
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}

    before = files()
    activity = look(tmp_path)
    assert (activity.entries, activity.limit_bytes, activity.owners, activity.downloads) == (1, LIMIT, (), ())
    assert files() == before


def test_the_dead_are_shown_as_dead_until_somebody_reaps_them(
    tmp_path: Path, server: FaultyHttpServer, stage: Stage, downloader: Actor
) -> None:
    directory = tmp_path / "cache"
    other = stage.start(pin_until_told, directory, LIMIT, [f"{server.url}/quick.bin"])
    other.hear()
    downloader.kill()
    assert {owner.pid: owner.is_alive for owner in look(directory).owners} == {downloader.pid: False, other.pid: True}
    assert re.search(rf"^ *{downloader.pid} .* dead$", run("cache", "top", directory).stdout, re.MULTILINE)
    with Cache(directory):
        pass  # reaps
    assert [owner.pid for owner in look(directory).owners] == [other.pid]


def test_who_waits_for_room_is_shown_with_what_it_needs(tmp_path: Path, server: FaultyHttpServer, stage: Stage) -> None:
    holder = stage.start(pin_until_told, tmp_path, 1_100_000, [f"{server.url}/quick.bin"])
    holder.hear()
    waiter = stage.start(begin_and_wait, tmp_path, 1_100_000, f"{server.url}/slow.bin")
    assert waiter.hear() == "asking"
    deadline = time.monotonic() + WAIT_SECONDS
    while not any(owner.waiting_bytes for owner in look(tmp_path).owners):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert re.search(rf"^ *{waiter.pid} .* waits for room for ", run("cache", "top", tmp_path).stdout, re.MULTILINE)


def test_on_a_terminal_it_refreshes_until_ctrl_c_and_leaves_the_screen_as_it_was(
    tmp_path: Path, server: FaultyHttpServer, stage: Stage, downloader: Actor
) -> None:
    terminal, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (20, 60))
    command = [sys.executable, "-m", "sqlstream", "cache", "top", str(tmp_path / "cache"), "--interval", "0.05"]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "PYTHONPATH": str(ROOT)}
    )
    os.close(theirs)
    shown = wait_for(terminal, "", f"{downloader.pid} ")
    assert shown.startswith("\x1b[?1049h")
    shown = wait_for(terminal, shown, "a second")  # the second frame and later ones have rates
    other = stage.start(pin_until_told, tmp_path / "cache", LIMIT, [f"{server.url}/quick.bin"])
    other.hear()
    shown = wait_for(terminal, shown, f"{other.pid} ")
    for frame in shown.split("\x1b[H")[1:]:
        lines = re.sub(r"\x1b\[\??[0-9]*[A-Za-z]", "", frame).split("\r\n")
        assert len(lines) <= 20
        assert max(map(len, lines)) <= 60
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_SECONDS) == 0
    assert "\x1b[?1049l" in rest_of(terminal)
    os.close(terminal)


def wait_for(terminal: int, shown: str, wanted: str) -> str:
    """What was shown until `wanted` came."""
    start = len(shown)
    deadline = time.monotonic() + WAIT_SECONDS
    while wanted not in shown[start:]:
        assert time.monotonic() < deadline, shown
        shown += os.read(terminal, 65536).decode(errors="replace")
    return shown


def rest_of(terminal: int) -> str:
    """What is left to read of a terminal that nobody has open any more."""
    rest = b""
    while True:
        try:
            rest += os.read(terminal, 65536)
        except OSError:  # EIO: the other end is closed
            return rest.decode(errors="replace")


@pytest.mark.parametrize("words", [["--interval", "0"], ["--interval", "-1"], ["--interval", "nan"], ["--interval", "inf"]])
def test_an_interval_that_is_none_is_refused(tmp_path: Path, words: list[str]) -> None:
    Cache(tmp_path).close()
    result = run("cache", "top", tmp_path, *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert "out of range" in result.stderr


def test_what_is_no_cache_is_named(tmp_path: Path) -> None:
    result = run("cache", "top", tmp_path)
    assert result.returncode == 2
    assert f"there is no sqlstream cache at {tmp_path}" in result.stderr


def test_a_ledger_of_another_version_and_a_damaged_one_are_named_with_their_cure(tmp_path: Path) -> None:
    Cache(tmp_path).close()
    raw = (tmp_path / "ledger.sqlite").read_bytes()
    (tmp_path / "ledger.sqlite").write_bytes(raw[:60] + (99).to_bytes(4, "big") + raw[64:])  # user_version in the header
    with pytest.raises(MigrationError, match=r"schema 99.*upgrade sqlstream"):
        look(tmp_path)
    (tmp_path / "ledger.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(CacheDamagedError, match="verify --repair"):
        look(tmp_path)
