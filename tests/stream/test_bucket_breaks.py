"""Runs by bucket that are broken off again and again, and go on elsewhere: what was delivered is the plan."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.order import Bucketed, BucketLanes
from tests.processes import ROOT, children, is_alive, wait_until
from tests.stream.bucket_runs import BUCKETS, BUDGET, LANES, NUM_LANES, drawn, seen, some_runs, write_lengths

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
KINDS: dict[str, dict[str, Any]] = {
    "even": {"batches": BUCKETS},
    "budget": {"batches": BUDGET},
    "weights": {"batches": BUDGET, "weights": "row + 1", "epoch_size": 60},
    "repeats": {"batches": replace(BUDGET, leftovers="repeat")},
    "lanes": {"batches": LANES},
    "lanes that weigh": {"batches": LANES, "weights": "row + 1", "epoch_size": 60},
    "nodes": {"batches": BUDGET, "num_canonical_nodes": 2},
}
Step = frozenset[tuple[Any, ...]]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_lengths(tmp_path)


@pytest.fixture
def runs(table: Path) -> Iterator[Any]:
    with some_runs(table) as make:
        yield make


def planned(dataset: StreamingDataset, num_steps: int) -> list[set[tuple[int, int]]]:
    """Round and row of each sample of the first steps, by the order alone."""
    order = dataset.schedule.steps.order
    assert isinstance(order, Bucketed | BucketLanes)
    num_batches = order.num_lanes or 1
    size, steps = order.step_size // num_batches, list[set[tuple[int, int]]]()
    for epoch in range(num_steps):
        for step in range(order.num_positions(epoch) // order.step_size):
            batches = step * num_batches + np.arange(num_batches)  # [batches]
            widths = order.sizes_at(epoch, batches)  # [batches]
            places = [batch * size + np.arange(width) for batch, width in zip(batches, widths, strict=True)]
            draws = order.rows_at(epoch, np.concatenate(places))
            steps.append(set(zip(draws.epoch.tolist(), draws.row.tolist(), strict=True)))
        if len(steps) >= num_steps:
            break
    return steps[:num_steps]


def break_off(runs: Any, kind: str, num_breaks: int, seed: int) -> None:
    """Break a run off at random steps and go on with a random layout; compare all that it gives with the plan."""
    print(f"{kind}, seed {seed}")
    draw, options = random.Random(seed), KINDS[kind]
    layouts = {num_ranks: runs(num_ranks, **options) for num_ranks in (1, 2, 4)}
    expected_run, expected = runs(**options), list[Step]()
    run, got, state = layouts[draw.choice((1, 2, 4))], list[Step](), None
    for _ in range(num_breaks):
        if state is not None:
            run.load(state)
        got += [run.step() for _ in range(draw.randint(1, 4))]
        state, run = run.state(), layouts[draw.choice((1, 2, 4))]
    expected = [expected_run.step() for _ in got]
    assert got == expected
    assert [{sample[:2] for sample in step} for step in got] == planned(expected_run.datasets[0], len(got))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_gives_that_breaks_off_at_random_steps_is_the_plan(kind: str, runs: Any) -> None:
    break_off(runs, kind, 12, seed=7)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_gives_that_breaks_off_450_times_is_the_plan(kind: str, runs: Any) -> None:
    break_off(runs, kind, -(-450 // len(KINDS)), seed=int.from_bytes(os.urandom(4)))


def batched(loader: StreamingDataLoader, num_rounds: int) -> Iterator[list[list[tuple[Any, ...]]]]:
    """The batches of a loader, those of each step together."""
    batches = list(loader)
    yield from (batches[start : start + num_rounds] for start in range(0, len(batches), num_rounds))


def start_ranks(table: Path, sync: str, num_ranks: int, num_workers: int, last_step: int) -> subprocess.Popen[bytes]:
    with (table.parent / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"),
                *("-m", "tests.stream.programs", "train_buckets", str(table), str(table.parent)),
                *(sync, str(num_workers), str(last_step)),
            ],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def saved_step(folder: Path) -> int:
    path = folder / "state.json"
    return int(json.loads(path.read_text())["step"]) if path.exists() else 0


def has_come_to(job: subprocess.Popen[bytes], folder: Path, step: int) -> bool:
    return saved_step(folder) >= step or job.poll() is not None


def are_gone(family: set[int]) -> bool:
    return not any(is_alive(pid) for pid in family)


def signal_all(family: set[int], number: signal.Signals) -> None:
    for pid in family:
        with contextlib.suppress(ProcessLookupError):  # a child of one that is gone has ended by itself
            os.kill(pid, number)


def kill_again_and_again(table: Path, sync: str, layouts: list[tuple[int, int]], seed: int) -> None:
    """Kill a job of torchrun some steps after each start, all of it at once; the last layout ends the run."""
    print(f"sync={sync!r}, seed {seed}")
    draw, folder, num_steps, counted = random.Random(seed), table.parent, 4 * len(layouts), dict[int, set[tuple[Any, ...]]]()
    for number, (num_ranks, num_workers) in enumerate(layouts):
        is_last = number == len(layouts) - 1
        before, stop = saved_step(folder), num_steps if is_last else saved_step(folder) + draw.randint(1, 3)
        job = start_ranks(table, sync, num_ranks, num_workers, num_steps)
        if is_last:
            assert job.wait(timeout=300) == 0, (folder / "log.txt").read_text()
        else:
            assert wait_until(partial(has_come_to, job, folder, stop))
            family = set[int]()
            while found := (children(job.pid) | {job.pid}) - family:  # else one that starts meanwhile would live on
                signal_all(found, signal.SIGSTOP)
                family |= found
            signal_all(family, signal.SIGKILL)
            job.wait()
            assert wait_until(partial(are_gone, family))
        after = saved_step(folder)
        for log in folder.glob("rank-*.jsonl"):
            for line in log.read_text().splitlines():
                if not line.endswith("}"):  # cut by the kill
                    continue
                found = json.loads(line)
                if before < found["step"] <= after:
                    counted.setdefault(found["step"], set()).update(map(tuple, found["samples"]))
            log.unlink()
    batches, rounds = (LANES, NUM_LANES) if sync == "lane" else (BUDGET, 1)
    with StreamingDataset(
        table, folder / "cache", shuffle_seed=5, show_progress=False, batches=batches, transforms=[drawn]
    ) as dataset:
        loader, expected = StreamingDataLoader(dataset, collate_fn=seen), list[set[tuple[Any, ...]]]()
        while len(expected) < num_steps:
            expected += [set().union(*some) for some in batched(loader, rounds)]
        assert [counted[step] for step in sorted(counted)] == expected[:num_steps]
        assert [{sample[:2] for sample in step} for step in expected[:num_steps]] == planned(dataset, num_steps)


@pytest.mark.timeout(600)
def test_a_killed_job_of_ranks_goes_on_with_others_and_gives_the_plan(table: Path) -> None:
    kill_again_and_again(table, "step", [(2, 0), (1, 0)], seed=11)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("sync", ["step", "lane"])
def test_a_job_that_is_killed_50_times_gives_the_plan(sync: str, table: Path) -> None:
    draw = random.Random(seed := int.from_bytes(os.urandom(4)))
    kill_again_and_again(table, sync, [(draw.choice((1, 2, 4)), draw.choice((0, 1, 2))) for _ in range(51)], seed)
