"""Processes and threads on one small cache, killed and started again at random: no promise breaks, nobody hangs."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cache.storm import SLACK_BYTES, StormReport
from tests.cli.commands import ROOT

UNSHARE = ["unshare", "--mount", "--map-root-user"]
"""A mount namespace of its own, for root and, where user namespaces are allowed, for everybody."""


@functools.cache
def may_mount() -> bool:
    """Whether a program of ours may mount a tmpfs that nobody else sees."""
    if shutil.which("unshare") is None:
        return False
    probe = [*UNSHARE, "mount", "-t", "tmpfs", "probe", "/mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def blow(directory: Path, seconds: float) -> StormReport:
    """Run `tests/cache/storm.py` and read its report."""
    command = [sys.executable, "-m", "tests.cache.storm", "--directory", str(directory), "--seconds", str(seconds)]
    if may_mount():
        command = [*UNSHARE, *command, "--mount"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + 500, check=False)
    assert done.returncode == 0, done.stderr
    return StormReport(**json.loads(done.stdout))


@pytest.mark.parametrize(
    "seconds",
    [
        8,
        pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(800)]),
        pytest.param(600, marks=[pytest.mark.slow, pytest.mark.timeout(1400)]),
    ],
)
def test_a_storm_of_kills_breaks_no_promise(tmp_path: Path, seconds: int, capsys: pytest.CaptureFixture[str]) -> None:
    report = blow(tmp_path, seconds)
    peak = report.highest_file_bytes / report.limit_bytes
    disk = " on a disk of its own" if report.has_own_disk else ""
    with capsys.disabled():
        print(
            f" seed {report.seed}: {report.num_kills} kills, {report.num_stops} stops, {report.num_reads} reads, "
            f"{report.num_downloads} downloads, {report.evictions} evictions, peak {peak:.3f} of the limit{disk} ",
            end="",
        )
    assert report.troubles == []
    assert 0 < report.highest_file_bytes <= report.limit_bytes
    if report.has_own_disk:
        assert report.num_disk_samples > 0
        assert report.highest_disk_bytes <= report.limit_bytes + SLACK_BYTES
    assert report.num_kills > 0
    assert report.num_downloads > 0
    assert report.evictions > 0
