"""Writes the pinned files with the code of another checkout: `python tests/pins/make.py --base CHECKOUT [NAME …]`.

Run with commit 1faac12 (`git worktree add CHECKOUT 1faac12`), in a virtual environment with the packages of constraints.txt.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("keys", "api", "orders", "states", "directories", "counts")
"""Modules of this folder, each with `compute`: what goes into NAME.json, from the code that is imported."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="the checkout whose code is pinned")
    parser.add_argument("names", nargs="*", default=NAMES, help=f"of {', '.join(NAMES)}")
    options = parser.parse_args()
    base = options.base.resolve()
    sys.path[0] = str(base)
    package = importlib.import_module("sqlstream")  # its modules come from there, from now on
    assert package.__file__ is not None
    assert Path(package.__file__).is_relative_to(base)
    sys.path[0] = str(ROOT)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=base, check=True, capture_output=True, text=True)
    for name in options.names:
        with tempfile.TemporaryDirectory() as directory:
            pinned = importlib.import_module(f"tests.pins.{name}").compute(Path(directory))
        text = lines_of({"commit": commit.stdout.strip(), **pinned})
        (ROOT / "tests" / "pins" / f"{name}.json").write_text(text + "\n")


def lines_of(document: object, depth: int = 0) -> str:
    """Return JSON that a diff can show: the outer three levels have a line for each value."""
    if not isinstance(document, dict) or depth == 3 or not document:
        return json.dumps(document, ensure_ascii=False)
    indent = " " * (depth + 1)
    items = [f"{indent}{json.dumps(str(name))}: {lines_of(value, depth + 1)}" for name, value in document.items()]
    return "{\n" + ",\n".join(items) + "\n" + " " * depth + "}"


if __name__ == "__main__":
    main()
