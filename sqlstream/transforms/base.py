"""What a transform is, and how a chain of them runs.

A transform takes a sample (a dict) and returns a sample, or several: a generator, list or tuple of samples. Each of several
goes through the rest of the chain by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from sqlstream.errors import SqlStreamError, TransformError
from sqlstream.transforms.rng import PRIVATE_FIELDS, RNG_KEY, begin_piece

Sample = dict[str, Any]
Transform = Callable[[Sample], Sample | Iterable[Sample]]


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
    return not type(transform).__module__.startswith("sqlstream.transforms.") or getattr(transform, "calls_given_code", False)


def transform_name(transform: Transform) -> str:
    """Return the name of a transform in messages."""
    return getattr(transform, "__name__", None) or type(transform).__name__


def _failed(transform: Transform, sample: Sample, error: Exception) -> TransformError:
    return TransformError(
        f"transform {transform_name(transform)} failed on {_describe(sample)}: {type(error).__name__}: {error}",
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
