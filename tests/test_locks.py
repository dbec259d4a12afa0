"""Locks: what the kernel promises us, and what a fork must not break."""

from __future__ import annotations

import errno
import fcntl
import gc
import operator
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from sqlstream.cache.files.read_hold import KeptLocks, ReadLock, ReadLocks
from sqlstream.process import fork, interrupts, locks
from sqlstream.process.fork import Forks, Stage
from sqlstream.process.lock_wait import lock_blocking
from tests.cache.kit import descriptors
from tests.processes import ROOT, answer_of_forked_child


def state_of(fd: int) -> str:
    try:
        os.fstat(fd)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "open"


def test_try_lock_says_whether_the_lock_is_ours(tmp_path: Path) -> None:
    first, second = (locks.open_descriptor(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert locks.try_lock(first)
    assert locks.try_lock(first)  # it is still ours
    assert not locks.try_lock(second)
    locks.unlock(first)
    assert locks.try_lock(second)
    locks.close_descriptor(first)
    locks.close_descriptor(second)


def test_close_descriptor_frees_its_lock(tmp_path: Path) -> None:
    first, second = (locks.open_descriptor(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert locks.try_lock(first)
    locks.close_descriptor(first)
    assert locks.try_lock(second)
    locks.close_descriptor(second)


def test_lock_blocking_waits_until_the_holder_closes(tmp_path: Path) -> None:
    holder, waiter = (locks.open_descriptor(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    lock_blocking(holder)
    order: list[str] = []

    def wait() -> None:
        lock_blocking(waiter)
        order.append("locked")

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.1)
    order.append("closing")
    locks.close_descriptor(holder)
    thread.join(300)
    assert order == ["closing", "locked"]
    locks.close_descriptor(waiter)


def test_a_raised_descriptor_keeps_its_lock_and_has_a_number_above_the_usual(tmp_path: Path) -> None:
    fd = locks.open_descriptor(tmp_path / "owner", os.O_RDWR | os.O_CREAT)
    assert locks.try_lock(fd)
    raised = locks.raise_descriptor(fd)
    assert raised > 100
    assert state_of(fd) == "EBADF"
    other = locks.open_descriptor(tmp_path / "owner", os.O_RDWR)
    assert not locks.try_lock(other)
    assert answer_of_forked_child(lambda: state_of(raised)) == "EBADF"
    locks.close_descriptor(raised)
    assert locks.try_lock(other)
    locks.close_descriptor(other)


def test_a_forked_child_raises_a_descriptor_without_a_larger_table(tmp_path: Path) -> None:
    """To grow the table, the kernel makes a process with threads wait for all processors."""

    def table_size() -> str:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(line for line in status if line.startswith("FDSize"))

    def grows() -> str:
        before = table_size()
        fd = locks.open_descriptor(tmp_path / "owner", os.O_RDWR | os.O_CREAT)
        return f"{locks.raise_descriptor(fd) > 100} {table_size() == before}"

    ledger = locks.open_descriptor(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    assert answer_of_forked_child(grows) == "True True"
    locks.close_descriptor(ledger)


def test_a_descriptor_above_the_limit_stays_where_it_is(tmp_path: Path) -> None:
    def is_where_it_was() -> str:
        fd = locks.open_descriptor(tmp_path / "owner", os.O_RDWR | os.O_CREAT)
        resource.setrlimit(resource.RLIMIT_NOFILE, (fd, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        return f"{locks.raise_descriptor(fd) == fd} {state_of(fd)}"

    assert answer_of_forked_child(is_where_it_was) == "True open"


def test_open_descriptor_does_not_follow_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        locks.open_descriptor(tmp_path / "link", os.O_RDWR)


def test_fork_closes_descriptors_in_the_child_and_leaves_the_parents_locked(tmp_path: Path) -> None:
    fd = locks.open_descriptor(tmp_path / "owner", os.O_RDWR | os.O_CREAT)
    assert locks.try_lock(fd)
    assert answer_of_forked_child(lambda: state_of(fd)) == "EBADF"
    assert state_of(fd) == "open"
    other = locks.open_descriptor(tmp_path / "owner", os.O_RDWR)
    assert not locks.try_lock(other)  # the child's end did not free what is ours
    locks.close_descriptor(fd)
    locks.close_descriptor(other)


def test_a_lock_ends_with_its_process_though_a_forked_child_lives_on(tmp_path: Path) -> None:
    fd = locks.open_descriptor(tmp_path / "owner", os.O_RDWR | os.O_CREAT)
    assert locks.try_lock(fd)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)  # lives until the parent has looked
        os._exit(0)
    os.close(reading)
    locks.close_descriptor(fd)
    other = locks.open_descriptor(tmp_path / "owner", os.O_RDWR)
    # The child closes its copy as its first act, but we may be faster than it: blocking, under the time limit of the test.
    lock_blocking(other)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)  # it is alive, and does not hold the lock
    os.close(writing)
    os.waitpid(pid, 0)
    locks.close_descriptor(other)


def test_a_closed_descriptor_is_not_closed_again_in_a_child(tmp_path: Path) -> None:
    """Its number may be another file's by then."""
    fd = locks.open_descriptor(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    locks.close_descriptor(fd)
    reused = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    assert reused == fd
    assert answer_of_forked_child(lambda: state_of(reused)) == "open"
    os.close(reused)


def test_fork_waits_for_the_thread_that_holds_the_guard_and_the_child_does_not_deadlock() -> None:
    held, released = threading.Event(), threading.Event()

    def hold() -> None:
        with locks.fork_guard():
            held.set()
            threading.Event().wait(0.2)  # the fork below arrives meanwhile
            released.set()

    def contend() -> None:
        held.wait()
        with locks.fork_guard():
            pass

    def use_guard_in_child() -> str:
        with locks.fork_guard():
            before = "after the release" if released.is_set() else "while held"
        thread = threading.Thread(target=lambda: locks.fork_guard().acquire())
        thread.start()
        thread.join(300)
        return before + (", a thread waits for ever" if thread.is_alive() else ", free for every thread")

    threads = [threading.Thread(target=hold), threading.Thread(target=contend)]
    for thread in threads:
        thread.start()
    held.wait()
    assert answer_of_forked_child(use_guard_in_child) == "after the release, free for every thread"
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()


class PausedLock:
    """An RLock that lets others run before its `release` returns."""

    def __init__(self, *pauses: Callable[[], object]) -> None:
        self._lock = threading.RLock()
        self._pauses = iter(pauses)
        self.acquire = self._lock.acquire

    def release(self) -> None:
        self._lock.release()
        next(self._pauses)()


def test_of_two_threads_that_fork_at_the_same_time_each_gives_back_its_own_locks() -> None:
    """The hooks by themselves: the second thread takes what the first one gives back, before that one has given back all."""
    forks = Forks()  # has no other test's locks
    is_held, is_given_back = threading.Event(), threading.Event()
    lock = locks.ForkLock()
    lock._lock = PausedLock(lambda: is_held.wait(300), bool)  # type: ignore[assignment]  # what the hooks ask of it
    forks.enclose(lock, Stage.FORK_LOCKS)

    def fork_too() -> None:
        forks.begin()
        is_held.set()
        is_given_back.wait(300)
        forks.end()

    forks.begin()
    thread = threading.Thread(target=fork_too)
    thread.start()
    try:
        forks.end()
    finally:
        is_given_back.set()
        thread.join(300)
    assert lock._lock.acquire(blocking=False)


def test_fork_by_the_thread_that_holds_the_guard_works() -> None:
    with locks.fork_guard():
        assert answer_of_forked_child(lambda: str(locks.fork_guard().acquire(blocking=False))) == "True"


class Connection:
    """What a process keeps open and a child must forget."""

    def __init__(self) -> None:
        self.forks = 0

    def after_fork_in_child(self) -> None:
        self.forks += 1


def test_holders_are_told_of_a_fork_in_the_child_only_and_only_while_they_live() -> None:
    connection, gone = Connection(), Connection()
    calls: list[str] = []
    gone.after_fork_in_child = lambda: calls.append("called")  # type: ignore[method-assign]  # leaves a trace when called
    fork.call_in_child(connection, Stage.MEMORY)
    fork.call_in_child(gone, Stage.MEMORY)
    del gone
    assert answer_of_forked_child(lambda: f"{connection.forks} {calls}") == "1 []"
    assert connection.forks == 0


class Probe:
    """Notes what it is asked to do, with its stage."""

    def __init__(self, stage: Stage, said: list[str]) -> None:
        self.stage, self.said = stage, said
        fork.enclose(self, stage)
        fork.call_in_child(self, stage)

    def before_fork(self) -> None:
        self.said.append(f"before {self.stage.name}")

    def after_fork(self, *, is_child: bool) -> None:
        self.said.append(f"{'child' if is_child else 'parent'} {self.stage.name}")

    def after_fork_in_child(self) -> None:
        self.said.append(f"repair {self.stage.name}")


def written_stages() -> list[str]:
    """The stages in the order of the table that `fork` begins with."""
    return [line.split()[0] for line in str(fork.__doc__).splitlines() if re.match(r"    [A-Z_]{4,} ", line)]


def test_the_stages_of_a_fork_run_in_the_order_that_is_written() -> None:
    said: list[str] = []
    probes = [Probe(stage, said) for stage in reversed(Stage)]  # the order of registration is without effect
    names = written_stages()
    assert names == [stage.name for stage in Stage] == [probe.stage.name for probe in reversed(probes)]
    before, back = [f"before {name}" for name in names], list(reversed(names))
    in_child = answer_of_forked_child(lambda: " ".join(said))
    assert in_child == " ".join([*before, *(f"{kind} {name}" for name in back for kind in ("child", "repair"))])
    assert said == [*before, *(f"parent {name}" for name in back)]


def test_a_step_that_fails_keeps_no_other_one_from_being_done_and_is_not_undone(capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    class Failing(Probe):
        def before_fork(self) -> None:
            raise RuntimeError("a step fails")

    probes = [Probe(Stage.SECTION, said), Failing(Stage.LEASES, said), Probe(Stage.FORK_LOCKS, said)]
    unraisable: list[object] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda what: unraisable.append(what.exc_value)
    try:
        assert answer_of_forked_child(lambda: "lives") == "lives"
    finally:
        sys.unraisablehook = hook
    assert [str(error) for error in unraisable] == ["a step fails"]
    assert said == ["before SECTION", "before FORK_LOCKS", "parent FORK_LOCKS", "parent SECTION"]
    del probes


def test_one_place_of_the_package_registers_with_the_fork() -> None:
    places = [path for path in (ROOT / "sqlstream").rglob("*.py") if "os.register_at_fork(" in path.read_text()]
    assert [str(path.relative_to(ROOT)) for path in places] == ["sqlstream/process/fork.py"]
    assert places[0].read_text().count("os.register_at_fork(") == 1


def test_leak_keeps_a_thing_alive() -> None:
    connection = Connection()
    reference = weakref.ref(connection)
    locks.leak(connection)
    del connection
    assert reference() is not None


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="there the collector runs between two instructions, not as objects are made"
)
def test_read_locks_make_no_object_in_the_guard_that_starts_the_garbage_collector(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"data")
    was_guarded: list[bool] = []

    def look(phase: str, info: dict[str, int]) -> None:
        was_guarded.append(locks.is_guarded())

    threshold = gc.get_threshold()
    gc.callbacks.append(look)
    gc.set_threshold(1)
    try:
        files: dict[str, ReadLock] = {}
        assert ReadLocks("", refuse, KeptLocks()).lock(str(path), 4, files)
        with locks.fork_guard():
            files.clear()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(look)
    assert was_guarded
    assert not any(was_guarded)


class Knot:
    """A cycle, which only the collector unties."""

    def __init__(self) -> None:
        self.me = self


def test_what_the_collector_asks_for_while_all_is_taken_under_a_lock_waits_for_its_end() -> None:
    lock = locks.ForkLock()
    held: list[bool] = []
    weakref.finalize(Knot(), interrupts.call_outside, lambda: held.append(lock.is_mine))
    taken = lock.take_all(map(gc.collect, (2,)))
    assert len(taken) == 1
    assert held == [False]

    weakref.finalize(Knot(), interrupts.call_outside, lambda: held.append(lock.is_mine))
    with pytest.raises(ZeroDivisionError):
        lock.take_all(map(operator.truediv, map(gc.collect, (2,)), (0,)))
    assert held == [False, False]
    assert not lock.is_mine
    assert not interrupts.is_inside()


def test_no_signal_handler_runs_while_all_is_taken_under_a_lock() -> None:
    lock = locks.ForkLock()
    held: list[bool] = []
    before = signal.signal(signal.SIGVTALRM, lambda signum, frame: held.append(lock.is_mine))
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)
    try:
        while len(held) < 50:
            assert lock.take_all(map(sum, repeat(range(20_000), 20))) == [199_990_000] * 20
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert not any(held)


def refuse(*arguments: Any) -> None:
    raise AssertionError(f"called with {arguments}")


def test_a_forked_child_opens_for_itself_what_its_parent_reads_and_its_own_child_keeps_none(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    Path(path).write_bytes(b"data")
    shared, files, others = ReadLocks("", refuse, KeptLocks()), dict[str, ReadLock](), dict[str, ReadLock]()
    assert shared.lock(path, 4, files)
    (inherited,) = descriptors(files[path])

    def in_child() -> str:
        assert files[path].owners == []
        was_closed = state_of(inherited)
        assert shared.lock(path, 4, others)
        (own,) = descriptors(others[path])
        said = f"{was_closed}, own {answer_of_forked_child(lambda: state_of(own))}, {state_of(own)}"
        others.clear()
        files.clear()
        return f"{said}, at the end {state_of(own)}"

    assert answer_of_forked_child(in_child) == "EBADF, own EBADF, open, at the end EBADF"
    assert state_of(inherited) == "open"
    files.clear()
    assert state_of(inherited) == "EBADF"
    assert shared.lock(path, 4, files)


def test_a_file_is_open_once_until_its_last_user_drops_it(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    Path(path).write_bytes(b"data")
    shared = ReadLocks("", refuse, KeptLocks())
    users = [dict[str, ReadLock]() for _ in range(3)]
    assert all(shared.lock(path, 4, files) for files in users)
    assert not shared.lock(path, 5, {}), "it has another size"
    (fd,) = {fd for files in users for fd in descriptors(files[path])}
    for files in users:
        assert state_of(fd) == "open"
        files.clear()
    assert state_of(fd) == "EBADF"
    Path(path).write_bytes(b"longer")
    assert not shared.lock(path, 4, {})
    assert shared.lock(path, 6, users[0]), "what was open is forgotten"


def test_no_temporary_directory_is_needed_for_locks() -> None:
    program = (
        "import resource, tempfile\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))\n"  # as on a disk that is full
        "import sqlstream.process.lock_wait as lock_wait\n"
        "print(lock_wait.portalocker.LockFlags.EXCLUSIVE.name, tempfile.tempdir)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("EXCLUSIVE None\n", "")


def test_the_holder_of_a_lock_is_not_one_of_a_file_with_its_inode_number_elsewhere(tmp_path: Path) -> None:
    with open(tmp_path / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status = os.fstat(file.fileno())
        assert locks.lock_holder(file.name) == os.getpid()
        stranger = f"1: FLOCK  ADVISORY  WRITE {os.getppid()} fe:ff:{status.st_ino} 0 EOF"
        assert locks.holder_among([stranger], status) is None
        subvolume = f"2: FLOCK  ADVISORY  WRITE {os.getpid()} fe:fe:{status.st_ino} 0 EOF"
        assert locks.holder_among([stranger, subvolume], status) == os.getpid()
