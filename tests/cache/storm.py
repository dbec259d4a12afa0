"""A storm: processes of mixed descent on one small cache, stopped, killed and started again at random. A program, so that its
parent is a clean process to fork from, and its disk a file system of its own where mounting is allowed:

    unshare --mount python -m tests.cache.storm --directory DIR --seconds 60 --mount

Half of the workers are forked from a parent that uses the cache itself (they inherit its connection, locks, helper and pins, as
a DataLoader's do), half are spawned. A third of them read in threads; a third take samples of a dataset in threads, with
transforms that draw; a third are interrupted by signal handlers that raise, and by others that use the cache. All of it comes
from forty servers that replace objects, cut bodies, code them and lie about ranges (`hostile_server.py`): a read may fail by
an error of ours, and what it gives is one version of its object, byte for byte.

Prints one JSON document, the `StormReport`; what it must say is in `test_storm.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, TracebackType

from sqlstream.cache import Cache
from sqlstream.config import StorageOptions
from sqlstream.errors import SqlStreamError
from sqlstream.testing.disk import DiskWatch
from sqlstream.testing.invariants import violations
from tests.cache.hostile_server import hostile_servers
from tests.cache.storm_reads import (
    LARGEST_BYTES,
    NUM_PROCESSES,
    NUM_RETRIES,
    NUM_THREADS,
    OPTIONS,
    MarkingFetcher,
    Reads,
    Task,
    Told,
    in_threads,
    limit_of,
    raise_alarm,
    read_with_alarms,
)

NUM_OBJECTS, NUM_HOSTS = 1000, 40
BLOCK_BYTES = 4096
SLACK_BYTES = 2 * BLOCK_BYTES * NUM_PROCESSES
"""Owner files that were unlinked and are not closed yet: no listing shows them, `statvfs` does. A block or two each."""
LAST_WORD_SECONDS = 240.0
"""For a worker's last round of reads, some seconds on a busy machine; who needs more hangs."""
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
    num_right: int = 0
    """Reads of those who lived to tell that gave one version, whole."""
    num_samples: int = 0
    """Among them: samples of a dataset, whose draws are those that they have without threads."""
    num_failed: int = 0
    """Reads that ended in an error of ours."""
    errors: dict[str, int] = field(default_factory=dict)
    """By class."""
    num_interrupts: int = 0
    """Signal handlers that raised within a read."""
    answers: dict[str, int] = field(default_factory=dict)
    """What the servers did, by how often."""
    highest_file_bytes: int = 0
    highest_disk_bytes: int = 0
    num_disk_samples: int = 0
    evictions: int = 0
    troubles: list[str] = field(default_factory=list)
    """Broken promises: wrong bytes, vanished files, objects downloaded twice at a time, hangs, findings."""


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


def work(connection: Connection, cache: Cache, task: Task, kind: str, seed: int) -> None:
    """Read, in rounds, until told that it is enough; then say what went wrong."""
    faulthandler.register(signal.SIGUSR2, file=(task.root / f"stacks-{os.getpid()}").open("w"), all_threads=True)
    told, rng = Told(), random.Random(seed)
    reads = Reads(cache, task, told)
    cache.fetcher = MarkingFetcher(cache, task.marks, told.troubles)
    with contextlib.ExitStack() as stack:
        run = ROUNDS[kind](reads, rng, stack)
        is_over = False
        while not is_over:
            try:
                run()
            except BaseException:
                told.troubles.append(traceback.format_exc())
            is_over = connection.poll() or bool(told.troubles)
    if kind == "interrupted":
        own = [owner.pinned_entries for owner in cache.statistics().owners if owner.pid == os.getpid()]
        if any(own):
            told.troubles.append(f"{own} entries stay pinned after reads that were interrupted")
    cache.close()
    connection.send(told)


def read_in_rounds(reads: Reads, rng: random.Random, _: contextlib.ExitStack) -> Callable[[], None]:
    """Return a round of reads in threads."""
    return lambda: in_threads(NUM_THREADS, reads.told, lambda: (reads.some, reads.task.draw_numbers(rng, 8)))


def take_samples_in_rounds(reads: Reads, rng: random.Random, stack: contextlib.ExitStack) -> Callable[[], None]:
    """Return a round of samples in threads, all of one dataset."""
    from tests.cache.storm_samples import open_dataset, take_samples  # torch, which the other kinds start without

    dataset = stack.enter_context(open_dataset(reads.task, has_objects=True))
    dataset.cache.fetcher = MarkingFetcher(dataset.cache, reads.task.marks, reads.told.troubles)
    take = functools.partial(take_samples, reads, dataset)
    return lambda: in_threads(NUM_THREADS, reads.told, lambda: (take, reads.task.draw_numbers(rng, 8)))


def be_interrupted_in_rounds(reads: Reads, rng: random.Random, _: contextlib.ExitStack) -> Callable[[], None]:
    """Return a round of reads in the main thread, whose signal handlers raise, and one that uses the cache."""

    def use_the_cache(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(SqlStreamError, RuntimeError):  # it works, or it says at once that it does not
            reads.cache.statistics()

    def run() -> None:
        read_with_alarms(reads, reads.task.draw_numbers(rng, 16), rng)
        signal.setitimer(signal.ITIMER_REAL, 0)
        timer = threading.Timer(rng.random() * 0.05, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        reads.some(reads.task.draw_numbers(rng, 4))
        timer.join()

    signal.signal(signal.SIGALRM, raise_alarm)
    signal.signal(signal.SIGUSR1, use_the_cache)
    return run


ROUNDS = {"reads": read_in_rounds, "samples": take_samples_in_rounds, "interrupted": be_interrupted_in_rounds}
"""What workers do, by kind: each makes the function that is one round."""


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


def start(number: int, cache: Cache, task: Task, seed: int) -> Worker:
    """Start worker `number`: every second one is spawned; each kind is there in turn."""
    context = multiprocessing.get_context("spawn" if number % 2 else "fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, cache, task, task.kinds[number % len(task.kinds)], seed), daemon=True)  # type: ignore[attr-defined]  # of every context
    process.start()
    theirs.close()
    return Worker(process=process, connection=ours)


def serve(connection: Connection, sizes: Sequence[int], seed: int) -> None:
    with hostile_servers(list(sizes), NUM_HOSTS, seed) as servers:
        connection.send(servers.urls)
        connection.recv()
        connection.send(dict(servers.num_requests))


@contextlib.contextmanager
def served(sizes: Sequence[int], seed: int) -> Iterator[tuple[list[str], Connection]]:
    """Servers in a process of their own: their threads must not be in the process that forks."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, sizes, seed), daemon=True)
    process.start()
    try:
        yield ours.recv(), ours
    finally:
        process.kill()
        process.join()


# -- the storm ------------------------------------------------------------------------------------------------------------


def storm(root: Path, seconds: float, seed: int, *, has_own_disk: bool, kinds: Sequence[str] = tuple(ROUNDS)) -> StormReport:
    """Let it blow for so long; the cache is `root/disk/cache`."""
    rng = random.Random(seed)
    sizes = [rng.randrange(500, LARGEST_BYTES) for _ in range(NUM_OBJECTS)]
    limit_bytes = limit_of(sizes)
    report = StormReport(seed=seed, has_own_disk=has_own_disk, limit_bytes=limit_bytes)
    directory = root / "disk" / "cache"
    options = StorageOptions(storage_options=OPTIONS, num_retries=NUM_RETRIES)
    with served(sizes, seed) as (urls, server), Cache(directory, limit=limit_bytes, storage_options=options) as cache:
        task = Task(root=root, urls=urls, sizes=sizes, draws=(), kinds=kinds)
        task.marks.mkdir()
        task.table.write_text("index,object\n" + "".join(f"{number},{url}\n" for number, url in enumerate(urls)))
        if "samples" in kinds:
            from tests.cache.storm_samples import drawn_alone

            task = dataclasses.replace(task, draws=drawn_alone(task))

        def fresh(number: int) -> Worker:
            return start(number, cache, task, rng.randrange(1 << 30))

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
                    if rng.random() < 0.5:  # the other half dies as it stands, perhaps while it holds the write lock
                        workers[victim].send_signal(signal.SIGCONT)
                        continue
                workers[victim].kill()
                report.num_kills += 1
                with contextlib.ExitStack() as stack:  # the parent has pins and a download when it forks
                    path = None
                    with contextlib.suppress(SqlStreamError):
                        path = stack.enter_context(cache.pinned(rng.choice(urls)))
                    workers[victim] = fresh(victim)
                    if path is not None and not path.exists():
                        report.troubles.append("a file that the parent pins has vanished")
                if rng.random() < 0.3:
                    report.troubles += violations(directory)
            finish(workers, report, root)
        report.highest_file_bytes, report.num_disk_samples = files.highest_bytes, disk.num_samples
        report.highest_disk_bytes = disk.highest_bytes
        statistics = cache.statistics()
        report.evictions, report.num_reads = statistics.evictions, statistics.hits + statistics.misses
        server.send("enough")
        report.answers = server.recv()
        report.num_downloads = sum(report.answers.values())
    report.troubles += violations(directory, at_rest=True)
    with Cache(directory) as cache:
        report.troubles += [str(finding) for finding in cache.verify()]
    return report


def finish(workers: Sequence[Worker], report: StormReport, root: Path) -> None:
    """Let all end their round, and hear them; who does not is asked where its threads are."""
    for worker in workers:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            worker.connection.send("enough")
    deadline = time.monotonic() + LAST_WORD_SECONDS
    for worker in workers:
        pid = worker.process.pid
        try:
            if worker.connection.poll(max(0.0, deadline - time.monotonic())):
                told: Told = worker.connection.recv()
            else:
                worker.send_signal(signal.SIGUSR2)
                time.sleep(1)
                told = Told(troubles=["it hangs:\n" + (root / f"stacks-{pid}").read_text()])
        except (EOFError, ConnectionResetError):  # the latter: as it had not read all that we sent
            told = Told(troubles=["it died without a word"])
        report.troubles += [f"process {pid}: {trouble}" for trouble in told.troubles]
        report.num_right += told.counts["right"]
        report.num_samples += told.counts["samples"]
        report.num_failed += told.counts["failed"]
        report.num_interrupts += told.counts["interrupts"]
        report.errors = dict(Counter(report.errors) + told.errors)
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
    parser.add_argument("--kinds", nargs="+", default=tuple(ROUNDS), choices=tuple(ROUNDS), help="what workers do")
    options = parser.parse_args()
    (options.directory / "disk").mkdir()
    if options.mount:
        mount_tmpfs(options.directory / "disk", 256 << 20)
    report = storm(options.directory, options.seconds, options.seed, has_own_disk=options.mount, kinds=options.kinds)
    json.dump(dataclasses.asdict(report), sys.stdout)


if __name__ == "__main__":
    main()
