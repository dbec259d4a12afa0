"""Caches and indexes that an earlier version left are used as they are: nothing is downloaded, built or lost again."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sqlstream.cache import Cache
from sqlstream.testing.invariants import violations
from sqlstream.testing.servers import FaultyHttpServer
from tests.pins import directories
from tests.pins.directories import FILTER, HALF_WAY, LIMIT_BYTES, PINNED, QUERY, facts_of, quiet, unpacked
from tests.pins.orders import WEIGHTS
from tests.pins.pinned import pinned
from tests.pins.served import NUM_OBJECTS, body, served, url_of


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyHttpServer]:
    with served() as server:
        yield server


def before(scene: str) -> dict[str, Any]:
    found: dict[str, Any] = pinned("directories")["scenes"][scene]
    return found


def index_files(directory: Path) -> dict[str, str]:
    """Return a digest of each file of the index."""
    files = [path for path in (directory / "index").iterdir() if path.suffix != ".lock"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@contextlib.contextmanager
def index_unchanged(directory: Path) -> Iterator[None]:
    """Check that no index file is built, built again or removed."""
    files = index_files(directory)
    yield
    assert index_files(directory) == files


@pytest.mark.parametrize("scene", directories.SCENES)
def test_the_archives_hold_what_is_written_about_them(scene: str, tmp_path: Path) -> None:
    found = facts_of(unpacked(scene, tmp_path))
    assert found == {name: before(scene)[name] for name in found}
    assert found["counts"]["entry"] > 4


@pytest.mark.parametrize("scene", directories.SCENES)
def test_every_entry_of_an_old_ledger_is_found_and_sound(scene: str, tmp_path: Path, server: FaultyHttpServer) -> None:
    directory = unpacked(scene, tmp_path)
    with quiet(server) as paths, Cache(directory) as cache:
        statistics = cache.statistics()
        assert statistics.entries == before(scene)["states"]["ready"]
        assert (statistics.pinned_entries, statistics.filling_bytes, statistics.owners) == (0, 0, ())
        assert cache.verify() == []
    assert paths == []
    assert sorted(str(path.relative_to(directory)) for path in (directory / "data").glob("*/*")) == before(scene)["data"]
    assert violations(directory, at_rest=True) == []


@pytest.mark.parametrize("scene", ["idle", "killed"])
def test_objects_of_an_old_cache_are_hits(scene: str, tmp_path: Path, server: FaultyHttpServer) -> None:
    numbers = [number for number in range(NUM_OBJECTS) if scene == "idle" or number != HALF_WAY]
    with Cache(unpacked(scene, tmp_path)) as cache:
        hits = cache.statistics().hits
        with quiet(server) as paths:
            found = cache.acquire_many([url_of(number) for number in numbers])
            assert [path.read_bytes() for path in found] == [body(number) for number in numbers]
            cache.release_many([url_of(number) for number in numbers])
        assert paths == []
        assert cache.statistics().hits == hits + len(numbers)


def test_what_a_killed_process_of_an_earlier_version_held_is_given_back(tmp_path: Path, server: FaultyHttpServer) -> None:
    directory = unpacked("killed", tmp_path)
    counts = facts_of(directory)["counts"]
    assert (counts["owner"], counts["pin"], counts["touch"]) == (1, len(PINNED) + 1, 1)
    with Cache(directory, limit=LIMIT_BYTES) as cache:
        assert cache.statistics().limit_bytes == LIMIT_BYTES
        assert list((directory / "part").iterdir()) == []
        with quiet(server) as paths, cache.pinned(url_of(HALF_WAY)) as path:
            assert path.read_bytes() == body(HALF_WAY)
        assert paths == [f"/objects/{HALF_WAY}.bin"]
        assert cache.clear().kept_pinned_entries == 0  # some went already: a download of unknown length reserves much
    assert violations(directory, at_rest=True) == []


def test_a_dataset_reads_an_old_cache_without_building_or_downloading(
    tmp_path: Path, server: FaultyHttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    directory, (expected, _) = unpacked("idle", tmp_path), before("idle")["epochs"]
    caplog.set_level(logging.WARNING)
    with index_unchanged(directory), quiet(server) as paths, directories.opened_idle(directory) as dataset:
        num_stored = dataset.cache.statistics().stored_samples
        assert directories.samples_of(dataset) == expected
        assert dataset.cache.statistics().stored_samples == num_stored, "samples were not found, and stored again"
    assert paths == []
    assert caplog.messages == []


@pytest.mark.parametrize("number", range(3))
def test_filters_and_weights_of_an_old_index_open_without_being_run_again(
    number: int, tmp_path: Path, server: FaultyHttpServer
) -> None:
    options = ({"where": FILTER}, {"sql_query": QUERY}, {"weights": WEIGHTS})[number]
    directory = unpacked("idle", tmp_path)
    with index_unchanged(directory), quiet(server) as paths, directories.opened_idle(directory, **options) as dataset:
        assert directories.samples_of(dataset) == before("idle")["filtered"][number]
    assert paths == []


def test_a_lazy_index_of_an_earlier_version_has_its_footers_its_chunks_and_its_filter(
    tmp_path: Path, server: FaultyHttpServer
) -> None:
    directory = unpacked("lazy", tmp_path)
    with index_unchanged(directory), quiet(server) as paths, directories.opened_lazy(directory) as dataset:
        assert len(dataset) == before("lazy")["length"], "the filter was not run on all chunks"
        assert directories.samples_of(dataset) == before("lazy")["epochs"][0]
    assert paths == []
