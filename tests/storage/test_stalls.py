"""A silent host and a retry are said in the log of the process that reads."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import FetchCancelledError
from sqlstream.storage.fetcher import Fetcher
from sqlstream.storage.protocol.messages import HelperTiming
from sqlstream.storage.worker.stalls import StallWatch, Wait
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.storage.downloads import Downloads

SOON = HelperTiming(look_seconds=0.02, stall_seconds=0.05, max_silent_looks=10**6, max_silent_looks_at_start=10**6)


class Said(logging.Handler):
    """The records of sqlstream's log, and an event for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.is_there = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.is_there.set()

    def wait(self) -> logging.LogRecord:
        """Return the first record."""
        assert self.is_there.wait(300)
        return self.records[0]


@pytest.fixture
def said() -> Iterator[Said]:
    handler, logger = Said(), logging.getLogger("sqlstream")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def reader() -> Iterator[Fetcher]:
    fetcher = Fetcher(StorageOptions(num_retries=1), SOON)
    yield fetcher
    fetcher.stop()


def test_a_silent_host_is_said_when_it_is_silent_for_long_and_when_its_silence_has_doubled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = StallWatch(10.0)
    for seconds in (0.0, 9.9, 10.0, 12.0, 19.9, 20.0, 39.0, 40.0, 3.0, 10.5):  # at the end another silence
        watch.look([Wait("s3://slow", seconds), Wait("s3://slow", seconds / 2), Wait("s3://fast", 0.1)])
    assert [record.args for record in caplog.records] == [
        ("s3://slow", 10.0, 1),
        ("s3://slow", 20.0, 2),
        ("s3://slow", 40.0, 2),
        ("s3://slow", 10.5, 1),
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert "s3://slow has sent nothing for 10 s" in caplog.text


def test_a_download_that_stalls_is_said_with_its_host(
    reader: Fetcher, server: FaultyHttpServer, tmp_path: Path, said: Said
) -> None:
    server.objects["/x"] = bytes(1000)
    gate = threading.Event()
    server.script("/x", FaultyAnswer(fault=Fault.HOLD, after_bytes=10, gate=gate))
    downloads = Downloads(reader, tmp_path)
    downloads.submit(f"{server.url}/x?token=hidden")
    record = said.wait()
    gate.set()
    (done,) = downloads.wait_done()
    assert (done.error, done.num_retries, record.levelname) == (None, 0, "WARNING")
    assert record.getMessage().startswith(f"{server.url} has sent nothing for ")
    assert "hidden" not in record.getMessage()


def test_a_question_at_open_that_stalls_is_said(reader: Fetcher, server: FaultyHttpServer, said: Said) -> None:
    server.objects["/x"] = b"1"
    server.script("/x", always=FaultyAnswer(fault=Fault.STALL, seconds=1000))

    def ask() -> None:
        with contextlib.suppress(FetchCancelledError):
            reader.head(f"{server.url}/x")

    asking = threading.Thread(target=ask)
    asking.start()
    assert f"{server.url} has sent nothing" in said.wait().getMessage()
    reader.stop()
    asking.join()


def test_a_retry_is_said_at_info_with_its_cause(server: FaultyHttpServer, tmp_path: Path, said: Said) -> None:
    server.objects["/x"] = b"1"
    server.script("/x", FaultyAnswer(fault=Fault.STATUS, status=503), FaultyAnswer(fault=Fault.STATUS, status=500))
    fetcher = Fetcher(StorageOptions())
    try:
        fetcher.download(f"{server.url}/x?token=hidden", tmp_path / "x")
    finally:
        fetcher.stop()
    assert [record.levelname for record in said.records] == ["INFO", "INFO"]
    first, second = (record.getMessage() for record in said.records)
    assert first.startswith(f"{server.url}/x: the server answers 503")
    assert "retry 1 of 3 follows in" in first
    assert "retry 2 of 3 follows in" in second
    assert "hidden" not in first + second


def test_what_goes_well_says_nothing(server: FaultyHttpServer, tmp_path: Path, said: Said) -> None:
    server.objects["/x"] = b"1"
    fetcher = Fetcher(StorageOptions())
    try:
        fetcher.head(f"{server.url}/x")
        fetcher.download(f"{server.url}/x", tmp_path / "x")
    finally:
        fetcher.stop()
    assert said.records == []
