"""Tensors in memory that a trainer and its workers share, and copies of them that are shared, too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import torch

from sqlstream.errors import ConfigError


def shared_bytes(num_bytes: int) -> torch.Tensor:
    """Return zeros that processes share: [num_bytes], uint8.

    To fill or copy more than 32768 numbers torch takes threads, for which a process that was forked from one that did so waits
    for ever: not `torch.zeros`, nor `share_memory_`.
    """
    return torch.empty(0, dtype=torch.uint8).set_(_storage(num_bytes))  # [bytes]


def _storage(num_bytes: int) -> torch.UntypedStorage:
    """Return memory without a name: of torch's own in /dev/shm containers have little, and batches of workers fill it.

    Torch shares a descriptor's memory only where it sends descriptors; by names it would copy it, and free what arrays show.
    """
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]  # torch annotates it not
    if num_bytes and strategy == "file_descriptor":
        with contextlib.suppress(OSError):  # none left, or forbidden in this container
            return _without_a_name(num_bytes)
    try:
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigError(
            f"there is no room for {num_bytes} bytes of memory that a trainer shares with its workers ({error}): make /dev/shm "
            "larger (docker run --shm-size=8g), or have torch send descriptors "
            "(torch.multiprocessing.set_sharing_strategy('file_descriptor'))"
        ) from error
    return storage


def _without_a_name(num_bytes: int) -> torch.UntypedStorage:
    new_shared: Callable[[int, int], torch.UntypedStorage]
    new_shared = torch.UntypedStorage._new_shared_fd_cpu  # type: ignore[attr-defined]  # torch's stubs leave it out
    fd = os.memfd_create("sqlstream-shared")
    try:
        os.ftruncate(fd, num_bytes)
        return new_shared(fd, num_bytes)
    finally:
        os.close(fd)  # torch keeps one of its own


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
