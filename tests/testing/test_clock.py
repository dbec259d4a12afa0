"""The clock that moves when it is told to, and who reads it."""

from __future__ import annotations

import ast
import sys
import time
from pathlib import Path

import pytest

import sqlstream.cache
from sqlstream.cache import Cache
from sqlstream.cache.ledger import ledger
from sqlstream.errors import CacheFullError
from sqlstream.testing.clock import MockClock, clock_readers
from sqlstream.testing.storage import ScriptedFetcher

URLS = [f"http://nowhere/{i}.bin" for i in range(2)]


def test_time_passes_only_when_told_and_a_step_moves_the_wall_clock_alone() -> None:
    clock = MockClock(start=1000.0)
    assert (clock.time(), clock.monotonic()) == (1000.0, 0.0)
    clock.advance(5)
    clock.step(-3600)
    assert (clock.time(), clock.monotonic()) == (1000.0 + 5 - 3600, 5.0)


def test_a_clock_with_a_rate_runs_on_its_own() -> None:
    clock = MockClock(rate=1e6)
    before = clock.monotonic()
    time.sleep(0.001)
    assert clock.monotonic() - before >= 1000


def test_it_is_the_time_of_every_module_of_the_cache_that_reads_one() -> None:
    """Also of those that come later: whoever imports `time` must use it as a module."""
    readers = {module.__name__.rpartition(".")[2] for module in clock_readers()}
    for path in Path(sqlstream.cache.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.module == "time"), f"{path.name} cannot be given a clock"
            if isinstance(node, ast.Import) and any(alias.name == "time" for alias in node.names):
                assert path.stem in readers or f"sqlstream.cache.{path.stem}" not in sys.modules
    with MockClock(start=7.0).installed():
        assert ledger.__dict__["time"].time() == 7.0
        assert ledger.__dict__["time"].perf_counter is time.perf_counter
        assert clock_readers() == []
    assert ledger.__dict__["time"] is time


def test_a_time_limit_of_minutes_passes_in_a_moment(tmp_path: Path) -> None:
    with Cache(tmp_path, limit=4096) as cache:
        cache.fetcher = ScriptedFetcher(dict.fromkeys(URLS, bytes(4096)))
        with (
            MockClock(rate=10_000).installed(),
            cache.pinned(URLS[0]),
            pytest.raises(CacheFullError, match="no room") as raised,
        ):
            cache.acquire_many(URLS[1:])
    assert int(str(raised.value).partition(" after ")[2].partition(" s")[0]) >= 120
