"""Helpers that die again and again, or hang alive: the request at fault fails alone, the others come through."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import FetchCancelledError, StorageError, TransientStorageError
from sqlstream.storage.fetcher import Fetcher
from sqlstream.storage.protocol.messages import HelperTiming
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.storage.downloads import Downloads, granted

STALL = FaultyAnswer(fault=Fault.STALL, seconds=60)


@pytest.fixture
def downloads(tmp_path: Path) -> object:
    fetcher = Fetcher(StorageOptions(num_threads=4))
    yield Downloads(fetcher, tmp_path)
    fetcher.stop()


class Killer:
    """Kills the helper whenever the server is asked for one path, as a request that crashes a client would; `most` times."""

    def __init__(self, fetcher: Fetcher, server: FaultyHttpServer, path: str, *, most: int = 1 << 30) -> None:
        self._fetcher, self._server, self._path, self._most = fetcher, server, path, most
        self.num_kills = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.005) and self.num_kills < self._most:
            if len(self._server.requests(self._path)) > self.num_kills and (pid := self._fetcher.helper_pid) is not None:
                self.num_kills += 1
                with contextlib.suppress(ProcessLookupError):  # of two requests of one helper, the other one had it killed
                    os.kill(pid, signal.SIGKILL)


def test_a_request_that_kills_helpers_fails_alone(downloads: Downloads, server: FaultyHttpServer) -> None:
    server.script("/bad", always=STALL)
    server.objects["/bad"] = b"bad"
    for i in range(8):
        server.objects[f"/{i}"] = str(i).encode()
        server.script(f"/{i}", *[FaultyAnswer(fault=Fault.STALL, seconds=0.2)] * 2)  # still open when the helper dies
    urls = [f"{server.url}/{i}" for i in range(8)]
    with Killer(downloads.fetcher, server, "/bad") as killer:
        downloads.submit(*urls[:3], f"{server.url}/bad", *urls[3:])
        done = downloads.wait_done()
    assert type(done[3].error) is TransientStorageError
    assert "died 3 times" in str(done[3].error)
    assert [event.error for event in done[:3] + done[4:]] == [None] * 8
    assert killer.num_kills == len(server.requests("/bad")) == 3
    assert downloads.fetcher.num_pending == 0


def test_what_is_asked_while_suspects_are_tried_comes_after_them(downloads: Downloads, server: FaultyHttpServer) -> None:
    server.script("/bad", always=STALL)
    server.objects |= {"/bad": b"bad", "/good": b"good"}
    with Killer(downloads.fetcher, server, "/bad") as killer:
        downloads.submit(*[f"{server.url}/bad"] * 2)
        while killer.num_kills < 2:
            time.sleep(0.005)
        downloads.submit(f"{server.url}/good")
        bad, also_bad, good = downloads.wait_done()
    assert (type(bad.error), type(also_bad.error), good.error) == (TransientStorageError, TransientStorageError, None)


def test_stopping_in_the_middle_of_a_crash_loop_ends_all(downloads: Downloads, server: FaultyHttpServer) -> None:
    server.script("/bad", always=STALL)
    server.objects["/bad"] = b"bad"
    with Killer(downloads.fetcher, server, "/bad", most=2) as killer:  # a third death would end requests before we do
        downloads.submit(*[f"{server.url}/bad"] * 5)
        while killer.num_kills < 2:
            time.sleep(0.005)
        downloads.fetcher.cancel(["4"])
        downloads.fetcher.stop()
    errors = [done.error for done in downloads.wait_done()]
    assert FetchCancelledError in {type(error) for error in errors}
    assert downloads.fetcher.num_pending == 0


NEVER = 10**6


@contextlib.contextmanager
def downloads_with(timing: HelperTiming, tmp_path: Path) -> Iterator[Downloads]:
    fetcher = Fetcher(StorageOptions(num_threads=4), timing)
    try:
        yield Downloads(fetcher, tmp_path)
    finally:
        fetcher.stop()


def test_a_helper_that_hangs_alive_is_replaced(
    server: FaultyHttpServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.objects["/x"] = b"data"
    server.script("/x", STALL)
    with downloads_with(
        HelperTiming(look_seconds=0.5, max_silent_looks=4, max_silent_looks_at_start=NEVER), tmp_path
    ) as downloads:
        downloads.submit(f"{server.url}/x")
        while not server.requests("/x"):
            time.sleep(0.01)
        pid = downloads.fetcher.helper_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        while downloads.fetcher.helper_pid == pid:
            time.sleep(0.01)
        (done,) = downloads.wait_done()
        assert (done.error, downloads.read("0")) == (None, b"data")
        assert "gives no sign of life" in caplog.text


def test_a_helper_that_only_waits_is_not_taken_for_a_hanging_one(server: FaultyHttpServer, tmp_path: Path) -> None:
    """It says that it lives at every look."""
    server.objects["/x"] = b"data"
    timing = HelperTiming(look_seconds=0.1, max_silent_looks=15, max_silent_looks_at_start=NEVER)
    with downloads_with(timing, tmp_path) as downloads:
        downloads.submit(f"{server.url}/x", like=granted(0))
        downloads.wait_grants(1)
        pid = downloads.fetcher.helper_pid
        time.sleep(2)
        assert downloads.fetcher.helper_pid == pid
        downloads.fetcher.grant("0", 10)
        assert downloads.wait_done()[0].error is None


def test_an_idle_helper_may_be_silent(server: FaultyHttpServer, tmp_path: Path) -> None:
    server.objects["/x"] = b"data"
    timing = HelperTiming(look_seconds=0.05, max_silent_looks=30, max_silent_looks_at_start=NEVER, max_idle_looks=NEVER)
    with downloads_with(timing, tmp_path) as downloads:
        downloads.fetcher.head(f"{server.url}/x")
        pid = downloads.fetcher.helper_pid
        time.sleep(3)
        assert downloads.fetcher.helper_pid == pid


def test_a_helper_that_dies_when_it_starts_is_an_error_soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deadly = tmp_path / "sitecustomize.py"
    deadly.write_text("import os, sys\nif 'sqlstream.storage.worker.helper' in sys.orig_argv: os._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with contextlib.ExitStack() as stack:
        fetcher = Fetcher(StorageOptions(num_threads=4))  # its helpers have the environment of this moment
        stack.callback(fetcher.stop)
        with pytest.raises(StorageError, match="dies when it starts"):
            fetcher.head("s3://bucket/x")
        deadly.unlink()
        (tmp_path / "x").write_bytes(b"1")
        assert fetcher.head(str(tmp_path / "x")).size_bytes == 1
