"""From the position of a mixture to a state that is saved, and back, also with other streams than those of the state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sqlstream.config import flag_of, is_word
from sqlstream.errors import ConfigError, StateError
from sqlstream.order import Tail
from sqlstream.stream.mixture.mixing import other_order
from sqlstream.stream.mixture.mixture_plan import MixtureUnit
from sqlstream.stream.mixture.mixture_run import MixtureRun
from sqlstream.stream.run.checkpoint import go_on, go_on_roughly, row_weights
from sqlstream.stream.run.mixture_state import MixturePart
from sqlstream.stream.run.positions import JobPosition, RunPosition
from sqlstream.stream.run.schedule import Schedule
from sqlstream.stream.run.state import COMPARED, StreamPart, StreamState
from sqlstream.stream.run.weighting import Change, Weighting

CONTINUE = "continue"
"""`streams=`: streams that the state does not have begin, and those that the run does not have pause."""
RESTART = "restart"
"""`streams={name: 'restart'}`: this stream begins anew, at its first draw."""


def save_mixture(run: MixtureRun, num_samples: int | None) -> StreamState:
    """Return the state after `num_samples` of the epoch; None: as far as this process knows.

    Raises:
        StateError: Workers of a plain DataLoader run ahead of the trainer, and `num_samples` is not given.
    """
    position = run.schedule.where(num_samples)
    counts = run.order.counts(position.job.epoch, position.job.consumed)
    parts = {name: part_of(stream.schedule, drawn) for (name, stream), drawn in zip(run.streams.items(), counts, strict=True)}
    return replace(
        _state_at_start(run),
        epoch=position.job.epoch,
        sample_in_epoch=position.job.consumed,
        share=position.share,
        beyond=position.beyond,
        streams=parts | run.away,
    )


def _state_at_start(run: MixtureRun) -> StreamState:
    """Return what a state says of a run wherever it stands."""
    schedule, rule = run.schedule, run.mixing.rule
    return StreamState(
        epoch=0,
        sample_in_epoch=0,
        shuffle_seed=schedule.identity.shuffle_seed,
        global_batch_size=schedule.global_batch_size,
        num_canonical_nodes=schedule.identity.num_canonical_nodes,
        epoch_size=schedule.identity.epoch_size,
        streams={},
        mixture=MixturePart(
            schedule=rule.schedule.value,
            unit=run.unit.value,
            block=rule.block,
            lanes=run.lanes,
            changes=tuple(run.mixing.to_state()),
            away=tuple(run.away),
        ),
    )


def load_mixture(
    run: MixtureRun, saved: Mapping[str, object], *, strict: bool, streams: str | Mapping[str, str] | None
) -> None:
    """Make the next iteration go on where a saved state says.

    Args:
        run: The run of now.
        saved: `StreamState.to_dict()`, of any number of ranks and workers.
        strict: False: take epoch and samples alone.
        streams: `'continue'`: streams come and go, and where none does the run goes on as it was; a dict: so that, and these
            begin anew.

    Raises:
        StateError: It is the state of another run.
        ConfigError: `streams` is unknown.
    """
    state = StreamState.from_dict(saved)
    if not flag_of("strict", strict):
        go_on_roughly(run.schedule, state)
        return
    if state.streams is None or state.mixture is None:
        raise StateError(
            f"the state is of a single dataset, this run has streams {sorted(run.streams)}: load it with strict=False, "
            "which takes epoch and samples alone, or resume with what the state came from"
        )
    anew = restarted(run.streams, streams, state.streams)
    lanes = run.lanes
    try:
        if run.unit is MixtureUnit.RANK:  # an epoch that rounds up to whole turns is as long as theirs
            run.lanes = state.mixture.lanes
            run.settle()
        is_changed = streams is not None and (bool(anew) or not _is_as_it_was(run, state, state.mixture))
        _check(run, state, state.mixture, state.streams, goes_on=is_changed, anew=anew)
        restored = restored_weights({name: stream.schedule for name, stream in run.streams.items()}, state.streams, anew)
        is_changed = is_changed or not _has_restored(run, state, state.mixture, state.streams, may_differ=streams is not None)
        if is_changed:
            _check_place(state)
    except BaseException:
        run.lanes = lanes
        run.settle()
        raise
    for weights, row_changes in restored:
        weights.take(row_changes)
    run.away = {name: part for name, part in state.streams.items() if name not in run.streams}
    if not is_changed:
        go_on(run.schedule, state)
        return
    drawn = {name: part.drawn for name, part in state.streams.items() if name not in anew}
    epoch, consumed = state.epoch, state.sample_in_epoch
    if consumed >= run.schedule.num_positions:
        epoch, consumed = epoch + 1, 0
    place = JobPosition(epoch, consumed)
    run.go_on(place, _num_steps_before(run, state, state.mixture), drawn)
    run.schedule.set_next(RunPosition(place), is_state=True)


def _has_restored(
    run: MixtureRun, state: StreamState, mixture: MixturePart, parts: Mapping[str, StreamPart], *, may_differ: bool
) -> bool:
    """Return whether a run has taken over the weights of a state, which lead to its draws.

    Raises:
        StateError: They do not, and they may not differ.
    """
    drawn = {name: part.drawn for name, part in parts.items() if name in run.streams}
    counts = partial(run.order.counts, state.epoch, state.sample_in_epoch)
    if not (has_restored := run.mixing.restore(mixture.changes, drawn, counts)) and not may_differ:
        raise other_order(run.mixing.names, drawn)
    return has_restored


def _num_steps_before(run: MixtureRun, state: StreamState, mixture: MixturePart) -> int | None:
    """Return how many steps the run of a state has made; None: neither knows the batch size.

    Epochs of the run of now may have other lengths, so its own places do not say it.
    """
    step_size = state.global_batch_size or run.schedule.global_batch_size
    if step_size is None:
        return None
    num_whole, rest = divmod(state.epoch_size or 0, step_size)
    num_steps = num_whole + (rest > 0 and run.schedule.steps.tail is not Tail.DROP)
    first = mixture.changes[0]
    before, epoch, sample = (first["step"], first["epoch"], first["sample"]) if "step" in first else (0, 0, 0)
    return before + (state.epoch - epoch) * num_steps + (state.sample_in_epoch - sample) // step_size


def _is_as_it_was(run: MixtureRun, state: StreamState, mixture: MixturePart) -> bool:
    present = set(state.streams or ()) - set(mixture.away)
    is_as_long = state.epoch_size == run.schedule.identity.epoch_size
    return present == set(run.streams) and is_as_long and have_same_weights(mixture.changes, _asked_for(run, mixture))


def _asked_for(run: MixtureRun, mixture: MixturePart) -> list[dict[str, object]]:
    """Return the weights of a run, JSON-able, from where the first ones of a state hold."""
    first = mixture.changes[0]
    if "drawn" not in first:
        return run.mixing.to_state()
    place = JobPosition(first["epoch"], first["sample"])  # the state's run has gone on there, behind weights of before
    return run.mixing.to_state(run.planned_at(place, first.get("step")))


def have_same_weights(theirs: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a state has the weights that a run was made with, from wherever the first of them hold."""
    return theirs[0]["weights"] == ours[0]["weights"] and [*theirs[1:]] == [*ours[1:]]


def restarted(names: Collection[str], streams: str | Mapping[str, str] | None, parts: Mapping[str, StreamPart]) -> set[str]:
    """Return the names of the streams that begin anew."""
    if streams is None or is_word(streams, CONTINUE):
        return set()
    if not isinstance(streams, Mapping) or not all(is_word(word, RESTART) for word in streams.values()):
        raise ConfigError(f"streams={streams!r} is unknown: give 'continue', or a dict such as {{'web': 'restart'}}")
    unknown = sorted(map(str, set(streams) - set(names)))
    if unknown:
        raise ConfigError(f"streams={streams!r} names {unknown}, this run has {sorted(names)}")
    return set(streams) & set(parts)


def _check(
    run: MixtureRun, state: StreamState, mixture: MixturePart, parts: Mapping[str, StreamPart], *, goes_on: bool, anew: set[str]
) -> None:
    """Raise StateError if a state is of another run than this."""
    theirs, ours = set(parts) - set(mixture.away), set(run.streams)
    if not goes_on and (theirs != ours or ours & set(mixture.away)):
        raise StateError(
            f"the state has streams {sorted(theirs)}, this run {sorted(ours)}: load it with streams='continue', then new "
            "streams begin, and missing ones pause"
        )
    current = _state_at_start(run)
    mixture.check(current.mixture or mixture)
    for name in COMPARED:
        if name == "first_weights" or (name == "epoch_size" and goes_on):
            continue
        of_state, of_run = getattr(state, name), getattr(current, name)
        if name == "global_batch_size" and (of_state is None or of_run is None):
            continue
        if of_state != of_run:
            raise StateError(
                f"the state has {name}={of_state!r}, this mixture {of_run!r}: resume with the streams, seed and global "
                "batch size (batch size x ranks) that the state came from, or load it with strict=False"
            )
    for name, part in parts.items():
        if name in run.streams and name not in anew:
            part.check(name, part_of(run.streams[name].schedule, 0, by_content=part.identity.content is not None))


def _check_place(state: StreamState) -> None:
    """Raise StateError if the turns of a run cannot begin anew where a state stands."""
    if state.share is not None or state.beyond is not None:
        raise StateError("the state was taken within a step, so streams cannot come or go: take it from a StreamingDataLoader")
    if state.sample_in_epoch % state.num_canonical_nodes:
        raise StateError(
            f"the state was taken after {state.sample_in_epoch} samples of an epoch, which are not the same number of each of "
            f"num_canonical_nodes={state.num_canonical_nodes} parts, so streams cannot come or go: take it after a step whose "
            "sample_in_epoch they divide, or at the end of an epoch"
        )


def restored_weights(
    schedules: Mapping[str, Schedule], parts: Mapping[str, StreamPart], anew: set[str]
) -> list[tuple[Weighting, tuple[Change, ...]]]:
    """Return the changes of the rows' weights that streams have in a state, to be taken once all of it is right.

    Raises:
        StateError: One was given as an array, and the stream was made without it.
    """
    kept = [(row_weights(schedules[name]), part) for name, part in parts.items() if name in schedules and name not in anew]
    return [(weights, weights.restored(part.weights)) for weights, part in kept]


def part_of(stream: Schedule, drawn: int, *, by_content: bool | None = None) -> StreamPart:
    """Return what a state says of a stream."""
    identity = stream.identity
    by_content = identity.content is not None if by_content is None else by_content
    if not by_content:
        identity = replace(identity, content=None)
    weights = row_weights(stream).to_state(by_content=by_content)
    return StreamPart(identity=identity, drawn=drawn, weights=tuple(weights))
