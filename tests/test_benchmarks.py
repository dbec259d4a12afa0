"""The benchmark against the peers, small: sqlstream and plain torch on a few photos, in this environment."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import contenders, data, disks, driver, mixture, resumed
from benchmarks.peers.case import Case
from benchmarks.peers.driver import (
    CUT_OFF,
    ROOT,
    ROUNDS_BESIDE,
    Disk,
    Settings,
    disk_bytes,
    estimate_seconds,
    in_process,
    job_of,
    prepare,
    run_rounds,
    selected,
    takes_part,
)
from benchmarks.peers.job import Job, Stream, names
from benchmarks.peers.measures import first_epoch, lru_bytes, run_epoch, second_epoch
from benchmarks.peers.profile import WORKER, counted, fold
from benchmarks.peers.reasons import REASONS
from benchmarks.peers.report import (
    HEADLINE,
    Runs,
    drop_in_table,
    headline,
    judge,
    lost_cases,
    page,
    read_results,
    with_headline,
)
from benchmarks.peers.workloads import BARS, CASES, HEADLINES
from sqlstream.cache import Cache
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
def test_a_second_epoch_as_users_write_it_counts_from_iter_with_own_transform_and_collate(settings: Settings) -> None:
    (case,) = selected(CASES, ["users-warm-bytes-2"])
    case = replace(case, contenders=("sqlstream",), prepares="")
    prepare([case], settings)
    run_rounds([case], settings)
    (run,) = read_results(settings.results)[case.name]["sqlstream"]
    assert run["samples_per_second"] == pytest.approx(settings.num_samples / run["seconds"]), run


def test_what_users_write_is_the_same_for_contenders(settings: Settings, tmp_path: Path) -> None:
    data.prepare(settings.place, settings.num_samples)
    data.prepare_rows(settings.place, 100)
    cases = {case.name: replace(case, options=case.options | {"num_workers": 0}) for case in CASES}
    torch_job = job_of(cases["users-warm-bytes-0"], "plain_torch", settings)
    stream = contenders.load("plain_torch").warm_bytes(torch_job)
    (batch,) = stream.batches
    assert (type(batch), {type(value) for value in batch}) == (list, {bytes}), "what the collate function gave"
    figures = second_epoch(torch_job, lambda _: stream)
    assert figures["samples_per_second"] > 0
    own = replace(job_of(cases["users-start-100000"], "sqlstream", settings), num_rows=100, work=str(tmp_path))
    for name in ("sqlstream", "plain_torch"):
        first = next(iter(contenders.load(name).start(own).batches))
        assert len(first) == own.batch_size
        assert all(caption.startswith("a photo of thing") for caption in first), name


def test_a_case_may_have_its_own_number_of_photos(settings: Settings) -> None:
    (case,) = selected(CASES, ["users-cold-s3-20-20000"])
    own = driver.settings_of(case, settings)
    assert (own.num_samples, own.place) == (20_000, settings.place.with_name("photos-20000"))
    assert driver.settings_of(replace(case, num_samples=0), settings) == settings


def test_workers_start_anew_where_whole_epochs_are_counted(settings: Settings) -> None:
    jobs = {case.name: job_of(case, case.contenders[0], settings) for case in CASES if not case.limit_share}
    assert not jobs["users-warm-bytes-2"].has_persistent_workers
    assert not jobs["users-cold-http-20-2000"].has_persistent_workers
    assert jobs["users-cpu"].has_persistent_workers
    assert jobs["warm-bytes-2"].has_persistent_workers
    assert {case.group for case in CASES if case.options.get("as_users")} == {"mixture", "shards", "users"}


def test_three_streams_are_mixed_at_their_shares_by_what_a_user_writes(settings: Settings, tmp_path: Path) -> None:
    data.prepare(settings.place, 100)
    (case,) = selected(CASES, ["mixture-loose-0"])
    job = replace(job_of(case, "sqlstream", settings), num_samples=100, work=str(tmp_path))
    contender = contenders.load("sqlstream")
    getattr(contender, case.prepares)(job)
    stream = getattr(contender, case.workload)(job)
    numbers = [mixture.number_of(photo) for batch in stream.batches for photo in stream.payload(batch)]
    parts = mixture.parts(100)
    assert len(numbers) == stream.num_samples == mixture.epoch_size(100) == 80
    assert [sum(number in part for number in numbers) for part in parts.values()] == [56, 16, 8]
    assert mixture.drift(numbers, 100) < 2


def test_an_epoch_of_a_mixture_may_be_shorter_than_all_photos_but_not_than_it_says(settings: Settings) -> None:
    job = replace(job_of(selected(CASES, ["mixture-loose-0"])[0], "sqlstream", settings), num_samples=100)
    short = Stream(batches=[[b"x"] * 80], payload=lambda batch: batch, num_samples=80)
    assert first_epoch(job, lambda _: short)["samples_per_second"] > 0
    with pytest.raises(RuntimeError, match="80 samples of 100"):
        first_epoch(job, lambda _: replace(short, num_samples=100))


@needs_nginx
def test_a_run_that_stops_after_a_third_goes_on_in_another_process_without_a_difference(settings: Settings) -> None:
    (run,) = measure(replace(settings, num_samples=500), "mixture-resume-0", "sqlstream")["mixture-resume-0"]["sqlstream"]
    assert (run["before_stop"], run["after_stop"]) == (128, 292), run
    assert [run[name] for name in ("lost", "repeated", "out_of_place", "before_stop_differ")] == [0] * 4


def test_samples_that_a_resumed_run_loses_repeats_or_moves_are_counted() -> None:
    whole = [0, 1, 2, 3, 4, 5]
    wanted = {"lost": 0, "repeated": 0, "out_of_place": 0, "before_stop": 2, "before_stop_differ": 0, "after_stop": 4}
    assert resumed.compare(whole, [0, 1], [2, 3, 4, 5]) == wanted
    assert resumed.compare(whole, [0, 1], [3, 2, 4, 5]) == wanted | {"out_of_place": 2}
    assert resumed.compare(whole, [0, 1], [2, 3, 4]) == wanted | {"lost": 1, "out_of_place": 1}
    assert resumed.compare(whole, [0, 1], [1, 2, 3, 4, 5]) == wanted | {"repeated": 1, "out_of_place": 5}
    assert resumed.compare(whole, [1, 0], [2, 3, 4, 5]) == wanted | {"before_stop_differ": 2}


_ORPHAN = """
import os, subprocess, sys, time
from benchmarks.peers.processes import cpu_seconds, keep_orphans
keep_orphans()
burn = "import time\\nwhile time.process_time() < 0.3: pass\\nprint(end='x', flush=True)"
worker = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {burn!r}])"
before = cpu_seconds()
process = subprocess.Popen([sys.executable, "-S", "-c", worker], stdout=subprocess.PIPE)
assert process.stdout.read(1) == b"x"
process.wait()
print(cpu_seconds() - before)
"""


def test_what_the_helper_of_an_ended_worker_has_used_counts() -> None:
    ran = subprocess.run([sys.executable, "-c", _ORPHAN], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) >= 0.25


@needs_nginx
def test_a_squeeze_counts_what_the_server_sent_and_what_the_disk_held(settings: Settings) -> None:
    squeezed = measure(settings, "squeeze", "sqlstream")["squeeze"]["sqlstream"][0]
    assert squeezed["samples"] == 2 * settings.num_samples, squeezed
    assert squeezed["sent_bytes"] > data.total_bytes(settings.place)
    assert squeezed["disk_over_limit"] <= 1, squeezed


def test_a_cache_of_many_small_samples_is_filled_without_a_download(settings: Settings, tmp_path: Path) -> None:
    data.prepare_rows(settings.place, 100)
    case = replace(selected(CASES, ["flat-10000"])[0], options={"num_rows": 100})
    job = replace(job_of(case, "sqlstream", settings), work=str(tmp_path))
    contender = contenders.load("sqlstream")
    getattr(contender, case.prepares)(job)
    assert run_epoch(getattr(contender, case.workload)(job)) == (100, 100 * 1024)
    with Cache(settings.place / "sqlstream-entries-100") as cache:
        statistics = cache.statistics()
        assert (statistics.entries, statistics.downloaded_bytes) == (100, 0), "a server was asked"
        assert cache.verify() == []


def test_a_contender_that_hangs_is_cut_off_and_not_run_again(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(contender="plain_torch", workload="warm_bytes", measure="throughput", data="", work="", num_samples=3)
    assert in_process(job, limit_seconds=0)["error"] == f"{CUT_OFF} after 0 s"
    asked: list[str] = []

    def hang(_case: Case, contender: str, _settings: Settings) -> dict[str, object]:
        asked.append(contender)
        figures: dict[str, object] = {"samples_per_second": 1.0, "wall_seconds": 1.0}
        return {"error": f"{CUT_OFF} after 90 s"} if contender == "plain_torch" else figures

    monkeypatch.setattr(driver, "run_once", hang)
    cases = [replace(case, contenders=("sqlstream", "plain_torch")) for case in selected(CASES, ["warm-bytes-0"])]
    run_rounds(cases, replace(settings, rounds=3))
    assert (asked.count("plain_torch"), asked.count("sqlstream")) == (1, 3)
    runs = read_results(settings.results)["warm-bytes-0"]
    assert [CUT_OFF in run["error"] for run in runs["plain_torch"]] == [True] * 3, "rounds stay in step"


def test_a_round_of_short_runs_counts_the_median_one_or_the_first_that_failed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (case,) = selected(CASES, ["resume"])
    (fresh,) = selected(CASES, ["start-1000000"])
    assert case.runs_a_round == fresh.runs_a_round == 5, "what is compared is measured alike"
    runs: list[dict[str, object]] = []
    runs += [{"first_batch_seconds": seconds, "wall_seconds": 2.0, "load": seconds} for seconds in (9.0, 1.0, 3.0, 2.0, 4.0)]
    monkeypatch.setattr(driver, "run_once", lambda *_: runs.pop(0))
    assert driver.run_round(case, "sqlstream", settings) == {
        "first_batch_seconds": 3.0,
        "load": 3.0,
        "wall_seconds": 10.0,
        "figures": [9.0, 1.0, 3.0, 2.0, 4.0],
    }
    runs += [{"first_batch_seconds": 1.0, "wall_seconds": 2.0}, {"error": "gone"}]
    assert driver.run_round(case, "sqlstream", settings) == {"error": "gone"}


def test_resuming_reads_the_state_that_was_saved_in_the_middle_of_an_epoch(settings: Settings) -> None:
    data.prepare_rows(settings.place, 100)
    (case,) = selected(CASES, ["resume"])
    job = replace(job_of(case, "sqlstream", settings), num_rows=100, batch_size=10)
    contender = contenders.load("sqlstream")
    getattr(contender, case.prepares)(job)
    resumed, whole = getattr(contender, case.workload)(job), contender.start(job)
    assert list(map(whole.rows, whole.batches))[5:] == list(map(resumed.rows, resumed.batches))


def test_a_run_writes_far_from_the_last_one(tmp_path: Path) -> None:
    for _ in range(2):
        directory = disks.scattered(tmp_path / "work")
    flags = bytearray(8)
    descriptor = os.open(directory, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without flags
        fcntl.ioctl(descriptor, disks.FS_IOC_GETFLAGS, flags)
    os.close(descriptor)
    system = subprocess.run(["stat", "-f", "-c", "%T", directory], capture_output=True, text=True, check=True).stdout.strip()
    assert bool(int.from_bytes(flags, "little") & disks.FS_TOPDIR_FL) == (system == "ext2/ext3")


def test_data_is_read_once_without_the_many_small_files(tmp_path: Path) -> None:
    for folder in ("photos", "many-100"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_bytes(bytes(8))
    assert disks.read_all(tmp_path, but="many-") == 8


def test_only_what_bars_need_runs_in_every_round() -> None:
    cases = {case.name: case for case in CASES}
    for late in (ROUNDS_BESIDE, 10):
        assert takes_part(cases["warm-bytes-0"], "plain_torch", late)
        assert takes_part(cases["start-1000000"], "sqlstream", late)
        assert takes_part(cases["scale-1"], "sqlstream", late), "another case's bar divides by it"
        assert not takes_part(cases["warm-bytes-0"], "huggingface", late)
        assert not takes_part(cases["cold-s3-0"], "sqlstream", late)
    assert all(takes_part(case, name, 0) for case in CASES for name in case.contenders)


def test_the_estimate_takes_what_runs_took_before(settings: Settings) -> None:
    cases = [replace(case, contenders=("sqlstream",)) for case in selected(CASES, ["random"])]
    settings.results.mkdir()
    (settings.results / "random.json").write_text('{"sqlstream": [{"wall_seconds": 3}, {"wall_seconds": 5}]}')
    assert estimate_seconds(cases, replace(settings, rounds=5)) == 5 * 4


def test_the_readme_gets_the_figures_that_were_measured() -> None:
    bars = {(bar.case, bar.text) for bar in BARS}
    assert {one for _, _, wanted in HEADLINES for one in wanted} <= bars
    assert REASONS.keys() <= bars
    profiles = set(re.findall(r"benchmarks/results/profiles/[\w-]+\.txt", " ".join(REASONS.values())))
    assert profiles
    assert [path for path in profiles if not (ROOT / path).is_file()] == [], "a reason is what a profile shows"
    start = {"sqlstream": [{"first_batch_seconds": 0.5}] * 2, "mosaicml": [{"first_batch_seconds": 1.0}] * 2}
    table = headline({"start-1000000": start})
    assert "| time to the first batch, 10^6 rows, index built, no workers | 0.50 of MosaicML's |" in table
    assert table.endswith("Medians of 2 rounds; 1 of 1 bars hold.")
    assert "belady" not in table, "what was not measured is not shown"
    assert with_headline(f"a\n{HEADLINE[0]}\nold\n{HEADLINE[1]}\nb", "new") == f"a\n{HEADLINE[0]}\n\nnew\n\n{HEADLINE[1]}\nb"
    assert with_headline("no marks", "new") == "no marks"


def test_a_page_is_not_made_anew_without_what_it_has(settings: Settings, tmp_path: Path) -> None:
    data.prepare(settings.place, settings.num_samples)
    runs: Runs = {contender: [{"samples_per_second": 1.0, "load": 0.0}] for contender in ("sqlstream", "plain_torch")}
    path = tmp_path / "benchmarks.md"
    assert lost_cases(path, {}) == []
    path.write_text(page({"warm-bytes-0": runs, "warm-bytes-2": runs}, settings, []))
    assert lost_cases(path, {"warm-bytes-0": runs}) == ["warm-bytes-2"]
    assert lost_cases(path, {"warm-bytes-0": runs, "warm-bytes-2": runs, "random": runs}) == []


def test_a_drop_in_is_compared_with_its_peer_round_by_round_and_above_1_is_better() -> None:
    results: dict[str, Runs] = {
        "shards-warm-0": {
            "mosaicml": [{"samples_per_second": 10.0, "cpu_us_per_sample": 30.0, "load": 1.0}, {"samples_per_second": 100.0}],
            "drop_in_mds": [
                {"samples_per_second": 20.0, "cpu_us_per_sample": 10.0},
                {"samples_per_second": 300.0, "load": 4.0},
            ],
            "webdataset": [{"error": "it is not installed"}],
            "drop_in_tar": [{"samples_per_second": 5.0}],
        },
        "shards-random": {"mosaicml": [{"p50_us": 10.0}], "drop_in_mds": [{"p50_us": 40.0}]},
    }
    _, _, *lines = drop_in_table(results)
    assert [line.split(" | ")[1:] for line in lines] == [
        ["MosaicML", "55 samples/s", "160 samples/s", "2.50 (2.00 to 3.00)", "3.00 (3.00 to 3.00)", "2", "1 to 4 |"],
        ["MosaicML", "10 µs", "40 µs", "0.25 (0.25 to 0.25)", "", "1", " |"],
    ]
    assert "| a whole shuffle" not in "\n".join(lines), "what was not measured is not shown"


@pytest.mark.parametrize("name", ["drop_in_mds", "drop_in_tar"])
def test_a_drop_in_runs_the_script_of_its_peer(name: str, settings: Settings) -> None:
    """Shards are written by ours here: the peers are not installed."""
    data.prepare(settings.place, 48)
    (case,) = selected(CASES, ["shards-warm-0"])
    job = replace(job_of(case, name, settings), num_samples=48, work=str(settings.place))
    contender = contenders.load(name)
    contender._write(job, *(["mds"] if name == "drop_in_mds" else ["tar", 20]))
    photos = [photo for batch in contender.warm_bytes(job).batches for photo in batch]
    assert sorted(photos) == sorted((job.photos / photo).read_bytes() for photo in names(48))


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


def test_a_profile_with_workers_keeps_them_and_the_trainer_apart() -> None:
    stacks = "main (x.py:1);sampled (p.py:2);wait (q.py:3) 30\n"
    stacks += "main (x.py:1);sampled (p.py:2);fork (f.py:1);_worker_loop (w.py:3);decode (d.py:4) 10\n"
    assert "100.0 %  wait (q.py)" in fold(stacks)
    assert "100.0 %  decode (d.py)" in fold(stacks, WORKER)


def test_calls_are_counted_for_each_sample(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def work() -> int:
        for _ in range(4):
            os.stat(tmp_path / "file")
        return 2

    assert counted(work)["lstat and stat"] == 2
