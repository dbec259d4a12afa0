from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.actors import Stage

MEMORY_BYTES = 512 << 20  # far more than a cache of these tests has


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer() as server:
        yield server


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory, if there is room: where processes die and the machine does not, nothing need wait for a disk."""
    memory = Path("/dev/shm")
    has_room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > MEMORY_BYTES
    with tempfile.TemporaryDirectory(prefix="sqlstream-", dir=memory if has_room else None) as path:
        yield Path(path)


@pytest.fixture
def stage() -> Iterator[Stage]:
    """Where other processes act; none of them outlives the test."""
    with Stage() as stage:
        yield stage
