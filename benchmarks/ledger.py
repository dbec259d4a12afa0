"""What the ledger costs: windows of hits at 10^4 and 10^6 entries, one pinned hit, waits for the write lock.

Run as `python -m benchmarks.ledger`.
CPU time and wall time are both printed, the least and the median of several rounds in turn: on a busy machine only the least
CPU time comes near to what the code costs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import random
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from sqlstream.cache import Cache
from sqlstream.cache.ledger.database import Database
from sqlstream.cache.model.refs import ObjectRef

WINDOW = 64
SIZE = 4096


def filled(directory: Path, num_entries: int) -> tuple[Cache, list[ObjectRef]]:
    """A full cache of `num_entries`: rows for all, files (hard links) for those that are used."""
    cache = Cache(directory, limit=num_entries * SIZE)
    refs = [ObjectRef.of(f"http://nowhere/{i}") for i in range(num_entries)]
    with cache._directory.ledger.transaction() as tx:
        tx.connection.executemany(
            "INSERT INTO entry (key, url, size, charged_bytes, state, tick, ext, created_at) "
            "VALUES (?, ?, ?, ?, 'ready', ?, '', 0)",
            [(ref.key, ref.url, SIZE, SIZE, i) for i, ref in enumerate(refs)],
        )
    used = random.Random(0).sample(refs, min(num_entries, 20_000))
    block = directory / "index" / "block"
    block.write_bytes(bytes(SIZE))
    for i, ref in enumerate(used):
        if i % 50_000 == 0 and i:
            block.unlink()
            block.write_bytes(bytes(SIZE))
        path = Path(cache._directory.disk.data_path(ref.key, ""))
        path.parent.mkdir(exist_ok=True)
        os.link(block, path)
    return cache, [ObjectRef.of(ref.url) for ref in used]  # made just before, as an engine's are: not strewn over the memory


class Measured:
    """Rounds of several pieces of work, in turn, so that all of them meet the same neighbours."""

    def __init__(self) -> None:
        self._works: dict[str, tuple[int, Callable[[], None]]] = {}
        self.cpu_us: dict[str, list[float]] = {}
        self._wall: dict[str, list[float]] = {}

    def add(self, name: str, num: int, work: Callable[[], None]) -> None:
        self._works[name] = (num, work)
        self.cpu_us[name], self._wall[name] = [], []

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            for name, (num, work) in self._works.items():
                wall, cpu = time.perf_counter(), time.process_time()
                work()
                self._wall[name].append(1e6 * (time.perf_counter() - wall) / num)
                self.cpu_us[name].append(1e6 * (time.process_time() - cpu) / num)
        for name, cpus in self.cpu_us.items():
            walls = self._wall[name]
            print(
                f"{name:<58} CPU least {min(cpus):7.1f} median {statistics.median(cpus):7.1f}   "
                f"wall least {min(walls):7.1f} median {statistics.median(walls):7.1f} us"
            )


def walk(refs: Sequence[ObjectRef]) -> Iterator[Sequence[ObjectRef]]:
    """Windows through all of `refs`, round and round: an epoch does not come back to the pages that it has just read."""
    return itertools.cycle([refs[at : at + WINDOW] for at in range(0, len(refs) - WINDOW, WINDOW)])


def windows(cache: Cache, walked: Iterator[Sequence[ObjectRef]], num_windows: int) -> None:
    session = cache.session
    for window in itertools.islice(walked, num_windows):
        holds = session.acquire([[ref] for ref in window])
        for hold in holds:
            session.open(hold)
            session.release(hold)


@contextlib.contextmanager
def far_from_full(cache: Cache) -> Iterator[None]:
    """Where order does not matter, and samples are held by locks."""
    limit = cache.limit_bytes
    assert limit is not None
    cache.limit_bytes = 4 * limit
    yield
    cache.limit_bytes = limit


def light_windows(cache: Cache, refs: Sequence[ObjectRef], num_windows: int, width: int) -> None:
    session = cache.session
    with far_from_full(cache):
        for start in range(0, num_windows * width, width):
            at = start % (len(refs) - width)
            for hold in session.acquire([[ref] for ref in refs[at : at + width]], for_reading=True):
                if not session.open(hold):
                    raise SystemExit("a read hold could not be claimed")
                session.release(hold)


def open_and_close(cache: Cache, refs: Sequence[ObjectRef], num: int) -> None:
    for i in range(num):
        os.close(os.open(cache._directory.disk.data_path(refs[i % len(refs)].key, ""), os.O_RDONLY))


def ledger_windows(cache: Cache, walked: Iterator[Sequence[ObjectRef]], num_windows: int) -> None:
    """The SQL alone: find, pin, touch; give back in a transaction of its own."""
    cache._directory.owner.run(lambda tx: None)
    owner = cache._directory.owner.id
    assert owner is not None
    for window in itertools.islice(walked, num_windows):
        keys = [ref.key for ref in window]
        with cache._directory.ledger.transaction() as tx:
            tx.find_ready(keys)
            tx.set_pins(owner, keys)
            tx.touch(keys)
        with cache._directory.ledger.transaction() as tx:
            tx.set_pins(owner, ())


def lookups(directory: Path, refs: Sequence[ObjectRef], num: int) -> None:
    connection = sqlite3.connect(directory / "ledger.sqlite")
    for i in range(num):
        connection.execute("SELECT size FROM entry WHERE key = ?", (refs[i % len(refs)].key,)).fetchone()
    connection.close()


def pinned(cache: Cache, refs: Sequence[ObjectRef], num: int) -> None:
    for i in range(num):
        with cache.pinned(refs[i % len(refs)].url):
            pass


def stream_of_one(directory: Path, refs: Sequence[ObjectRef], num_windows: int) -> tuple[float, float]:
    """When a process began and ended to stream windows of hits."""
    with Cache(directory) as cache:
        walked = walk(refs)
        windows(cache, walked, 4)
        started = time.monotonic()
        windows(cache, walked, num_windows)
        return started, time.monotonic()


def node_wide(directory: Path, refs: Sequence[ObjectRef], num_processes: int, num_windows: int) -> None:
    """Several processes stream hits side by side: seconds of the node a sample."""
    slices = [(directory, refs[i::num_processes], num_windows) for i in range(num_processes)]
    with multiprocessing.get_context("forkserver").Pool(num_processes) as pool:
        spans = pool.starmap(stream_of_one, slices, chunksize=1)
    seconds = max(end for _, end in spans) - min(start for start, _ in spans)
    microseconds = 1e6 * seconds / (num_processes * num_windows * WINDOW)
    print(f"{num_processes} processes side by side: {microseconds:.1f} us of the node a sample")


def wait_at_the_write_lock(directory: Path, think_seconds: float, seconds: float) -> list[float]:
    database = Database(directory / "ledger.sqlite")
    waits: list[float] = []
    stop = time.monotonic() + seconds
    while (started := time.monotonic()) < stop:
        with database.write_transaction() as connection:
            waits.append(time.monotonic() - started)
            connection.execute("UPDATE meta SET tick = tick + 1")
        time.sleep(think_seconds)
    database.close()
    return waits


def door(directory: Path, num_processes: int, think_seconds: float, seconds: float) -> None:
    with multiprocessing.get_context("forkserver").Pool(num_processes) as pool:
        lists = pool.starmap(wait_at_the_write_lock, [(directory, think_seconds, seconds)] * num_processes)
    waits = sorted(wait for theirs in lists for wait in theirs)
    p99 = waits[int(len(waits) * 0.99)]
    print(
        f"{num_processes} writers, {1e3 * think_seconds:.0f} ms of thought: {len(waits)} transactions, wait p50 "
        f"{1e3 * waits[len(waits) // 2]:.2f} p99 {1e3 * p99:.2f} max {1e3 * waits[-1]:.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for num_entries in options.entries:
        directory = Path(tempfile.mkdtemp(prefix="sqlstream-bench-"))
        cache, refs = filled(directory, num_entries)
        label, walked = f"{num_entries:.0e} entries", walk(refs)
        measured = Measured()
        measured.add(f"{label}: raw row lookup (sqlite3)", 5000, partial(lookups, directory, refs, 5000))
        measured.add(f"{label}: ledger SQL a sample, windows of 64", 60 * WINDOW, partial(ledger_windows, cache, walked, 60))
        measured.add(f"{label}: acquire + release a sample, windows of 64", 60 * WINDOW, partial(windows, cache, walked, 60))
        measured.add(f"{label}: the same for_reading", 60 * WINDOW, partial(light_windows, cache, refs, 60, WINDOW))
        measured.add(f"{label}: Cache.pinned, a random hit", 500, partial(pinned, cache, refs, 500))
        measured.add(f"{label}: a random hit for_reading", 2000, partial(light_windows, cache, refs, 2000, 1))
        measured.add(f"{label}: open and close of a file", 2000, partial(open_and_close, cache, refs, 2000))
        measured.run(options.rounds)
        cache.close()
        if num_entries == options.entries[0]:
            os.sync()  # else checkpoints wait, under the write lock, for the thousands of files made above
            node_wide(directory, refs[:6400], 4, 300)
            door(directory, 8, 0.002, 3.0)
            door(directory, 4, 0.0, 3.0)
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
