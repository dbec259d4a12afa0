from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.actors import Stage


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer() as server:
        yield server


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def stage() -> Iterator[Stage]:
    """Where other processes act; none of them outlives the test."""
    with Stage() as stage:
        yield stage
