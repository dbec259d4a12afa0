"""What the state of a mixture says beside its streams: the schedule, and the changes of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlstream.errors import StateError
from sqlstream.order import MIXTURE_VERSION
from sqlstream.stream.run.partial_steps import check_counts, is_count

_CHANGE = frozenset(("epoch", "sample", "weights"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePart:
    """The schedule of a mixture in a state."""

    schedule: str
    """How turns follow each other."""
    unit: str
    """What a turn is."""
    block: int | None
    lanes: int | None
    """Batches of ranks in a step, where a turn is one of them; None: a turn is something else."""
    changes: tuple[Mapping[str, Any], ...]
    """Places, and whole weights by name from each on; the first one with the draws, and steps, before it, where a run has gone
    on."""
    away: tuple[str, ...] = ()
    """Streams that the run has no more: their draws are kept."""
    version: int = MIXTURE_VERSION

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON would give it back."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {
            "changes": [dict(change) for change in self.changes],
            "away": list(self.away),
        }

    @classmethod
    def from_dict(cls, part: object) -> MixturePart:
        """Return the part in a dict.

        Raises:
            StateError: It is none.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(part, Mapping) or set(part) != names:
            raise StateError(f"mixture={part!r} in the state is no dict of {', '.join(sorted(names))}")
        changes, away = part["changes"], part["away"]
        if not isinstance(changes, Sequence) or not changes or not all(map(_is_change, changes)):
            raise StateError(f"the state has changes={changes!r} of its mixture, no list of epoch, sample and weights by name")
        if part["lanes"] is not None:
            check_counts("the state's mixture", ("lanes",), part)
        if not isinstance(away, Sequence) or not all(isinstance(name, str) for name in away):
            raise StateError(f"the state has away={away!r} of its mixture, no list of names")
        return cls(**{**part, "changes": tuple(changes), "away": tuple(away)})

    @property
    def counts_steps(self) -> bool:
        """Steps are counted from the place where the run has gone on with other streams."""
        return "step" in self.changes[0]

    def check(self, current: MixturePart) -> None:
        """Raise StateError if this is another schedule than `current`."""
        for name in ("version", "schedule", "unit", "block"):
            theirs, ours = getattr(self, name), getattr(current, name)
            if theirs != ours:
                raise StateError(
                    f"the state has {name}={theirs!r} of its mixture, this one {ours!r}: make the mixture as the one that the "
                    "state came from, or load it with strict=False, which takes epoch and samples alone"
                )


def _is_change(change: object) -> bool:
    if not isinstance(change, Mapping) or set(change) - {"drawn", "step"} != _CHANGE:
        return False
    counts = [change["epoch"], change["sample"], change.get("step", 0)]
    for named in (change["weights"], change.get("drawn", {})):
        if not isinstance(named, Mapping):
            return False
        counts += named.values()
    return all(map(is_count, counts))
