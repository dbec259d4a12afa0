"""A point of a chain at which samples are stored: the second epoch skips what lies before it.

`CacheTransform` is a marker that the stream engine looks for (`stream.engine.stored_samples`) in a dataset's list of
transforms; called without an engine, or inside another transform, it runs its transforms. `chain_key` decides whether two
chains are the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from sqlstream.errors import ConfigError
from sqlstream.transforms.base import Sample, Transform, apply, may_draw_globally
from sqlstream.transforms.description import Describer
from sqlstream.transforms.optional import require
from sqlstream.transforms.rng import next_stage

CHAIN_FORMAT = 1
"""Part of every key: raised when the codec changes its form; one of our transforms that changes what it gives raises its own
`values_format` (`BaseTransform`)."""


class CacheTransform:
    """Runs transforms, and marks their result as one to be stored.

    Args:
        name: Name of this point; part of the key.
        transforms: Transforms that are skipped when the result is found.
        version: Part of the key: change it when something changes that the key cannot see (a file that a transform reads, a
            model's weights, an installed package).

    Example:
        >>> from sqlstream.transforms.metadata import LoadJsonMetadataTransform
        >>> CacheTransform("decoded", [LoadJsonMetadataTransform("meta")])({"meta": '{"a": 1}'})
        {'meta': {'a': 1}}
    """

    def __init__(self, name: str, transforms: Sequence[Transform], version: str | int = "") -> None:
        if not name or not isinstance(name, str):
            raise ConfigError(f"CacheTransform: name={name!r} must be a text that is not empty")
        self.name = name
        self.transforms = tuple(transforms)
        self.version = str(version)

    @property
    def calls_given_code(self) -> bool:
        """Within another point it runs as a transform, and so do those within it."""
        return any(map(may_draw_globally, self.transforms))

    def __call__(self, sample: Sample) -> Sample | Iterable[Sample]:
        """Return the transformed sample, without looking for a stored one; what follows draws from the next stage."""
        result = apply(self.transforms, sample)
        if isinstance(result, dict):
            next_stage(result)
        return result


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CachePoint:
    """A `CacheTransform` in its chain."""

    name: str
    key: str
    """Hash of all that decides what a sample is at this point; see `chain_key`."""
    transforms: tuple[Transform, ...]
    """Transforms from the point before, or from the start of the chain, up to this one."""


def split_at_points(transforms: Sequence[Transform]) -> tuple[list[CachePoint], list[Transform]]:
    """Return the cache points of a chain, and the transforms behind the last one.

    Raises:
        ConfigError: A transform before a point has no stable description.
        MissingDependencyError: There is a point, and safetensors is not installed.
    """
    points: list[CachePoint] = []
    start = 0
    for number, transform in enumerate(transforms):
        if isinstance(transform, CacheTransform):
            require("safetensors.torch", "latent", "to store samples")
            key = chain_key(transform, before=transforms[:number])
            between = (*transforms[start:number], *transform.transforms)
            points.append(CachePoint(name=transform.name, key=key, transforms=between))
            start = number + 1
    return points, list(transforms[start:])


def chain_key(transform: CacheTransform, before: Sequence[Transform] = ()) -> str:
    """Return a hash of everything that decides what the transforms inside make of a sample: 32 hex digits.

    Classes and functions count by name, byte code and what they refer to (those of sqlstream by name and `values_format`), with
    their parameters (`description`).

    Args:
        transform: The point.
        before: The transforms before it in its chain.

    Raises:
        ConfigError: A parameter has no stable description and `version` is not given either.
    """
    describe_part = Describer(has_version=bool(transform.version)).describe
    parts = [
        *(CHAIN_FORMAT, transform.name, transform.version),
        [describe_part(part) for part in before],
        [describe_part(part) for part in transform.transforms],
    ]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def describe(value: Any) -> Any:
    """Return a value of a row as JSON, the same in every process.

    Raises:
        ConfigError: It has no stable description.
    """
    return Describer(has_version=False).describe(value)
