"""What holds for all tests."""

from __future__ import annotations

import gc
import itertools
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.starters import keep_starter, leave_out_name_of_test, leave_starter

TESTS = Path(__file__).parent

# No test fails by the time that it takes: the machine may be busy with other things.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Shells start what runs in the background without Ctrl-C; tests press it, and children inherit that it is ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONG = (
    *("cache/test_crash.py", "stream/test_loader.py", "stream/test_processes.py", "cache/test_ledger_faults.py"),
    *("stream/test_lazy.py", "cache/test_storm.py", "cache/test_migrations.py", "test_wheel.py", "test_suite.py"),
    *("test_docs.py", "stream/test_ranks.py", "cache/test_full_disk.py", "cache/test_model.py", "cache/test_put.py"),
    *("stream/test_odd_processes.py", "cache/test_handler_errors.py", "cache/test_signals.py", "index/test_duckdb.py"),
)
"""Files that take longest: they come first, for xdist gives out whole files, and would wait for one that is given out last."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; all else stays in its order."""
    places = {TESTS / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))


def pytest_collection_finish() -> None:
    """Leave what collection made out of later searches for garbage: some tests look for theirs hundreds of times."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(request: pytest.FixtureRequest) -> None:
    """Have helpers of fixtures forked, too: pytest names the test in the environment once more before each of its parts."""
    if "starts_anew" not in request.fixturenames:
        leave_out_name_of_test()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Have helpers forked by a process that outlives the test, if the test does not say otherwise."""
    if "starts_anew" not in pyfuncitem.fixturenames:
        keep_starter()


def pytest_sessionfinish() -> None:
    """End that process, so that nothing is left of the session."""
    leave_starter()


_TMP_PATHS = itertools.count()
_HAS_PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note whether a test has passed, for its fixtures."""
    report = yield
    if call.when == "call":
        item.stash[_HAS_PASSED] = report.passed
    return report


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder of this test; it takes the next number, where pytest lists the folders of all tests before.

    It goes once the test has passed, else one failure keeps those of all: 24 GB.
    """
    name = re.sub(r"\W", "_", request.node.name)[:28]  # as short as pytest's: the path of a socket has 108 bytes
    path = tmp_path_factory.getbasetemp() / f"{name}-{next(_TMP_PATHS)}"
    path.mkdir(mode=0o700)
    yield path
    if request.node.stash.get(_HAS_PASSED, False):
        shutil.rmtree(path, ignore_errors=True)  # not what a test gave away, or mounted


@pytest.fixture
def starts_anew() -> None:
    """Helpers and starters of this test are started with the interpreter, as in a program of a user; for what shows starts."""
    leave_starter()


@pytest.fixture(autouse=True)
def usual_priority() -> Iterator[None]:
    """No test leaves this process at a real-time priority (some encoders take one): all that it starts would starve others."""
    before = os.sched_getscheduler(0)
    yield
    assert os.sched_getscheduler(0) == before


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all users may look into."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
