"""Tensors in memory that a trainer and its workers share, and copies of them that are shared, too."""

from __future__ import annotations

import torch


def shared_bytes(num_bytes: int) -> torch.Tensor:
    """Return zeros that processes share: [num_bytes], uint8.

    To fill or copy more than 32768 numbers torch takes threads, for which a process that was forked from one that did so waits
    for ever: not `torch.zeros`, nor `share_memory_`.
    """
    storage = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]  # torch annotates it not
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # [bytes]


def is_shared(tensor: torch.Tensor) -> bool:  # [...]
    """Return whether a tensor is in memory that processes share."""
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]  # torch annotates it not


def as_shared(tensor: torch.Tensor) -> torch.Tensor:  # [...]
    """Return a tensor in memory that processes share: the same one, or a copy if it was unpickled or copied without that.

    What comes from `pickle` or `deepcopy` is in memory of this process alone. Workers that are forked then would not see what
    is written; and for those that are spawned torch moves the memory as it pickles the tensor, and frees what arrays show.
    """
    if is_shared(tensor):
        return tensor
    own = tensor.contiguous()  # [...]
    shared = shared_bytes(own.numel() * own.element_size())  # [bytes]
    shared.numpy()[:] = own.view(-1).view(torch.uint8).numpy()  # [bytes]
    return shared.view(own.dtype).view(own.shape)  # [...]
