"""The example of aspect ratios on 1, 2 and 4 ranks: the same global batches of one shape each."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.processes import ROOT

EXAMPLE = ROOT / "examples" / "aspect_ratio.py"
LINE = re.compile(r"rank (\d+) step (\d+): \((\d+), (\d+, \d+, \d+)\) rows \[([\d, ]*)\]")


def steps_of(output: str) -> dict[int, tuple[set[str], list[int]]]:
    """The shapes and the rows of each step, of all ranks."""
    steps: dict[int, tuple[set[str], list[int]]] = {}
    for _, step, size, shape, rows in LINE.findall(output):
        shapes, all_rows = steps.setdefault(int(step), (set(), []))
        shapes.add(shape)
        numbers = [int(row) for row in rows.split(",")]
        assert len(numbers) == int(size)
        all_rows += numbers
    return {step: (shapes, sorted(rows)) for step, (shapes, rows) in sorted(steps.items())}


def ran(words: list[str], **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *words, str(EXAMPLE)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(steps: dict[int, tuple[set[str], list[int]]]) -> None:
    assert list(steps) == list(range(6)), "24 pictures, 4 a step"
    assert all(len(shapes) == 1 and len(rows) == 4 for shapes, rows in steps.values())
    assert sorted(row for _, rows in steps.values() for row in rows) == list(range(24))


@pytest.mark.timeout(600)
def test_the_example_gives_the_same_global_batches_under_torchrun_on_two_ranks_as_alone() -> None:
    alone = steps_of(ran([]))
    check(alone)
    assert steps_of(ran(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"])) == alone


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_example_gives_the_same_global_batches_under_torchrun_on_one_two_and_four_ranks() -> None:
    found = [
        steps_of(ran(["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]))
        for num_ranks in (1, 2, 4)
    ]  # fmt: skip
    check(found[0])
    assert found[1] == found[2] == found[0]
