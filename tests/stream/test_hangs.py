"""What must never wait for what: other caches, forks, finalizers and Ctrl-C beside a process that is stopped."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sqlstream import StreamingDataset
from sqlstream.cache import Cache
from sqlstream.cache.ledger.database import Database
from sqlstream.errors import CacheError, ConfigError
from sqlstream.process import fork, interrupts, locks
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import Fault, FaultyAnswer
from tests.cache.session import Session
from tests.processes import answer_of_forked_child, children
from tests.stream.sources import Photos, check_bytes

STOPPED_INSIDE = """
import os, signal, sys
from sqlstream.cache import Cache
from tests.cache.session import Session
cache = Cache(sys.argv[1])
with Session(cache).transaction():
    print("inside", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
cache.close()
"""


@contextlib.contextmanager
def stopped_inside(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is stopped while it holds the write lock of a cache; it goes on, and ends, at the end."""
    command = [sys.executable, "-c", STOPPED_INSIDE, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "inside\n"
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield process
        finally:
            os.kill(process.pid, signal.SIGCONT)
            assert process.wait() == 0


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def send(signum: int, is_seen: Callable[[], object]) -> None:
    """Send this process a signal until it is seen: one that comes as a wait in the kernel begins is seen with the next."""
    while not is_seen():
        os.kill(os.getpid(), signum)
        deadline = time.monotonic() + 20
        while not is_seen() and time.monotonic() < deadline:
            time.sleep(0.01)


def test_a_process_stopped_in_one_cache_stops_neither_another_cache_nor_a_fork_nor_a_read(
    photos: Photos, tmp_path: Path
) -> None:
    urls = [f"{photos.server.url}{photos.path(number)}" for number in range(3)]
    with Cache(tmp_path / "a") as first, Cache(tmp_path / "b") as second:
        first.acquire_many(urls[:1])
        first.release_many(urls[:1])
        with stopped_inside(tmp_path / "a"):
            waiting = started(first.statistics)
            wait_until(lambda: Session(first).database._write_lock.turn._holder)
            second.acquire_many(urls)
            second.release_many(urls)
            assert second.statistics().entries == 3
            assert first.policy.name == "lru"  # a read of the same cache
            answer = answer_of_forked_child(lambda: str(second.statistics().entries))
            with Cache(tmp_path / "c") as third:
                third.acquire_many(urls[:1])
            assert answer == "3"
            assert waiting.is_alive()
        waiting.join(60)
        assert not waiting.is_alive()


WAITS: dict[str, Callable[[Cache], object]] = {
    "statistics": lambda cache: cache.statistics(),
    "close": lambda cache: cache.close(),
    "open": lambda cache: Cache(cache.path),
}


@pytest.mark.parametrize("way", WAITS)
def test_ctrl_c_ends_a_wait_for_a_stopped_process_and_other_handlers_run_in_it(tmp_path: Path, way: str) -> None:
    handled: list[int] = []
    ended = threading.Event()
    cache = Cache(tmp_path / "a")
    if way == "open":
        cache.close()
    other = Cache(tmp_path / "b")
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: handled.append(other.statistics().entries))

    def interrupt() -> None:
        if way == "open":
            time.sleep(0.3)  # it need not wait by then: the signal comes in any case
        else:
            wait_until(lambda: Session(cache).database._write_lock.turn._holder)
        send(signal.SIGUSR1, lambda: handled)
        send(signal.SIGINT, ended.is_set)

    try:
        with stopped_inside(tmp_path / "a"):
            thread = started(interrupt)
            with pytest.raises(KeyboardInterrupt):
                WAITS[way](cache)
            ended.set()
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert set(handled) == {0}
    cache.close()
    other.close()
    check_invariants(tmp_path / "a", at_rest=True)


def test_ctrl_c_ends_the_close_of_one_of_several_caches_whose_pins_go_with_the_next_transaction(
    photos: Photos, tmp_path: Path
) -> None:
    url = f"{photos.server.url}{photos.path(0)}"
    with Cache(tmp_path / "a") as staying:
        closing = Cache(tmp_path / "a")
        pinned = closing.pinned(url)
        assert pinned.__enter__().exists()
        closing.session.flush()
        assert staying.statistics().pinned_entries == 1

        ended = threading.Event()

        def interrupt() -> None:
            wait_until(lambda: Session(staying).database._write_lock.turn._holder)
            send(signal.SIGINT, ended.is_set)

        with stopped_inside(tmp_path / "a"):
            thread = started(interrupt)
            with pytest.raises(KeyboardInterrupt):
                closing.close()
            ended.set()
            thread.join()
        assert staying.statistics().pinned_entries == 0
        assert staying.clear().removed_entries == 1
        with pytest.raises(ConfigError, match="closed"):
            closing.acquire_many([url])
    check_invariants(tmp_path / "a", at_rest=True)


def test_ctrl_c_ends_a_wait_for_a_silent_server_at_once(photos: Photos, tmp_path: Path) -> None:
    photos.server.script(photos.path(0), FaultyAnswer(fault=Fault.STALL, seconds=60))
    url = f"{photos.server.url}{photos.path(0)}"
    with Cache(tmp_path / "dst") as cache:

        def interrupt() -> None:
            wait_until(lambda: photos.server.requests(photos.path(0)))
            os.kill(os.getpid(), signal.SIGINT)

        thread = started(interrupt)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt), cache.pinned(url):
            pass
        thread.join()
        assert time.monotonic() - start < 30
        gc.collect()
        assert Session(cache).pinned_keys == []


class Knot:
    """A cycle, which only the collector unties: as a trainer that knows its iterator."""

    def __init__(self, held: object) -> None:
        self.held, self.me = held, self


def open_dataset(photos: Photos, dst: Path) -> StreamingDataset:
    return StreamingDataset(
        photos.src, dst=dst, columns_to_download=["image"], transforms=[check_bytes], shuffle_seed=0, cache_limit="10mb"
    )


@pytest.mark.parametrize("forgotten", ["iterator", "dataset", "iterator of another dataset"])
def test_an_iterator_collected_inside_a_transaction_is_ended_after_it(photos: Photos, tmp_path: Path, forgotten: str) -> None:
    before = children(os.getpid())
    with open_dataset(photos, tmp_path / "dst") as dataset:
        other = open_dataset(photos, tmp_path / "dst") if forgotten != "iterator" else dataset
        samples = iter(other)
        next(samples)
        knot = Knot((samples, other if forgotten == "dataset" else None))
        fetcher = other.cache.fetcher
        gc.collect()
        gc.disable()
        try:
            del samples, knot
            if forgotten == "dataset":
                del other
            with Session(dataset.cache).owner.transaction() as tx:
                num_transactions = Session(dataset.cache).num_transactions
                gc.collect()
                assert tx.account().entries
                assert Session(dataset.cache).num_transactions == num_transactions
        finally:
            gc.enable()
        wait_until(lambda: fetcher.helper_pid is None)
        assert dataset[0]["is_right"]
        dataset.cache.rest()
        if forgotten == "iterator of another dataset":
            other.close()
        wait_until(lambda: children(os.getpid()) <= before)
        wait_until(lambda: [t.name for t in threading.enumerate() if t.name == "sqlstream-cache-close"] == [])
        dataset.cache.statistics()
    check_invariants(tmp_path / "dst", at_rest=True)


def test_an_iterator_with_much_ahead_that_is_collected_inside_a_transaction_gives_everything_back(
    photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: failed.append(repr(unraisable.exc_value)))
    with StreamingDataset(
        photos.src, dst=tmp_path / "dst", columns_to_download=["image"], cache_limit="10mb", retained_samples=1, prefetch=100
    ) as dataset:
        samples = iter(dataset)
        for _ in range(12):
            next(samples)
        session = Session(dataset.cache)
        session.flush()
        wait_until(lambda: session.holdings.released == deque())
        Session(dataset.cache).stop_background()
        with session.owner.transaction():
            del samples
        assert failed == []
        assert dataset.cache.statistics().pinned_entries == 1, "what was ahead is given back, the sample in hand stays"
        assert sum(1 for _ in dataset) == photos.num


class Watched(weakref.WeakSet[fork.ForkAware]):
    """Collects garbage at each holder that is added, as Python may."""

    def add(self, item: fork.ForkAware) -> None:
        gc.collect()
        super().add(item)


def test_an_iterator_collected_as_another_one_opens_its_helper_waits_for_no_thread_that_wants_the_guard(
    photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_dataset(photos, tmp_path / "dst") as dataset:
        samples = iter(dataset)
        next(samples)
        knot = Knot(samples)
        gc.collect()
        gc.disable()
        try:
            monkeypatch.setitem(
                fork.FORKS._holders, fork.Stage.LOCKS, Watched()
            )  # empty: each holder of this process would collect
            del samples, knot
            lock = locks.StateLock()
            assert not lock.is_mine
        finally:
            gc.enable()
            monkeypatch.undo()
        wait_until(lambda: dataset.cache.fetcher.helper_pid is None)
        assert dataset[0]["is_right"]


def test_what_waits_for_the_end_of_a_section_is_done_one_after_another_however_much_it_is() -> None:
    depths: list[int] = []

    def work() -> None:
        with interrupts.uninterrupted():
            depths.append(len(inspect.stack(0)))

    with interrupts.uninterrupted():
        for _ in range(3):
            interrupts.call_outside(work)
    assert len(depths) == 3
    assert len(set(depths)) == 1


def test_a_transaction_begun_by_its_own_thread_in_the_middle_of_one_is_a_clear_error(tmp_path: Path) -> None:
    database = Database(tmp_path / "ledger.sqlite")
    with database.write_transaction() as connection:
        connection.execute("INSERT INTO stat VALUES ('a', 1)")
        with pytest.raises(CacheError, match="in use by this very thread"), database.write_transaction():
            pass
    assert database.read("SELECT name FROM stat") == [("a",)]
    database.close()


@pytest.mark.parametrize("num_forks", [7, pytest.param(20, marks=pytest.mark.slow)])
def test_a_child_forked_while_another_thread_waits_for_a_lock_or_is_in_a_transaction_works_and_ends(
    tmp_path: Path, num_forks: int
) -> None:
    """It ends as Python ends, with all that this tidies up."""
    program = f"""
import os, sys, threading
from sqlstream.cache import Cache
from tests.cache.session import Session
cache = Cache({str(tmp_path / "dst")!r})
over = threading.Event()
def work():
    while not over.is_set():
        with Session(cache).owner.transaction() as tx:
            tx.account()
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range({num_forks}):
    pid = os.fork()
    if pid == 0:
        assert cache.statistics().entries == 0
        over.set()
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert all(thread.is_alive() for thread in threads)
over.set()
for thread in threads:
    thread.join()
cache.close()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=300, cwd=Path(__file__).parents[2])
    check_invariants(tmp_path / "dst", at_rest=True)


OPEN_AND_CLOSE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sqlstream.cache import Cache
root, url, num_turns = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def open_and_close(number):
    for turn in range(num_turns):
        with Cache(root / f"dst{(number + turn) % 2}", limit="10mb") as cache:
            cache.acquire_many([url])
            cache.statistics()

with ThreadPoolExecutor(2) as threads:
    for done in [threads.submit(open_and_close, number) for number in range(2)]:
        done.result()
"""


@pytest.mark.parametrize("num_turns", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_caches_opened_and_closed_by_many_threads_and_processes_never_wait_for_each_other_for_ever(
    photos: Photos, tmp_path: Path, num_turns: int
) -> None:
    url = f"{photos.server.url}{photos.path(0)}"
    command = [sys.executable, "-c", OPEN_AND_CLOSE, str(tmp_path), url, str(num_turns)]
    processes = [subprocess.Popen(command, cwd=Path(__file__).parents[2]) for _ in range(3)]
    try:
        assert [process.wait(240) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for number in range(2):
        check_invariants(tmp_path / f"dst{number}", at_rest=True)


def test_a_handler_in_a_section_waits_for_its_end_whatever_the_signal() -> None:
    came: list[str] = []
    signals = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
    before = [signal.signal(signum, lambda number, frame: came.append(signal.Signals(number).name)) for signum in signals]
    try:
        with interrupts.uninterrupted():
            for signum in signals:
                signal.raise_signal(signum)
            with interrupts.uninterrupted():
                pass
            assert came == []
        assert came == ["SIGUSR1", "SIGUSR2", "SIGALRM"]
    finally:
        for signum, original in zip(signals, before, strict=True):
            signal.signal(signum, original)


def raise_in_section(*signals: signal.Signals) -> None:
    with interrupts.uninterrupted():
        for signum in signals:
            signal.raise_signal(signum)


def test_of_two_handlers_that_waited_the_second_runs_though_the_first_raises() -> None:
    came: list[int] = []

    def fail(signum: int, frame: object) -> None:
        raise ValueError("the first")

    before = signal.signal(signal.SIGUSR1, fail), signal.signal(signal.SIGUSR2, lambda number, frame: came.append(number))
    try:
        with pytest.raises(ValueError, match="the first"):
            raise_in_section(signal.SIGUSR1, signal.SIGUSR2)
        assert came == [signal.SIGUSR2]
        assert not interrupts.is_inside()
        assert signal.getsignal(signal.SIGUSR1) is fail
    finally:
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGUSR2, before[1])
