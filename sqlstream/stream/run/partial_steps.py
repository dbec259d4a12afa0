"""What is taken behind the end of a step: by one process alone, or by a rank where rows give no sample, or several.

Positions stay the unit of order and state. A rank takes its positions step by step. Their numbers in that order are the same
for any number of workers, so any number of workers can go on from a state that names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sqlstream.config import INT64_MAX
from sqlstream.errors import StateError
from sqlstream.order import Int64Array, Partition


class DeliveredSpan(NamedTuple):
    """Numbers `[start, stop)` of an epoch, all of whose samples are delivered."""

    epoch: int
    start: int
    stop: int


class PartialRow(NamedTuple):
    """A number of an epoch, some of whose samples are delivered."""

    epoch: int
    number: int
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredAhead:
    """What one rank has delivered behind the samples that the whole job has taken."""

    rank: int
    world_size: int
    num_workers: int
    first_worker: int
    """The worker that takes the first incomplete step, counted from the worker that is asked next; valid for `num_workers`."""
    taken: tuple[DeliveredSpan, ...]
    """Spans, in order."""
    unfinished: tuple[PartialRow, ...]

    def is_taken(self, epoch: int, numbers: Int64Array) -> NDArray[np.bool_]:
        """Return which of `numbers` need not come again: [n]."""
        bounds = [bound for stretch in self.taken if stretch.epoch == epoch for bound in (stretch.start, stretch.stop)]
        num_passed = np.searchsorted(np.array(bounds, dtype=np.int64), numbers, side="right")
        is_within: NDArray[np.bool_] = num_passed % 2 == 1
        return is_within

    def numbers(self, epoch: int, start: int) -> Int64Array:
        """Return all numbers from `start` on that need not come again: [n]."""
        ranges = [np.arange(max(s.start, start), s.stop) for s in self.taken if s.epoch == epoch]
        return np.concatenate([np.empty(0, dtype=np.int64), *ranges])

    def num_delivered(self, epoch: int, number: int) -> int:
        """Return how many samples of an unfinished position are delivered."""
        return next((u.num_samples for u in self.unfinished if (u.epoch, u.number) == (epoch, number)), 0)

    def check_place(self, rank: int, world_size: int) -> None:
        """Raise StateError if another rank delivered this."""
        if (self.rank, self.world_size) != (rank, world_size):
            raise StateError(
                f"the state is that of rank {self.rank} of {self.world_size}, this is rank {rank} of {world_size}: where rows "
                "give no sample, or several, each rank goes on from a state of its own, on as many ranks; or load it with "
                "strict=False to go on at the last step that is complete"
            )

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON would give it back."""
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        return counts | {name: [list(triple) for triple in counts[name]] for name in ("taken", "unfinished")}

    @classmethod
    def from_dict(cls, beyond: object) -> DeliveredAhead:
        """Return what a dict in a state says.

        Raises:
            StateError: The dict has other keys, or values that are no counts.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(beyond, Mapping) or set(beyond) != names:
            raise StateError(f"beyond={beyond!r} in the state is not a dict of {', '.join(sorted(names))}")
        lists = {name: _triples(name, beyond[name]) for name in ("taken", "unfinished")}
        counts = {name: beyond[name] for name in names - set(lists)}
        check_counts("beyond of the state", tuple(counts), counts)
        return cls(
            taken=tuple(DeliveredSpan(*triple) for triple in lists["taken"]),
            unfinished=tuple(PartialRow(*triple) for triple in lists["unfinished"]),
            **counts,
        )


def check_is_state(given: object) -> None:
    """Raise StateError if what was given as a state is no dict, such as the None of a checkpoint that lacks it."""
    if not isinstance(given, Mapping):
        raise StateError(
            f"the state is {given!r:.80}, of type {type(given).__name__}: give the dict that state_dict() returned"
        )


def is_count(value: object) -> bool:
    """Return whether a value is a whole number that positions and epochs can have."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT64_MAX


def check_counts(owner: str, names: tuple[str, ...], state: Mapping[str, object]) -> None:
    """Raise StateError if one of the values with these names is no count."""
    for name in names:
        if not is_count(value := state[name]):
            raise StateError(f"{name}={value!r} in {owner} is not a count: give 0 or more, and at most 2**63 - 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenAlone:
    """What one process has taken of its share behind the last step of the whole job; no other process can go on there."""

    rank: int
    world_size: int
    worker: int
    num_workers: int
    first_worker: int
    """The worker that takes the step after `sample_in_epoch`."""
    taken: int
    """Positions taken behind `sample_in_epoch`, in the order of the share."""
    offset: int
    """Samples taken of the next position."""

    @classmethod
    def of(cls, partition: Partition, taken: int, offset: int) -> TakenAlone:
        """Return the share after `taken` positions and `offset` samples of the next one."""
        world = partition.world
        return cls(
            rank=world.rank,
            world_size=world.world_size,
            worker=world.worker,
            num_workers=world.num_workers,
            first_worker=partition.first_worker,
            taken=taken,
            offset=offset,
        )

    @property
    def place(self) -> str:
        """The process of the share, in words."""
        return f"rank {self.rank} of {self.world_size}, worker {self.worker} of {self.num_workers}"

    @classmethod
    def from_dict(cls, share: object) -> TakenAlone:
        """Return the share in a dict.

        Raises:
            StateError: The dict is no share.
        """
        names = tuple(field.name for field in fields(cls))
        if not isinstance(share, Mapping) or set(share) != set(names):
            raise StateError(f"share={share!r} in the state is not a dict of {', '.join(names)}")
        check_counts("the state's share", names, share)
        return cls(**share)


def stretches_of(epoch: int, numbers: Int64Array) -> list[DeliveredSpan]:
    """Return `numbers`, which may repeat, as the fewest stretches."""
    numbers = np.unique(numbers)
    if not numbers.size:
        return []
    breaks = np.flatnonzero(np.diff(numbers) > 1)
    starts, stops = numbers[np.append(0, breaks + 1)], numbers[np.append(breaks, -1)] + 1
    return [DeliveredSpan(epoch, start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


def _triples(name: str, value: Any) -> Sequence[Sequence[int]]:
    if not isinstance(value, list | tuple) or not all(
        isinstance(triple, list | tuple) and len(triple) == 3 and all(map(is_count, triple)) for triple in value
    ):
        raise StateError(f"beyond[{name!r}]={value!r} in the state is not a list of [epoch, number, number]")
    return value
