from __future__ import annotations

from collections.abc import Iterator

import pytest

from sqlstream.config import StorageOptions
from sqlstream.storage.fetcher import Fetcher
from sqlstream.testing.servers import FaultyHttpServer, LocalS3


@pytest.fixture(scope="session")
def s3() -> Iterator[LocalS3]:
    with LocalS3() as server:
        yield server


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer() as server:
        yield server


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    """Anonymous S3 goes to whatever endpoint a test names; small timeouts, so that a stall ends soon."""
    fetcher = Fetcher(StorageOptions(read_timeout_seconds=1.0, connect_timeout_seconds=2.0, num_threads=4))
    yield fetcher
    fetcher.stop()
