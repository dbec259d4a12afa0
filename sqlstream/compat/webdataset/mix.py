"""Several pipelines as one, which run as they are, each with its own order, cache and state; and a pipeline for tests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset


class RoundRobin(IterableDataset[Any]):
    """A sample of each dataset in turn.

    Args:
        datasets: The datasets.
        longest: Go on until all have ended, without those that have; False: end with the first one.
    """

    def __init__(self, datasets: Sequence[Any], longest: bool = False) -> None:
        self.datasets, self.longest = datasets, longest

    def __iter__(self) -> Iterator[Any]:
        """Yield samples."""
        sources, at = [iter(dataset) for dataset in self.datasets], 0
        while sources:
            at %= len(sources)
            try:
                yield next(sources[at])
                at += 1
            except StopIteration:
                if not self.longest:
                    return
                del sources[at]


class RandomMix(IterableDataset[Any]):
    """A sample of a dataset that is drawn each time.

    Args:
        datasets: The datasets.
        probs: Weight of each; None: the same. Where all that are left have 0, they come in turn, the first one first.
        longest: Go on until all have ended, without those that have; False: end with the first one.
    """

    def __init__(self, datasets: Sequence[Any], probs: Sequence[float] | None = None, longest: bool = False) -> None:
        self.datasets, self.probs, self.longest = datasets, probs, longest

    def __iter__(self) -> Iterator[Any]:
        """Yield samples."""
        sources = [iter(dataset) for dataset in self.datasets]
        weights = [1.0] * len(sources) if self.probs is None else list(self.probs)
        while sources:
            at = random.choices(range(len(sources)), weights)[0] if any(weights) else 0
            try:
                yield next(sources[at])
            except StopIteration:
                if not self.longest:
                    return
                del sources[at], weights[at]


class MockDataset(IterableDataset[Any]):
    """One sample again and again.

    Args:
        sample: The sample.
        length: How often.
    """

    def __init__(self, sample: Any, length: int) -> None:
        self.sample, self.length = sample, length

    def __iter__(self) -> Iterator[Any]:
        """Yield the sample."""
        for _ in range(self.length):
            yield self.sample
