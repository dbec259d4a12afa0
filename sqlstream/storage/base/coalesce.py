"""Which ranges of one object become one request, and how the answers are cut apart again. Pure: nothing is read here.

Source of the shape: zarr's `_coalesce.py`, a planner whose result is the plan that the reader runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_GAP_BYTES = 256 << 10
"""Bytes between two ranges that cost less than a request of their own: 25 ms at 10 MB/s; object_store has 1 MiB."""
MAX_REQUEST_BYTES = 16 << 20
"""No merged request is larger: one that fails is asked for again as a whole. A single range may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The place of one range's bytes in the answers."""

    request: int
    """Number of the request that reads it."""
    start: int
    """Its start in that request's answer, in bytes."""
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """The requests to make, and the way from their answers to the ranges that were asked."""

    requests: tuple[tuple[int, int], ...]
    """Half open ranges of the object, in its order, disjoint."""
    pieces: tuple[Piece, ...]
    """One for each range, in the order asked; an empty range is an empty piece of request 0."""

    def cut(self, answers: Sequence[bytes | memoryview]) -> list[memoryview]:
        """Return the bytes of each range in the order asked: views into the answers, no copies."""
        views = [memoryview(answer) for answer in answers] or [memoryview(b"")]
        return [views[piece.request][piece.start : piece.stop] for piece in self.pieces]


def plan_reads(
    ranges: Sequence[tuple[int, int]], *, max_gap_bytes: int = MAX_GAP_BYTES, max_request_bytes: int = MAX_REQUEST_BYTES
) -> ReadPlan:
    """Return how to read `ranges` (half open, any order, may overlap) with few requests.

    Args:
        ranges: What is wanted.
        max_gap_bytes: Ranges at most so far apart are read in one, the gap with them.
        max_request_bytes: Ranges are not merged beyond this; overlapping ones always are, no byte comes twice.

    Raises:
        ValueError: A range that ends before it begins, or begins before the object.

    Example:
        >>> plan_reads([(100, 110), (0, 10)]).requests, plan_reads([(0, 10), (100, 110)], max_gap_bytes=5).requests
        (((0, 110),), ((0, 10), (100, 110)))
    """
    if wrong := [(start, stop) for start, stop in ranges if not 0 <= start <= stop]:
        raise ValueError(f"ranges {wrong} are not half open ranges from 0 on")
    merged: list[list[int]] = []
    for start, stop in sorted((start, stop) for start, stop in ranges if start < stop):
        if merged:
            last = merged[-1]
            is_overlap = start < last[1]
            is_near = start - last[1] <= max_gap_bytes and max(stop, last[1]) - last[0] <= max_request_bytes
            if is_overlap or is_near:
                last[1] = max(last[1], stop)
                continue
        merged.append([start, stop])
    pieces = tuple(_piece(merged, start, stop) for start, stop in ranges)
    return ReadPlan(requests=tuple((start, stop) for start, stop in merged), pieces=pieces)


def _piece(merged: Sequence[Sequence[int]], start: int, stop: int) -> Piece:
    if start == stop:
        return Piece(request=0, start=0, stop=0)
    low, high = 0, len(merged)  # the last request that starts at or before `start`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if merged[middle][0] <= start else (low, middle)
    return Piece(request=low, start=start - merged[low][0], stop=stop - merged[low][0])
