"""How many downloads at a time, seen from the server: a number that is given, and a share of the node's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.config import StorageOptions
from sqlstream.storage.base.concurrency import MOST_THREADS_OF_NODE
from sqlstream.storage.fetcher import Fetcher
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.cache.actors import Stage, objects, pin_until_told
from tests.storage.downloads import Downloads


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.mark.parametrize(("num_threads", "num_processes", "num_asked"), [(3, 1, 3), ("auto", 1, 16), ("auto", 128, 2)])
def test_so_many_requests_are_under_way_and_no_more(
    server: FaultyHttpServer, tmp_path: Path, num_threads: int | str, num_processes: int, num_asked: int
) -> None:
    """They are all stalled, so that the first ones stay under way."""
    assert MOST_THREADS_OF_NODE // 128 == 2
    for i in range(32):
        server.script(f"/{i}", FaultyAnswer(fault=Fault.STALL, seconds=60))
        server.objects[f"/{i}"] = b"x"
    fetcher = Fetcher(StorageOptions(num_threads=num_threads))  # type: ignore[arg-type]  # an int, or the one word
    fetcher.share_node(num_processes)
    assert fetcher.num_processes == num_processes
    Downloads(fetcher, tmp_path).submit(*[f"{server.url}/{i}" for i in range(32)])
    deadline = time.monotonic() + 300
    while len(server.requests()) < num_asked:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    threading.Event().wait(0.2)  # for one too many
    assert len(server.requests()) == num_asked
    fetcher.stop()


def test_processes_that_share_a_cache_share_the_downloads_of_the_node(
    server: FaultyHttpServer, tmp_path: Path, stage: Stage
) -> None:
    """Also without DataLoader and without a limit: who uses the cache stands in the ledger."""
    server.objects.update(objects([1000] * 4))
    urls = [f"{server.url}/o/{i}.bin" for i in range(4)]
    others = [stage.start(pin_until_told, tmp_path / "cache", None, [urls[i]]) for i in (0, 1)]
    for other in others:
        other.hear()
    with Cache(tmp_path / "cache") as cache:
        assert cache.fetcher.num_processes == 1
        cache.acquire_many([urls[2]])
        assert cache.fetcher.num_processes == 2
        cache.acquire_many([urls[3]])
        assert cache.fetcher.num_processes == 3  # now this one holds something, too
        cache.release_many(urls[2:])
    for other in others:
        other.tell()
        other.end()
