"""Runs that an earlier version began go on with the batches that it would have given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.testing.servers import FaultyHttpServer
from tests.pins import states
from tests.pins.pinned import pinned
from tests.pins.served import served

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyHttpServer]:
    with served() as server:
        yield server


@pytest.fixture(scope="module")
def folder(server: FaultyHttpServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All tests take the indexes from here; the server is up first."""
    return tmp_path_factory.mktemp("states")


@pytest.mark.parametrize("name", states.RUNS)
def test_a_state_of_an_earlier_version_gives_the_batches_that_came_next(name: str, folder: Path) -> None:
    before = pinned("states")["states"][name]
    assert states.resumed(states.RUNS[name], folder, before["state"]) == before["next"]


@pytest.mark.parametrize("name", ["with workers", "weights", "other weights from a step on", "blocks"])
def test_it_does_so_on_other_workers_too(name: str, folder: Path) -> None:
    before, run = pinned("states")["states"][name], states.RUNS[name]
    other = dataclasses.replace(run, num_workers=0 if run.num_workers else 2)
    assert states.resumed(other, folder, before["state"]) == before["next"]


def test_no_state_is_missing() -> None:
    assert set(pinned("states")["states"]) == set(states.RUNS)
