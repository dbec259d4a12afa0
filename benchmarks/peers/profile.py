"""Where the time of sqlstream's own path goes, as text: py-spy's stacks folded, and calls counted per sample.

    python -m benchmarks.peers.profile warm-bytes-0 random start-1000000 …
    python -m benchmarks.peers.profile warm-tensors --num-workers 2 --idle      # where trainer and workers work, and wait
    python -m benchmarks.peers.profile shards-warm-0 --contender sqlstream_mds

Writes `benchmarks/results/profiles/<case>.txt` (of another contender `<case>-<contender>.txt`, with workers
`<case>-<workers>.txt`, its trainer and its workers apart). py-spy
looks from outside, so shares are true; cProfile slows calls down, so of it only the counts are taken, and only of one process.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.peers.case import Case
from benchmarks.peers.contenders import load
from benchmarks.peers.driver import LIMIT_SECONDS, ROOT, Settings, in_group, job_of, prepare, selected, server, settings_of
from benchmarks.peers.job import Job
from benchmarks.peers.measures import run_epoch, weigh
from benchmarks.peers.workloads import CASES

HERTZ = 500
SHOWN = 40
MOST_BATCHES = 160
"""Of an epoch: the photos are fewer, a million rows would take a minute each time."""
USUAL = "sqlstream"
"""The contender that has no shards."""
TRAINER, WORKER = "sampled ", "_worker_loop "
"""Functions whose stacks are those of the trainer, and of its workers."""
COUNTED = {
    "statements": ("execute", "executemany", "executescript"),
    "fetches": ("fetchall", "fetchone"),
    "opened files": ("open",),
    "lstat and stat": ("lstat", "stat"),
    "flock": ("flock",),
}
"""Built-in functions by what they stand for."""
CALLED_BY_C = {"_fetched": ("statements", "fetches")}
"""Functions of ours whose calls of built-in functions no profile sees."""


def sampled(work: Callable[[], int], seconds: float) -> None:
    """Do the work again and again; what py-spy sees below this function counts."""
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        work()


def counted(work: Callable[[], int]) -> dict[str, float]:
    """Do the work once; return calls of some built-in functions, for each sample."""
    profile = cProfile.Profile()
    profile.enable()
    num_samples = work()
    profile.disable()
    calls: Counter[str] = Counter()
    total = 0
    for (file, _, function), (num_calls, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]  # untyped
        total += num_calls
        name = function.strip("{}<>").split("'")[1] if "'" in function else function.rpartition(".")[2].strip("{}<>")
        for what, names in COUNTED.items():
            if (file == "~" and name in names) or what in CALLED_BY_C.get(function, ()):
                calls[what] += num_calls
    return {"python calls": total / num_samples} | {what: calls[what] / num_samples for what in COUNTED}


def work_of(job: Job) -> Callable[[], int]:
    """Return what is profiled: an epoch, some accesses, or an opening with its first batch."""
    begin: Callable[[Job], Any] = getattr(load(job.contender), job.workload)
    if job.measure == "lookups":
        lookup = begin(job)
        return lambda: sum(len(lookup.get(index)) > 0 for index in range(0, job.num_samples, 7))
    if job.measure == "first_batch":
        return lambda: len(next(iter(begin(job).batches)))
    if job.measure in ("one_pass", "two_passes", "first_epoch"):
        numbers = iter(range(1_000_000))

        def from_nothing() -> int:
            work = Path(job.work) / str(next(numbers))
            work.mkdir()
            return run_epoch(begin(replace(job, work=str(work))))[0]

        return from_nothing
    stream = begin(job)
    return lambda: sum(weigh(stream, batch)[0] for batch in islice(stream.batches, MOST_BATCHES))


def run(job: Job, answer: Path) -> None:
    """Be the process that is looked at."""
    work = work_of(job)
    work()
    sampled(work, job.seconds)
    answer.write_text(json.dumps({} if job.num_workers else counted(work)))


def fold(stacks: str, role: str = TRAINER) -> list[str]:
    """Return functions by their own share and by that of all below them, of the trainer or of its workers."""
    own: Counter[str] = Counter()
    below: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, number = line.rpartition(" ")
        frames = [frame.rpartition(":")[0] + ")" if ":" in frame else frame for frame in stack.split(";")]
        if role != next((one for one in (WORKER, TRAINER) if any(frame.startswith(one) for frame in frames)), None):
            continue  # a forked worker's stack begins with its trainer's
        frames = [frame for frame in frames if not frame.startswith("process ")]  # its command line has paths of this machine
        own[frames[-1]] += int(number)
        below.update(dict.fromkeys(frames, int(number)))
    total = own.total() or 1
    lines = []
    for title, shares in (("itself", own), ("with all that it calls", below)):
        lines += [f"-- {title}: share of {total} looks, {HERTZ} a second"]
        lines += [f"{100 * number / total:5.1f} %  {frame}" for frame, number in shares.most_common(SHOWN)]
    return lines


def profile(case: Case, settings: Settings, num_workers: int, idle: bool) -> str:
    """Profile one case in a process of its own; return the text."""
    settings = settings_of(case, settings)
    with tempfile.TemporaryDirectory(prefix="sqlstream-bench-") as work:
        with server(case, settings, Path(work) / "log") as url:
            (contender,) = case.contenders
            job = replace(job_of(case, contender, settings), work=work, endpoint=url, num_workers=num_workers)
            stacks, answer = Path(work) / "stacks", Path(work) / "answer"
            spy = [
                str(Path(sys.executable).parent / "py-spy"),
                "record",
                "-r",
                str(HERTZ),
                "-f",
                "raw",
                "-o",
                str(stacks),
                *(["--subprocesses"] if num_workers else []),
                *(["--idle"] if idle else []),
                "--",
            ]
            command = [sys.executable, "-m", "benchmarks.peers.profile", "--run", job.to_json(), str(answer)]
            ended = in_group(spy + command, LIMIT_SECONDS)
            if not ended.succeeded:
                raise RuntimeError(f"{case.name}: {ended.said.strip()[-500:]}")
        counts = json.loads(answer.read_text())
        shown = [f"{number:10.3f}  {what}" for what, number in counts.items()]
        if num_workers:
            halves = [("trainer", fold(stacks.read_text(), TRAINER)), ("workers", fold(stacks.read_text(), WORKER))]
            text = [line for name, lines in halves for line in ["", f"== {name}", *lines]]
            return "\n".join([f"{case.title}, {num_workers} workers{', waiting included' if idle else ''}", *text]) + "\n"
        return "\n".join([f"{case.title}, in one process", "", "-- for each sample", *shown, *fold(stacks.read_text())]) + "\n"


def main() -> None:
    """Profile the cases that are named."""
    if sys.argv[1:2] == ["--run"]:
        return run(Job.from_json(sys.argv[2]), Path(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--contender", default=USUAL, help="sqlstream_mds, sqlstream_tar, drop_in_mds …")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--idle", action="store_true", help="look at what waits, too")
    parser.add_argument("--num-samples", type=int, default=5000)
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "sqlstream-bench")
    options = parser.parse_args()
    results = ROOT / "benchmarks" / "results"
    settings = Settings(
        place=options.data / f"photos-{options.num_samples}",
        num_samples=options.num_samples,
        rounds=1,
        seconds=5.0,
        results=results,
    )
    cases = [replace(case, contenders=(options.contender,)) for case in selected(CASES, options.cases)]
    prepare(cases, settings)
    (results / "profiles").mkdir(parents=True, exist_ok=True)
    for case in cases:
        told = [options.contender] if options.contender != USUAL else []
        name = "-".join([case.name, *told, *([str(options.num_workers)] if options.num_workers else [])]) + ".txt"
        try:
            (results / "profiles" / name).write_text(profile(case, settings, options.num_workers, options.idle))
            print(f"wrote benchmarks/results/profiles/{name}", flush=True)
        except (OSError, RuntimeError) as error:  # py-spy may not look at processes here: the figures stand without
            print(f"no profile: {error}", flush=True)
    return None


if __name__ == "__main__":
    main()
