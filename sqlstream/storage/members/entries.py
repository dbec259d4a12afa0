"""Which bytes of a shard are one object of the cache. Pure.

The cut is made from the shard's own table of samples, and by nothing that a dataset chooses: two datasets that want other
columns, or other rows, of one shard find each other's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

Span = tuple[int, int]
"""Bytes of a shard, half open."""

MAX_SAMPLE_BYTES = 256 << 10
"""A sample up to this size, whose parts lie side by side, is one object: most pictures, with what is said of them."""
LEAST_PART_BYTES = 16 << 10
"""A part of this size is worth an object of its own: four units of the account, and far less than a request costs."""
MAX_JOINED_BYTES = 64 << 10
"""Small neighbours are joined up to this size: who reads one of them pays some milliseconds for the others."""


def cut(samples: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """Return the objects that hold the parts of each sample, in the order of the shard.

    Args:
        samples: The parts of each sample. They do not overlap.

    Example:
        >>> cut([[(512, 600), (1536, 1540)], [(2560, 2600)], [(3584, 400_000), (400_896, 400_900)]])
        [[(512, 2600)], [(512, 2600)], [(3584, 400000), (400896, 400900)]]
    """
    starts = sorted(start for parts in samples for start, _ in parts)
    follows = dict(pairwise(starts))
    pieces = sorted({piece for parts in samples for piece in _pieces(sorted(parts), follows)})
    entry_of: dict[Span, Span] = {}
    for run in _joined(pieces):
        entry = (run[0][0], run[-1][1])
        entry_of.update(dict.fromkeys(run, entry))
    return [list(dict.fromkeys(entry_of[piece] for piece in _pieces(sorted(parts), follows))) for parts in samples]


def _pieces(parts: Sequence[Span], follows: dict[int, int]) -> Iterator[Span]:
    """Yield the pieces of a sample: all of it, or its large parts, and its small ones as far as they lie side by side."""
    if not parts:
        return
    are_together = all(follows.get(before[0]) == part[0] for before, part in pairwise(parts))
    if are_together and parts[-1][1] - parts[0][0] <= MAX_SAMPLE_BYTES:
        yield (parts[0][0], parts[-1][1])
        return
    start = last = None
    for part in parts:
        is_small = part[1] - part[0] < LEAST_PART_BYTES
        if last is not None and start is not None and not (is_small and follows.get(last[0]) == part[0]):
            yield (start, last[1])
            start = None
        if is_small:
            start = part[0] if start is None else start
        else:
            yield part
        last = part
    if start is not None and last is not None:
        yield (start, last[1])


def _joined(pieces: Sequence[Span]) -> Iterator[list[Span]]:
    """Yield the pieces that are one object: neighbours that are small, up to a size."""
    run: list[Span] = []
    for piece in pieces:
        is_small = piece[1] - piece[0] < LEAST_PART_BYTES
        if run and not (is_small and run[-1][1] - run[-1][0] < LEAST_PART_BYTES and piece[1] - run[0][0] <= MAX_JOINED_BYTES):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run
