"""Processes and threads on one small cache, killed and started again at random: no promise breaks, nobody hangs."""

from __future__ import annotations

import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.testing.disk import DiskWatch
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.actors import Actor, Stage, objects, read_in_threads

NUM_PROCESSES, NUM_THREADS, NUM_OBJECTS = 6, 4, 400


def read_for_ever(connection: Connection, directory: Path, limit: int, urls: list[str], seed: int) -> None:
    rng = random.Random(seed)
    while not connection.poll():
        read_in_threads(connection, directory, limit, rng.sample(urls, 30), NUM_THREADS)


@pytest.mark.parametrize("seconds", [8, pytest.param(600, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_storm_of_kills_breaks_no_promise(
    server: FaultyHttpServer, directory: Path, stage: Stage, seconds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed := random.randrange(1 << 30))
    sizes = [rng.randrange(500, 40_000) for _ in range(NUM_OBJECTS)]
    server.objects.update(objects(sizes))
    urls = [f"{server.url}/o/{i}.bin" for i in range(NUM_OBJECTS)]
    limit = max(sum(sizes) // 20, NUM_PROCESSES * NUM_THREADS * 45_056)

    def start() -> Actor:
        return stage.start(read_for_ever, directory, limit, urls, rng.randrange(1 << 30))

    actors = [start() for _ in range(NUM_PROCESSES)]
    num_kills = 0
    deadline = time.monotonic() + seconds
    with DiskWatch(directory) as watch:
        while time.monotonic() < deadline:
            time.sleep(rng.random() * 0.4)
            victim = rng.randrange(NUM_PROCESSES)
            if rng.random() < 0.2:
                os.kill(actors[victim].pid, signal.SIGSTOP)
                time.sleep(rng.random() * 0.3)
            actors[victim].kill()
            num_kills += 1
            actors[victim] = start()
            if rng.random() < 0.3 and (directory / "ledger.sqlite").exists():
                check_invariants(directory)
        for actor in actors:
            actor.tell("enough")
        for actor in actors:
            assert actor.hear() is None
            actor.end()
    check_invariants(directory, at_rest=True)
    with Cache(directory) as cache:
        stats = cache.statistics()
        assert cache.verify() == []
    with capsys.disabled():
        reads = stats.hits + stats.misses
        print(f" seed {seed}: {num_kills} kills, {reads} reads, peak {watch.highest_bytes / limit:.3f} of the limit ", end="")
    assert watch.highest_bytes <= limit
    assert num_kills > seconds
