from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.testing.servers import FaultyHttpServer
from tests.stream.sources import Photos, make_photos


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer() as server:
        yield server


@pytest.fixture
def photos(server: FaultyHttpServer, tmp_path: Path) -> Photos:
    return make_photos(server, tmp_path)
