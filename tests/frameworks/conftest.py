"""Tests with real frameworks run by `make test-frameworks` alone, in a venv of their own."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("accelerate") else ["test_*.py"]
