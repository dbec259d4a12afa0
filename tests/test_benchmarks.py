"""The benchmark against the peers, small: sqlstream and plain torch on a few photos, in this environment."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import contenders, data
from benchmarks.peers.driver import Disk, Settings, disk_bytes, in_process, prepare, run_rounds, selected
from benchmarks.peers.job import Job, names
from benchmarks.peers.measures import lru_bytes
from benchmarks.peers.profile import counted, fold
from benchmarks.peers.report import Runs, judge, page, read_results
from benchmarks.peers.workloads import BARS, CASES
from sqlstream.testing.nginx import find_nginx

needs_nginx = pytest.mark.skipif(find_nginx() is None, reason="nginx is not installed: scripts/install_servers.sh")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(place=tmp_path / "data", num_samples=48, rounds=1, seconds=0.01, results=tmp_path / "results")


def measure(settings: Settings, name: str, *competing: str) -> dict[str, Runs]:
    cases = [replace(case, contenders=competing) for case in selected(CASES, [name])]
    prepare(cases, settings)
    run_rounds(cases, settings)
    results = read_results(settings.results)
    assert list(results) == [name]
    return results


@needs_nginx
def test_the_driver_runs_contenders_in_processes_and_the_report_shows_what_they_did(settings: Settings) -> None:
    results = measure(settings, "warm-bytes-2", "sqlstream", "plain_torch")
    for runs in results["warm-bytes-2"].values():
        assert runs[0]["samples"] >= 16, results
    text = page(results, settings, [])
    assert "| sqlstream | loose files |" in text
    assert "| plain torch | loose files |" in text
    assert "not measured" in text, "cases that were not run are not left out"


@needs_nginx
def test_a_squeeze_counts_what_the_server_sent_and_what_the_disk_held(settings: Settings) -> None:
    squeezed = measure(settings, "squeeze", "sqlstream")["squeeze"]["sqlstream"][0]
    assert squeezed["samples"] == 2 * settings.num_samples, squeezed
    assert squeezed["sent_bytes"] > data.total_bytes(settings.place)
    assert squeezed["disk_over_limit"] <= 1, squeezed


def test_a_contender_that_fails_is_an_error_in_the_results_not_the_end() -> None:
    job = Job(contender="nobody", workload="warm_bytes", measure="throughput", data="", work="", num_samples=3)
    assert "No module named 'benchmarks.peers.contenders.nobody'" in in_process(job)["error"]


def test_photos_are_all_different_and_made_once(settings: Settings) -> None:
    data.prepare(settings.place, 20)
    photos = [(settings.place / "bench" / "photos" / name).read_bytes() for name in names(20)]
    assert len(set(photos)) == 20
    (settings.place / "bench" / "photos" / names(20)[0]).write_bytes(b"touched")
    data.prepare(settings.place, 20)
    assert (settings.place / "bench" / "photos" / names(20)[0]).read_bytes() == b"touched"


def test_lru_by_simulation_counts_what_an_lru_cache_downloads(tmp_path: Path) -> None:
    photos = tmp_path / "bench" / "photos"
    photos.mkdir(parents=True)
    for name in names(3):
        (photos / name).write_bytes(bytes(5000))
    job = Job(contender="", workload="", measure="", data=str(tmp_path), work="", num_samples=3)
    assert lru_bytes(job, [0, 1, 0, 2, 0, 1], limit_bytes=2 * 8192) == 4 * 5000
    assert lru_bytes(job, [0, 1, 2] * 2, limit_bytes=3 * 8192) == 3 * 5000


def test_a_bar_is_a_ratio_within_each_round() -> None:
    bar = next(bar for bar in BARS if bar.case == "warm-bytes-0" and bar.against == ("plain_torch",))
    busy, quiet = {"samples_per_second": 10.0}, {"samples_per_second": 100.0}
    results = {
        "warm-bytes-0": {"sqlstream": [{"samples_per_second": 8.0}, {"samples_per_second": 80.0}], "plain_torch": [busy, quiet]}
    }
    verdict = judge(results, bar)
    assert verdict is not None
    assert (verdict.value, verdict.holds) == (0.8, True)
    assert judge({}, bar) is None


def test_every_contender_says_what_it_is_and_every_case_names_known_ones() -> None:
    for name in contenders.MODULES:
        assert all(contenders.load_words(name).values())
    assert {name for case in CASES for name in case.contenders} <= set(contenders.MODULES)
    assert {bar.case for bar in BARS} <= {case.name for case in CASES}
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_watched_disk_is_what_files_take(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_bytes(bytes(10_000))
    assert 10_000 <= disk_bytes(tmp_path) <= 16_384
    with Disk(tmp_path) as disk:
        while not disk.peak_bytes:
            time.sleep(0.01)
    assert disk.peak_bytes >= 10_000


def test_a_profile_counts_only_what_is_below_the_measured_part() -> None:
    stacks = "main (x.py:1);sampled (p.py:2);work (w.py:3);read (r.py:4) 30\nmain (x.py:1);sampled (p.py:2);work (w.py:9) 10\n"
    lines = fold(stacks + "main (x.py:1);import_all (y.py:5) 1000\n")
    assert " 75.0 %  read (r.py)" in lines
    assert "100.0 %  work (w.py)" in lines
    assert not any("import_all" in line for line in lines)


def test_calls_are_counted_for_each_sample(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def work() -> int:
        for _ in range(4):
            os.stat(tmp_path / "file")
        return 2

    assert counted(work)["lstat and stat"] == 2
