"""Other processes that use a cache, as functions that a process of its own runs."""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from sqlstream.cache import Cache
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.process import locks
from sqlstream.process.lock_wait import lock_blocking
from tests.cache.session import Session
from tests.processes import FORKSERVER

WAIT_SECONDS = 300.0  # for a machine that does much else; nothing waits so long otherwise


def body(path: str, size_bytes: int) -> bytes:
    """The bytes of the object at `path`: any process can tell whether it got the right ones."""
    seed = hashlib.sha256(path.encode()).digest()
    return (seed * (size_bytes // len(seed) + 1))[:size_bytes]


def objects(sizes: Sequence[int], prefix: str = "/o") -> dict[str, bytes]:
    return {(path := f"{prefix}/{i}.bin"): body(path, size) for i, size in enumerate(sizes)}


def is_right(path: Path, url: str) -> bool:
    data = path.read_bytes()
    return data == body("/" + url.split("/", 3)[3], len(data)) and bool(data)


@contextlib.contextmanager
def nobody_at_the_write_lock(directory: Path) -> Iterator[None]:
    """Hold the lock and its queue: others may want them, nobody has them."""
    with locks.fork_guard(), contextlib.ExitStack() as stack:
        for name in ("gate", "lock"):
            fd = locks.open_descriptor(directory / name, os.O_RDWR | os.O_CREAT)
            stack.callback(locks.close_descriptor, fd)
            lock_blocking(fd)
        yield


def wait_for_helpers(directory: Path) -> None:
    """Wait until the helpers of killed processes have ended: a moment after them, and they hold their parts until then."""
    disk = Disk(directory)
    while any(map(disk.part_is_live, disk.scan_parts())):
        time.sleep(0.01)


class Actor:
    """A process that runs one function, and what it says."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process = process
        self.connection = connection

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def stop_outside_the_write_lock(self, directory: Path) -> None:
        """Stop it (SIGSTOP) where it holds no lock of the cache: one that is stopped under the write lock stops everybody."""
        with nobody_at_the_write_lock(directory):
            os.kill(self.pid, signal.SIGSTOP)
            while "T" not in Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]:
                time.sleep(0.001)

    def kill_outside_the_write_lock(self, directory: Path) -> None:
        """Kill it where a child that it forked without hooks inherits no lock that is taken."""
        with nobody_at_the_write_lock(directory):
            self.kill()

    def hear(self, timeout_seconds: float = WAIT_SECONDS) -> Any:
        """The next thing it says; its error if it failed."""
        if not self.connection.poll(timeout_seconds):
            os.kill(self.pid, signal.SIGUSR1)  # it writes where it is, to where pytest shows what a test wrote
            time.sleep(1)
            raise AssertionError(f"process {self.pid} says nothing; alive: {self.process.is_alive()}")
        kind, value = self.connection.recv()
        assert kind == "said", value
        return value

    def tell(self, value: object = None) -> None:
        self.connection.send(value)

    def kill(self) -> None:
        """Kill it, and see its end; it may have come to its end by itself."""
        self.process.kill()
        self.process.join(WAIT_SECONDS)

    def end(self) -> None:
        self.process.join(WAIT_SECONDS)
        assert self.process.exitcode == 0, self.process.exitcode


class Stage:
    """Starts actors, and ends those that are left."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []

    def start(self, function: Callable[..., Any], *arguments: object) -> Actor:
        ours, theirs = FORKSERVER.Pipe()
        process = FORKSERVER.Process(target=_run, args=(theirs, function, arguments), daemon=True)
        process.start()
        theirs.close()
        self.actors.append(Actor(process, ours))
        return self.actors[-1]

    def run_all(self, function: Callable[..., Any], all_arguments: Sequence[Sequence[object]]) -> list[Any]:
        """What `function` returns in a process for each of the argument lists, all at a time."""
        actors = [self.start(function, *arguments) for arguments in all_arguments]
        results = [actor.hear() for actor in actors]
        for actor in actors:
            actor.end()
        return results

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for actor in self.actors:
            if actor.process.is_alive():
                actor.kill()  # one that is stopped, too; the end of one that ends at this moment is no error
            actor.process.join(WAIT_SECONDS)
            actor.connection.close()
            actor.process.close()


def _run(connection: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    faulthandler.register(signal.SIGUSR1)
    try:
        connection.send(("said", function(connection, *arguments)))
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        raise


def say(connection: Connection, value: object = None) -> None:
    connection.send(("said", value))


# -- what actors do -------------------------------------------------------------------------------------------------------


def read_in_threads(_: Connection, directory: Path, limit: int | None, urls: Sequence[str], num_threads: int) -> int:
    """Each thread reads all URLs in an order of its own; returns how many reads gave the right bytes."""
    right: list[bool] = []
    with Cache(directory, limit=limit) as cache:

        def read(seed: int) -> None:
            for url in random.Random(seed).sample(urls, len(urls)):
                with cache.pinned(url) as path:
                    right.append(is_right(path, url))

        threads = [threading.Thread(target=read, args=(os.getpid() * 100 + i,)) for i in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return sum(right)


def pin_until_told(connection: Connection, directory: Path, limit: int | None, urls: Sequence[str]) -> None:
    """Pin the URLs, say so, and keep them until told to go on."""
    with Cache(directory, limit=limit) as cache:
        paths = cache.acquire_many(urls)
        say(connection, [str(path) for path in paths])
        connection.recv()
        assert all(is_right(path, url) for path, url in zip(paths, urls, strict=True))
        cache.release_many(urls)


def begin_and_wait(connection: Connection, directory: Path, limit: int | None, url: str) -> bool:
    """Ask for one object, saying that we do; return whether its bytes are right."""
    with Cache(directory, limit=limit) as cache:
        say(connection, "asking")
        with cache.pinned(url) as path:
            return is_right(path, url)


def prefetch_and_sleep(_: Connection, directory: Path, limit: int, urls: Sequence[str], seed: int) -> int:
    """Like a DataLoader worker: acquire ahead whatever fits, use one at a time, sleep between two; returns bytes read."""
    rng = random.Random(seed)
    refs = [ObjectRef.of(url) for url in rng.sample(urls, len(urls))]
    total_bytes = 0
    with Cache(directory, limit=limit) as cache:
        session = Session(cache)
        ahead: dict[str, Any] = {}
        for i, ref in enumerate(refs):
            missing = [other for other in refs[i : i + 4] if other.url not in ahead]
            holds = session.acquire([[other] for other in missing])
            ahead.update({other.url: hold for other, hold in zip(missing, holds, strict=False)})
            hold = ahead.pop(ref.url, None)
            while True:
                if hold is None:
                    hold = session.acquire_one([ref])
                session.wait(hold)
                assert hold.error is None, hold.error
                if session.claim(hold):
                    break
                session.release(hold)
                hold = None
            path = cache.path_of(ref)
            assert is_right(path, ref.url)
            total_bytes += path.stat().st_size
            time.sleep(rng.random() * 0.005)
            session.release(hold)
        for hold in ahead.values():
            session.release(hold)
    return total_bytes
