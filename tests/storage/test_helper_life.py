"""How the helper process starts, is replaced, and ends."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import FetchCancelledError, ObjectNotFoundError, TransientStorageError
from sqlstream.process import locks
from sqlstream.storage.fetcher import FetchDone, Fetcher, FetchEvent, FetchRequest
from sqlstream.storage.protocol.messages import HelperTiming
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.storage.downloads import Downloads, granted, wait_for_size
from tests.storage.life import PATIENCE_SECONDS, counted, has_more_than, in_forked_child, is_alive, wait_dead, wait_for_requests

pytestmark = pytest.mark.usefixtures("starts_anew")
DATA = b"0123456789" * 300_000


@pytest.fixture
def url(server: FaultyHttpServer) -> str:
    server.objects["/x"] = DATA
    return f"{server.url}/x"


@pytest.fixture
def downloads(fetcher: Fetcher, tmp_path: Path) -> Downloads:
    return Downloads(fetcher, tmp_path)


def running(fetcher: Fetcher, url: str) -> int:
    """Use the fetcher; return its helper's pid."""
    with contextlib.suppress(ObjectNotFoundError):
        fetcher.head(url)
    assert fetcher.helper_pid is not None
    return fetcher.helper_pid


OWNER = """
import os, signal, sys
from sqlstream.config import StorageOptions
from sqlstream.storage.fetcher import Fetcher
fetcher = Fetcher(StorageOptions())
fetcher.head(sys.argv[1])
print(fetcher.helper_pid, flush=True)
{end}
"""


@contextlib.contextmanager
def owner(end: str, url: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process with a helper, which then does `end`."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", OWNER.format(end=end), url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # children that it forked, too


class TestEnd:
    def test_stop_leaves_no_process_thread_or_descriptor(self, fetcher: Fetcher, tmp_path: Path) -> None:
        (tmp_path / "source").write_bytes(DATA)
        before = counted()
        for _ in range(3):
            fetcher.download(str(tmp_path / "source"), tmp_path / "x")
            pid = fetcher.helper_pid
            assert pid is not None
            assert fetcher.is_running
            fetcher.stop()
            assert not Path(f"/proc/{pid}").exists()  # not even a zombie
            assert not fetcher.is_running
        assert not has_more_than(before)

    def test_a_fetcher_that_is_forgotten_ends_its_helper(self, tmp_path: Path) -> None:
        gc.collect()  # what earlier tests forgot must not be counted as ours
        before = counted()
        fetcher = Fetcher(StorageOptions())
        pid = running(fetcher, str(tmp_path))
        del fetcher
        gc.collect()
        wait_dead(pid)
        while has_more_than(before):  # its thread reaps it: where garbage is collected, nothing may be waited for
            time.sleep(0.01)

    def test_the_helper_ends_when_its_owner_is_killed(self, url: str) -> None:
        with owner("signal.pause()", url) as (process, pid):
            assert is_alive(pid)
            process.kill()
            wait_dead(pid)

    @pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise RuntimeError", "os._exit(0)", "fetcher.stop()"])
    def test_the_helper_ends_when_its_owner_ends(self, url: str, end: str) -> None:
        with owner(end, url) as (process, pid):
            _, errors = process.communicate(timeout=PATIENCE_SECONDS)
            wait_dead(pid)
        assert "ResourceWarning" not in errors
        assert "Exception ignored" not in errors

    def test_the_helper_ends_though_a_child_forked_without_hooks_holds_its_socket(self, url: str) -> None:
        """The kernel's end of the socket does not come; the helper sees that its parent is another one."""
        end = (
            "import ctypes; ctypes.CDLL(None).fork() or ctypes.CDLL(None).sleep(3600) and os._exit(0); "
            "print('forked', flush=True); signal.pause()"
        )
        with owner(end, url) as (process, pid):
            assert process.stdout is not None
            assert process.stdout.readline() == "forked\n"
            process.kill()
            wait_dead(pid)

    def test_ctrl_c_on_the_terminal_leaves_the_helper_alive(self, url: str) -> None:
        with owner("signal.signal(signal.SIGINT, signal.SIG_IGN); print('ready', flush=True); signal.pause()", url) as (
            process,
            pid,
        ):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            os.killpg(process.pid, signal.SIGINT)
            os.kill(pid, signal.SIGINT)
            time.sleep(0.2)
            assert is_alive(pid)
            process.kill()
            wait_dead(pid)

    def test_downloads_under_way_end_with_an_error_when_stopped(self, downloads: Downloads, url: str) -> None:
        downloads.submit(url, url, like=granted(0))
        downloads.wait_grants(2)
        downloads.fetcher.stop()
        assert {type(done.error) for done in downloads._done().values()} == {FetchCancelledError}  # before stop() returned
        assert len(downloads.wait_done()) == 2
        assert downloads.fetcher.num_pending == 0

    def test_a_helper_that_was_stopped_by_a_signal_can_still_be_ended(self, fetcher: Fetcher, url: str) -> None:
        pid = running(fetcher, url)
        os.kill(pid, signal.SIGSTOP)
        fetcher.stop()
        assert not Path(f"/proc/{pid}").exists()


class TestRestart:
    def test_a_killed_helper_is_replaced_and_its_downloads_are_done_again(
        self, downloads: Downloads, server: FaultyHttpServer, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        server.script("/x", FaultyAnswer(fault=Fault.STALL, after_bytes=2_000_000, seconds=60))
        downloads.submit(url)
        wait_for_size(tmp_path / "0", 1_000_000)
        pid = downloads.fetcher.helper_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        (done,) = downloads.wait_done()
        assert done.error is None
        assert downloads.read("0") == DATA
        assert downloads.fetcher.helper_pid != pid
        assert len(server.requests("/x")) == 2
        assert "died; another one gets its 1 open requests" in caplog.text

    def test_a_grant_is_remembered_over_the_death_of_the_helper(
        self, downloads: Downloads, server: FaultyHttpServer, url: str, tmp_path: Path
    ) -> None:
        server.script("/x", FaultyAnswer(fault=Fault.STALL, after_bytes=2_000_000, seconds=60))
        downloads.submit(url, like=granted(0))
        downloads.wait_grants(1)
        downloads.fetcher.grant("0", len(DATA))
        wait_for_size(tmp_path / "0", 1_000_000)
        kill_helper(downloads.fetcher)
        assert downloads.wait_done()[0].error is None
        assert len(downloads.wait_grants(1)) == 1

    def test_a_request_that_kills_every_helper_fails_in_the_end(
        self, downloads: Downloads, server: FaultyHttpServer, url: str, tmp_path: Path
    ) -> None:
        server.script("/x", always=FaultyAnswer(fault=Fault.STALL, after_bytes=2_000_000, seconds=60))
        downloads.submit(url)
        for num_tries in (1, 2, 3):
            wait_for_requests(server, num_tries)
            kill_helper(downloads.fetcher)
        (done,) = downloads.wait_done()
        assert type(done.error) is TransientStorageError
        assert "died 3 times" in str(done.error)
        server.script("/x")
        assert downloads.fetcher.head(url).size_bytes == len(DATA)

    def test_a_descriptor_closed_too_early_ends_its_request_and_not_the_fetcher(
        self, fetcher: Fetcher, server: FaultyHttpServer, url: str, tmp_path: Path
    ) -> None:
        server.script("/x", FaultyAnswer(fault=Fault.STALL, seconds=60))
        fd = os.open(tmp_path / "early", os.O_WRONLY | os.O_CREAT)
        ended: queue.SimpleQueue[Sequence[FetchEvent]] = queue.SimpleQueue()
        fetcher.submit([FetchRequest(ticket="early", url=url, fd=fd, granted_bytes=1 << 30)], ended.put)
        wait_for_requests(server, 1)
        os.close(fd)
        kill_helper(fetcher)
        (done,) = ended.get(timeout=PATIENCE_SECONDS)
        assert isinstance(done, FetchDone)
        assert "closed before its FetchDone" in str(done.error)
        fetcher.download(url, tmp_path / "next")

    def test_calls_are_asked_again_too(self, fetcher: Fetcher, server: FaultyHttpServer, url: str) -> None:
        server.script("/x", FaultyAnswer(fault=Fault.STALL, seconds=60))

        def kill() -> None:
            wait_for_requests(server, 1)
            kill_helper(fetcher)

        killer = threading.Thread(target=kill)
        killer.start()
        assert fetcher.head(url).size_bytes == len(DATA)
        killer.join()

    def test_an_idle_helper_that_dies_is_replaced_on_the_next_use(self, fetcher: Fetcher, url: str) -> None:
        pid = running(fetcher, url)
        os.kill(pid, signal.SIGKILL)
        wait_dead(pid)
        assert running(fetcher, url) != pid

    def test_a_cancelled_download_is_not_asked_again(self, downloads: Downloads, server: FaultyHttpServer, url: str) -> None:
        downloads.submit(url, like=granted(0))
        downloads.wait_grants(1)
        pid = downloads.fetcher.helper_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        downloads.fetcher.cancel(["0"])
        os.kill(pid, signal.SIGKILL)
        assert type(downloads.wait_done()[0].error) is FetchCancelledError
        assert len(server.requests("/x")) == 1


class TestFork:
    @pytest.mark.parametrize("attempt", [0, 1, *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, 10))])
    def test_used_in_the_parent_and_then_in_a_forked_child(
        self, fetcher: Fetcher, url: str, tmp_path: Path, attempt: int
    ) -> None:
        parents = running(fetcher, url)

        def child() -> None:
            assert (fetcher.is_running, fetcher.num_pending) == (False, 0)
            fetcher.download(url, tmp_path / "childs")
            assert fetcher.helper_pid not in (None, parents)
            if attempt % 2:
                fetcher.stop()

        assert in_forked_child(child) == 0
        assert (tmp_path / "childs").read_bytes() == DATA
        assert running(fetcher, url) != parents  # idle, it was ended by the fork
        fetcher.download(url, tmp_path / "parents")
        assert (tmp_path / "parents").read_bytes() == DATA

    def test_fork_in_the_middle_of_downloads(
        self, downloads: Downloads, server: FaultyHttpServer, url: str, tmp_path: Path
    ) -> None:
        server.script("/x", *[FaultyAnswer(fault=Fault.DRIP, seconds=0.03)] * 4)
        downloads.submit(url, url, url, url)

        def child() -> None:
            assert downloads.fetcher.num_pending == 0
            assert downloads.fetcher.head(url).size_bytes == len(DATA)

        assert [in_forked_child(child) for _ in range(3)] == [0, 0, 0]
        assert {done.error for done in downloads.wait_done()} == {None}

    def test_the_helper_of_a_forked_child_ends_with_it(self, fetcher: Fetcher, url: str, tmp_path: Path) -> None:
        fetcher.head(url)
        assert in_forked_child(lambda: (tmp_path / "pid").write_text(str(running(fetcher, url))) and None) == 0
        wait_dead(int((tmp_path / "pid").read_text()))

    def test_a_forked_child_does_not_keep_the_parents_helper_alive(self, server: FaultyHttpServer, url: str) -> None:
        """It has no end of the helper's socket, so the helper sees the end of its owner by the end of the socket.

        The helper is at work when its owner forks: an idle one would be ended by the fork.
        """
        end = (
            "import threading; threading.Thread(target=fetcher.head, args=[sys.argv[1] + '-stalls'], daemon=True).start(); "
            "sys.stdin.readline(); os.fork() or print(os.getpid(), flush=True); signal.pause()"
        )
        server.objects["/x-stalls"] = DATA
        server.script("/x-stalls", always=FaultyAnswer(fault=Fault.STALL, seconds=600))
        with owner(end, url) as (process, pid):
            wait_for_requests(server, 1, "/x-stalls")
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("fork\n")
            process.stdin.flush()
            child = int(process.stdout.readline())
            assert is_alive(pid)
            assert sockets(process.pid)
            assert not sockets(process.pid) & sockets(child)
            process.kill()
            wait_dead(pid)


def test_the_reading_process_imports_no_client_and_the_helper_no_torch(url: str) -> None:
    end = "print(sorted({'obstore', 'fsspec', 'urllib3', 'torch'} & set(sys.modules)), flush=True)"
    with owner(end, url) as (process, _):
        assert process.stdout is not None
        assert process.stdout.readline() == "[]\n"
    imports = "import sys, sqlstream.storage.worker.helper, sqlstream.storage.backends.obstore"
    program = (
        f"{imports}; print({{'torch', 'urllib3'}} & set(sys.modules))"  # each is a tenth of a second and more of a first batch
    )
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout == "set()\n"


def sockets(pid: int) -> set[str]:
    """The sockets that a process has open."""
    names = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.add(os.readlink(fd))
    return {name for name in names if name.startswith("socket:")}


def kill_helper(fetcher: Fetcher) -> None:
    """SIGKILL the helper and wait until another one or none is there."""
    pid = fetcher.helper_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while fetcher.helper_pid == pid:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fork_and_wait() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def receivers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sqlstream-fetcher"]


def test_a_fork_ends_an_idle_helper_and_its_thread_and_the_next_question_starts_another(fetcher: Fetcher, url: str) -> None:
    pid = running(fetcher, url)
    others = len(receivers()) - 1
    fork_and_wait()
    assert len(receivers()) <= others
    assert fetcher.helper_pid is None
    wait_dead(pid)
    assert fetcher.head(url).size_bytes == len(DATA)


def test_a_fork_leaves_a_helper_at_work_alone(downloads: Downloads, url: str, fetcher: Fetcher) -> None:
    downloads.submit(url, like=granted(1000))
    (need,) = downloads.wait_grants(1)
    pid = fetcher.helper_pid
    fork_and_wait()
    assert fetcher.helper_pid == pid
    fetcher.grant(need.ticket, len(DATA))
    (done,) = downloads.wait_done(need.ticket)
    assert done.error is None
    assert fetcher.helper_pid == pid


NEVER = 10**6
IDLE_SOON = HelperTiming(look_seconds=0.02, max_idle_looks=5, max_silent_looks=NEVER, max_silent_looks_at_start=NEVER)
"""Helpers are taken for idle after moments, and none for a hanging one, however slow this machine is."""


@pytest.fixture
def idle_soon() -> Iterator[Fetcher]:
    fetcher = Fetcher(StorageOptions(num_threads=4), IDLE_SOON)
    yield fetcher
    fetcher.stop()


def test_a_fork_and_idleness_leave_a_helper_with_an_open_listing_alone(idle_soon: Fetcher, tmp_path: Path) -> None:
    names = {f"{number:04}" for number in range(1100)}  # two pages
    for name in names:
        (tmp_path / name).touch()
    listing = idle_soon.list(f"file://{tmp_path}/")
    found = [next(listing).url]
    fork_and_wait()
    time.sleep(0.2)
    found += [info.url for info in listing]
    assert {Path(url).name for url in found} == names
    assert len(found) == len(names)


def test_a_thread_that_holds_the_guard_forks_without_waiting_for_the_helper(fetcher: Fetcher, url: str) -> None:
    pid = running(fetcher, url)
    with locks.fork_guard():
        fork_and_wait()
    assert fetcher.helper_pid == pid


@pytest.mark.parametrize("ask", ["head", "list", "get_ranges", "download"])
def test_an_idle_helper_ends_whatever_it_was_asked(
    idle_soon: Fetcher, server: FaultyHttpServer, url: str, ask: str, tmp_path: Path
) -> None:
    (tmp_path / "x").touch()
    asked: dict[str, Callable[[], object]] = {
        "head": lambda: idle_soon.head(url),
        "list": lambda: list(idle_soon.list(f"file://{tmp_path}/")),
        "get_ranges": lambda: idle_soon.get_ranges(url, [(0, 10)]),
        "download": lambda: idle_soon.download(url, tmp_path / "copy"),
    }
    assert asked[ask]()
    pid = idle_soon.helper_pid
    if pid is not None:  # else it has ended already
        wait_dead(pid)
    assert idle_soon.head(url).size_bytes == len(DATA)
