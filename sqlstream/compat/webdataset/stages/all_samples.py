"""Stages that take all samples of an iteration: they mix them, or make batches."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from sqlstream.compat.webdataset.handlers import Handler
from sqlstream.compat.webdataset.stages.base import PipelineStage


class Shuffle(PipelineStage):
    """Mixes samples in a buffer: reads two and yields one at random until the buffer is full, then one for one.

    In a pipeline that the engine runs it is the order of the dataset, and no buffer.
    """

    name = "shuffle"
    shown = ("bufsize",)

    def __init__(
        self, bufsize: int = 1000, initial: int = 100, rng: Any = None, seed: Any = None, handler: Handler | None = None
    ) -> None:
        self.bufsize, self.seed = bufsize, seed
        self._initial, self._rng, self._handler = min(initial, bufsize), rng, handler

    def run(self, data: Iterable[Any]) -> Iterator[Any]:
        """Yield samples in another order."""
        if self.seed is not None and self._rng is not None:
            raise ValueError("shuffle has rng= and seed=: give one of them")
        rng = self._rng if self.seed is None else random.Random(self.seed)
        return _mixed(iter(data), self.bufsize, self._initial, rng or random.Random())


class detshuffle(PipelineStage):  # noqa: N801 - theirs is written so
    """Mixes samples in a buffer, in another way each time, by seed and number of the iteration."""

    name = "detshuffle"

    def __init__(self, bufsize: int = 1000, initial: int = 100, seed: int = 0, epoch: int = -1) -> None:
        self.bufsize, self.initial, self.seed, self.epoch = bufsize, initial, seed, epoch

    def run(self, src: Iterable[Any]) -> Iterator[Any]:
        """Yield samples in another order."""
        self.epoch += 1
        return _mixed(iter(src), self.bufsize, min(self.initial, self.bufsize), random.Random(self.seed + self.epoch))


def _mixed(data: Iterator[Any], bufsize: int, initial: int, rng: Any) -> Iterator[Any]:
    buffer: list[Any] = []
    for sample in data:
        buffer.append(sample)
        if len(buffer) < bufsize:
            buffer.extend(itertools.islice(data, 1))
        if len(buffer) >= initial:
            yield _picked(buffer, rng)
    while buffer:
        yield _picked(buffer, rng)


def _picked(buffer: list[Any], rng: Any) -> Any:
    place = rng.randint(0, len(buffer) - 1)
    buffer[place], buffer[-1] = buffer[-1], buffer[place]
    return buffer.pop()


STACKS: dict[type, Callable[[list[Any]], Any]] = {torch.Tensor: torch.stack, np.ndarray: np.array}
"""How values of a type are stacked; a drop-in for another framework adds its tensors."""


def combine_values(b: Sequence[Any], combine_tensors: bool = True, combine_scalars: bool = True) -> Any:
    """Return the values of a field in a batch: numbers as an array, tensors and arrays stacked, others as a list.

    Raises:
        ValueError: Tensors or arrays have different shapes.
    """
    first = b[0]
    if isinstance(first, int | float):
        return np.array(list(b)) if combine_scalars else b
    stack = next((function for kind, function in STACKS.items() if isinstance(first, kind)), None)
    if stack is None:
        return list(b)
    if not combine_tensors:
        return b
    shapes = {tuple(value.shape) for value in b}
    if len(shapes) > 1:
        raise ValueError(f"a batch has values of the shapes {sorted(shapes)}: make them equal first, or give collation_fn")
    return stack(list(b))


def default_collation_fn(samples: Sequence[Any], combine_tensors: bool = True, combine_scalars: bool = True) -> Any:
    """Return a batch of samples that are dicts, or tuples.

    Raises:
        ValueError: They have other fields, or values of other shapes.
    """
    rows = [sample if isinstance(sample, dict) else dict(enumerate(sample)) for sample in samples]
    names = rows[0].keys()
    if other := next((row for row in rows if row.keys() != names), None):
        raise ValueError(f"samples of a batch have different fields: {sorted(map(str, names))}, {sorted(map(str, other))}")
    batch = {name: combine_values([row[name] for row in rows], combine_tensors, combine_scalars) for name in names}
    return tuple(batch.values()) if isinstance(samples[0], list | tuple) else batch


class Batched(PipelineStage):
    """Makes batches of samples that follow each other; a pipeline that the engine runs takes its steps by them."""

    name = "batched"
    shown = ("batchsize",)

    def __init__(self, batchsize: int = 20, collation_fn: Any = default_collation_fn, partial: bool = True) -> None:
        if batchsize < 1:
            raise ValueError(f"batched({batchsize}) has no samples: give 1 or more")
        self.batchsize, self.collation_fn, self.partial = batchsize, collation_fn, partial

    def run(self, data: Iterable[Any]) -> Iterator[Any]:
        """Yield batches; each as soon as it is full."""
        batch: list[Any] = []
        for sample in data:
            batch.append(sample)
            if len(batch) == self.batchsize:
                yield self.collated(batch)
                batch = []
        if batch and self.partial:
            yield self.collated(batch)

    def collated(self, samples: list[Any]) -> Any:
        """Return the batch of samples."""
        return samples if self.collation_fn is None else self.collation_fn(samples)


class Unbatched(PipelineStage):
    """Makes samples of batches."""

    name = "unbatched"

    def run(self, data: Iterable[Any]) -> Iterator[Any]:
        """Yield samples."""
        for batch in data:
            if isinstance(batch, list | tuple):
                for place in range(len(batch[0])):
                    yield tuple(values[place] for values in batch)
            elif isinstance(batch, dict):
                if len(lengths := {len(values) for values in batch.values()}) != 1:
                    raise ValueError(f"unbatched: the fields of a batch have the lengths {sorted(lengths)}")
                for place in range(lengths.pop()):
                    yield {name: values[place] for name, values in batch.items()}
            else:
                raise TypeError(f"unbatched: a batch is a dict, list or tuple, not {type(batch).__name__}")


class Unlisted(PipelineStage):
    """Makes samples of lists of them."""

    name = "unlisted"

    def run(self, data: Iterable[Any]) -> Iterator[Any]:
        """Yield samples."""
        for batch in data:
            if not isinstance(batch, list):
                raise TypeError(f"unlisted: a batch is a list, not {type(batch).__name__}")
            yield from batch


class Slice(PipelineStage):
    """Some of the samples of an iteration, by their places."""

    name = "slice"
    shown = ("bounds",)

    def __init__(self, *bounds: int | None) -> None:
        self.bounds = bounds

    def run(self, data: Iterable[Any]) -> Iterator[Any]:
        """Return the samples at these places."""
        return itertools.islice(data, *self.bounds)


class Info(PipelineStage):
    """Prints some of the samples."""

    name = "info"

    def __init__(self, fmt: str | None, n: int, every: int, width: int, stream: Any, name: str) -> None:
        self._given = (fmt, n, every, width, stream, name)

    def run(self, data: Iterable[Any]) -> Iterator[Any]:
        """Yield the samples."""
        fmt, n, every, width, stream, name = self._given
        stream = sys.stderr if stream is None else stream
        for place, sample in enumerate(data):
            if place < n or (every > 0 and (place + 1) % every == 0):
                lines = ["---" + name, *(f"{field} {repr(value)[:width]}" for field, value in sample.items())]
                stream.write((fmt.format(**sample) if fmt is not None else "\n".join(lines)) + "\n")
            yield sample


class LogKeys(PipelineStage):
    """Writes the key of each sample to a file."""

    name = "log_keys"
    shown = ("logfile",)

    def __init__(self, logfile: str | None) -> None:
        self.logfile = logfile

    def run(self, data: Iterable[Any]) -> Iterator[Any]:
        """Yield the samples."""
        if not self.logfile:
            yield from data
            return
        with open(self.logfile, "a", buffering=1) as stream:  # whole lines, which O_APPEND does not mix
            for place, sample in enumerate(data):
                stream.write(f"{place}\t{sample.get('__worker__')}\t{sample.get('__rank__')}\t{sample.get('__key__')}\n")
                yield sample


class Curried(PipelineStage):
    """A function from iterator to iterator, with its other arguments.

    Args:
        f: The function.
        args: Arguments behind the iterator.
        kw: Arguments behind the iterator.
    """

    shown = ("args", "kw")

    def __init__(self, f: Callable[..., Iterator[Any]], *args: Any, **kw: Any) -> None:
        self.f, self.args, self.kw = f, args, kw
        self.name = getattr(f, "__name__", "")

    def run(self, data: Iterable[Any]) -> Iterator[Any]:
        """Return what the function makes of the samples."""
        return self.f(data, *self.args, **self.kw)


class Cached(PipelineStage):
    """Keeps all samples of the first whole iteration in memory."""

    name = "mcached"

    def __init__(self) -> None:
        self._samples: list[Any] | None = None

    def run(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the samples."""
        if self._samples is not None:
            yield from self._samples
            return
        samples = []
        for sample in source:
            samples.append(sample)
            yield sample
        self._samples = samples
