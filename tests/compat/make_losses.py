"""Writes scripts/losses.json: what the training scripts beside it print with WebDataset and wids themselves.

PEER/bin/python tests/compat/make_losses.py        PEER as `make test-frameworks` makes it
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).with_name("scripts")


def printed_by(script: Path) -> dict[str, Any]:
    """Runs a script in a process of its own, on one thread, and returns what it prints in its last line."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-c", "import runpy, sys, torch; torch.set_num_threads(1); sys.argv = sys.argv[1:]; "
                   "runpy.run_path(sys.argv[0], run_name='__main__')", str(script), place]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    made = {script.stem: printed_by(script) for script in sorted(SCRIPTS.glob("*.py"))}
    for runs in made.values():
        for run in runs.values():
            run["losses"] = [round(loss, 6) for loss in run["losses"]]
    (SCRIPTS / "losses.json").write_text("{\n" + ",\n".join(f'"{name}": {json.dumps(made[name])}' for name in made) + "\n}\n")
