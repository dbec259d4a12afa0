"""The example of packs under torchrun: every number of ranks takes the same global batches."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

EXAMPLES = ROOT / "examples"


def steps_of(printed: str) -> dict[int, set[str]]:
    """The packs of each step, as all ranks have printed them."""
    steps: dict[int, set[str]] = {}
    for step, packs in re.findall(r"step (\d+): .*rows \[(\[.*\])\]", printed):
        found = re.findall(r"\[[^\]]*\]", packs)
        assert not steps.setdefault(int(step), set()) & set(found), "no pack comes twice"
        steps[int(step)] |= set(found)
    return steps


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_global_batches_of_packs_are_the_same_under_torchrun(
    num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / "packing.py"), run_name="__main__")
    alone = steps_of(capsys.readouterr().out)
    assert len(alone) == 11
    logs = tmp_path / "logs"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [*command, "--log-dir", str(logs), "--redirects", "1", str(EXAMPLES / "packing.py")],  # a file for each rank's output
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = [path.read_text() for path in logs.rglob("stdout.log")]
    assert len(printed) == num_ranks
    assert steps_of("".join(printed)) == alone
