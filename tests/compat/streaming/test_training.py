"""Training scripts written against MosaicML Streaming train as they do there: `losses.json` is what the real package gave."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.compat.imports import with_our_imports

SCRIPTS = Path(__file__).with_name("scripts")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Steps of some numbers each take longer on several."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["images", "texts"])
def test_a_script_gives_the_losses_that_it_gives_with_the_real_package(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a shuffle each loss is equal, also after the interruption; with one the order is ours, and it trains as well."""
    theirs = json.loads((SCRIPTS / "losses.json").read_text())[name]
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path)])
    source = with_our_imports((SCRIPTS / f"{name}.py").read_text())
    exec(compile(source, f"{name}.py", "exec"), {"__name__": "__main__"})
    ours = json.loads(capsys.readouterr().out)
    assert ours["in_order"] == pytest.approx(theirs["in_order"], abs=1e-4)
    assert len(ours["shuffled"]) == len(theirs["shuffled"])
    assert ours["shuffled"][-1] < 0.5 * ours["shuffled"][0]
    assert theirs["shuffled"][-1] < 0.5 * theirs["shuffled"][0]
