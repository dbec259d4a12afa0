"""From the position of a run to a state that is saved, and back."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from sqlstream.config import flag_of
from sqlstream.stream.run.positions import JobPosition, RunPosition
from sqlstream.stream.run.schedule import Schedule
from sqlstream.stream.run.state import StreamState
from sqlstream.stream.run.weighting import Weighting

logger = logging.getLogger(__name__)


def save_state(schedule: Schedule, num_samples: int | None, *, by_content: bool | None = None) -> StreamState:
    """Return the state of a run after `num_samples` samples of the epoch; None: as far as this process knows.

    Args:
        schedule: The run.
        num_samples: Samples of the epoch.
        by_content: Name rows and weights by what they are, not by the place of their index as versions 1 and 2 do; None: where
            the index knows what its rows are.

    Raises:
        StateError: Workers of a plain DataLoader run ahead of the trainer, and `num_samples` is not given.
    """
    position, identity = schedule.where(num_samples), schedule.identity
    by_content = identity.content is not None if by_content is None else by_content
    return StreamState(
        epoch=position.job.epoch,
        sample_in_epoch=position.job.consumed,
        fingerprint=identity.fingerprint,
        content=identity.content if by_content else None,
        shuffle_seed=identity.shuffle_seed,
        global_batch_size=schedule.global_batch_size,
        num_canonical_nodes=identity.num_canonical_nodes,
        blocks=identity.blocks,
        epoch_size=identity.epoch_size,
        weights=tuple(row_weights(schedule).to_state(by_content=by_content)),
        share=position.share,
        beyond=position.beyond,
        rank_multiple=schedule.rank_multiple,
    )


def load_state(schedule: Schedule, saved: Mapping[str, object], *, strict: bool) -> None:
    """Make the next iteration go on where a saved state says.

    Args:
        schedule: The run.
        saved: `StreamState.to_dict()`, of any number of ranks and workers.
        strict: False: take epoch and samples alone, from the state of another dataset, query, seed or global batch size.

    Raises:
        StateError: It is the state of another one.
    """
    state = StreamState.from_dict(saved)
    if not flag_of("strict", strict):
        go_on_roughly(schedule, state)
        return
    multiple, changes = schedule.rank_multiple, row_weights(schedule).changes
    try:
        _take_over(schedule, state)
    except BaseException:  # a run that begins anew has the batches and weights of before
        if multiple is not None:
            schedule.fit_ranks(multiple)
        row_weights(schedule).take(changes)
        raise
    go_on(schedule, state)


def _take_over(schedule: Schedule, state: StreamState) -> None:
    """Take over what decides the order of a state's run.

    Raises:
        StateError: It is the state of another one.
    """
    if state.rank_multiple is not None and state.shuffle_seed == schedule.identity.shuffle_seed:
        schedule.fit_ranks(state.rank_multiple)
    state.check(save_state(schedule, 0, by_content=state.content is not None))
    if state.fingerprint is not None:
        weights = row_weights(schedule)
        weights.take(weights.restored(state.weights))
    batches = schedule.steps.batches
    if batches is not None and batches.num_lanes is not None:  # a step may be cut at a lane, where not all ranks can begin
        schedule.steps.partition(state.epoch, schedule.world, state.sample_in_epoch)


def row_weights(schedule: Schedule) -> Weighting:
    """Return the weights of the rows of a single dataset."""
    assert isinstance(schedule.weighting, Weighting)
    return schedule.weighting


def go_on(schedule: Schedule, state: StreamState) -> None:
    """Make the next iteration go on exactly where a state says."""
    position = RunPosition(JobPosition(state.epoch, state.sample_in_epoch), state.share, state.beyond)
    schedule.set_next(position, is_state=True)


def go_on_roughly(schedule: Schedule, state: StreamState) -> None:
    """Make the next iteration go on after the samples that a state of another run counts, at the start of a step."""
    consumed, step_size = state.sample_in_epoch, schedule.step_size
    num_positions = schedule.steps.order.num_positions(state.epoch)
    if schedule.global_batch_size is not None and consumed < num_positions and consumed % step_size:
        consumed -= consumed % step_size
        logger.warning(
            "sample_in_epoch=%d of the state is no multiple of a step of %d samples: going on after %d, so %d come again",
            *(state.sample_in_epoch, step_size, consumed, state.sample_in_epoch - consumed),
        )
    schedule.set_next(RunPosition(JobPosition(state.epoch, consumed)), is_state=True)
