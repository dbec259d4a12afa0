"""`max_age`: what came longer ago goes before all else, and is fetched again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sqlstream import StreamingDataset
from sqlstream.cache import Cache
from sqlstream.cache.admin.age import age_seconds
from sqlstream.errors import ConfigError
from sqlstream.testing.clock import MockClock
from sqlstream.testing.disk import cached_files
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.actors import objects
from tests.cache.kit import num_gets
from tests.stream.shards import serve

DAY = 86_400.0


@pytest.fixture
def urls(server: FaultyHttpServer) -> list[str]:
    server.objects.update(objects([10_000] * 40))
    return [f"{server.url}/o/{i}.bin" for i in range(40)]


def read(cache: Cache, urls: list[str]) -> None:
    cache.acquire_many(urls)
    cache.release_many(urls)


def test_what_came_longer_ago_is_fetched_again_and_the_rest_stays(
    directory: Path, urls: list[str], server: FaultyHttpServer
) -> None:
    with MockClock().installed() as clock:
        with Cache(directory) as cache:
            read(cache, urls)
            clock.advance(5 * DAY)
            read(cache, urls)  # a use makes nothing younger
            assert num_gets(server) == 40
        with Cache(directory, max_age="7d") as cache:
            read(cache, urls[:1])
            assert num_gets(server) == 40
            clock.advance(3 * DAY)
            read(cache, urls[:3])
            assert num_gets(server) == 43
            assert len(cached_files(directory)) == 3
            clock.advance(5 * DAY)
            read(cache, urls[:3])
            assert num_gets(server) == 43
    check_invariants(directory)


def test_opening_a_cache_removes_what_is_too_old(directory: Path, urls: list[str]) -> None:
    with MockClock().installed() as clock:
        with Cache(directory) as cache:
            read(cache, urls)
        clock.advance(100.0)
        Cache(directory).close()
        assert len(cached_files(directory)) == 40
        Cache(directory, max_age=50).close()
        assert not cached_files(directory)


def test_what_came_while_the_clock_was_years_ahead_is_fetched_again(
    directory: Path, urls: list[str], server: FaultyHttpServer
) -> None:
    with MockClock().installed() as clock:
        clock.step(3650 * DAY)
        with Cache(directory) as cache:
            read(cache, urls[:2])
        clock.step(-3650 * DAY)
        for _ in range(2):
            with Cache(directory, max_age="7d") as cache:
                read(cache, urls[:2])
                assert num_gets(server) == 4
    check_invariants(directory)


def test_what_a_process_holds_stays_until_it_is_given_back(directory: Path, urls: list[str], server: FaultyHttpServer) -> None:
    with MockClock().installed() as clock, Cache(directory, max_age=3600) as cache:
        with cache.pinned(urls[0]) as path:
            cache.session.flush()  # the row has the time of its transaction
            clock.advance(2 * 3600)
            read(cache, urls[:2])
            assert path.exists()
            assert num_gets(server) == 2
        clock.advance(3600)
        read(cache, urls[:1])
        assert num_gets(server) == 3
    check_invariants(directory)


def test_a_dataset_fetches_old_objects_again(directory: Path, urls: list[str], server: FaultyHttpServer) -> None:
    rows = [{"index": number, "file": url} for number, url in enumerate(urls[:5])]
    with (
        MockClock().installed() as clock,
        StreamingDataset(rows, directory, columns_to_download=["file"], max_age="1h", show_progress=False) as dataset,
    ):
        for advance, expected in ((0.0, 5), (1800.0, 5), (3600.0, 10)):
            clock.advance(advance)
            assert sorted(sample["index"] for sample in dataset) == list(range(5))
            dataset.cache.session.flush()  # rows have the time of their transaction
            assert num_gets(server) == expected


@pytest.mark.parametrize(("max_age", "seconds"), [(None, None), ("7d", 7 * DAY), (90, 90.0), (0.5, 0.5), (np.int64(90), 90.0)])
def test_an_age_is_seconds_or_a_text(max_age: str | float | None, seconds: float | None) -> None:
    assert age_seconds(max_age) == seconds


@pytest.mark.parametrize("max_age", [0, -1, "0d", "soon", True, float("nan"), float("inf"), 10**400, [7]])
def test_what_is_no_age_is_refused(directory: Path, max_age: float) -> None:
    with pytest.raises(ConfigError, match="max_age"):
        Cache(directory, max_age=max_age)
    assert not directory.exists() or not list(directory.iterdir())


def test_an_age_that_no_clock_counts_bounds_nothing(directory: Path, urls: list[str], server: FaultyHttpServer) -> None:
    for _ in range(2):
        with Cache(directory, limit="1mb", max_age=10**30) as cache, cache.pinned(urls[0]):
            pass
    assert num_gets(server) == 1


@pytest.mark.parametrize("remove", ["max_age", "clear"])
def test_a_shard_that_stays_open_between_its_samples_goes_as_others_do(
    directory: Path, server: FaultyHttpServer, remove: str
) -> None:
    """No sample uses it: it is open for the next one alone."""
    expected = serve(server, 1, 8)
    url = f"{server.url}/data/s-000.tar"
    options: Any = {"shards": "whole", "show_progress": False}
    with MockClock().installed() as clock:
        with StreamingDataset(url, directory, **options) as dataset:
            assert len(list(dataset)) == len(expected)
        with StreamingDataset(url, directory, **options, max_age="1d" if remove == "max_age" else None) as dataset:
            for number in range(4):
                dataset[number]
            before = num_gets(server)
            clock.advance(2 * DAY)
            if remove == "clear":
                report = dataset.cache.clear()
                assert (report.removed_entries, report.kept_pinned_entries) == (1, 0)
            assert dataset[5]["__key__"].encode() == expected[5]["__key__"]
            assert num_gets(server) > before
    check_invariants(directory)
