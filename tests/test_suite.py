"""The suite itself: what it collects is the same in every process, at any time; what its modules import and reach into."""

from __future__ import annotations

import ast
import importlib
import numbers
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import LONG
from tests.processes import ROOT

TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Another day: what writes the time into an id writes another one, also when both processes start within one second.
COLLECT = """
import sys, time
real = time.time
time.time = lambda: real() + 100_000
import pytest
options = ["--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", "--assert=plain"]  # nothing is asserted
sys.exit(pytest.main([*options, *sys.argv[1:]]))
"""


def collected_later(paths: list[str], directory: Path) -> list[str]:
    """Ids that a process of another hash seed, time and folder for temporary files collects from these files.

    It runs without pytest's cache, at the root of the repository.

    Args:
        paths: test files, relative to the root.
        directory: where the other process puts its temporary files.
    """
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "TMPDIR": str(directory)}
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *paths],
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_another_process_collects_the_same_tests_in_the_same_order(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """This process is one of the two: xdist compares the ids of its workers in the same manner."""
    ours = [item.nodeid for item in request.session.items]
    later = collected_later(list(dict.fromkeys(name.partition("::")[0] for name in ours)), tmp_path)
    missing = sorted(set(ours) - set(later))
    assert missing == [], "an id of a test holds the time, a random order or an address: give `ids`"
    asked = set(ours)  # -k, -m and single ids leave some out
    assert [name for name in later if name in asked] == ours


def test_an_id_that_holds_the_time_or_the_order_of_a_set_is_found(tmp_path: Path) -> None:
    bad = tmp_path / "test_bad.py"
    bad.write_text(
        "import gzip, pytest\n"
        "@pytest.mark.parametrize('data', [gzip.compress(b'x')])\n"
        "def test_time(data): pass\n"
        "@pytest.mark.parametrize('name', {f'name {i}' for i in range(20)})\n"
        "def test_order(name): pass\n"
    )
    first = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", str(bad)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "3"},
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
    )
    ours = [line for line in first.stdout.splitlines() if "::" in line]
    later = collected_later([str(bad)], tmp_path)
    assert len(ours) == len(later) == 21
    assert ours[0] != later[0]
    assert ours[1:] != later[1:]
    assert sorted(ours[1:]) == sorted(later[1:])


def test_the_files_that_come_first_are_there() -> None:
    assert [name for name in LONG if not (ROOT / "tests" / name).exists()] == []


def imported(tree: ast.Module) -> Iterator[str]:
    """Names of modules, and of what is taken from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_module_imports_from_a_test_module() -> None:
    """What several modules need is in a kit, such as tests/cache/kit.py."""
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in TESTS
        for name in imported(ast.parse(path.read_text()))
        if re.match(r"tests\.(\w+\.)*test_\w", name)
    }
    assert found == set()


def test_tests_reach_the_parts_of_a_cache_by_the_session_alone() -> None:
    """When these parts move, one file of the tests does, too."""
    found = {
        str(path.relative_to(ROOT))
        for path in TESTS
        if re.search(r"cache\._directory\b|(session|primary)\._directory\b", path.read_text())
    }
    assert found == {"tests/cache/session.py"}


PATCHED = {
    "tests/index/test_database.py": {"_stream"},  # how many rows a cursor brings at a time shows nowhere else
}
"""Private names of modules that tests patch, and why nothing can be passed in."""


def modules_of(tree: ast.Module) -> dict[str, ModuleType]:
    """Modules of the package that a file imports, by the names that it gives them."""
    found: dict[str, ModuleType] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sqlstream"):
            for alias in node.names:
                value = getattr(importlib.import_module(str(node.module)), alias.name, None)
                if isinstance(value, ModuleType):
                    found[alias.asname or alias.name] = value
    return found


def patched(source: str) -> set[str]:
    """Private names and numbers of our modules that a file patches."""
    if "setattr(" not in source:
        return set()
    tree, found = ast.parse(source), set()
    modules = modules_of(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr"):
            continue
        match node.args:
            case [ast.Constant(value=str(path)), *_] if path.startswith("sqlstream."):
                where, _, name = path.rpartition(".")
                module: object = importlib.import_module(where)
            case [ast.Name(id=where), ast.Constant(value=str(name)), *_] if where in modules:
                module = modules[where]
            case _:
                continue
        if name.startswith("_") or isinstance(getattr(module, name), numbers.Number):
            found.add(name)
    return found


def test_no_test_patches_what_is_private_to_a_module_or_a_number_of_it() -> None:
    """Times, windows and thresholds are passed in, such as a `CacheTuning`."""
    found = {str(path.relative_to(ROOT)): names for path in TESTS if (names := patched(path.read_text()))}
    assert found == PATCHED
    assert patched("from sqlstream.index.file import sums\npatch.setattr(sums, 'NUM_KEYS', 1)") == {"NUM_KEYS"}
    assert patched("patch.setattr('sqlstream.index.file.sums.NUM_KEYS', 1)") == {"NUM_KEYS"}


def test_nothing_is_committed_beside_the_folders_of_the_project() -> None:
    """A trial that ran at the root once left a cache directory, with paths of its machine, in a commit."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no list of what is committed: an unpacked source, or no git")
    done = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"git does not list what is committed: {done.stderr}")
    folders = {"benchmarks", "docs", "examples", "migrations", "scripts", "sqlstream", "tests", ".ci"}
    files = {".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "SECURITY.md"}
    found = {name.partition("/")[0] for name in done.stdout.splitlines()}
    assert found <= folders | files | {"constraints.txt", "pyproject.toml"}
