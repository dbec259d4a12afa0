"""Weights that change while a run goes on: from which position, which no process may have planned."""

from __future__ import annotations

from typing import Any

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError, StateError
from sqlstream.stream.run.positions import JobPosition
from sqlstream.stream.run.schedule import Schedule
from sqlstream.stream.run.shares import PLANNED_TOGETHER


def reweight(schedule: Schedule, weights: Any, at_step: int | None, prefetch: int) -> None:
    """Make rows, or streams, weigh `weights` from the next epoch on, or from a step of the epoch under way.

    Args:
        schedule: The run.
        weights: Weights of the rows, or of the streams.
        at_step: The step, counted from the start of the epoch.
        prefetch: Samples that each process plans ahead.

    Raises:
        StateError: The step is handed out or planned already.
    """
    if schedule.is_mixed:
        raise ConfigError(
            "a stream of a mixture keeps the weights of its rows, whose epochs are not those of a run: give weights= to the "
            "stream, or change how often the stream comes, with reweight() of the mixture"
        )
    is_between_epochs = at_step is None and not schedule.is_endless
    following = schedule.counter.next if is_between_epochs else first_free(schedule, prefetch)
    if at_step is None:
        schedule.weighting.add(following.epoch + (following.consumed > 0), 0, weights)
        return
    check_at_least("at_step", at_step, 0)
    epoch, num_steps = schedule.place.epoch, schedule.num_steps
    first = following.consumed // schedule.step_size if following.epoch == epoch else num_steps
    if not first <= at_step < num_steps:
        possible = f"the first possible one is {first}" if first < num_steps else "no step of it is possible any more"
        raise StateError(
            f"the weights cannot change at_step={at_step} of epoch {epoch}, which has {num_steps} steps: {possible}, since "
            "what comes before is handed out or planned; leave at_step out to change them with the next epoch"
        )
    schedule.weighting.add(epoch, at_step * schedule.step_size, weights)


def first_free(schedule: Schedule, prefetch: int) -> JobPosition:
    """Return the first position of the run that no process can have planned, the same on every rank."""
    if not schedule.is_under_way:
        return schedule.counter.next
    if schedule.counter.has_several:
        raise StateError(
            "the weights cannot change within an epoch whose rows give no sample, or several: it is not known which positions "
            "are planned; leave at_step out"
        )
    options, batch_size = schedule.batches, schedule.steps.least_batch_on(schedule.world)
    planned = 1 + -(-(prefetch + PLANNED_TOGETHER) // batch_size)
    if options is None or options.num_workers == 0:
        return schedule.place_after(planned)
    return schedule.place_after(options.num_workers * (options.prefetch_factor + planned))
