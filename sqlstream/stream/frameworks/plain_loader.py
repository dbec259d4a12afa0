"""What a loader other than StreamingDataLoader cannot know about its dataset: one warning for each dataset, with the cure."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

from torch.utils.data import get_worker_info

from sqlstream.config import DEFAULT_RETAINED
from sqlstream.errors import ConfigError, UnknownLengthError
from sqlstream.stream.run.schedule import Schedule
from sqlstream.world import World

logger = logging.getLogger(__name__)

_LOADERS = ("torch.utils.data.", "torchdata.stateful_dataloader.")
"""Modules of loaders that know no ranks."""
_SKIPPING = ("accelerate.data_loader", "SkipDataLoader")
"""Module and class of what `skip_first_batches` returns."""
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
    frame = _loader_frame()
    if frame is None or _is_of_skipping(frame):
        return
    world = read_world()
    if world.world_size > 1 and world.rank == 0:
        warn_once(
            given,
            "len() of a plain DataLoader counts the batches of all %d ranks together, so a schedule made of it is as many "
            "times too long: use sqlstream.StreamingDataLoader, or dataset.num_steps(batch_size)",
            world.world_size,
        )


def warn_of_length(num_rows: int, schedule: Schedule, given: set[str]) -> None:
    """Warn, if a plain loader asks, that it counts other batches in an epoch than it gives.

    Args:
        num_rows: Rows of the dataset, by which it counts.
        schedule: The order of the dataset, which may take another number of samples, or end each worker's share in between.
        given: Warnings that this process has given.
    """
    frame = _loader_frame()
    loader = None if frame is None else frame.f_locals.get("self")
    batch_size, num_workers = getattr(loader, "batch_size", None), getattr(loader, "num_workers", 0)
    if not batch_size or schedule.is_endless or schedule.world.world_size > 1:  # of several ranks there is another warning
        return
    is_dropping = bool(getattr(loader, "drop_last", False))
    try:
        shares, alone = (schedule.samples_of_workers(number) for number in (max(1, num_workers), 1))
    except (ConfigError, UnknownLengthError):
        return  # it says so as it is iterated, or has no length
    counted, made, without_workers = (_num_batches(some, batch_size, is_dropping) for some in ([num_rows], shares, alone))
    if made == counted:
        return
    cure = f"give the dataset batch_size={batch_size}, or use" if without_workers == counted else "use"
    effect = "leaves rows out" if made > counted else "counts epochs as longer than they are, and resumes at another place"
    warn_once(
        given,
        "len() of a plain DataLoader is %d, by the rows, and it gives %d batches an epoch (num_workers=%d), so a trainer that "
        "goes by len() %s: %s sqlstream.StreamingDataLoader",
        *(counted, made, num_workers, effect, cure),
    )


def _num_batches(shares: Sequence[int], batch_size: int, is_dropping: bool) -> int:
    return sum(share // batch_size if is_dropping else -(-share // batch_size) for share in shares)


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


def _is_of_skipping(frame: FrameType | None) -> bool:
    """Return whether a loader is what Accelerate makes of a StreamingDataLoader, also for a Trainer, to skip batches."""
    while frame is not None:
        if frame.f_globals.get("__name__") == _SKIPPING[0] and type(frame.f_locals.get("self")).__name__ == _SKIPPING[1]:
            return True
        frame = frame.f_back
    return False


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
