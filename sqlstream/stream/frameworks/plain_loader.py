"""What a loader other than StreamingDataLoader cannot know about its dataset: one warning for each dataset, with the cure."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

from torch.utils.data import get_worker_info

from sqlstream.config import DEFAULT_RETAINED
from sqlstream.world import World

logger = logging.getLogger(__name__)

_LOADERS = ("torch.utils.data.", "torchdata.stateful_dataloader.")
"""Modules of loaders that know no ranks."""
_LOOKED_AT = 4
"""Number of callers that are looked at: a subclass of the dataset may be between it and the loader."""


def warn_once(given: set[str], text: str, *arguments: object) -> None:
    """Log a warning that is not among those `given`, and not in a second worker of the same loader."""
    info = get_worker_info()
    if text not in given and (info is None or info.id == 0):
        given.add(text)
        logger.warning(text, *arguments)


def warn_of_ranks(read_world: Callable[[], World], given: set[str]) -> None:
    """Warn, if a plain loader asks, that it counts the batches of all ranks as its own."""
    if not _is_called_by_loader():
        return
    world = read_world()
    if world.world_size > 1 and world.rank == 0:
        warn_once(
            given,
            "len() of a plain DataLoader counts the batches of all %d ranks together, so a schedule made of it is as many "
            "times too long: use sqlstream.StreamingDataLoader, or dataset.num_steps(batch_size)",
            world.world_size,
        )


def warn_of_workers(num_rows: int, shares: Callable[[int], Sequence[int]], given: set[str]) -> None:
    """Warn, if a plain loader asks, that its workers give more batches than it counts: each ends with an incomplete one.

    Args:
        num_rows: Rows of the dataset, by which it counts.
        shares: Returns the samples of an epoch that each of so many workers makes.
        given: Warnings that this process has given.
    """
    frame = _loader_frame()
    loader = None if frame is None else frame.f_locals.get("self")
    batch_size, num_workers = getattr(loader, "batch_size", None), getattr(loader, "num_workers", 0)
    if not batch_size or num_workers < 2 or getattr(loader, "drop_last", True):
        return
    num_counted, num_given = (sum(-(-share // batch_size) for share in some) for some in ([num_rows], shares(num_workers)))
    if num_given > num_counted:
        warn_once(
            given,
            "len() of a plain DataLoader is %d, and its %d workers give %d batches, so a trainer that stops after len() leaves "
            "rows out: give the dataset batch_size=%d, or use sqlstream.StreamingDataLoader",
            *(num_counted, num_workers, num_given, batch_size),
        )


def warn_of_paths(may_warn: Callable[[], bool] | None, given: set[str]) -> None:
    """Warn, in a process of a loader of which nothing is known, that paths which it gave away are not kept any more.

    Args:
        may_warn: Returns True to one process of the dataset (`Handover.may_warn`); None: each loader's first worker warns.
        given: Warnings that this process has given.
    """
    if may_warn is not None and not may_warn():
        return
    warn = partial(warn_once, given) if may_warn is None else logger.warning
    warn(
        "samples leave the transforms with paths of cached files, and how many of them this DataLoader has under way is not "
        "known: those of the last %d samples of each process stay valid. Use sqlstream.StreamingDataLoader, or give the "
        "dataset batch_size= (kept for prefetch_factor=2) or retained_samples=",
        DEFAULT_RETAINED,
    )


def collates_samples() -> bool | None:
    """Return whether a loader that iterates a dataset makes batches itself (`batch_size=` of it); None: no loader asks."""
    frame = _loader_frame()
    if frame is None:
        return None
    return bool(frame.f_locals.get("auto_collation", True))


def _is_called_by_loader() -> bool:
    """Return whether torch's DataLoader, or torchdata's, has called the method of the dataset that asks."""
    return _loader_frame() is not None


def _loader_frame() -> FrameType | None:
    """Return the frame of torch's DataLoader, or torchdata's, that has called the method of the dataset that asks."""
    frame: FrameType | None = sys._getframe(3)
    for _ in range(_LOOKED_AT):
        if frame is None:
            return None
        if frame.f_globals.get("__name__", "").startswith(_LOADERS):
            return frame
        frame = frame.f_back
    return None
