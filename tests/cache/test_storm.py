"""Processes and threads on one small cache, killed, interrupted and lied to at random: no promise breaks, no process hangs."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cache.kit import UNSHARE, may_mount
from tests.cache.storm import SLACK_BYTES, StormReport, Worker, finish
from tests.processes import ROOT


def blow(directory: Path, seconds: float, kinds: Sequence[str]) -> StormReport:
    """Run `tests/cache/storm.py` and read its report."""
    words = ["--directory", str(directory), "--seconds", str(seconds), "--kinds", *kinds]
    command = [sys.executable, "-m", "tests.cache.storm", *words]
    if may_mount():
        command = [*UNSHARE, *command, "--mount"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + 500, check=False)
    assert done.returncode == 0, done.stderr
    return StormReport(**json.loads(done.stdout))


LONG_SECONDS = int(os.environ.get("STORM_SECONDS", "600"))
"""Of the long form: `STORM_SECONDS=3600 make test ARGS="-m slow tests/cache/test_storm.py"`."""


ALL_KINDS = ("reads", "samples", "interrupted")


@pytest.mark.parametrize(
    ("seconds", "kinds"),
    [
        (8, ALL_KINDS),
        pytest.param(60, ALL_KINDS, marks=[pytest.mark.slow, pytest.mark.timeout(800)]),
        pytest.param(LONG_SECONDS, ALL_KINDS, marks=[pytest.mark.slow, pytest.mark.timeout(LONG_SECONDS + 800)]),
    ],
    ids=["short", "middle", "long"],
)
def test_a_storm_of_kills_breaks_no_promise(
    tmp_path: Path, seconds: int, kinds: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    report = blow(tmp_path, seconds, kinds)
    peak = report.highest_file_bytes / report.limit_bytes
    disk = " on a disk of its own" if report.has_own_disk else ""
    with capsys.disabled():
        print(
            f" seed {report.seed}: {report.num_kills} kills, {report.num_stops} stops, {report.num_reads} reads, "
            f"{report.num_downloads} requests, {report.evictions} evictions, peak {peak:.3f} of the limit{disk}; of those who "
            f"lived: {report.num_right} right, {report.num_samples} of them samples, {report.num_failed} failed, "
            f"{report.num_interrupts} interrupted ",
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
    assert report.num_right > report.num_failed
    assert (report.num_samples > 0) == ("samples" in kinds)
    assert (report.num_interrupts > 0) == ("interrupted" in kinds)
    assert set(report.answers) >= {"fine", "cut", "cut, and replaced", "br", "gzip, cut"}


def test_a_worker_that_died_with_words_unread_is_a_trouble_of_the_report(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    ours.send("unread")
    theirs.close()
    report = StormReport(seed=0, has_own_disk=False)
    finish([Worker(process=process, connection=ours)], report, tmp_path)
    assert report.troubles == [f"process {process.pid}: it died without a word"]
