"""Which bytes of a shard are one object of the cache. Pure.

The cut is made from the shard's own table of samples, and by nothing that a dataset chooses: two datasets that want other
columns, or other rows, of one shard find each other's bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise

Span = tuple[int, int]
"""Bytes of a shard, half open."""

MAX_SAMPLE_BYTES = 256 << 10
"""A sample up to this size, whose parts lie side by side, is one object: most pictures, with what is said of them."""
LEAST_PART_BYTES = 16 << 10
"""A part of this size is worth an object of its own: four units of the account, and far less than a request costs."""
MAX_JOINED_BYTES = 64 << 10
"""Small neighbours are joined up to this size: who reads one of them pays some milliseconds for the others."""

_SAMPLES = 1 << 12
"""Arbitrary: samples that are cut at a time."""


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
    pieces_of = [[*_pieces(sorted(parts), follows)] for parts in samples]
    entry_of: dict[Span, Span] = {}
    for run in _joined(sorted(set(chain.from_iterable(pieces_of)))):
        entry_of.update(dict.fromkeys(run, (run[0][0], run[-1][1])))
    return [list(dict.fromkeys(map(entry_of.__getitem__, pieces))) for pieces in pieces_of]


def are_in_order(samples: Iterable[Sequence[Span]]) -> bool:
    """Return whether the parts of each sample lie behind those of all samples before it."""
    end = 0
    for parts in samples:
        if parts and min(parts)[0] < end:
            return False
        end = max([end, *(stop for _, stop in parts)])
    return True


def cut_in_order(samples: Iterable[Sequence[Span]], at_a_time: int = _SAMPLES) -> Iterator[list[Span]]:
    """Yield what `cut` returns, of samples that are in order: some of them are held at a time.

    Args:
        samples: The parts of each sample.
        at_a_time: More samples that are taken, until one of them begins an object: what is joined does not reach across it.

    Example:
        >>> list(cut_in_order([[(0, 40_000)], [(40_512, 80_000)], [(80_384, 80_400)]], at_a_time=1))
        [[(0, 40000)], [(40512, 80000)], [(80384, 80400)]]
    """
    waiting: list[Sequence[Span]] = []
    enough = at_a_time
    for parts in samples:
        waiting.append(parts)
        if len(waiting) < enough:
            continue
        entries = cut(waiting)
        begins = (at for at in range(len(waiting) - 1, 0, -1) if waiting[at] and entries[at][0][0] == min(waiting[at])[0])
        stop = next(begins, 0)
        yield from entries[:stop]
        del waiting[:stop]
        enough = max(len(waiting) + at_a_time, 2 * len(waiting))  # where none begins one, all is cut few times
    yield from cut(waiting)


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
