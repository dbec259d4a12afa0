"""What a loader other than StreamingDataLoader cannot know about the dataset that it loads: said once, with the cure."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import FrameType

from torch.utils.data import get_worker_info

from sqlstream.config import DEFAULT_RETAINED
from sqlstream.world import World

logger = logging.getLogger(__name__)

_LOADERS = ("torch.utils.data.", "torchdata.stateful_dataloader.")
"""Modules of loaders that know no ranks."""
_LOOKED_AT = 3
"""Callers that are looked at: a subclass of the dataset may stand between it and the loader."""
_said: set[str] = set()
"""Warnings that this process has given."""


def warn_once(text: str, *arguments: object) -> None:
    """Log a warning once in a process, and once for all workers of a loader."""
    info = get_worker_info()
    if text not in _said and (info is None or info.id == 0):
        _said.add(text)
        logger.warning(text, *arguments)


def warn_of_ranks(read_world: Callable[[], World]) -> None:
    """Say, to a plain loader that asks, that it counts the batches of all ranks as its own."""
    if not _is_called_by_loader():
        return
    world = read_world()
    if world.world_size > 1 and world.rank == 0:
        warn_once(
            "len() of a plain DataLoader counts the batches of all %d ranks together, so a schedule made of it is as many "
            "times too long: use sqlstream.StreamingDataLoader, or dataset.num_steps(batch_size)",
            world.world_size,
        )


def warn_of_paths(may_warn: Callable[[], bool] | None) -> None:
    """Say, in a worker of a loader of which nothing is known, that paths which it gave away are not kept any more.

    Args:
        may_warn: Says whether no process of the dataset has said it (`Handover.may_warn`); None: once in each first worker.
    """
    if may_warn is not None and not may_warn():
        return
    (warn_once if may_warn is None else logger.warning)(
        "samples leave the transforms with paths of cached files, and how many of them this DataLoader has under way is not "
        "known: those of the last %d samples of a worker stay valid. Use sqlstream.StreamingDataLoader, or give the dataset "
        "batch_size= (kept for prefetch_factor=2) or retained_samples=",
        DEFAULT_RETAINED,
    )


def _is_called_by_loader() -> bool:
    """Return whether the method that is in question was called by torch's DataLoader, or torchdata's."""
    frame: FrameType | None = sys._getframe(3)
    for _ in range(_LOOKED_AT):
        if frame is None:
            return False
        if frame.f_globals.get("__name__", "").startswith(_LOADERS):
            return True
        frame = frame.f_back
    return False
