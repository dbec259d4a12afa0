"""The state of a run of streams with batches of their own: a small JSON-able dict that is checked when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlstream.errors import StateError
from sqlstream.order import MIXTURE_VERSION, PERMUTATION_VERSION
from sqlstream.stream.run.partial_steps import check_counts, check_is_state, is_count
from sqlstream.stream.run.state import StreamPart

MULTI_STREAM_VERSION = 1
"""Version of what is written, under the key `multi_stream`, which tells this state from that of a dataset or a mixture."""
COMPARED_RULE = ("mixture_version", "permutation_version", "schedule", "block", "seed", "groups", "epoch_size")
"""Fields that decide, beside weights and streams, what comes when."""
_CHANGE = frozenset(("step", "weights"))
_BATCHES = ("global_batch", "micro_batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedPart:
    """What the state says of one stream, beside its name."""

    part: StreamPart
    """Its dataset and its draws."""
    global_batch: int
    """Samples of all ranks in a step."""
    micro_batch: int
    """Samples of a rank in a round, on the ranks that saved the state."""

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON would give it back."""
        return self.part.to_dict() | {name: getattr(self, name) for name in _BATCHES}

    @classmethod
    def from_dict(cls, name: str, part: object) -> SteppedPart:
        """Return the part in a dict.

        Raises:
            StateError: It has other keys, or values that are no counts.
        """
        if not isinstance(part, Mapping) or set(_BATCHES) - set(part):
            raise StateError(f"stream {name!r} in the state is {part!r}, which does not say {' and '.join(_BATCHES)}")
        check_counts(f"stream {name!r} of the state", _BATCHES, part)
        dataset = {key: value for key, value in part.items() if key not in _BATCHES}
        return cls(part=StreamPart.from_dict(name, dataset), **{key: part[key] for key in _BATCHES})


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedState:
    """Where a run stands, and what decides how it goes on."""

    step: int
    """Steps that the whole job has done."""
    round: int
    """Rounds of the next step that are done, on the layout that saved the state."""
    world_size: int
    """Ranks of that layout."""
    schedule: str
    block: int | None
    seed: int
    groups: dict[str, int] | None
    """Mixing group of each stream, those that are away included; None: each step has one stream."""
    lanes: int | None
    """Lanes of a step; None: each step has one stream."""
    epoch_size: int | None
    """Steps of an iteration."""
    changes: tuple[Mapping[str, Any], ...]
    """Steps, and whole weights by name from each on; the first one with the draws before it, where a run has gone on."""
    streams: Mapping[str, SteppedPart]
    away: tuple[str, ...] = ()
    """Streams that the run has no more: their draws are kept."""
    mixture_version: int = MIXTURE_VERSION
    permutation_version: int = PERMUTATION_VERSION

    def to_dict(self) -> dict[str, object]:
        """Return it as a plain dict."""
        whole = {field.name: getattr(self, field.name) for field in fields(self)}
        return whole | {
            "multi_stream": MULTI_STREAM_VERSION,
            "changes": [dict(change) for change in self.changes],
            "streams": {name: part.to_dict() for name, part in self.streams.items()},
            "away": list(self.away),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> SteppedState:
        """Return the state in a dict.

        Raises:
            StateError: It is that of something else, of a newer sqlstream, or damaged.
        """
        check_is_state(state)
        version = state.get("multi_stream")
        if version is None:
            what = (
                "a MixedDataset" if state.get("mixture") is not None else "sds" if "stream_states" in state else "one dataset"
            )
            raise StateError(
                f"the state is of {what}, and does not say which streams with batches of their own come next: load a state of "
                "a MultiStreamDataLoader"
            )
        if not isinstance(version, int) or version > MULTI_STREAM_VERSION:
            raise StateError(
                f"the state has version {version!r}, this sqlstream knows {MULTI_STREAM_VERSION}: upgrade sqlstream"
            )
        names = {field.name for field in fields(cls)} | {"multi_stream"}
        if set(state) != names:
            missing, unknown = sorted(names - set(state)), sorted(set(state) - names)
            raise StateError(f"not a state of a MultiStreamDataLoader: missing keys {missing}, unknown keys {unknown}")
        check_counts("the state", ("step", "round", "world_size", "seed"), state)
        changes, away, streams = state["changes"], state["away"], state["streams"]
        if not isinstance(changes, Sequence) or not changes or not all(map(_is_change, changes)):
            raise StateError(f"the state has changes={changes!r}, no list of step and weights by name")
        if not isinstance(away, Sequence) or not isinstance(streams, Mapping) or set(away) - set(streams):
            raise StateError(f"the state has away={away!r}, no list of its streams")
        parts = {name: SteppedPart.from_dict(name, part) for name, part in streams.items()}
        known = {key: value for key, value in state.items() if key != "multi_stream"}
        return cls(**{**known, "changes": tuple(changes), "away": tuple(away), "streams": parts})

    @property
    def group_of(self) -> Mapping[str, int]:
        """The mixing group of each stream; without groups each is one of its own."""
        alone = {name: number for number, name in enumerate(self.streams) if name not in self.away}
        return alone if self.groups is None else self.groups

    def check_rule(self, current: SteppedState) -> None:
        """Raise StateError if this is a run of another rule than `current`."""
        for name in COMPARED_RULE:
            theirs, ours = getattr(self, name), getattr(current, name)
            is_same = _together(self, current) == _together(current, self) if name == "groups" else theirs == ours
            if not is_same:
                raise StateError(
                    f"the state has {name}={theirs!r}, this loader {ours!r}: make the loader as "
                    "the one that the state came from, or load it with strict=False, which takes the step alone"
                )


def _together(state: SteppedState, other: SteppedState) -> list[list[str]]:
    """Return which of the streams that both runs have are in one group, whatever its number."""
    members: dict[int, list[str]] = {}
    for name, group in sorted(state.group_of.items()):
        if name in other.group_of:
            members.setdefault(group, []).append(name)
    return sorted(members.values())


def _is_change(change: object) -> bool:
    if not isinstance(change, Mapping) or set(change) - {"drawn"} != _CHANGE:
        return False
    counts = [change["step"]]
    for named in (change["weights"], change.get("drawn", {})):
        if not isinstance(named, Mapping):
            return False
        counts += named.values()
    return all(map(is_count, counts))
