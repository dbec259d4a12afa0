"""Processes of an earlier version and of this one on one cache: right bytes, one account, and no process hangs.

Where this version has another schema of the ledger, the earlier one is refused from the moment of the upgrade on, by one clear
error; until then, and where the schema is the same, they work side by side.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.ledger.schema import SCHEMA_VERSION
from sqlstream.testing.disk import DiskWatch
from sqlstream.testing.invariants import violations
from sqlstream.testing.servers import FaultyHttpServer
from tests.pins import mixed_worker
from tests.pins.pinned import COMMIT, FOLDER

ROOT = FOLDER.parents[1]
NUM_OBJECTS, LIMIT_BYTES = 200, 300_000
OLD_SCHEMA = 4
"""Of the wheel."""
PATIENCE_SECONDS = 240.0
"""For a last round on a busy machine; a process that takes longer hangs."""
OLD_ALONE_READS = 20


class Process:
    """A worker of one version."""

    def __init__(self, package: Path, directory: Path, origin: str, seed: int) -> None:
        words = [str(package), str(directory), origin, str(LIMIT_BYTES), str(NUM_OBJECTS), str(seed)]
        self.package = package
        self._child = subprocess.Popen(
            [sys.executable, str(FOLDER / "mixed_worker.py"), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=directory.parent,
        )

    @property
    def has_ended(self) -> bool:
        """It was refused, or gave up."""
        return self._child.poll() is not None

    def kill(self) -> None:
        """End it as it stands."""
        self._child.kill()
        self._child.communicate()

    def finish(self) -> dict[str, Any]:
        """Let it end its round; return what it says."""
        try:
            said, errors = self._child.communicate("", timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return {"reads": 0, "refused": False, "troubles": ["it hangs"]}
        if self._child.returncode:
            return {"reads": 0, "refused": False, "troubles": [f"it ended with {self._child.returncode}: {errors}"]}
        found: dict[str, Any] = json.loads(said)
        return found


@pytest.fixture(scope="module")
def old_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the pinned commit, out of its wheel."""
    place = tmp_path_factory.mktemp("old")
    with zipfile.ZipFile(FOLDER / f"sqlstream-{COMMIT}.whl") as wheel:
        wheel.extractall(place)
    return place


@pytest.mark.parametrize(
    "seconds", [4, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=["short", "long"]
)
def test_two_versions_on_one_cache_break_no_promise(seconds: int, old_package: Path, tmp_path: Path) -> None:
    rng, directory = random.Random(seconds), tmp_path / "cache"
    objects = {f"/o/{number}.bin": mixed_worker.body(number) for number in range(NUM_OBJECTS)}
    reads, num_refused = {old_package: 0, ROOT: 0}, 0
    with FaultyHttpServer(objects) as server, DiskWatch(directory) as watch:

        def start(package: Path) -> Process:
            return Process(package, directory, server.url, rng.randrange(1 << 30))

        processes = [start(old_package), start(old_package)]
        wait_until(lambda: len(server.requests()) > OLD_ALONE_READS)
        processes += [start(ROOT), start(ROOT)]
        deadline, num_kills = time.monotonic() + seconds, 0
        while time.monotonic() < deadline or num_kills < 2:
            time.sleep(rng.random() * 0.8)
            place = rng.randrange(len(processes))
            if processes[place].has_ended:
                said = processes[place].finish()
            else:
                processes[place].kill()
                said, num_kills = {"reads": 0, "refused": False, "troubles": []}, num_kills + 1
            assert said["troubles"] == []
            reads[processes[place].package] += said["reads"]
            num_refused += said["refused"]
            processes[place] = start(rng.choice((old_package, ROOT)))
        for process in processes:
            said = process.finish()
            assert said["troubles"] == []
            assert not (said["refused"] and process.package == ROOT), "this version was refused"
            reads[process.package] += said["reads"]
            num_refused += said["refused"]
        reads[ROOT] += start(ROOT).finish()["reads"]
    assert 0 < watch.highest_bytes <= LIMIT_BYTES
    assert reads[ROOT] > 0
    assert (num_refused > 0) <= (SCHEMA_VERSION != OLD_SCHEMA), "the ledger is one that both know"
    assert violations(directory, at_rest=True) == []
    with Cache(directory) as cache:
        assert cache.verify() == []


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, for as long as a busy machine may take."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
