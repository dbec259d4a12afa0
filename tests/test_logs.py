from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.errors import ConfigError
from sqlstream.logs import configure_logs

PROGRAM = """
import logging
from sqlstream.logs import configure_logs
for _ in range(2):
    configure_logs()
logger = logging.getLogger("sqlstream.place")
logger.info("first")
logging.basicConfig()
logger.info("second")
"""


@pytest.fixture(autouse=True)
def level_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SQLSTREAM_LOG_LEVEL", "SDS_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger("sqlstream")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({"SQLSTREAM_LOG_LEVEL": "INFO"}, logging.INFO),
        ({"SDS_LOG_LEVEL": "debug"}, logging.DEBUG),
        ({"SDS_LOG_LEVEL": "debug", "SQLSTREAM_LOG_LEVEL": " error "}, logging.ERROR),
        ({"SDS_LOG_LEVEL": "", "SQLSTREAM_LOG_LEVEL": ""}, logging.NOTSET),
        ({}, logging.NOTSET),
    ],
)
def test_a_cache_takes_the_level_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], level: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    Cache(tmp_path / "cache").close()
    assert logging.getLogger("sqlstream").level == level


def test_what_is_no_level_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDS_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="SDS_LOG_LEVEL='loud' is no level: give DEBUG, INFO"):
        configure_logs()


def test_each_record_is_shown_once_with_and_without_handlers_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLSTREAM_LOG_LEVEL", "INFO")
    shown = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stderr.splitlines()
    assert [line.rpartition(":")[2].strip() for line in shown] == ["first", "second"]
