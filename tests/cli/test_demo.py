"""`sqlstream demo`: the whole way of a sample, as a new user sees it first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.commands import run, run_json, run_python
from tests.processes import ROOT


def test_demo_streams_under_its_limit_and_says_what_happened(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    result = run("demo", "--samples", "60", "--epochs", "2", "--workers", "2", "--dir", directory, "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    told = json.loads(result.stdout)
    assert told["num_samples"] == 120
    assert told["num_wrong"] == told["num_missing"] == 0
    assert told["limit_held"] is True
    assert 0 < told["highest_disk_bytes"] <= told["limit_bytes"] < told["data_bytes"] / 4
    assert told["delivered_bytes"] == 2 * told["data_bytes"]
    statistics = told["statistics"]
    assert statistics["evictions"] > 0
    assert (
        statistics["downloaded_bytes"] > told["data_bytes"]
    )  # the limit is too small for one epoch: the second one fetches again
    assert statistics["failures"] == 0

    kept = run_json("cache", "stats", directory)
    assert kept["limit_bytes"] == told["limit_bytes"]
    assert kept["used_bytes"] <= kept["limit_bytes"]
    assert kept["filling_bytes"] == kept["pinned_entries"] == 0
    assert run("cache", "verify", directory).returncode == 0


def test_demo_tells_people_rates_evictions_and_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):  # of the network that pip needs, say: the server is on this machine
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    result = run("demo", "--samples", "20", "--epochs", "1", "--workers", "0")
    assert result.returncode == 0, result.stdout + result.stderr
    for words in ("20 pictures", "samples/s", "limit held", "evictions", "pinned entries"):
        assert words in result.stdout
    assert "it/s" not in result.stderr  # no progress bar off a terminal


def test_demo_that_is_interrupted_ends_its_workers_and_leaves_nothing(tmp_path: Path) -> None:
    """SIGINT to this process alone: the workers have to be ended by it, before the directory that they fill is removed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    words = ["-m", "sqlstream", "demo", "--samples", "100", "--epochs", "100"]
    process = subprocess.Popen(
        [sys.executable, *words], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while not any(tmp_path.glob("sqlstream-demo-*/cache/data/*/*")):  # until it streams; the test's time limit is the bound
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=500)  # ends when the last process that holds its standard error has ended
    assert process.returncode == 130, errors
    assert list(tmp_path.glob("sqlstream-*")) == []  # what Python's multiprocessing leaves there is not ours


def test_demo_pictures_are_the_same_in_each_run_and_varied() -> None:
    from sqlstream.cli.demo_data import make_pictures

    first, second = list(make_pictures(12)), list(make_pictures(12))
    assert first == second
    assert len({picture.jpeg for picture in first}) == 12
    assert len({picture.width for picture in first}) > 6
    assert all(picture.jpeg.startswith(b"\xff\xd8") for picture in first)


@pytest.mark.parametrize("package", ["moto", "PIL"])
def test_demo_without_its_packages_names_the_extra(package: str) -> None:
    script = f"import sys; sys.modules[{package!r}] = None; from sqlstream.cli.main import main; sys.exit(main(['demo']))"
    result = run_python("-c", script)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"sqlstream: the demo needs {package}, which is not installed: pip install 'sqlstream-data[demo]'"
    ]


def test_demo_refuses_numbers_out_of_range() -> None:
    result = run("demo", "--samples", "3")
    assert result.returncode == 2
    assert "--samples=3 is out of range: give 20 or more" in result.stderr
