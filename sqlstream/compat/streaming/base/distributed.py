"""What users import from `streaming.base.distributed`: the place of this process in its job, and calls of all ranks.

The place is what our datasets go by: that of torch.distributed, or of the launcher's variables.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, distributed

from sqlstream.distributed import read_local_rank, read_world
from sqlstream.errors import ConfigError

__all__ = [
    "all_gather",
    "all_gather_object",
    "barrier",
    "broadcast",
    "get_local_rank",
    "get_local_world_size",
    "get_rank",
    "get_world_size",
    "maybe_init_dist",
]

Value = TypeVar("Value")


def get_rank() -> int:
    """Return the rank of this process."""
    return read_world().rank


def get_world_size() -> int:
    """Return the number of ranks."""
    return read_world().world_size


def get_local_rank() -> int:
    """Return the rank of this process on its node."""
    return read_local_rank()


def get_local_world_size() -> int:
    """Return the number of ranks on this node."""
    return read_world().local_world_size


def barrier() -> None:
    """Wait for all ranks, where there is a process group."""
    if _has_group():
        distributed.barrier()


def broadcast(tensor: Tensor, src: int) -> None:  # [...]
    """Give all ranks the tensor of one, where there is a process group."""
    if _has_group():
        distributed.broadcast(tensor, src)


def all_gather(tensor_list: list[Tensor], tensor: Tensor) -> None:  # [...], [...]
    """Fill a list with the tensors of all ranks, where there is a process group."""
    if _has_group():
        distributed.all_gather(tensor_list, tensor)


def all_gather_object(obj: Value) -> list[Value]:
    """Return the objects of all ranks.

    Raises:
        ConfigError: There are several ranks, and no process group.
    """
    if _has_group():
        found: list[Value] = [obj] * distributed.get_world_size()
        distributed.all_gather_object(found, obj)
        return found
    if (num_ranks := get_world_size()) > 1:
        raise ConfigError(
            f"all_gather_object on {num_ranks} ranks without a process group: call torch.distributed.init_process_group(), or "
            "maybe_init_dist(), before"
        )
    return [obj]


def maybe_init_dist() -> bool:
    """Make a process group if there are several ranks and none is there; return whether it was made here."""
    if get_world_size() == 1 or not distributed.is_available() or distributed.is_initialized():
        return False
    has_nccl = torch.cuda.is_available() and distributed.is_nccl_available()
    distributed.init_process_group("nccl" if has_nccl else "gloo", rank=get_rank(), world_size=get_world_size())
    return True


def _has_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()
