"""A storm: processes of mixed descent on one small cache, stopped, killed and started again at random. A program, so that its
parent is a clean process to fork from, and its disk a file system of its own where mounting is allowed:

    unshare --mount python -m tests.cache.storm --directory DIR --seconds 60 --mount

Half of the workers are forked from a parent that uses the cache itself (they inherit its connection, locks, helper and pins, as
a DataLoader's do), half are spawned. Prints one JSON document, the `StormReport`; what it must say is in `test_storm.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

from sqlstream import locks
from sqlstream.cache import Cache
from sqlstream.storage.fetcher import FetchDone, Fetcher, FetchEvent, FetchRequest, Sink
from sqlstream.testing.disk import DiskWatch
from sqlstream.testing.invariants import violations
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.actors import is_right, objects

NUM_PROCESSES, NUM_THREADS, NUM_OBJECTS, LARGEST_BYTES = 6, 4, 1000, 60_000
BLOCK_BYTES = 4096
SLACK_BYTES = 2 * BLOCK_BYTES * NUM_PROCESSES
"""Owner files that were unlinked and are not closed yet: no listing shows them, `statvfs` does. A block or two each."""
LAST_WORD_SECONDS = 240.0
"""For a worker's last round of reads, some seconds on a busy machine; who needs more hangs."""
PF_EXITING = 0x4
"""Linux's include/linux/sched.h."""
LEAST_KILLS = 3
"""However slow the machine is."""


@dataclass(kw_only=True)
class StormReport:
    """What came of it."""

    seed: int
    has_own_disk: bool
    """`highest_disk_bytes` is the file system's word (`statvfs`), not a sum of files."""
    limit_bytes: int = 0
    num_kills: int = 0
    num_stops: int = 0
    num_reads: int = 0
    """Hits and misses in the ledger; what the killed had not written yet is lost."""
    num_downloads: int = 0
    highest_file_bytes: int = 0
    highest_disk_bytes: int = 0
    num_disk_samples: int = 0
    evictions: int = 0
    troubles: list[str] = field(default_factory=list)
    """Broken promises: wrong bytes, vanished files, objects downloaded twice at a time, hangs, findings."""


class MarkingFetcher(Fetcher):
    """Holds a lock of its own for each object while it downloads it; whoever finds one held has found a second download."""

    def __init__(self, cache: Cache, marks: Path, troubles: list[str]) -> None:
        super().__init__(cache.storage_options)
        self._marks = marks
        self._troubles = troubles

    def submit(self, requests: Sequence[FetchRequest], sink: Sink) -> None:
        held: dict[str, int] = {}
        for request in requests:
            mark = self._marks / request.url.rpartition("/")[2]
            fd = locks.open_descriptor(mark, os.O_RDWR | os.O_CREAT)
            if not locks.try_lock(fd) and (holder := locks.lock_holder(mark)) is not None and not is_ending(holder):
                self._troubles.append(f"{request.url} is downloaded twice at the same time")
            held[request.ticket] = fd

        def pass_on(events: Sequence[FetchEvent]) -> None:
            for event in events:
                if isinstance(event, FetchDone):
                    locks.close_descriptor(held.pop(event.ticket))
            sink(events)

        super().submit(requests, pass_on)


def is_ending(pid: int) -> bool:
    """Whether the kernel is closing a process's files: one after the other, a part's lock perhaps before our mark."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    state, flags = fields[0], int(fields[6])
    return state in "ZX" or bool(flags & PF_EXITING)


class TmpfsWatch:
    """Asks a file system that holds nothing but a cache how full it is; the ledger and other overhead are taken off.

    A look counts only when the overhead was the same before and after it.
    """

    def __init__(self, directory: Path) -> None:
        self.highest_bytes = self.num_samples = 0
        self._directory = directory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> TmpfsWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not (self._stop.wait(0.003) and self.num_samples):
            before, status, after = self._overhead(), os.statvfs(self._directory), self._overhead()
            if before == after:
                self.num_samples += 1
                used = (status.f_blocks - status.f_bfree) * status.f_frsize - sum(before.values())
                self.highest_bytes = max(self.highest_bytes, used)

    def _overhead(self) -> dict[str, int]:
        sizes = {}
        for folder in (".", "owners", "index"):
            with contextlib.suppress(FileNotFoundError):
                for entry in os.scandir(self._directory / folder):
                    with contextlib.suppress(FileNotFoundError):
                        if entry.is_file(follow_symlinks=False):
                            sizes[entry.path] = entry.stat(follow_symlinks=False).st_blocks * 512
        return sizes


# -- workers --------------------------------------------------------------------------------------------------------------


def work(connection: Connection, cache: Cache, marks: Path, urls: Sequence[str], seed: int) -> None:
    """Read in threads, in rounds, until told that it is enough; then say what went wrong."""
    troubles: list[str] = []
    cache.fetcher = MarkingFetcher(cache, marks, troubles)

    def read(wanted: Sequence[str]) -> None:
        try:
            for url in wanted:
                with cache.pinned(url) as path:
                    if not is_right(path, url):
                        troubles.append(f"{url}: wrong bytes")
                    if random.random() < 0.1:
                        time.sleep(0.01)
                    if not path.exists():
                        troubles.append(f"{url}: its file vanished while it was pinned")
        except BaseException:
            troubles.append(traceback.format_exc())

    rng = random.Random(seed)
    is_over = False
    while not is_over:
        threads = [threading.Thread(target=read, args=(rng.sample(urls, 8),)) for _ in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        is_over = connection.poll() or bool(troubles)
    cache.close()
    connection.send(troubles)


@dataclass(kw_only=True)
class Worker:
    process: BaseProcess
    connection: Connection

    def send_signal(self, number: signal.Signals) -> None:
        """Stop it, or let it go on; one that gave up has ended by itself, and says why in its last word."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def start(kind: str, cache: Cache, marks: Path, urls: Sequence[str], seed: int) -> Worker:
    context = multiprocessing.get_context(kind)
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, cache, marks, urls, seed), daemon=True)  # type: ignore[attr-defined]  # of every context
    process.start()
    theirs.close()
    return Worker(process=process, connection=ours)


def serve(connection: Connection, sizes: Sequence[int]) -> None:
    with FaultyHttpServer(objects(sizes)) as server:
        connection.send(server.url)
        connection.recv()
        connection.send(len(server.requests()))


@contextlib.contextmanager
def served(sizes: Sequence[int]) -> Iterator[tuple[str, Connection]]:
    """A server in a process of its own: its threads must not be in the process that forks."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, sizes), daemon=True)
    process.start()
    try:
        yield ours.recv(), ours
    finally:
        process.kill()
        process.join()


# -- the storm ------------------------------------------------------------------------------------------------------------


def storm(root: Path, seconds: float, seed: int, *, has_own_disk: bool) -> StormReport:
    """Let it blow for so long; the cache is `root/disk/cache`."""
    rng = random.Random(seed)
    sizes = [rng.randrange(500, LARGEST_BYTES) for _ in range(NUM_OBJECTS)]
    limit_bytes = sum(sizes) // 20
    assert limit_bytes >= NUM_PROCESSES * NUM_THREADS * LARGEST_BYTES, "every thread must be able to hold one object"
    report = StormReport(seed=seed, has_own_disk=has_own_disk, limit_bytes=limit_bytes)
    (marks := root / "marks").mkdir()
    directory = root / "disk" / "cache"
    with served(sizes) as (url, server), Cache(directory, limit=limit_bytes) as cache:
        urls = [f"{url}/o/{i}.bin" for i in range(NUM_OBJECTS)]

        def fresh(number: int) -> Worker:
            return start("spawn" if number % 2 else "fork", cache, marks, urls, rng.randrange(1 << 30))

        with DiskWatch(directory) as files, TmpfsWatch(directory) as disk:
            workers = [fresh(number) for number in range(NUM_PROCESSES)]
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline or report.num_kills < LEAST_KILLS:
                if any(worker.connection.poll() for worker in workers):
                    break  # one gave up: what went wrong comes with its last word
                time.sleep(rng.random() * 0.4)
                victim = rng.randrange(NUM_PROCESSES)
                if rng.random() < 0.25:
                    report.num_stops += 1
                    workers[victim].send_signal(signal.SIGSTOP)
                    time.sleep(rng.random() * 0.3)
                    if rng.random() < 0.5:  # the other half dies as it stands, perhaps with the door in its hand
                        workers[victim].send_signal(signal.SIGCONT)
                        continue
                workers[victim].kill()
                report.num_kills += 1
                with cache.pinned(rng.choice(urls)) as path:  # the parent has pins and a download when it forks
                    workers[victim] = fresh(victim)
                    if not path.exists():
                        report.troubles.append("a file that the parent pins has vanished")
                if rng.random() < 0.3:
                    report.troubles += violations(directory)
            finish(workers, report)
        report.highest_file_bytes, report.num_disk_samples = files.highest_bytes, disk.num_samples
        report.highest_disk_bytes = disk.highest_bytes
        statistics = cache.statistics()
        report.evictions, report.num_reads = statistics.evictions, statistics.hits + statistics.misses
        server.send("enough")
        report.num_downloads = server.recv()
    report.troubles += violations(directory, at_rest=True)
    with Cache(directory) as cache:
        report.troubles += [str(finding) for finding in cache.verify()]
    return report


def finish(workers: Sequence[Worker], report: StormReport) -> None:
    """Let all end their round, and hear them."""
    for worker in workers:
        with contextlib.suppress(BrokenPipeError):
            worker.connection.send("enough")
    deadline = time.monotonic() + LAST_WORD_SECONDS
    for worker in workers:
        is_heard = worker.connection.poll(max(0.0, deadline - time.monotonic()))
        try:
            troubles = worker.connection.recv() if is_heard else ["it hangs"]
        except EOFError:
            troubles = ["it died without a word"]
        report.troubles += [f"process {worker.process.pid}: {trouble}" for trouble in troubles]
        worker.kill()


def mount_tmpfs(directory: Path, size_bytes: int) -> None:
    """Mount a file system of its own; it goes with the mount namespace of this process, whatever ends it."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "sqlstream-test", str(directory)]
    subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True, help="an empty directory")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--mount", action="store_true", help="this process has a mount namespace of its own")
    options = parser.parse_args()
    (options.directory / "disk").mkdir()
    if options.mount:
        mount_tmpfs(options.directory / "disk", 256 << 20)
    report = storm(options.directory, options.seconds, options.seed, has_own_disk=options.mount)
    json.dump(dataclasses.asdict(report), sys.stdout)


if __name__ == "__main__":
    main()
