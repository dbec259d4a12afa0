"""Examples in docstrings hold."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "sqlstream").rglob("*.py")
    if ">>> " in path.read_text()
)
NEED_DATA = frozenset(
    {
        "sqlstream.cache.cache.Cache",
        "sqlstream.stream.loader.StreamingDataLoader",
        "sqlstream.stream.mixed.dataset.MixedDataset",
        "sqlstream.stream.multi.loader.MultiStreamDataLoader",
        "sqlstream.stream.selected_rows.SelectedRows.split",
        "sqlstream.stream.transport.packed_collate.PackedCollate",
    }
)
"""Examples that go on from a dataset or a server of the reader: these are compiled only."""


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_hold(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    found = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert found
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in found:
        if test.name in NEED_DATA:
            for example in test.examples:
                compile(example.source, test.name, "single")
        else:
            runner.run(test)
    assert runner.failures == 0
