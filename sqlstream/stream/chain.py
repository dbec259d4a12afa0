"""Runs a chain of transforms with randomness that depends on (seed, epoch, position) alone.

`rng(sample)` draws from the sample's own generator. For code that draws from the global generators of python, numpy and torch,
these are seeded from the same key while the chain runs, and put back after: the trainer's own draws are not disturbed. That
costs 50 µs a sample (numpy's and python's states are 2.5 KB each), as much as reading a small file; so it is left out for
chains of our own transforms, which draw from `rng(sample)` alone, and nothing is put back in a DataLoader worker, where no
trainer draws.
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
from torch.utils.data import get_worker_info

from sqlstream.transforms.base import Sample, Transform, apply, may_draw_globally
from sqlstream.transforms.rng import GENERATOR, begin, begin_stage, end

_UNSEEDED = contextlib.nullcontext()


class GlobalGenerators:
    """The state of the three global generators that belongs to one sample; a context manager that may be entered again.

    Args:
        key: Whose state: (seed, epoch, position, stage).
        watches: Find out whether anything was drawn.
    """

    def __init__(self, key: tuple[int, ...], *, watches: bool = False) -> None:
        self._seed = int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "little")
        self._own: tuple[Any, ...] | None = None
        self._others: tuple[Any, ...] | None = None
        self._watches = watches
        self._fresh = ""
        self.goes_on = False
        """It will be entered again: remember how far the generators came."""
        self.was_drawn_from = False

    def __enter__(self) -> None:
        self._others = _states() if get_worker_info() is None else None
        if self._own is not None:
            _restore(self._own)
            return
        random.seed(self._seed)
        np.random.seed(self._seed & 0xFFFF_FFFF)  # its seeds have 32 bits
        # The generator itself, not torch.manual_seed: that one queues a call for every GPU, for ever, in a process without one.
        torch.default_generator.manual_seed(self._seed)
        if self._watches:
            self._fresh = _fingerprint()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.goes_on:
            self._own = _states()
        if self._watches:
            self.was_drawn_from = _fingerprint() != self._fresh
        if self._others is not None:
            _restore(self._others)


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()


def _fingerprint() -> str:
    """Return what differs once anything was drawn from one of the three."""
    python, numpy, own = _states()
    state = numpy["state"]
    return repr((hash(python), state["pos"], numpy["has_gauss"], hash(state["key"].tobytes()), hash(own.numpy().tobytes())))


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
        self._seeds_globals = seeds_globals and any(map(may_draw_globally, self._transforms))
        self.drew = False
        """Whether the last run that watched drew random numbers."""

    @property
    def is_empty(self) -> bool:
        """Whether it leaves samples as they are."""
        return not self._transforms

    def run(self, sample: Sample, epoch: int, position: int) -> Sample | Iterator[Sample]:
        """Return the sample after all transforms, or an iterator of samples if one of them makes several.

        Raises:
            TransformError: One of them failed.
        """
        if not self._transforms:
            return sample
        if self._seeds_globals:
            return self.run_keyed(sample, (self._seed, epoch, position))
        begin_stage(sample, (self._seed, epoch, position, self._stage))
        outcome = apply(self._transforms, sample)
        if not isinstance(outcome, dict):
            return _each(outcome, _UNSEEDED)
        end(outcome)
        return outcome

    def run_keyed(self, sample: Sample, key: tuple[int, int, int], *, watches: bool = False) -> Sample | Iterator[Sample]:
        """Do what `run` does, with the randomness of `key`; with `watches`, note in `drew` whether it was used."""
        if not self._transforms:
            return sample
        begin(sample, key, self._stage)
        if not self._seeds_globals:
            return self._ended(apply(self._transforms, sample), None)
        generators = GlobalGenerators((*key, self._stage), watches=watches)
        with generators:
            outcome = apply(self._transforms, sample)
            generators.goes_on = not isinstance(outcome, dict)
        return self._ended(outcome, generators)

    def _ended(self, outcome: Sample | Iterator[Sample], generators: GlobalGenerators | None) -> Sample | Iterator[Sample]:
        """Take what belongs to the run out of a sample, or of each of several when it is made."""
        if not isinstance(outcome, dict):
            return _each(outcome, generators or _UNSEEDED)
        self.drew = GENERATOR in outcome or (generators is not None and generators.was_drawn_from)
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
