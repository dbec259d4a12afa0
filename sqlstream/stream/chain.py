"""Runs a chain of transforms with randomness that depends on (seed, epoch, position) alone.

`rng(sample)` draws from the sample's own generator. For code that draws from the global generators of python, numpy and torch,
these are seeded from the same key while the chain runs, and put back after: the trainer's own draws are not disturbed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from types import TracebackType
from typing import Any

import numpy as np
import torch

from sqlstream.transforms.base import Sample, Transform, apply
from sqlstream.transforms.rng import begin, end


class GlobalGenerators:
    """The state of the three global generators that belongs to one sample; a context manager that may be entered again.

    Args:
        key: Whose state: (seed, epoch, position, stage).
    """

    def __init__(self, key: tuple[int, ...]) -> None:
        self._seed = int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "little")
        self._own: tuple[Any, ...] | None = None
        self.goes_on = False
        """It will be entered again: remember how far the generators came."""

    def __enter__(self) -> None:
        self._others = _states()
        if self._own is not None:
            _restore(self._own)
            return
        random.seed(self._seed)
        np.random.seed(self._seed & 0xFFFF_FFFF)  # its seeds have 32 bits
        # The generator itself, not torch.manual_seed: that one queues a call for every GPU, for ever, in a process without one.
        torch.default_generator.manual_seed(self._seed)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.goes_on:
            self._own = _states()
        _restore(self._others)


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()


def _restore(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


class Chain:
    """Transforms of one stage.

    Args:
        transforms: What is applied, in order.
        seed: Part of every sample's key; None (no shuffle) counts as 0.
        stage: Tells chains apart: 0 before the download, 1 after it.
        seeds_globals: Seed the global generators, too.
    """

    def __init__(self, transforms: Sequence[Transform], *, seed: int | None, stage: int, seeds_globals: bool) -> None:
        self._transforms = tuple(transforms)
        self._seed = seed or 0
        self._stage = stage
        self._seeds_globals = seeds_globals

    def run(self, sample: Sample, epoch: int, position: int) -> Sample | Iterator[Sample]:
        """Return the sample after all transforms, or an iterator of samples if one of them makes several.

        Raises:
            TransformError: One of them failed.
        """
        if not self._transforms:
            return sample
        key = (self._seed, epoch, position)
        begin(sample, key, self._stage)
        generators = GlobalGenerators((*key, self._stage))
        seeded = generators if self._seeds_globals else contextlib.nullcontext()
        with seeded:
            outcome = apply(self._transforms, sample)
            generators.goes_on = not isinstance(outcome, dict)
        if not isinstance(outcome, dict):
            return _each(outcome, seeded)
        end(outcome)
        return outcome


def _each(outcome: Iterator[Sample], generators: contextlib.AbstractContextManager[None]) -> Iterator[Sample]:
    """Yield the samples of one; they are made while they are asked for, with the generators going on where they were."""
    while True:
        with generators:
            piece = next(outcome, None)
        if piece is None:
            return
        end(piece)
        yield piece
