"""The process that forks helpers: who gets one from it, who none, and what is left when anyone dies."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.config import StorageOptions
from sqlstream.storage.client.starter import STARTER, Starter
from sqlstream.storage.fetcher import Fetcher
from tests.storage.life import PATIENCE_SECONDS, counted, has_more_than, in_forked_child, is_alive, wait_dead

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the starter needs pidfds")


@pytest.fixture
def place(tmp_path: Path) -> str:
    (tmp_path / "x").write_bytes(b"12345")
    return str(tmp_path / "x")


@pytest.fixture(autouse=True)
def trusted(starts_anew: None, monkeypatch: pytest.MonkeyPatch) -> Starter:
    gc.collect()  # users that earlier tests forgot
    monkeypatch.setattr(STARTER, "_is_trusted", True)
    assert STARTER.pid is None
    return STARTER


@pytest.fixture
def fetcher(trusted: Starter) -> Iterator[Fetcher]:
    fetcher = Fetcher(StorageOptions(num_threads=4))
    fetcher.expect_forks()
    yield fetcher
    fetcher.stop()
    assert trusted.pid is None


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def helper_of(fetcher: Fetcher, place: str) -> int:
    """Use the fetcher; return its helper's pid."""
    assert fetcher.head(place).size_bytes == 5
    assert fetcher.helper_pid is not None
    return fetcher.helper_pid


def ask_for_helper(fetcher: Fetcher) -> None:
    """Ask the starter, and do not wait for what comes of it."""
    with fetcher._client._lock:
        fetcher._client._users.add(fetcher._user)
        fetcher._client._ensure_helper()


def check_is_forked(fetcher: Fetcher, place: str, starter: int) -> None:
    assert parent_of(helper_of(fetcher, place)) == starter


def test_a_fetcher_that_expects_forks_and_a_forked_child_get_their_helpers_from_one_starter(
    fetcher: Fetcher, place: str
) -> None:
    starter = STARTER.pid
    assert starter is not None
    check_is_forked(fetcher, place, starter)

    def work() -> None:
        check_is_forked(fetcher, place, starter)
        os.environ["PYTEST_CURRENT_TEST"] = fetcher._client._environment["PYTEST_CURRENT_TEST"]  # it has changed since
        other = Fetcher(StorageOptions(num_threads=2))
        other.expect_forks()
        check_is_forked(other, place, starter)
        other.stop()
        fetcher.stop()

    assert in_forked_child(work) == 0
    assert is_alive(starter)
    check_is_forked(fetcher, place, starter)


def test_the_starter_ends_with_its_last_user_and_leaves_nothing(trusted: Starter, place: str) -> None:
    before = counted()
    one, other = Fetcher(StorageOptions(num_threads=4)), Fetcher(StorageOptions(num_threads=2))
    one.expect_forks()
    other.expect_forks()
    starter, helpers = trusted.pid, {helper_of(one, place), helper_of(other, place)}
    assert starter is not None
    one.stop()
    assert is_alive(starter)
    other.stop()
    assert not Path(f"/proc/{starter}").exists()
    for pid in helpers:
        wait_dead(pid)
    assert not has_more_than(before)


def test_a_fetcher_that_is_forgotten_ends_the_starter(trusted: Starter) -> None:
    fetcher = Fetcher(StorageOptions(num_threads=4))
    fetcher.expect_forks()
    starter = trusted.pid
    assert starter is not None
    del fetcher
    gc.collect()
    assert not Path(f"/proc/{starter}").exists()


def test_a_killed_helper_is_followed_by_another_fork(fetcher: Fetcher, place: str) -> None:
    starter, pid = STARTER.pid, helper_of(fetcher, place)
    assert starter is not None
    os.kill(pid, signal.SIGKILL)
    wait_dead(pid)
    check_is_forked(fetcher, place, starter)
    while Path(f"/proc/{pid}").exists():  # its parent reaps it
        time.sleep(0.01)


def test_without_the_starter_a_helper_is_started_anew_and_that_is_said_once(
    fetcher: Fetcher, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    pid, starter = helper_of(fetcher, place), STARTER.pid
    assert starter is not None
    os.kill(starter, signal.SIGKILL)
    wait_dead(starter)
    assert helper_of(fetcher, place) == pid  # it outlives its starter, as long as it is read with
    for _ in range(2):
        fetcher._client.end_idle()
        assert parent_of(helper_of(fetcher, place)) == os.getpid()
    assert [record.levelno for record in caplog.records if "forks helpers" in record.message] == [logging.WARNING]


def test_a_forked_child_whose_starter_is_gone_starts_its_helper_anew(fetcher: Fetcher, place: str) -> None:
    starter = STARTER.pid
    assert starter is not None

    def work() -> None:
        wait_dead(starter)
        assert parent_of(helper_of(fetcher, place)) == os.getpid()

    os.kill(starter, signal.SIGKILL)
    assert in_forked_child(work) == 0


def test_a_request_that_the_starter_takes_to_its_grave_is_asked_again(fetcher: Fetcher, place: str) -> None:
    starter = STARTER.pid
    assert starter is not None
    os.kill(starter, signal.SIGSTOP)
    with contextlib.ExitStack() as stack:
        stack.callback(os.kill, starter, signal.SIGKILL)
        ask_for_helper(fetcher)
    assert parent_of(helper_of(fetcher, place)) == os.getpid()


def test_a_forked_child_whose_request_is_lost_with_the_starter_starts_its_helper_in_silence(
    fetcher: Fetcher, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    starter = STARTER.pid
    assert starter is not None
    os.kill(starter, signal.SIGSTOP)  # it is busy as the owner ends it

    def work() -> None:
        caplog.clear()
        ask_for_helper(fetcher)
        os.kill(starter, signal.SIGKILL)
        assert parent_of(helper_of(fetcher, place)) == os.getpid()
        assert caplog.messages == []

    assert in_forked_child(work) == 0


def test_a_helper_that_was_not_yet_forked_can_be_ended(fetcher: Fetcher, place: str) -> None:
    starter = STARTER.pid
    assert starter is not None
    helper_of(fetcher, place)
    fetcher._client.end_idle()
    os.kill(starter, signal.SIGSTOP)
    ask_for_helper(fetcher)
    fetcher.stop()  # neither waits for the other


def test_a_helper_whose_reader_is_gone_before_its_first_word_ends_in_silence(
    fetcher: Fetcher, place: str, capfd: pytest.CaptureFixture[str]
) -> None:
    starter = STARTER.pid
    assert starter is not None
    os.kill(starter, signal.SIGSTOP)
    forked = STARTER.fork_helper(fetcher._client._environment)
    assert forked is not None
    forked.ours.close()
    os.kill(starter, signal.SIGCONT)
    asked_later = helper_of(fetcher, place)
    while Path(f"/proc/{starter}/task/{starter}/children").read_text().split() != [str(asked_later)]:
        time.sleep(0.01)
    assert capfd.readouterr().err == ""


def test_other_variables_of_the_environment_mean_a_helper_started_anew(
    fetcher: Fetcher, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "nowhere-1")
    other = Fetcher(StorageOptions(num_threads=4))
    other.expect_forks()
    assert parent_of(helper_of(other, place)) == os.getpid()
    other.stop()


def test_a_forked_helper_has_directory_group_limits_and_processors_of_its_reader(
    fetcher: Fetcher, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    monkeypatch.chdir(tmp_path)

    def work() -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))  # a process of the suite has some 200 open
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        pid = helper_of(fetcher, place)
        assert os.readlink(f"/proc/{pid}/cwd") == str(tmp_path)
        assert os.getpgid(pid) == pid
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (hard, hard)
        assert os.sched_getaffinity(pid) == os.sched_getaffinity(0)

    assert in_forked_child(work) == 0


OWNER = """
import ctypes, os, signal, sys
from sqlstream.config import StorageOptions
from sqlstream.storage.client.starter import STARTER
from sqlstream.storage.fetcher import Fetcher
fetcher = Fetcher(StorageOptions())
fetcher.expect_forks()
fetcher.head(sys.argv[1])
starter, first = STARTER.pid, fetcher.helper_pid
said, says = os.pipe()
child = os.fork()
if not child:
    fetcher.head(sys.argv[1])
    os.write(says, b"%d" % fetcher.helper_pid)
    {hidden}
    signal.pause()
second = int(os.read(said, 20))
fetcher.head(sys.argv[1])
print(starter, fetcher.helper_pid, child, second, flush=True)
{end}
"""
HIDDEN = "ctypes.CDLL(None).fork() or ctypes.CDLL(None).sleep(3600)"
"""A child of C code, which holds all that its parent had open."""


@contextlib.contextmanager
def owner(end: str, place: str, hidden: str = "") -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process with a starter, a helper and a forked child with a helper; and the ids of these."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", OWNER.format(end=end, hidden=hidden), place]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        try:
            yield process, list(map(int, process.stdout.readline().split()))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_who_is_killed_takes_along_its_own_helper_and_the_owner_the_starter(place: str) -> None:
    with owner("signal.pause()", place, HIDDEN) as (process, (starter, helper, child, its_helper)):
        assert parent_of(helper) == parent_of(its_helper) == starter
        process.kill()
        wait_dead(starter)
        wait_dead(helper)
        assert is_alive(its_helper)
        os.kill(child, signal.SIGKILL)  # the socket of its helper stays open, in what it has forked
        wait_dead(its_helper)


@pytest.mark.parametrize("end", ["", "os._exit(0)", "fetcher.stop()"])
def test_a_process_that_ends_leaves_no_starter(place: str, end: str) -> None:
    with owner(f"os.kill(child, 9); os.wait(); {end}", place) as (process, (starter, helper, _, its_helper)):
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
        for pid in (starter, helper, its_helper):
            wait_dead(pid)
    assert "ResourceWarning" not in errors
    assert "Exception ignored" not in errors
