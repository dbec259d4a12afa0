"""Damaged media never crash, hang or leak: short forms of the fuzzer, and its long form (`-m slow`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .fuzz import ROOT, run

MEBIBYTE = 1 << 20


def test_damaged_files_are_decoded_or_refused_never_worse(tmp_path: Path) -> None:
    outcome = run(tmp_path, 0, 500)
    assert outcome.problems == ()
    assert outcome.num_decoded + outcome.num_refused == 500
    assert outcome.num_decoded > 50, "the damage is so coarse that nothing behind the headers is tried"
    assert outcome.num_refused > 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_thousand_damaged_files_are_decoded_or_refused_never_worse(tmp_path: Path) -> None:
    assert run(tmp_path, 1000, 21_000).problems == ()


LEAK = """
import sys
import torch
from sqlstream.errors import SqlStreamError
from sqlstream.transforms import apply
from sqlstream.transforms.rng import begin
from tests.transforms.clips import video
from tests.transforms.fuzz import chain_of, damage, resident_bytes
import numpy as np
torch.set_num_threads(1)
kinds = [("joint", video(sound=True)), ("video", video("matroska")), ("video", video("mpegts"))]
early, late = int(sys.argv[1]), int(sys.argv[2])
for number in range(late + 1):
    name, data = kinds[number % 3]
    if number % 5 == 4:
        data = damage(data, np.random.default_rng(number))
    sample = {"x": data}
    begin(sample, (0, 0, number))
    try:
        apply(chain_of(name), sample)
    except SqlStreamError:
        pass
    if number in (early, late):
        print(resident_bytes())
"""


def memory_after(early: int, late: int) -> list[int]:
    """Resident bytes of a process after so many clips."""
    done = subprocess.run(
        [sys.executable, "-c", LEAK, str(early), str(late)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [int(line) for line in done.stdout.split()]


def test_memory_does_not_grow_with_clips() -> None:
    early, late = memory_after(60, 240)
    assert late - early < 0.05 * early, f"{early / MEBIBYTE:.0f} MiB after 60 clips, {late / MEBIBYTE:.0f} MiB after 240"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_after_two_thousand_clips_is_that_after_two_hundred() -> None:
    early, late = memory_after(200, 2000)
    assert late - early < 0.05 * early, f"{early / MEBIBYTE:.0f} MiB after 200 clips, {late / MEBIBYTE:.0f} MiB after 2000"
