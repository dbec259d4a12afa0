"""The place in a job, as launchers and torch.distributed tell it, and one seed for all ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sqlstream.distributed import agree_on_seed, read_local_rank, read_world
from sqlstream.errors import ConfigError
from sqlstream.world import World
from tests.processes import start_script

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
PLACE = World(rank=5, world_size=8, local_rank=1, local_world_size=4, node=1, num_nodes=2)
PREFIXES = ("SLURM_", "OMPI_")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what the launcher of the tests may have set."""
    for name in list(os.environ):
        if name in TORCHRUN or name.startswith(PREFIXES):
            monkeypatch.delenv(name)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_without_a_launcher_the_process_is_alone() -> None:
    assert read_world() == World()


@pytest.mark.parametrize("variables", [TORCHRUN, SLURM, OPEN_MPI], ids=["torchrun", "slurm", "open mpi"])
def test_each_launcher_tells_the_same_place(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    set_all(monkeypatch, variables)
    assert read_world() == PLACE


@pytest.mark.parametrize("inner", [TORCHRUN, OPEN_MPI], ids=["torchrun", "open mpi"])
def test_a_launcher_inside_a_slurm_task_is_the_one_that_counts(monkeypatch: pytest.MonkeyPatch, inner: dict[str, str]) -> None:
    set_all(monkeypatch, SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"} | inner)
    assert read_world() == PLACE


def test_slurm_variables_of_a_job_without_step_ones_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(
        monkeypatch,
        {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NNODES": "2"},
    )
    assert read_world() == PLACE


def test_the_body_of_a_batch_script_is_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert read_world() == World()


def test_slurm_nodes_with_unequal_tasks_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    unequal = {"SLURM_STEP_NUM_TASKS": "11", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
    set_all(monkeypatch, SLURM | unequal | {"SLURM_PROCID": "9", "SLURM_NODEID": "2"})
    world = read_world()
    assert (world.node, world.local_world_size, world.is_even) == (2, 3, False)


def test_slurm_ranks_dealt_to_nodes_in_turn_keep_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, SLURM | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"})
    world = read_world()
    assert (world.rank, world.node, world.local_rank) == (3, 1, 1)


def test_open_mpi_ranks_dealt_to_nodes_in_turn_have_places_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    places = set()
    for rank in range(6):
        told = {"SIZE": "6", "RANK": str(rank), "LOCAL_SIZE": "2", "LOCAL_RANK": str(rank // 3)}
        set_all(monkeypatch, {f"OMPI_COMM_WORLD_{name}": value for name, value in told.items()})
        world = read_world()
        places.add((world.node, world.local_rank))
        assert (world.num_nodes, world.local_world_size, read_local_rank()) == (3, 2, rank // 3)
    assert len(places) == 6


def test_rank_and_world_size_alone_mean_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {"RANK": "3", "WORLD_SIZE": "4"})
    assert read_world() == World(rank=3, world_size=4, local_rank=3, local_world_size=4)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is not a whole number"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not"),
        ({"RANK": "1"}, "RANK=1 is set but WORLD_SIZE is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank=2 does not fit world_size=2"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, "local_rank=1 does not fit local_world_size=0"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "many"}, "'many' cannot be read"),
    ],
)
def test_wrong_variables_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str) -> None:
    set_all(monkeypatch, variables)
    with pytest.raises(ConfigError, match=message):
        read_world()


def test_a_world_of_one_without_a_rank_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {"WORLD_SIZE": "1"})
    assert read_world() == World()


def test_reading_the_place_does_not_import_torch() -> None:
    code = "import sys; from sqlstream.distributed import *; agree_on_seed(read_world()); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_one_process_draws_a_new_seed_each_time() -> None:
    seeds = {agree_on_seed(World()) for _ in range(5)}
    assert len(seeds) == 5
    assert all(0 <= seed < 1 << 32 for seed in seeds)


def test_several_ranks_without_torch_distributed_cannot_agree_on_a_seed() -> None:
    with pytest.raises(ConfigError, match=r"shuffle_seed=-1 needs one random seed for 2 ranks.*init_process_group"):
        agree_on_seed(World(rank=1, world_size=2))


RANK_SCRIPT = """
import dataclasses, json, sys
import torch.distributed as dist
from sqlstream.distributed import agree_on_seed, read_world
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
world = read_world()
print(json.dumps([dataclasses.asdict(world), agree_on_seed(world), agree_on_seed(world)]))
dist.barrier()
dist.destroy_process_group()
"""


def run_two_ranks(tmp_path: Path, variables: list[dict[str, str]]) -> list[tuple[World, list[int]]]:
    """Two real processes of one gloo group; returns each one's world and seeds."""
    script = tmp_path / "rank.py"
    script.write_text(RANK_SCRIPT)
    ranks = [
        start_script(script, str(tmp_path / "store"), str(rank), environment=os.environ | own)
        for rank, own in enumerate(variables)
    ]
    done = [rank.finish(300) for rank in ranks]
    assert [rank.returncode for rank in done] == [0, 0], [rank.stderr for rank in done]
    told = [json.loads(rank.stdout) for rank in done]
    return [(World(**place), seeds) for place, *seeds in told]


@pytest.mark.timeout(600)
def test_ranks_of_a_process_group_know_their_place_and_agree_on_every_seed(tmp_path: Path) -> None:
    # WORLD_SIZE alone, as Lightning leaves it: the process group knows better
    ranks = run_two_ranks(tmp_path, [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2"}])
    assert [world for world, _ in ranks] == [
        World(rank=rank, world_size=2, local_rank=rank, local_world_size=2) for rank in range(2)
    ]
    (first, second), other = ranks[0][1], ranks[1][1]
    assert [first, second] == other
    assert first != second


@pytest.mark.timeout(600)
def test_a_process_group_takes_its_nodes_from_the_launcher_of_the_same_job(tmp_path: Path) -> None:
    one_rank_a_node = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ranks = run_two_ranks(tmp_path, [one_rank_a_node | {"RANK": str(rank)} for rank in range(2)])
    assert [world for world, _ in ranks] == [World(rank=rank, world_size=2, node=rank, num_nodes=2) for rank in range(2)]


MESH_SCRIPT = """
import json
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from sqlstream.distributed import world_of_mesh
from sqlstream.errors import ConfigError
for shape, names in (((2, 3), ("dp", "tp")), ((3, 2), ("tp", "dp"))):
    for rank in range(6):
        dist.init_process_group("fake", rank=rank, world_size=6, store=FakeStore())
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        world = world_of_mesh(mesh, "dp")
        try:
            world_of_mesh(mesh, "pp")
        except ConfigError as error:
            refused = str(error)
        dist.destroy_process_group()
        print(json.dumps([names[0], rank, world.rank, world.world_size, refused]))
"""


@pytest.mark.timeout(600)
def test_ranks_along_one_dimension_of_a_mesh_are_told_apart_and_others_count_as_one(tmp_path: Path) -> None:
    script = tmp_path / "mesh.py"
    script.write_text(MESH_SCRIPT)
    told = start_script(script).finish()
    assert told.returncode == 0, told.stderr
    places: dict[str, list[tuple[int, int]]] = {}
    for line in told.stdout.splitlines():
        first, _, rank, world_size, refused = json.loads(line)
        places.setdefault(first, []).append((rank, world_size))
        assert "no dimension 'pp': give one of" in refused
    assert places["dp"] == [(0, 2)] * 3 + [(1, 2)] * 3
    assert places["tp"] == [(0, 2), (1, 2)] * 3


REPLICAS_SCRIPT = """
import json, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from sqlstream.distributed import agree_on_seed, have_same, world_of_mesh
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
worlds = [world_of_mesh(mesh, "dp"), world_of_mesh(mesh["dp"], "dp")]
print(json.dumps([[agree_on_seed(world), have_same(world, "a"), have_same(world, str(rank))] for world in worlds]))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.timeout(600)
def test_ranks_that_share_a_place_of_a_mesh_agree_as_others_do(tmp_path: Path) -> None:
    script = tmp_path / "replicas.py"
    script.write_text(REPLICAS_SCRIPT)
    ranks = [start_script(script, str(tmp_path / "store"), str(rank)) for rank in range(2)]
    done = [rank.finish(300) for rank in ranks]
    assert [rank.returncode for rank in done] == [0, 0], [rank.stderr for rank in done]
    first, other = [json.loads(rank.stdout) for rank in done]
    assert first == other
    assert [same for _, *same in first] == [[True, False]] * 2
