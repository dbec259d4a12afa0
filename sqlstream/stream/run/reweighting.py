"""Weights that change while a run goes on: from which position, which no process may have planned."""

from __future__ import annotations

import math
from typing import Any

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError, StateError
from sqlstream.stream.run.positions import JobPosition
from sqlstream.stream.run.schedule import Schedule
from sqlstream.stream.run.shares import PLANNED_TOGETHER


def reweight(schedule: Schedule, weights: Any, at_step: int | None, at_epoch: int | None, prefetch: int) -> None:
    """Make rows, or streams, weigh `weights` from the next epoch on, from a later one, or from a step of the epoch under way.

    Where they begin is never what happens to be free: that depends on workers and prefetch, and the order must not.

    Args:
        schedule: The run.
        weights: Weights of the rows, or of the streams.
        at_step: The step, counted from the start of the epoch.
        at_epoch: The epoch; without it and `at_step` the next one.
        prefetch: Samples that each process plans ahead.

    Raises:
        StateError: The step, or the epoch, is handed out or planned already.
        ConfigError: Both are given, or there is no next epoch.
    """
    if schedule.is_mixed:
        raise ConfigError(
            "a stream of a mixture keeps the weights of its rows, whose epochs are not those of a run: give weights= to the "
            "stream, or change how often the stream comes, with reweight() of the mixture"
        )
    if at_step is None:
        schedule.weighting.add(_epoch_of_change(schedule, at_epoch, prefetch), 0, weights)
        return
    if at_epoch is not None:
        raise ConfigError(f"at_step={at_step} is a step of the epoch under way, at_epoch={at_epoch} another: give one of them")
    at_step = check_at_least("at_step", at_step, 0)
    following = first_free(schedule, prefetch)
    epoch, num_steps = schedule.place.epoch, schedule.num_steps if schedule.has_end else math.inf
    first = following.consumed // schedule.step_size if following.epoch == epoch else num_steps
    if not first <= at_step < num_steps:
        possible = f"the first possible one is {first}" if first < num_steps else "no step of it is possible any more"
        which, cure = "which has no end", f"give at_step={first}, or a later one"
        if schedule.has_end:
            which, cure = f"which has {num_steps} steps", "leave at_step out to change them with the next epoch"
        raise StateError(
            f"the weights cannot change at_step={at_step} of epoch {epoch}, {which}: {possible}, since what comes before is "
            f"handed out or planned; {cure}"
        )
    schedule.weighting.add(epoch, at_step * schedule.step_size, weights)


def _epoch_of_change(schedule: Schedule, at_epoch: int | None, prefetch: int) -> int:
    """Return the epoch from which on weights change that do so between epochs."""
    if not schedule.has_end:
        raise ConfigError("the weights cannot change with the next epoch, since stop='never' has none: give at_step=")
    if at_epoch is not None:
        at_epoch = check_at_least("at_epoch", at_epoch, 0)
    if schedule.is_endless:  # the next epoch is planned within the iteration of this one
        following, free = schedule.place, first_free(schedule, prefetch)
    else:
        following = free = schedule.counter.next
    asked = _first_epoch(following) if at_epoch is None else at_epoch
    if asked < (first := _first_epoch(free)):
        raise StateError(
            f"the weights cannot change from epoch {asked} on, since steps of it are handed out or planned: the first possible "
            f"one is {first}; give at_epoch={first}, or a later one, the same on every rank"
        )
    return asked


def _first_epoch(job: JobPosition) -> int:
    """Return the first epoch that begins at a position or behind it."""
    return job.epoch + (job.consumed > 0)


def first_free(schedule: Schedule, prefetch: int) -> JobPosition:
    """Return the first position of the run that no process can have planned, the same on every rank."""
    if not schedule.is_under_way:
        return schedule.counter.next
    if schedule.counter.has_several:
        raise StateError(
            "the weights cannot change within an iteration whose rows give no sample, or several: it is not known which "
            "positions are planned; leave at_step and infinite_iteration out, then they change with the next epoch"
        )
    options, batch_size = schedule.batches, schedule.steps.least_batch_on(schedule.world)
    planned = 1 + -(-(prefetch + PLANNED_TOGETHER) // batch_size)
    if options is None:
        return schedule.place_after(planned)
    if options.num_workers:
        planned = options.num_workers * (options.prefetch_factor + planned)
    return schedule.place_after(planned + options.num_held)
