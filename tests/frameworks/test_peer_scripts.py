"""Training scripts of the peers' users, before and after their imports are changed: with the real package, and with ours."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compat.imports import with_our_imports
from tests.processes import ROOT

SCRIPTS = sorted((ROOT / "tests/compat/scripts").glob("*.py"))


def printed_by(source: str, place: Path) -> dict[str, Any]:
    """What a script prints in its last line, run in a process of its own, on one thread."""
    place.mkdir()
    script = place / "script.py"
    script.write_text(source)
    environment = os.environ | {"SQLSTREAM_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(place)],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_trains_before_and_after_its_imports_are_changed(script: Path, tmp_path: Path) -> None:
    """In order each loss is equal; shuffled, each sample comes once an epoch, and the loss falls as far."""
    for package in ("webdataset", *(["wids"] if "import wids" in script.read_text() else [])):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    source = script.read_text()
    assert with_our_imports(source) != source
    before, after = printed_by(source, tmp_path / "before"), printed_by(with_our_imports(source), tmp_path / "after")
    assert before.keys() == after.keys()
    for kind in before:
        assert after[kind]["seen"] == before[kind]["seen"], kind
        assert after[kind].get("accuracy") == before[kind].get("accuracy"), kind
        assert len(after[kind]["losses"]) == len(before[kind]["losses"])
    assert after["in_order"]["losses"] == pytest.approx(before["in_order"]["losses"], abs=1e-6)
    for run in (run for some in (before, after) for kind, run in some.items() if kind == "shuffled"):
        last_epoch = run["losses"][-len(run["losses"]) // 3 :]
        assert sum(last_epoch) / len(last_epoch) < 0.5 * run["losses"][0]
