"""The weights of the streams of a run, in memory that trainer and workers share: each change holds from a place of the run on.

changes    (epoch, sample, whole weights) …   the first one with the draws of each stream before it, where a run has gone on
           with other streams
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from sqlstream.errors import ConfigError, StateError
from sqlstream.order import Mixture, MixtureSince, ScheduleType, TurnLayout
from sqlstream.order.streams.whole_weights import Number
from sqlstream.stream.run.shared.text import SharedText

NamedWeights: TypeAlias = Mapping[str, Number]
TEXT_BYTES = 1 << 22
"""Room for a ramp of 64 changes over some thousand streams; pages that are never written take no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureRule:
    """What decides whose turn it is, beside the weights."""

    schedule: ScheduleType
    """How turns follow each other."""
    seed: int
    """Seed of the random schedules."""
    block: int | None
    """Turns of a block; None: as the schedule has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChange:
    """Weights that hold from a place of the run on."""

    epoch: int
    sample: int
    """Position of the epoch."""
    weights: tuple[int, ...]
    """Whole weights, in the order of the streams."""
    drawn: tuple[int, ...] | None = None
    """Draws of each stream before the place; None: those that earlier weights have led to."""
    step: int | None = None
    """Steps of the run before the place, where it has gone on with other streams; None: those that come before the place."""

    @classmethod
    def of_json(cls, change: Mapping[str, Any]) -> StreamChange:
        """Return a change after JSON, which has lists for tuples."""
        drawn = change["drawn"]
        return cls(**{**change, "weights": tuple(change["weights"]), "drawn": None if drawn is None else tuple(drawn)})

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and position, which order the changes."""
        return self.epoch, self.sample


def check_named(weights: object) -> None:
    """Raise ConfigError unless weights are given by name."""
    if not isinstance(weights, Mapping):
        raise ConfigError(f"weights={weights!r} are no dict: give a weight for each stream by its name")


class Mixing:
    """The weights of a mixture.

    Args:
        names: Names of the streams.
        rule: The schedule.
        weights: Whole weights from the start, in the order of the streams.
        whole: Returns the whole weights of named ones.
    """

    def __init__(
        self,
        names: Sequence[str],
        rule: MixtureRule,
        weights: Sequence[int],
        whole: Callable[[NamedWeights], tuple[int, ...]],
    ) -> None:
        self.names = tuple(names)
        self.rule = rule
        self.whole = whole
        self._shared = SharedText(TEXT_BYTES)
        self._read: tuple[int, tuple[StreamChange, ...]] = (0, ())
        self._since: tuple[int, TurnLayout, MixtureSince] | None = None
        self.set([StreamChange(epoch=0, sample=0, weights=tuple(weights))])

    @property
    def changes(self) -> tuple[StreamChange, ...]:
        """All changes so far, also those that the trainer makes while this worker runs."""
        if self._shared.version != self._read[0]:
            version, text = self._shared.read()
            self._read = (version, tuple(map(StreamChange.of_json, json.loads(text))))
        return self._read[1]

    @property
    def fingerprint(self) -> str:
        """A text for all changes so far."""
        return f"{hashlib.blake2b(repr(self.changes).encode(), digest_size=8).hexdigest()} {self.rule}"

    def since(self, turns: TurnLayout) -> MixtureSince:
        """Return whose turn it is, by the changes of now."""
        version = self._shared.version
        if self._since is not None and self._since[:2] == (version, turns):
            return self._since[2]
        changes = self.changes
        first = changes[0]
        begins = turns.turn_of(*first.place)
        weights = {turns.turn_of(*change.place) - begins: change.weights for change in changes}
        rule, num_streams = self.rule, len(self.names)
        mixture = Mixture(
            num_streams=num_streams,
            changes=tuple(sorted(weights.items())),
            schedule=rule.schedule,
            seed=rule.seed,
            block=rule.block,
        )
        drawn = first.drawn or (0,) * num_streams
        since = MixtureSince(begins, tuple(count // turns.num_parts for count in drawn), mixture)
        self._since = (version, turns, since)
        return since

    def add(self, epoch: int, sample: int, weights: NamedWeights) -> None:
        """Make streams weigh `weights` from position `sample` of `epoch` on; changes for later places are dropped.

        Raises:
            ConfigError: `weights` are not weights of all streams, or these are too many changes.
        """
        changes = [change for change in self.changes if change.place < (epoch, sample)]
        change = StreamChange(epoch=epoch, sample=sample, weights=self.whole(weights))
        first = self.changes[0]
        self.set([*changes, change] if changes else [replace(change, drawn=first.drawn, step=first.step)])

    def set(self, changes: Sequence[StreamChange]) -> None:
        """Replace all changes.

        Raises:
            ConfigError: They are too many.
        """
        text = json.dumps([asdict(change) for change in changes]).encode()
        if len(text) > TEXT_BYTES:
            raise ConfigError(f"{len(changes)} changes of weights are too many for one run ({len(text)} bytes): begin another")
        self._shared.write(text)

    # -- in a state ---------------------------------------------------------------------------------------------------

    def to_state(self, changes: Sequence[StreamChange] | None = None) -> list[dict[str, object]]:
        """Return changes, JSON-able, by the names of the streams; None: all."""
        return [_named(change, self.names) for change in (self.changes if changes is None else changes)]

    def restore(
        self, state: Sequence[Mapping[str, Any]], drawn: Mapping[str, int], counts: Callable[[], Sequence[int]]
    ) -> bool:
        """Take over the changes of a state, unless its streams stood in another order, and ours would have given others by now.

        Args:
            state: The changes; streams that they do not name weigh nothing in them.
            drawn: Draws of each stream that the state has.
            counts: Returns the draws of each stream by the changes of now, at the place of the state.

        Returns:
            Whether they are taken over.
        """
        before, is_same = self.changes, (*state[0]["weights"],) == self.names
        self._read_state(state)
        try:  # a file may have sorted the names of the state
            is_same = is_same or tuple(counts()) == tuple(drawn[name] for name in self.names)
        finally:
            if not is_same:
                self.set(before)
        return is_same

    def _read_state(self, state: Sequence[Mapping[str, Any]]) -> None:

        def of_ours(values: Mapping[str, int]) -> tuple[int, ...]:
            return tuple(int(values.get(name, 0)) for name in self.names)

        self.set(
            [
                StreamChange(
                    epoch=entry["epoch"],
                    sample=entry["sample"],
                    weights=of_ours(entry["weights"]),
                    drawn=of_ours(entry["drawn"]) if "drawn" in entry else None,
                    step=entry.get("step"),
                )
                for entry in state
            ]
        )

    def go_on(self, epoch: int, sample: int, drawn: Mapping[str, int], planned: Sequence[StreamChange]) -> None:
        """Begin at a place, after draws that other streams and weights have led to.

        Args:
            epoch: The epoch.
            sample: Its position.
            drawn: Draws of streams before it; 0 of those that are not named.
            planned: Changes of the constructor: the last one up to the place holds there, and the later ones from theirs on.
        """
        first, *later = held_from(planned, epoch, sample)
        self.set([replace(first, drawn=tuple(drawn.get(name, 0) for name in self.names)), *later])


def other_order(names: Sequence[str], drawn: Mapping[str, int]) -> StateError:
    """Return the error of a state whose streams stood in another order."""
    return StateError(
        f"the state is of a mixture in another order than {', '.join(names)}, which would not have given {dict(drawn)} by now: "
        "give the streams in the order that the state came from, or load it with streams='continue', then each goes on where "
        "it was"
    )


def held_from(planned: Sequence[StreamChange], epoch: int, sample: int) -> list[StreamChange]:
    """Return the weights that hold from a place on, of those of a constructor: the last ones up to it, and the later ones."""
    at_place = [change for change in planned if change.place <= (epoch, sample)][-1]
    later = [change for change in planned if change.place > (epoch, sample)]
    return [replace(at_place, epoch=epoch, sample=sample), *later]


def _named(change: StreamChange, names: Sequence[str]) -> dict[str, object]:
    named: dict[str, object] = {"epoch": change.epoch, "sample": change.sample}
    named["weights"] = dict(zip(names, change.weights, strict=True))
    if change.drawn is not None:
        named["drawn"] = dict(zip(names, change.drawn, strict=True))
    return named if change.step is None else named | {"step": change.step}
