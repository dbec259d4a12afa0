"""Reads what is pinned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
COMMIT = "1faac12"
"""The commit whose code wrote the files."""


def pinned(name: str) -> dict[str, Any]:
    """Return what `NAME.json` holds."""
    document: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    assert document["commit"].startswith(COMMIT)
    return document
