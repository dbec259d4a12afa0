"""What scripts take from `webdataset.utils`: their place in the job, and seeds that are other ones there."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from sqlstream import distributed
from sqlstream.compat.webdataset.stages.base import PipelineStage

_MULTIPLIER, _MASK = 31, 0x7FFFFFFF
"""As theirs, so that numbers give the same seeds."""


class WorkerInfo(NamedTuple):
    """The place of a process in its job; theirs is a tuple of these."""

    rank: int
    world_size: int
    worker: int
    num_workers: int


def pytorch_worker_info(group: Any = None) -> WorkerInfo:  # noqa: ARG001 - theirs has it
    """Return rank, number of ranks, number of this DataLoader's worker, and how many there are."""
    world, info = distributed.read_world(), get_worker_info()
    return WorkerInfo(world.rank, world.world_size, *((0, 1) if info is None else (info.id, info.num_workers)))


def pytorch_worker_seed(group: Any = None) -> int:
    """Return a seed that each worker of each rank has another one of."""
    rank, _, worker, _ = pytorch_worker_info(group)
    return rank * 1000 + worker


def make_seed(*args: Any) -> int:
    """Return a seed made of numbers, or of other values that can be hashed."""
    seed = 0
    for arg in args:
        seed = (seed * _MULTIPLIER + hash(arg)) & _MASK
    return seed


def identity(x: Any) -> Any:
    """Return what it is given."""
    return x


__all__ = ["PipelineStage", "WorkerInfo", "identity", "make_seed", "pytorch_worker_info", "pytorch_worker_seed"]
