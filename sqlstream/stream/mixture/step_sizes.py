"""The batches of each stream on a number of ranks, also where a run goes on that began on another number. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlstream.order import StreamBatches


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedBatches:
    """What the user asks for, on the ranks of now."""

    name: str
    global_batch: int
    """Samples of all ranks in a step."""
    micro_batch: int
    """Samples of a rank in a round; where the global batch is inferred: at most so many."""
    is_inferred: bool
    """The global batch follows from the micro-batch and the ranks on which the run began."""
    group: int
    """Mixing group."""


def fit_batches(
    asked: Sequence[AskedBatches], begun: Mapping[str, int], num_ways: int, *, is_grouped: bool
) -> tuple[StreamBatches, ...]:
    """Return the batches of all streams; rounds are what gives way.

    Args:
        asked: What the user asks for.
        begun: Global batches with which streams began, by name.
        num_ways: Ranks, or lanes, that divide a step.
        is_grouped: Streams of a group take as many rounds.
    """
    sizes = {one.name: begun.get(one.name, one.global_batch) if one.is_inferred else one.global_batch for one in asked}
    micro = {one.name: one.micro_batch for one in asked}
    units: dict[int | str, list[AskedBatches]] = {(one.group if is_grouped else one.name): [] for one in asked}
    for one in asked:
        units[one.group if is_grouped else one.name].append(one)
    for members in units.values():
        micro |= _fitted(members, sizes, num_ways)
    return tuple(StreamBatches(name=name, global_batch=size, micro_batch=micro[name]) for name, size in sizes.items())


def _fitted(members: Iterable[AskedBatches], sizes: Mapping[str, int], num_ways: int) -> dict[str, int]:
    """Return smaller micro-batches for streams whose batch came from a state; none where those that are asked for do."""
    moving = [one for one in members if one.is_inferred and one.micro_batch and sizes[one.name] % num_ways == 0]
    shares = {one.name: sizes[one.name] // num_ways for one in moving}
    if all(shares[one.name] % one.micro_batch == 0 for one in moving):
        return {}
    for rounds in range(1, max(shares.values()) + 1):
        if all(shares[one.name] % rounds == 0 and shares[one.name] // rounds <= one.micro_batch for one in moving):
            return {name: share // rounds for name, share in shares.items()}
    return {}
