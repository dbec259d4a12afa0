"""What a process pins, and when the ledger knows it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.recovery import recover
from sqlstream.errors import CacheClosedError, CacheDiskError, SqlStreamError
from sqlstream.process import locks
from sqlstream.testing.faulty import FaultyHttpServer
from sqlstream.testing.invariants import check_invariants
from tests.cache.session import Session
from tests.processes import open_files

ONE, OTHER = b"1" * 16, b"2" * 16


def written(cache: Cache) -> set[bytes]:
    return {key for (key,) in Session(cache).read("SELECT key FROM pin")}


def test_whoever_reads_the_pins_in_a_transaction_of_their_owner_sees_them_as_they_are_by_then(directory: Path) -> None:
    with Cache(directory) as cache:
        owner = Session(cache).owner
        with owner.transaction():
            owner.pin([ONE])
        assert written(cache) == {ONE}
        owner.unpin([ONE])
        with owner.transaction() as tx:
            assert tx.pinned() == set(), "what was given back before it is free in it"
            owner.pin([ONE])
            assert tx.pinned() == {ONE}
            owner.pin([ONE, OTHER])
        assert written(cache) == {ONE, OTHER}
        owner.unpin([ONE, OTHER])
        with owner.transaction() as tx:
            assert tx.pinned() == {ONE}
            assert tx.pinned(besides=owner.id) == set()
        owner.unpin([ONE])
        owner.flush()
        assert written(cache) == set()
    check_invariants(directory, at_rest=True)


def test_a_transaction_that_fails_leaves_the_pins_of_the_one_before_and_the_next_one_writes_what_is_so(directory: Path) -> None:
    with Cache(directory) as cache:
        owner = Session(cache).owner
        with owner.transaction():
            owner.pin([ONE])

        def fail_with_pins() -> None:
            with owner.transaction() as tx:
                owner.pin([OTHER])
                assert tx.pinned() == {ONE, OTHER}
                raise OSError("the disk is gone")

        with pytest.raises(CacheDiskError, match="the disk is gone"):
            fail_with_pins()
        assert written(cache) == {ONE}
        assert owner.is_waiting, "it pins what the ledger does not know"
        owner.flush()
        assert written(cache) == {ONE, OTHER}
        owner.unpin([ONE, OTHER])
    check_invariants(directory, at_rest=True)


def test_a_download_is_written_once_though_others_write_before_its_thread_goes_on(
    directory: Path, server: FaultyHttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.objects["/x"] = b"x" * 5000
    with Cache(directory, limit=1 << 20) as cache:
        with cache.pinned(f"{server.url}/x"):
            pass
        owner, lock = Session(cache).owner, Session(cache).database._write_lock
        keys = [key for (key,) in Session(cache).read("SELECT key FROM entry")]
        leave = lock.leave

        def leave_and_be_overtaken() -> None:
            leave()
            if lock.turn.is_mine or threading.current_thread() is not threading.main_thread():
                return
            monkeypatch.undo()
            with Session(cache).transaction() as tx:  # another process, say
                recover.remove(tx, Session(cache).disk, list(tx.find(keys).values()))
            other = threading.Thread(target=lambda: owner.run(lambda _: None))
            other.start()
            other.join()

        monkeypatch.setattr(lock, "leave", leave_and_be_overtaken)
        owner.run(lambda _: None)
        assert Session(cache).read("SELECT count(*) FROM entry") == [(0,)]
    check_invariants(directory, at_rest=True)


def test_an_owner_that_gets_no_new_file_closes_no_file_of_others(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cache(directory, limit="1mb") as cache:
        (own,) = (directory / "owners").iterdir()
        own.unlink()  # with its directory, as a rule

        def fail(owner: str) -> int:
            raise OSError(errno.EMFILE, "too many open files")

        monkeypatch.setattr(Session(cache).disk.owners, "create", fail)
        with pytest.raises(CacheDiskError), Session(cache).owner.transaction():
            pass
        monkeypatch.undo()
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
        others.append(fcntl.fcntl(others[0], fcntl.F_DUPFD_CLOEXEC, locks.HIGH_DESCRIPTOR))  # where that of an owner is
        with Session(cache).owner.transaction():
            pass
        for fd in others:
            os.close(fd)
    check_invariants(directory, at_rest=True)


class Stopped:
    """Makes one method of an object wait, in the thread that `close_while_a_thread_reads` starts, until that is let on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, thing: object, name: str) -> None:
        self._method: Callable[..., Any] = getattr(thing, name)
        self.thread: threading.Thread | None = None
        self.has_come, self.may_go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(thing, name, self._wait_and_call)

    def _wait_and_call(self, *arguments: Any) -> Any:
        if threading.current_thread() is self.thread:
            self.has_come.set()
            self.may_go_on.wait(60)
        return self._method(*arguments)


def close_while_a_thread_reads(cache: Cache, url: str, stopped: Stopped) -> Exception:
    """Close the cache while a thread that reads waits where it was stopped; return what that thread gets."""
    errors: list[Exception] = []

    def read() -> None:
        try:
            with cache.pinned(url):
                pass
        except Exception as error:
            errors.append(error)

    thread = stopped.thread = threading.Thread(target=read)
    thread.start()
    assert stopped.has_come.wait(60)
    cache.close()
    stopped.may_go_on.set()
    thread.join()
    return errors[0]


def test_a_thread_that_waits_for_the_lock_while_the_cache_is_closed_registers_and_opens_nothing(
    directory: Path, server: FaultyHttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.objects |= {"/0": b"0", "/1": b"1"}
    cache = Cache(directory, limit=1 << 20)
    with cache.pinned(f"{server.url}/0"):
        pass
    stopped = Stopped(monkeypatch, Session(cache).database._write_lock, "take")
    error = close_while_a_thread_reads(cache, f"{server.url}/1", stopped)
    assert isinstance(error, CacheClosedError)
    assert "was closed" in str(error)
    assert open_files(directory) == []
    assert list((directory / "owners").iterdir()) == []
    assert not list(directory.glob("*.bad"))
    check_invariants(directory, at_rest=True)


def test_a_download_that_would_start_after_the_cache_was_closed_leaves_no_file_open(
    directory: Path, server: FaultyHttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.objects |= {"/0": b"0", "/1": b"1"}
    cache = Cache(directory, limit=1 << 20)
    with cache.pinned(f"{server.url}/0"):
        pass
    stopped = Stopped(monkeypatch, Session(cache).downloads, "start")
    assert isinstance(close_while_a_thread_reads(cache, f"{server.url}/1", stopped), SqlStreamError)
    assert open_files(directory) == []
    with Cache(directory) as again, again.pinned(f"{server.url}/1") as path:
        assert path.read_bytes() == b"1"
    check_invariants(directory, at_rest=True)


def test_a_process_that_can_make_no_other_file_of_its_own_hands_nothing_over_and_says_why(directory: Path) -> None:
    with Cache(directory) as cache:
        owner = Session(cache).owner
        with owner.transaction():
            owner.pin([ONE])
        shutil.rmtree(directory / "owners")
        (directory / "owners").write_bytes(b"")  # no folder can be made there
        with pytest.raises(SqlStreamError, match="owners"):
            owner.hand_over(lambda _: None)
        assert owner.is_closed
        (directory / "owners").unlink()


def test_a_program_whose_name_is_no_utf8_has_its_cache(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [os.fsdecode(b"/home/me/entra\xeeneur.py")])
    with Cache(directory, limit="1mb") as cache:
        assert [owner.name for owner in cache.statistics().owners] == ["entra\\udceeneur.py"]
