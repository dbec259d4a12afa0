"""MultiStreamDataLoader in real processes: ranks of gloo, workers that are spawned, and one that is killed."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT
from tests.stream.multi_jobs import SIZES, Job, samples_of, streams_of
from tests.stream.tables import make_table

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


def run_ranks(folder: Path, num_ranks: int, num_workers: int, num_steps: int) -> None:
    words = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m", "tests.stream.programs")
    done = subprocess.run(
        [sys.executable, *words, "train_streams", str(folder), str(num_workers), str(num_steps)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(700)
def test_a_job_goes_on_with_other_ranks_and_workers_and_its_steps_are_those_of_one_process(tmp_path: Path) -> None:
    for size in SIZES.values():  # before the ranks, which would write them at the same time
        make_table(tmp_path, size)
    run_ranks(tmp_path, 2, 1, 4)
    run_ranks(tmp_path, 1, 2, 4)
    steps: dict[int, set[Any]] = {}
    for log in tmp_path.glob("rank-*.jsonl"):
        for line in log.read_text().splitlines():
            step, name, rows = json.loads(line)
            steps.setdefault(step, set()).update((name, *row) for row in rows)
    with Job(tmp_path, streams_of(a=1, b=1)) as job:
        assert sorted(steps.items()) == [(step, set(samples)) for step, samples in samples_of(job.steps(8))]


@pytest.mark.timeout(300)
def test_spawned_workers_make_the_same_batches_and_go_on_from_a_state(tmp_path: Path) -> None:
    with Job(tmp_path, streams_of(a=1, b=1)) as job:
        expected = samples_of(job.steps(6))
    with Job(tmp_path, streams_of(a=1, b=1), 1, 2, {"multiprocessing_context": "spawn"}) as job:
        assert samples_of(job.steps(2)) == expected[:2]
        state = job.state()
        assert samples_of(job.steps(2)) == expected[2:4]
        job.load(state)
        assert samples_of(job.steps(4)) == expected[2:]


@pytest.mark.timeout(300)
def test_a_killed_worker_is_an_error_and_iterating_again_goes_on_after_the_last_batch(tmp_path: Path) -> None:
    with Job(tmp_path, streams_of(a=1, b=1)) as job:
        expected = [batch["rows"] for batch in islice(job.loaders[0], 40)]
    with Job(tmp_path, streams_of(a=1, b=1), num_workers=2) as job:
        loader, got = job.loaders[0], []

        def take_and_kill() -> None:
            for batch in loader:
                got.append(batch["rows"])
                os.kill(loader._iterator._workers[0].pid, signal.SIGKILL)

        with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):  # whichever torch sees first
            take_and_kill()
        assert len(got) < 40
        got += [batch["rows"] for batch in islice(loader, 40 - len(got))]
    assert got == expected


@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_persistent", [True, False])
def test_a_loader_that_is_dropped_ends_its_workers_without_the_garbage_collector(is_persistent: bool, tmp_path: Path) -> None:
    """That closes the queues of torch's iterator first, which then waits 5 s for each worker."""
    others = set(multiprocessing.active_children())
    job = Job(tmp_path, streams_of(a=1, b=1), num_workers=2, loader_options={"persistent_workers": is_persistent})
    next(batches := iter(job.loaders[0]))
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    gc.disable()
    try:
        del batches, job
        assert workers.isdisjoint(multiprocessing.active_children())
    finally:
        gc.enable()
    assert [worker.exitcode for worker in workers] == [0, 0], "none was terminated"
