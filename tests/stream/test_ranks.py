"""The place in the job: torchrun and its death, nodes with caches of their own, ranks that share their samples."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError
from sqlstream.order import Plan
from sqlstream.world import World
from tests.processes import ROOT, children, is_alive, wait_until
from tests.stream.sources import Photos, check_bytes
from tests.stream.tables import make_table, rows_of

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
NUM_ROWS, GLOBAL_BATCH = 120, 12


def start_torchrun(folder: Path, num_ranks: int, num_workers: int, last_step: int) -> subprocess.Popen[bytes]:
    with (folder / f"log-{num_ranks}.txt").open("wb") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"),
                *("-m", "tests.stream.programs", "train_rank", str(folder / f"rows-{NUM_ROWS}.parquet"), str(folder)),
                *(str(GLOBAL_BATCH), str(num_workers), str(last_step)),
            ],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def saved(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    state: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"step": 0}
    return state


def lines_of(folder: Path, num_ranks: int) -> Iterator[dict[str, Any]]:
    for rank in range(num_ranks):
        for line in (folder / f"rank-{rank}-of-{num_ranks}.jsonl").read_text().splitlines():
            if line.endswith("}"):  # the last one may be cut
                yield json.loads(line)


def num_steps_of(folder: Path, num_ranks: int) -> list[int]:
    logs = [folder / f"rank-{rank}-of-{num_ranks}.jsonl" for rank in range(num_ranks)]
    return [log.read_text().count("\n") if log.exists() else 0 for log in logs]


@pytest.mark.timeout(800)
def test_a_killed_job_goes_on_with_other_ranks_and_workers_and_no_row_is_lost_or_seen_twice(tmp_path: Path) -> None:
    """4 ranks x 2 workers on gloo, SIGKILL at step 7 of 10 of an epoch, then 2 ranks x 3 workers from the last state."""
    make_table(tmp_path, NUM_ROWS)
    job = start_torchrun(tmp_path, 4, 2, 7)
    assert wait_until(lambda: num_steps_of(tmp_path, 4) == [7] * 4 or job.poll() is not None)
    family = children(job.pid) | {job.pid}
    assert len(family) >= 1 + 4 + 4 * 2
    for pid in family:
        with contextlib.suppress(ProcessLookupError):  # a child of one that is gone has ended by itself
            os.kill(pid, signal.SIGKILL)
    job.wait()
    assert wait_until(lambda: not any(is_alive(pid) for pid in family))
    before = saved(tmp_path)["step"]
    assert before == 6, (tmp_path / "log-4.txt").read_text()
    second = start_torchrun(tmp_path, 2, 3, -1)
    assert second.wait(timeout=300) == 0, (tmp_path / "log-2.txt").read_text()
    steps: dict[int, list[tuple[int, int]]] = {}
    for num_ranks, counted in ((4, range(1, before + 1)), (2, range(before + 1, 100))):
        for line in lines_of(tmp_path, num_ranks):
            if line["step"] in counted:
                steps.setdefault(line["step"], []).extend(map(tuple, line["rows"]))
    plan = Plan(num_samples=NUM_ROWS, seed=5, batch_size=1)
    order = [(epoch, row) for epoch in range(2) for row in plan.rows(epoch, 0, NUM_ROWS).tolist()]
    assert sorted(steps) == list(range(1, 21))
    for step, rows in steps.items():
        assert sorted(rows) == sorted(order[(step - 1) * GLOBAL_BATCH : step * GLOBAL_BATCH]), step


# -- nodes ------------------------------------------------------------------------------------------------------------


def node_variables(node: int) -> dict[str, str]:
    return {
        "RANK": str(node),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": "2",
    }


@pytest.mark.parametrize("num_canonical_nodes", [1, 2])
def test_with_canonical_nodes_a_node_downloads_nothing_in_its_second_epoch(
    photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_canonical_nodes: int
) -> None:
    """Two nodes by environment, each with a cache that holds half of the data (and a little more)."""
    seen: list[set[int]] = []
    for node in range(2):
        with StreamingDataset(
            photos.src,
            tmp_path / f"node-{node}",
            columns_to_download=["image"],
            transforms=[check_bytes],
            shuffle_seed=3,
            num_canonical_nodes=num_canonical_nodes,
            cache_limit=photos.total_bytes * 55 // 100,
            prefetch=8,
        ) as dataset:
            for name, value in node_variables(node).items():
                monkeypatch.setenv(name, value)  # after the dataset was made: read when iteration starts
            loader = StreamingDataLoader(dataset, batch_size=4, num_workers=2, collate_fn=rows_of)
            first = {row for batch in loader for _, row in batch}
            num_gets = len(photos.server.requests())
            second = {row for batch in loader for _, row in batch}
            num_new = sum(request.path.endswith(".jpg") for request in photos.server.requests()[num_gets:])
            seen.append(first)
            if num_canonical_nodes == 2:
                assert second == first
                assert num_new == 0
            else:
                assert second != first
                assert num_new > 10, "the test would not notice a node that changes its half"
    assert len(seen[0] | seen[1]) == photos.num


# -- ranks that take the same samples ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_replicated_ranks_get_the_same_samples_and_the_order_does_not_change(tmp_path: Path, num_groups: int) -> None:
    src = make_table(tmp_path, 24)

    def batches(world: World, replication: int) -> list[list[tuple[int, int]]]:
        with StreamingDataset(
            src, tmp_path / "cache", shuffle_seed=5, world=world, replication=replication, show_progress=False
        ) as dataset:
            loader = StreamingDataLoader(dataset, batch_size=12 // num_groups, collate_fn=rows_of)
            taken = list(loader)
            assert len(taken) == len(loader) == 2
            return taken

    plain = [batches(World(rank=rank, world_size=num_groups, local_world_size=1), 1) for rank in range(num_groups)]
    for replication in (2, 4):
        for rank in range(num_groups * replication):
            world = World(rank=rank, world_size=num_groups * replication, local_world_size=1)
            assert batches(world, replication) == plain[rank // replication]


def test_a_replication_that_does_not_divide_the_job_is_refused(tmp_path: Path) -> None:
    with (
        StreamingDataset(make_table(tmp_path, 24), tmp_path / "cache", world=World(world_size=4), replication=3) as dataset,
        pytest.raises(ConfigError, match="replication=3 does not divide world_size=4"),
    ):
        next(iter(dataset))
    with pytest.raises(ConfigError, match="replication=0"):
        StreamingDataset(make_table(tmp_path, 24), tmp_path / "cache", replication=0)


def test_the_place_is_read_when_iteration_starts_and_goes_to_spawned_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StreamingDataset(make_table(tmp_path, 24), tmp_path / "cache", show_progress=False) as dataset:
        assert dataset.world == World()
        for name, value in node_variables(1).items():
            monkeypatch.setenv(name, value)
        assert dataset.world == World(rank=1, world_size=2, node=1, num_nodes=2)
        loader = StreamingDataLoader(dataset, batch_size=6, num_workers=1, multiprocessing_context="spawn", collate_fn=rows_of)
        assert [row for batch in loader for _, row in batch] == [*range(6, 12), *range(18, 24)]


def test_a_slow_start_of_workers_never_takes_an_epoch_twice(tmp_path: Path) -> None:
    """The trainer, not its workers, decides which epoch an iteration is: leaving at once and starting again is the next one."""
    with StreamingDataset(make_table(tmp_path, 24), tmp_path / "cache", shuffle_seed=1, show_progress=False) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=4, num_workers=2, collate_fn=rows_of, worker_init_fn=wait_a_little)
        for _ in range(3):
            iter(loader)
        assert {epoch for batch in loader for epoch, _ in batch} == {3}


def wait_a_little(worker: int) -> None:
    time.sleep(0.1)
