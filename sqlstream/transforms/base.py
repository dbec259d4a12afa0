"""What a transform is, and how a chain of them runs.

A transform takes a sample (a dict) and returns a sample, or several: a generator, list or tuple of samples. Each of several
goes through the rest of the chain by itself.

The randomness of a chain depends on (seed, epoch, position) alone. `rng(sample)` draws from the sample's own generator. For
code that draws from the global generators of python, numpy and torch, these are seeded from the same key while the chain runs,
and restored afterwards: the trainer's own draws do not change (`stream/chain/global_rng.py`). Chains of our own transforms,
which draw from `rng(sample)` alone, do without; so do those whose code cannot draw (`draw_free.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, Protocol, TypeVar

from sqlstream.errors import SqlStreamError, TransformError, text_of
from sqlstream.transforms.draw_free import GivenCode, draw_free
from sqlstream.transforms.grounds import DrawFree
from sqlstream.transforms.reading import LENT, OpenFiles
from sqlstream.transforms.rng import GENERATOR, PRIVATE_FIELDS, RNG_KEY, begin_piece, end

BUCKET = "__bucket__"
"""Field of a sample of a dataset with `batches=`: what names its bucket, such as (1024, 768)."""

_OWN_MODULES = ("sqlstream.transforms.", "sqlstream.compat.")
"""Modules of our own transforms."""

Sample = dict[str, Any]
Transform = Callable[[Sample], Sample | Iterable[Sample]]
Made = TypeVar("Made")


class SeededGenerators(Protocol):
    """The global generators while a sample is made."""

    was_drawn_from: bool
    """The transforms drew from them."""

    def run(self, make: Callable[[], Made], goes_on: Callable[[Made], bool]) -> Made:
        """Return what `make` returns; where that `goes_on`, the next run draws from where this one ends."""
        ...


class Seeding(Protocol):
    """Makes the global generators of a sample."""

    def __call__(self, key: tuple[int, ...], *, watches: bool = False) -> SeededGenerators:
        """Return those of a key (seed, epoch, position, stage); with `watches` they say whether they were drawn from."""


class Chain:
    """Transforms of one stage.

    Args:
        transforms: The transforms, in order.
        seed: Part of every sample's key; None (no shuffle) counts as 0.
        stage: Part of every key, a number for each chain: 0 before the download, 1 after it.
        generators: Seeds the global generators for code that may draw from them; None: they are left alone.
        previous: The chain whose samples come in; None: samples of an index.
        is_plain: Samples of the index have plain values: no objects that were unpickled.
    """

    def __init__(
        self,
        transforms: Sequence[Transform],
        *,
        seed: int | None,
        stage: int,
        generators: Seeding | None = None,
        previous: Chain | None = None,
        is_plain: bool = True,
    ) -> None:
        self._transforms = tuple(transforms)
        self.seed = seed or 0
        """First part of the keys of a stream's samples."""
        self._stage = stage
        self._previous = None if previous is None or previous.is_empty else previous
        self._draw_free: DrawFree | None = None
        foreign = [transform for transform in self._transforms if may_draw_globally(transform)]
        self._generators_of = generators if foreign else None
        if is_plain and not any(map(_unpickles, self._transforms)) and (previous is None or previous._draw_free is not None):
            self._draw_free = draw_free(map(_code_of, foreign))
        self.drew = False
        """The last run with `watches` drew random numbers."""

    @property
    def is_empty(self) -> bool:
        """The chain has no transforms."""
        return not self._transforms

    def cannot_draw(self) -> bool:
        """Return whether neither its code nor that of the chain before it can draw from global generators now."""
        proof, previous = self._draw_free, self._previous
        return proof is not None and proof.holds() and (previous is None or previous.cannot_draw())

    def run(
        self, sample: Sample, key: tuple[int, int, int], *, files: OpenFiles | None = None, watches: bool = False
    ) -> Sample | Iterator[Sample]:
        """Return the sample after all transforms, or an iterator of samples if one of them makes several.

        Args:
            sample: The sample, which the transforms may change.
            key: What its random numbers depend on, beside the stage: seed, epoch and position.
            files: Files that `read_file` reads where they are open, in this thread, until others are lent or they are closed.
            watches: Set `drew`.

        Raises:
            TransformError: One of them failed.
        """
        if not self._transforms:
            return sample
        if files is not None:
            LENT.files = files
        key_of_stage = sample[RNG_KEY] = (*key, self._stage)
        sample.pop(GENERATOR, None)
        if self._generators_of is None or self.cannot_draw():
            outcome = apply(self._transforms, sample)
            if not isinstance(outcome, dict):
                return _each(outcome, None)
            self.drew = GENERATOR in outcome
        else:
            generators = self._generators_of(key_of_stage, watches=watches)
            outcome = generators.run(partial(apply, self._transforms, sample), _is_several)
            if not isinstance(outcome, dict):
                return _each(outcome, generators)
            self.drew = GENERATOR in outcome or generators.was_drawn_from
        outcome.pop(RNG_KEY, None)
        outcome.pop(GENERATOR, None)
        return outcome


def _is_several(outcome: Sample | Iterator[Sample]) -> bool:
    return not isinstance(outcome, dict)


def _each(outcome: Iterator[Sample], generators: SeededGenerators | None) -> Iterator[Sample]:
    """Yield the samples of one; each is made when it is asked for, and the generators go on where they were."""
    take_next = partial(next, outcome, None)
    while True:
        piece = take_next() if generators is None else generators.run(take_next, _is_sample)
        if piece is None:
            return
        end(piece)
        yield piece


def _is_sample(piece: Sample | None) -> bool:
    return piece is not None


def apply(transforms: Sequence[Transform], sample: Sample) -> Sample | Iterator[Sample]:
    """Return the sample after all `transforms`; an iterator of samples once one of them made several.

    Raises:
        TransformError: A transform raised, or returned something else; it names the transform and the sample. From an
            iterator it is raised when the sample is asked for.
    """
    for number, transform in enumerate(transforms):
        try:
            result = transform(sample)
        except SqlStreamError:
            raise
        except Exception as error:
            raise _failed(transform, sample, error) from error
        if result is sample:
            continue
        if not isinstance(result, dict):
            if not isinstance(result, Iterator | list | tuple):
                raise _wrong_type(transform, sample, result)
            return _apply_to_each(transform, result, transforms[number + 1 :], sample)
        _carry(sample, result)
        sample = result
    return sample


def _carry(origin: Sample, result: Sample) -> None:
    """Copy the sample's generator to the dict that a transform returned: without it later draws would not depend on the key."""
    for field in PRIVATE_FIELDS:
        if field in origin and field not in result:
            result[field] = origin[field]


def _apply_to_each(
    transform: Transform, results: Iterable[Sample], rest: Sequence[Transform], origin: Sample
) -> Iterator[Sample]:
    pieces = iter(results)
    key = origin.get(RNG_KEY)
    for number in count():
        try:
            piece = next(pieces)
        except StopIteration:
            return
        except SqlStreamError:
            raise
        except Exception as error:
            raise _failed(transform, origin, error) from error
        if not isinstance(piece, dict):
            raise _wrong_type(transform, origin, piece)
        begin_piece(piece, key, number)
        outcome = apply(rest, piece)
        if isinstance(outcome, dict):
            yield outcome
        else:
            yield from outcome


def may_draw_globally(transform: Transform) -> bool:
    """Return whether it may draw from global generators: foreign code may, our own transforms use `rng(sample)` alone."""
    return not _is_ours(transform) or getattr(transform, "calls_given_code", False)


def _code_of(transform: Transform) -> Transform | GivenCode:
    """Return what of a transform may draw: itself, or of one of ours what the user has given it."""
    given: GivenCode | None = getattr(transform, "given_code", None) if _is_ours(transform) else None
    return transform if given is None else given


def _is_ours(transform: Transform) -> bool:
    return type(transform).__module__.startswith(_OWN_MODULES)


def _unpickles(transform: Transform) -> bool:
    """Return whether it gives objects of any class, whose methods may draw whatever they are called."""
    return any(getattr(of, "allow_pickle", False) for of in (transform, getattr(transform, "options", None)))


def transform_name(transform: Transform) -> str:
    """Return the name of a transform in messages."""
    return getattr(transform, "__name__", None) or type(transform).__name__


def _failed(transform: Transform, sample: Sample, error: Exception) -> TransformError:
    return TransformError(
        f"transform {transform_name(transform)} failed on {_describe(sample)}: {text_of(error)}",
        transform=transform_name(transform),
    )


def _wrong_type(transform: Transform, sample: Sample, result: object) -> TransformError:
    return TransformError(
        f"transform {transform_name(transform)} returned {type(result).__name__} for {_describe(sample)}: "
        "return the sample (a dict), or a generator, list or tuple of samples"
    )


def _describe(sample: Sample) -> str:
    fields = ", ".join(str(field) for field in sample if field not in PRIVATE_FIELDS)
    return f"sample {sample.get('__sample_key__')!r} with fields {fields or 'none'}"
