"""From the position of a run of streams with batches of their own to a state, and back, also with other streams."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sqlstream.config import flag_of
from sqlstream.errors import StateError
from sqlstream.stream.mixture.mixing import held_from, other_order
from sqlstream.stream.mixture.mixture_checkpoint import have_same_weights, part_of, restarted, restored_weights
from sqlstream.stream.mixture.stepped_run import SteppedRun, StepPlace
from sqlstream.stream.mixture.stepped_state import SteppedPart, SteppedState

logger = logging.getLogger(__name__)


def save_stepped(run: SteppedRun) -> SteppedState:
    """Return the state after the last micro-batch that the trainer was given."""
    run.settle()
    counts = run.order.counts(run.place.step)
    batches = {stream.name: stream for stream in run.order.batches}
    parts = {
        name: SteppedPart(
            part=part_of(schedule, drawn),
            global_batch=batches[name].global_batch,
            micro_batch=batches[name].micro_batch,
        )
        for (name, schedule), drawn in zip(run.schedules.items(), counts, strict=True)
    }
    groups, rule = run.options.group_of, run.mixing.rule
    return SteppedState(
        step=run.place.step,
        round=run.place.round,
        world_size=run.world.world_size,
        schedule=rule.schedule.value,
        block=rule.block,
        seed=rule.seed,
        groups=None if groups is None else dict(zip(run.names, groups, strict=True)),
        lanes=None if groups is None else run.order.num_lanes,
        epoch_size=run.options.epoch_size,
        changes=tuple(_by_step(change) for change in run.mixing.to_state()),
        streams=parts | run.away,
        away=tuple(run.away),
    )


def load_stepped(run: SteppedRun, saved: Mapping[str, Any], *, strict: bool, streams: str | Mapping[str, str] | None) -> None:
    """Make the next iteration go on where a saved state says.

    Args:
        run: The run of now.
        saved: `SteppedState.to_dict()`, of any number of ranks and workers.
        strict: False: within a step of another layout go on at its start; of another run take the step alone.
        streams: `'continue'`: streams that the state does not have begin, those that the run does not have pause, and where
            there are none the run goes on as it was; a dict: so that, and these begin anew.

    Raises:
        StateError: It is the state of another run, or one within a step of another layout.
        ConfigError: `streams` is unknown, or ranks do not divide what the state says.
    """
    state = SteppedState.from_dict(saved)
    parts = {name: part.part for name, part in state.streams.items()}
    anew, is_strict = restarted(run.names, streams, parts), flag_of("strict", strict)
    is_changed = streams is not None and (bool(anew) or not _is_as_it_was(run, state))
    try:
        _check(run, state, goes_on=is_changed, anew=anew)
    except StateError:
        if is_strict:
            raise
        place = StepPlace(state.step)
        run.partition(place)  # it is an error if the run went on with other streams behind that step
        logger.warning("the state is of another run: going on at its step %d, with streams and weights of this one", state.step)
        run.place = place
        return
    before = run.lanes, run.begun
    run.lanes = state.lanes or run.options.lanes
    run.begun = {name: part.global_batch for name, part in state.streams.items() if name not in anew}
    try:
        run.settle()
        place = _place(run, state, strict=strict, goes_on=is_changed)
        restored = restored_weights(run.schedules, parts, anew)
        if not is_changed and not _has_restored(run, state, may_differ=streams is not None or not is_strict):
            is_changed, place = True, _place(run, state, strict=strict, goes_on=True)
    except BaseException:
        run.lanes, run.begun = before
        run.settle()
        raise
    for weights, row_changes in restored:
        weights.take(row_changes)
    run.away = {name: part for name, part in state.streams.items() if name not in run.schedules}
    if is_changed:
        drawn = {name: part.part.drawn for name, part in state.streams.items() if name not in anew}
        run.mixing.go_on(0, state.step, drawn, run.options.planned)
    run.place = place


def _has_restored(run: SteppedRun, state: SteppedState, *, may_differ: bool) -> bool:
    """Return whether a run has taken over the weights of a state, which lead to its draws.

    Raises:
        StateError: They do not, and they may not differ.
    """
    drawn = {name: part.part.drawn for name, part in state.streams.items() if name in run.schedules}
    changes = [{"epoch": 0, "sample": change["step"], **_without_step(change)} for change in state.changes]
    if not (has_restored := run.mixing.restore(changes, drawn, lambda: run.order.counts(state.step))) and not may_differ:
        raise other_order(run.names, drawn)
    return has_restored


def _is_as_it_was(run: SteppedRun, state: SteppedState) -> bool:
    first = state.changes[0]
    has_gone_on = "drawn" in first  # with other streams, behind weights of before
    asked = run.mixing.to_state(held_from(run.options.planned, 0, first["step"]) if has_gone_on else None)
    ours = [_by_step(change) for change in asked]
    return set(state.streams) - set(state.away) == set(run.schedules) and have_same_weights(state.changes, ours)


def _place(run: SteppedRun, state: SteppedState, *, strict: bool, goes_on: bool) -> StepPlace:
    """Return where to go on; within a step that is a matter of the layout.

    Raises:
        StateError: The state is within a step, and this is another layout, or other streams.
    """
    if not state.round:
        return StepPlace(state.step)
    ours = {stream.name: stream.micro_batch for stream in run.order.batches}
    is_same = run.world.world_size == state.world_size and all(
        ours.get(name) == part.micro_batch for name, part in state.streams.items() if name not in state.away
    )
    if is_same and not goes_on:
        return StepPlace(state.step, state.round)
    if not strict:
        return StepPlace(state.step)
    sizes = {name: part.micro_batch for name, part in state.streams.items() if name not in state.away}
    raise StateError(
        f"the state was taken within step {state.step}, after {state.round} of its rounds on {state.world_size} ranks with "
        f"batch_gpu={sizes}, and this run has {run.world.world_size} ranks with batch_gpu={ours}"
        f"{', and other streams' if goes_on else ''}: go on with the same ranks and sizes, save states where "
        "num_accum_rounds_left is 0, or load it with strict=False, then the step begins anew"
    )


def _check(run: SteppedRun, state: SteppedState, *, goes_on: bool, anew: set[str]) -> None:
    """Raise StateError if a state is of another run than this."""
    theirs, ours = set(state.streams) - set(state.away), set(run.schedules)
    if not goes_on and (theirs != ours or ours & set(state.away)):
        raise StateError(
            f"the state has streams {sorted(theirs)}, this loader {sorted(ours)}: load it with streams='continue', then new "
            "streams begin, and missing ones pause"
        )
    state.check_rule(save_stepped(run))
    if run.options.lanes is not None and state.lanes is not None and run.options.lanes != state.lanes:
        raise StateError(f"the state has lanes={state.lanes}, this loader lanes={run.options.lanes}: leave lanes= out")
    asked = {one.name: one for one in run.options.asked(run.world.world_size)}
    for name, part in state.streams.items():
        if name not in run.schedules or name in anew:
            continue
        part.part.check(name, part_of(run.schedules[name], 0, by_content=part.part.identity.content is not None))
        if not asked[name].is_inferred and asked[name].global_batch != part.global_batch:
            raise StateError(
                f"the state has batch_size={part.global_batch} of stream {name!r}, this loader {asked[name].global_batch}: "
                "give the batch size of the state, or batch_gpu= alone, which takes it from there"
            )


def _by_step(change: Mapping[str, Any]) -> dict[str, Any]:
    return {"step": change["sample"], **{key: value for key, value in change.items() if key not in ("epoch", "sample")}}


def _without_step(change: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in change.items() if key != "step"}
