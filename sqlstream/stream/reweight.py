"""Changes the weights of a run that is under way: from which place on, and whether that is still possible."""

from __future__ import annotations

from sqlstream.config import check_at_least
from sqlstream.errors import StateError
from sqlstream.index.weights import WeightsSpec
from sqlstream.stream.epochs import Mark
from sqlstream.stream.schedule import Schedule
from sqlstream.stream.shares import PLANNED_TOGETHER


def reweight(schedule: Schedule, weights: WeightsSpec | None, at_step: int | None, prefetch: int) -> None:
    """Have rows weigh `weights` from the next epoch on, or from a step of the epoch under way.

    Args:
        schedule: Whose.
        weights: What rows weigh; None: all the same.
        at_step: The step, counted from the start of the epoch.
        prefetch: Samples that each process plans ahead.

    Raises:
        StateError: The step is handed out already.
    """
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


def first_free(schedule: Schedule, prefetch: int) -> Mark:
    """Return the first place of the run that no process can have planned, the same on every rank."""
    if not schedule.is_under_way:
        return schedule.counter.next
    if schedule.counter.has_several:
        raise StateError(
            "the weights cannot change within an epoch whose rows give no sample, or several: it is not known which positions "
            "are planned; leave at_step out"
        )
    options, batch_size = schedule.batches, schedule.plan.batch_size or 1
    planned = 1 + -(-(prefetch + PLANNED_TOGETHER) // batch_size)
    if options is None or options.num_workers == 0:
        return schedule.place_after(planned)
    return schedule.place_after(options.num_workers * (options.prefetch_factor + planned))
