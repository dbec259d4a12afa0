"""Fixtures for tests of the drop-in of MosaicML Streaming."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sqlstream.testing.servers import FaultyHttpServer


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer() as server:
        yield server
