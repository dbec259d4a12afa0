"""Runs cases: contenders in turn, each in a fresh process, several rounds; keeps every figure of every run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers import contenders, data, disks
from benchmarks.peers.case import Case
from benchmarks.peers.job import Job
from benchmarks.peers.measures import sent_bytes
from benchmarks.peers.runner import MARK
from benchmarks.peers.workloads import judged
from sqlstream.testing.nginx import Nginx

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 90
"""For one run; the longest on a quiet machine takes 20. Who is cut off is not run again in that case."""
PREPARE_SECONDS = 900
"""MosaicML writes 10^7 rows, from Python, in three minutes."""
ROUNDS_BESIDE = 2
"""Of contenders, and of cases, that no bar needs."""
USUAL_SECONDS = 7.0
"""Of a run, where none was measured before: three of imports, three of work."""
LOOK_SECONDS = 0.05
ENTRIES = "sqlstream-entries-"
SMALL_FILES = "litdata-files-"
"""Folders with a million small files."""
BESIDE_TABLES = (ENTRIES, SMALL_FILES, "bench", "sqlstream-cache", "arrow-rows-10000000", "mds-rows-10000000")
"""Folders that starts at 10^6 rows do not read."""
OURS = ("data", "part")
"""What sqlstream's limit covers; the rest of its directory is a bounded overhead."""

CUT_OFF = "no answer"

Run = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of a whole benchmark."""

    place: Path
    """The data."""
    num_samples: int
    rounds: int
    seconds: float
    results: Path
    other_results: tuple[Path, ...] = ()
    """Folders of results of earlier runs, for the page; the first that has a case shows it."""
    sds: str = ""
    only: tuple[str, ...] = ()
    """Groups or names of cases; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that was run."""

    said: str
    """What it wrote; at the end, that it was cut off."""
    succeeded: bool


class Disk:
    """Looks at a directory again and again, and keeps the most bytes that its files took."""

    def __init__(self, directory: Path) -> None:
        self.peak_bytes = 0
        self._directory = directory
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Disk:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            parts = [self._directory / name for name in OURS if (self._directory / "FORMAT").exists()] or [self._directory]
            self.peak_bytes = max(self.peak_bytes, sum(disk_bytes(part) for part in parts))


def disk_bytes(directory: Path) -> int:
    """Return what the files below a directory take, those that vanish meanwhile left out."""
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
    return total


def selected(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """Return the cases of some groups, or of some names; all if none is given."""
    return [case for case in cases if not only or case.group in only or case.name in only]


def present(case: Case, settings: Settings) -> list[str]:
    """Return the contenders of a case that can run here."""
    return [name for name in case.contenders if contenders.can_run(name) and (name != "sds" or settings.sds)]


def settings_of(case: Case, settings: Settings) -> Settings:
    """Return the settings of a case, which may have a number of photos of its own."""
    if not case.num_samples:
        return settings
    return replace(settings, place=settings.place.with_name(f"photos-{case.num_samples}"), num_samples=case.num_samples)


def job_of(case: Case, contender: str, settings: Settings) -> Job:
    """Return what a contender is asked in a case."""
    total = data.total_bytes(settings.place) if case.limit_share else 0
    return Job(
        contender=contender,
        workload=case.functions.get(contender, case.workload),
        measure=case.measure,
        data=str(settings.place),
        work="",
        num_samples=settings.num_samples,
        seconds=settings.seconds,
        limit_bytes=int(total * case.limit_share) if case.limit_share else None,
        sds=settings.sds,
        **case.options,
    )


def in_group(command: Sequence[str], limit_seconds: float) -> Ended:
    """Run a command as a group of processes of its own; nothing of it runs on after it, or after the limit.

    Its output goes to a file: a pipe would be held open by whatever it leaves running.
    """
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    # Some containers have it. Then our package alone, installed in place, would be compiled anew by every process of a run.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryFile("w+") as written:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
        was_cut_off = False
        try:
            process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            was_cut_off = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
        written.seek(0)
        said = written.read()
    if was_cut_off:
        said = f"{said.strip()}\n{CUT_OFF} after {limit_seconds:g} s".strip()
    return Ended(said=said or f"ended with {process.returncode}, and said nothing", succeeded=process.returncode == 0)


def in_process(job: Job, *arguments: str, limit_seconds: float = LIMIT_SECONDS) -> Run:
    """Run a contender in a process of its own; return its figures, or its error."""
    command = [sys.executable, "-m", "benchmarks.peers.runner", job.to_json(), *arguments]
    ended = in_group(command, limit_seconds)
    lines = [line for line in ended.said.splitlines() if line.startswith(MARK)]
    if lines:
        figures: Run = json.loads(lines[-1].removeprefix(MARK))
        return figures
    return {} if ended.succeeded and arguments else {"error": ended.said.strip()[-2000:]}


@contextlib.contextmanager
def server(case: Case, settings: Settings, log: Path) -> Iterator[str]:
    """Serve the data if the case needs it; yield where."""
    if not case.needs_server:
        yield ""
        return
    with Nginx(settings.place, latency_seconds=case.latency_ms / 1000, log=log) as nginx:
        yield nginx.url


def run_once(case: Case, contender: str, settings: Settings) -> Run:
    """Run one contender once; whatever fails is its result."""
    work = Path(tempfile.mkdtemp(dir=disks.scattered(settings.place / "work")))
    started = time.monotonic()
    try:
        figures = _run_in(work, case, contender, settings)
    except (OSError, RuntimeError) as error:  # the server did not start, the disk is full
        figures = {"error": repr(error)}
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return figures | {"load": os.getloadavg()[0], "wall_seconds": time.monotonic() - started}


def run_round(case: Case, contender: str, settings: Settings) -> Run:
    """Run one contender as often as a round of the case has it; return its median run, or the first that failed."""
    runs: list[Run] = []
    for _ in range(case.runs_a_round):
        if case.reads_photos or case.runs_a_round > 1:  # a start of 10 ms would be twenty with pages from the disk
            disks.read_all(settings.place, but=(ENTRIES, SMALL_FILES) if case.reads_photos else BESIDE_TABLES)
        run = run_once(case, contender, settings)
        if case.figure not in run:
            return run
        runs.append(run)
    figures = [run[case.figure] for run in runs]
    median = runs[figures.index(statistics.median_low(figures))]
    return median | {"wall_seconds": sum(run["wall_seconds"] for run in runs), "figures": figures}


def _run_in(work: Path, case: Case, contender: str, settings: Settings) -> Run:
    log = work / "sent.log"
    with server(case, settings, log) as url, Disk(work / "cache") if case.limit_share else contextlib.nullcontext() as disk:
        job = replace(job_of(case, contender, settings), work=str(work), endpoint=url)
        figures = in_process(job, limit_seconds=case.limit_seconds or LIMIT_SECONDS)
    if disk is not None and "error" not in figures:
        sent = sent_bytes(job)
        total = data.total_bytes(settings.place)
        figures |= {"sent_bytes": sent, "sent_share": sent / total, "disk_bytes": disk.peak_bytes}
        figures["disk_over_limit"] = disk.peak_bytes / (job.limit_bytes or 1)
        if "lru_bytes" in figures:
            figures["lru_share"] = figures["lru_bytes"] / total
    return figures


def prepare(cases: Sequence[Case], settings: Settings) -> None:
    """Make the data, and every contender's own format of it; who fails here will fail in its cases, and say why."""
    for own in dict.fromkeys(settings_of(case, settings) for case in cases):
        _prepare([case for case in cases if settings_of(case, settings) == own], own)


def _prepare(cases: Sequence[Case], settings: Settings) -> None:
    data.prepare(settings.place, settings.num_samples)
    wanted = {(name, case.prepares, int(case.options.get("num_rows", 0))) for case in cases for name in present(case, settings)}
    for num_rows in {num_rows for *_, num_rows in wanted} - {0}:
        data.prepare_rows(settings.place, num_rows)
    with Nginx(settings.place) as nginx, tempfile.TemporaryDirectory() as work:
        for name, function, num_rows in sorted(wanted):
            if not contenders.has(name, function):
                continue
            job = Job(
                contender=name,
                workload=function,
                measure="",
                data=str(settings.place),
                work=work,
                num_samples=settings.num_samples,
                num_rows=num_rows,
                endpoint="" if num_rows else nginx.url,
            )
            started = time.monotonic()
            outcome = in_process(job, "--prepare", limit_seconds=PREPARE_SECONDS)
            print(f"prepared {name} {num_rows or ''} ({time.monotonic() - started:.0f} s)", flush=True)
            if "error" in outcome:
                print(f"  failed: {outcome['error']}", flush=True)


def takes_part(case: Case, name: str, number: int) -> bool:
    """Return whether a contender is run in a round: those that bars are about in all, the others in the first ones."""
    return number < ROUNDS_BESIDE or name in judged(case)


def estimate_seconds(cases: Sequence[Case], settings: Settings) -> float:
    """Return about how long all rounds will take, by what runs took the last time."""
    seconds = 0.0
    for case in cases:
        path = settings.results / f"{case.name}.json"
        before: dict[str, list[Run]] = json.loads(path.read_text()) if path.exists() else {}
        for name in present(case, settings):
            taken = [run["wall_seconds"] for run in before.get(name, []) if "wall_seconds" in run]
            num_runs = sum(takes_part(case, name, number) for number in range(settings.rounds))
            seconds += num_runs * (statistics.median(taken) if taken else USUAL_SECONDS)
    return seconds


def run_rounds(cases: Sequence[Case], settings: Settings) -> None:
    """Run every case in every round, its contenders in turn, beginning with another one each round."""
    settings.results.mkdir(parents=True, exist_ok=True)
    print(
        f"{settings.rounds} rounds of {len(cases)} cases: about {estimate_seconds(cases, settings) / 60:.0f} minutes",
        flush=True,
    )
    runs: dict[str, dict[str, list[Run]]] = {case.name: {} for case in cases}
    measured = commit()
    for number in range(settings.rounds):
        for case in cases:
            own = settings_of(case, settings)
            names = [name for name in present(case, settings) if takes_part(case, name, number)]
            first = number % len(names) if names else 0
            for name in names[first:] + names[:first]:
                so_far = runs[case.name].setdefault(name, [])
                was_cut_off = bool(so_far) and CUT_OFF in so_far[-1].get("error", "")
                figures = {"error": so_far[-1]["error"]} if was_cut_off else run_round(case, name, own)
                so_far.append(figures | {"commit": measured})
                shown = (
                    f"{figures[case.figure]:.6g} {case.unit}" if case.figure in figures else figures.get("error", "?")[-300:]
                )
                took = figures.get("wall_seconds", 0)
                print(f"round {number + 1}: {case.name} {name}: {shown} ({took:.0f} s)", flush=True)
            (settings.results / f"{case.name}.json").write_text(json.dumps(runs[case.name], indent=1) + "\n")


def commit() -> str:
    """Return the short name of what is checked out; `-dirty` where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"
