"""docs/reliability.md names the test of each promise and case: each of them is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_named_test_exists(path: str, name: str) -> None:
    assert name in names_in(path), f"{path} has no {name}: correct docs/reliability.md"


@pytest.mark.parametrize(
    ("title", "num_rows"), [("The cases, one by one", 33), ("The interleavings", 15), ("What the cache promises", 8)]
)
def test_each_row_names_a_test_or_says_why_there_is_none(title: str, num_rows: int) -> None:
    section = re.split(r"^#+ ", PAGE.split(f"# {title}", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    rows = re.findall(r"^\| L?(\d+) \| (.*) \| (.*) \|$", section, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, num_rows + 1))
    for number, what, tests in rows:
        assert "::test_" in tests or (tests == "none" and "Not had here" in what), f"row {number} of {title!r}"
