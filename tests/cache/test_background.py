"""The background thread of a cache, when what it does fails."""

from __future__ import annotations

import logging
import threading

import pytest

from sqlstream.cache.acquire.background import BackgroundThread
from sqlstream.errors import CacheDiskError

WAIT_SECONDS = 60.0


@pytest.mark.parametrize("error", [CacheDiskError("the disk is read-only"), ValueError("a fault of ours")], ids=repr)
def test_an_error_of_the_cache_is_said_in_a_line_and_a_fault_of_ours_with_its_place(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    is_said = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            is_said.set()

    def fail() -> bool:
        raise error

    thread, logger = BackgroundThread(fail), logging.getLogger("sqlstream.cache.acquire.background")
    logger.addHandler(listener := Listener())
    try:
        thread.wake()
        assert is_said.wait(WAIT_SECONDS)
    finally:
        thread.stop()
        logger.removeHandler(listener)
    (record,) = caplog.records
    assert str(error) in record.getMessage()
    assert bool(record.exc_info) == isinstance(error, ValueError)
