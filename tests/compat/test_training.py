"""Training scripts written against WebDataset and wids train as they do there: `losses.json` is what the real packages gave.

`tests/frameworks/test_peer_scripts.py` runs each of them with the real package and with ours, one after the other.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.compat.imports import with_our_imports

SCRIPTS = Path(__file__).with_name("scripts")
THEIRS = json.loads((SCRIPTS / "losses.json").read_text())

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*single process.*:UserWarning"),
]


@pytest.mark.parametrize("name", THEIRS)
def test_a_script_gives_the_losses_that_it_gives_with_the_real_package(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order each loss is equal; with a shuffle the order is ours: each sample comes once an epoch, and it learns as well."""
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path)])
    monkeypatch.setenv("SQLSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WDS_VERBOSE_CACHE", "0")  # the script sets it, too: it has its value back when the test ends
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steps of some numbers each take longer on several
    try:
        source = with_our_imports((SCRIPTS / f"{name}.py").read_text())
        exec(compile(source, f"{name}.py", "exec"), {"__name__": "__main__"})
    finally:
        torch.set_num_threads(num_threads)
    ours = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert ours.keys() == THEIRS[name].keys()
    for kind, theirs in THEIRS[name].items():
        assert ours[kind]["seen"] == theirs["seen"], kind
        assert ours[kind].get("accuracy") == theirs.get("accuracy"), kind
    assert ours["in_order"]["losses"] == pytest.approx(THEIRS[name]["in_order"]["losses"], abs=1e-4)
    for run in (run for some in (ours, THEIRS[name]) for kind, run in some.items() if kind == "shuffled"):
        last_epoch = run["losses"][-len(run["losses"]) // 3 :]
        assert sum(last_epoch) / len(last_epoch) < 0.5 * run["losses"][0]
