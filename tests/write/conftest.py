from __future__ import annotations

from collections.abc import Iterator

import pytest

from sqlstream.testing.servers import LocalS3


@pytest.fixture(scope="session")
def s3() -> Iterator[LocalS3]:
    with LocalS3() as server:
        yield server
