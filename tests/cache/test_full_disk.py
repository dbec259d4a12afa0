"""A disk that is really full: a small file system of its own, for the objects, the ledger and the ballast alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cache.full_disk import FLOOR_BYTES, NUM_OF_SIZE
from tests.cache.kit import UNSHARE, may_mount
from tests.processes import ROOT


@pytest.mark.parametrize(("size", "num"), NUM_OF_SIZE.items())
def test_on_a_full_disk_eviction_goes_on_errors_are_clear_and_nothing_is_left_broken(
    tmp_path: Path, size: int, num: int
) -> None:
    if not may_mount():
        pytest.skip("mounting is not allowed here: `unshare --mount --map-root-user mount -t tmpfs …` fails")
    command = [*UNSHARE, sys.executable, "-m", "tests.cache.full_disk", "--directory", str(tmp_path)]
    command += ["--size", str(size)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "No space left on device" in report.pop("error")
    assert report.pop("evictions") > 0
    # The floor holds but for the ledger's own pages, and is used up to one object.
    assert FLOOR_BYTES - (1 << 20) <= report.pop("least_free_bytes") < FLOOR_BYTES + 2 * size
    assert report == {
        "num_right": 2 * num,
        "stranger": "No space left on device",
        "troubles_when_full": [],
        "pinned_are_there": True,
        "works_again": True,
        "num_right_without_ballast": num // 4,
        "findings": [],
        "has_ballast": True,
        "troubles_at_rest": [],
        "opened_when_full": {"num_right": num // 2, "findings": [], "troubles": []},
    }
