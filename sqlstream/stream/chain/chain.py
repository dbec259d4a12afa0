"""Runs a chain of transforms with randomness that depends on (seed, epoch, position) alone.

`rng(sample)` draws from the sample's own generator. For code that draws from the global generators of python, numpy and torch,
these are seeded from the same key while the chain runs, and restored afterwards: the trainer's own draws do not change. That
costs more than reading a small file (`global_rng.py`), so it is left out for chains of our own transforms, which draw from
`rng(sample)` alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from sqlstream.stream.chain.global_rng import GlobalGenerators
from sqlstream.transforms.base import Sample, Transform, apply, may_draw_globally
from sqlstream.transforms.rng import GENERATOR, begin_stage, end

_UNSEEDED = contextlib.nullcontext()


class Chain:
    """Transforms of one stage.

    Args:
        transforms: The transforms, in order.
        seed: Part of every sample's key; None (no shuffle) counts as 0.
        stage: Part of every key, a number for each chain: 0 before the download, 1 after it.
        seeds_globals: Seed the global generators, too.
    """

    def __init__(self, transforms: Sequence[Transform], *, seed: int | None, stage: int, seeds_globals: bool) -> None:
        self._transforms = tuple(transforms)
        self.seed = seed or 0
        """First part of the keys of a stream's samples."""
        self._stage = stage
        self._seeds_globals = seeds_globals and any(map(may_draw_globally, self._transforms))
        self.drew = False
        """The last run with `watches` drew random numbers."""

    @property
    def is_empty(self) -> bool:
        """The chain has no transforms."""
        return not self._transforms

    def run(self, sample: Sample, key: tuple[int, int, int], *, watches: bool = False) -> Sample | Iterator[Sample]:
        """Return the sample after all transforms, or an iterator of samples if one of them makes several.

        Args:
            sample: The sample, which the transforms may change.
            key: What its random numbers depend on, beside the stage: seed, epoch and position.
            watches: Set `drew`.

        Raises:
            TransformError: One of them failed.
        """
        if not self._transforms:
            return sample
        begin_stage(sample, (*key, self._stage))
        if not self._seeds_globals:
            outcome = apply(self._transforms, sample)
            if not isinstance(outcome, dict):
                return _each(outcome, _UNSEEDED)
            self.drew = GENERATOR in outcome
        else:
            generators = GlobalGenerators((*key, self._stage), watches=watches)
            with generators:
                outcome = apply(self._transforms, sample)
                generators.goes_on = not isinstance(outcome, dict)
            if not isinstance(outcome, dict):
                return _each(outcome, generators)
            self.drew = GENERATOR in outcome or generators.was_drawn_from
        end(outcome)
        return outcome


def _each(outcome: Iterator[Sample], generators: contextlib.AbstractContextManager[None]) -> Iterator[Sample]:
    """Yield the samples of one; each is made when it is asked for, and the generators go on where they were."""
    while True:
        with generators:
            piece = next(outcome, None)
        if piece is None:
            return
        end(piece)
        yield piece
