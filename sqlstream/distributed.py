"""What this process knows of its training job, and what ranks must agree on: a random seed, rows that may change.

Nothing here imports torch, creates a process group, waits at a barrier or touches a GPU: torch.distributed is asked only if the
training script has initialised it. Call these in the trainer process and hand the result to DataLoader workers: a spawned
worker has no process group, and would take itself for a job of one.
"""

from __future__ import annotations

import secrets
import sys
from itertools import count
from typing import Any

from sqlstream.environment import LauncherRank, read_launcher_rank
from sqlstream.errors import ConfigError
from sqlstream.world import World

_agreement_numbers = count()
"""Tells the seeds of one job apart: ranks ask in the same order, as for any collective, so their numbers match."""
_comparison_numbers = count()
"""The same for comparisons."""


def read_world() -> World:
    """Return this process's place: from torch.distributed if it is initialised, else from the launcher's variables, else alone.

    Raises:
        ConfigError: The launcher's variables contradict each other, or are half there.
    """
    return find_world() or World()


def find_world() -> World | None:
    """Return this process's place as `read_world` does; None: neither torch.distributed nor a launcher says one.

    torch.distributed does not know nodes: they come from the launcher if it speaks of the same job, else one node is assumed.

    Raises:
        ConfigError: The launcher's variables contradict each other, or are half there.
    """
    distributed = _initialised_torch_distributed()
    if distributed is None:
        launcher = read_launcher_rank()
        return None if launcher is None else _world_of(launcher)
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    launcher = read_launcher_rank(must_be_whole=False)
    if launcher is not None and (launcher.rank, launcher.world_size) == (rank, world_size):
        return _world_of(launcher)
    return World(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)


def read_local_rank() -> int:
    """Return which of the trainers of its machine this one is, as its launcher says: a GPU may be chosen by it.

    Raises:
        ConfigError: The launcher's variables contradict each other, or are half there.
    """
    world, launcher = read_world(), read_launcher_rank(must_be_whole=False)
    if launcher is None or launcher.local_rank is None or launcher.rank != world.rank:
        return world.local_rank
    return launcher.local_rank


def world_of_mesh(mesh: Any, dimension: str) -> World:
    """Return this process's place along one dimension of a DeviceMesh, which ranks that differ in other dimensions share.

    Nodes are not told apart: give `World` itself where `num_canonical_nodes` needs them.

    Args:
        mesh: A `torch.distributed.device_mesh.DeviceMesh` with named dimensions.
        dimension: The one along which samples differ, such as `'dp'`.

    Raises:
        ConfigError: The mesh has no such dimension.
    """
    names = mesh.mesh_dim_names or ()
    if dimension not in names:
        raise ConfigError(f"the mesh has no dimension {dimension!r}: give one of {', '.join(names) or 'its names to it first'}")
    rank, world_size = mesh.get_local_rank(dimension), mesh.size(names.index(dimension))
    distributed = _initialised_torch_distributed()
    num_ranks = mesh.size() if distributed is None else distributed.get_world_size()  # a slice of a mesh has only its own
    num_replicas = num_ranks // world_size
    return World(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, num_replicas=num_replicas)


def agree_on_seed(world: World) -> int:
    """Return a random seed that is the same on every rank (`shuffle_seed=-1`); every rank must call it, and as often.

    Raises:
        ConfigError: There are other ranks, but no way to talk to them.
    """
    seed = secrets.randbits(32)  # short enough to read in a log and to pass as shuffle_seed= later
    if world.num_processes == 1:
        return seed
    store = _store()
    if store is None:
        raise ConfigError(
            f"shuffle_seed=-1 needs one random seed for {world.num_processes} ranks, and torch.distributed is not initialised: "
            f"call torch.distributed.init_process_group first, or give shuffle_seed=<number>"
        )
    key = f"sqlstream/seed/{next(_agreement_numbers)}"
    if store.add(f"{key}/drawn", 1) == 1:  # whichever comes first: several may have rank 0
        store.set(key, str(seed))
    return int(store.get(key))


def have_same(world: World, text: str | None) -> bool:
    """Return, on every rank alike, whether all ranks have the same text; every rank must call it, and as often.

    Each asks the group's store a few times, however many ranks there are; it returns when all have called it.

    Args:
        world: This rank's place.
        text: What it has; None: nothing, which is the same as no other's.

    Raises:
        ConfigError: There are other ranks, but no way to talk to them.
    """
    if world.num_processes == 1:
        return text is not None
    store = _store()
    if store is None:
        raise ConfigError(
            f"refresh='epoch' has {world.num_processes} ranks agree on the rows of an epoch, and torch.distributed is not "
            "initialised: call torch.distributed.init_process_group first, or leave refresh out"
        )
    key = _compare(world, store, text)
    return bool(store.get(f"{key}/all") == b"0")


def disagree(world: World) -> None:
    """Call this in place of `have_same` on a rank that fails before it: the others are told, and this one waits for none."""
    if world.num_processes > 1 and (store := _store()) is not None:
        _compare(world, store, None)


def _compare(world: World, store: Any, text: str | None) -> str:
    """Tell the other ranks what this one has; return where the result is once all have done so."""
    key = f"sqlstream/same/{next(_comparison_numbers)}"
    if store.add(f"{key}/begun", 1) == 1:  # whichever comes first: several may have rank 0
        store.set(f"{key}/text", text or "")
    is_same = text is not None and text != "" and store.get(f"{key}/text") == text.encode()
    store.add(f"{key}/others", int(not is_same))
    if store.add(f"{key}/arrived", 1) == world.num_processes:  # the last one: it sees what all others have added
        store.set(f"{key}/all", str(store.add(f"{key}/others", 0)))
    return key


def _store() -> Any | None:
    """Return the key-value store of the process group.

    Not a broadcast: with NCCL that takes GPU memory, and a second group for the CPU is a group too many.
    """
    distributed = _initialised_torch_distributed()
    return None if distributed is None else distributed.distributed_c10d._get_default_store()


def _initialised_torch_distributed() -> Any | None:
    """Return the module torch.distributed if the program has imported and initialised it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def _world_of(launcher: LauncherRank) -> World:
    """Return the place that a launcher told, with what it left out worked out for nodes that are alike.

    Without a node, the place there goes by the rank, too: Open MPI may deal ranks to nodes in turn, and no two have one place.
    """
    rank, world_size = launcher.rank, launcher.world_size
    num_nodes, local_world_size = launcher.num_nodes, launcher.local_world_size
    if local_world_size is None:
        local_world_size = -(-world_size // (num_nodes or 1))
    if num_nodes is None:
        num_nodes = -(-world_size // local_world_size) if local_world_size > 0 else 1
    is_one_node = num_nodes == 1
    local_rank = None if launcher.node is None else launcher.local_rank
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=rank if is_one_node else rank % local_world_size if local_rank is None else local_rank,
        local_world_size=local_world_size,
        node=launcher.node if launcher.node is not None else 0 if is_one_node else rank // local_world_size,
        num_nodes=num_nodes,
    )
