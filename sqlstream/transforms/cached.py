"""A point of a chain at which samples are stored: the second epoch skips what lies before it.

`CacheTransform` is a marker that the stream engine looks for (`stream/cached.py`) in a dataset's list of transforms; called
without an engine, or inside another transform, it just runs its own. Here is what decides whether two chains are the same.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from types import CodeType
from typing import Any
from uuid import UUID

import numpy as np
import torch

from sqlstream.errors import ConfigError
from sqlstream.transforms.base import Sample, Transform, apply
from sqlstream.transforms.optional import require
from sqlstream.transforms.rng import next_stage

CHAIN_FORMAT = 1
"""Part of every key: raised when our own transforms change what they give, or the codec its form."""


class CacheTransform:
    """Runs transforms, and marks their result as one to be stored.

    Args:
        name: Of this point; part of the key.
        transforms: What is skipped when the result is found.
        version: Part of the key: change it when something changes that the key cannot see (a file that a transform reads, a
            model's weights).

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
    """What is run from the point before, or from the start of the chain, up to this one."""


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

    Classes and functions count by name and byte code (those of sqlstream by name and `CHAIN_FORMAT`), with their parameters.

    Args:
        transform: The point.
        before: What stands before it in its chain.

    Raises:
        ConfigError: A parameter has no stable description and `version` is not given either.
    """
    describe_part = functools.partial(_description, has_version=bool(transform.version))
    parts = [
        *(CHAIN_FORMAT, transform.name, transform.version),
        [describe_part(part) for part in before],
        [describe_part(part) for part in transform.transforms],
    ]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def describe(value: Any) -> Any:
    """Return what JSON can say of a value in a row, the same in every process.

    Raises:
        ConfigError: It has no stable description.
    """
    return _description(value, has_version=False)


def _description(value: Any, has_version: bool) -> Any:  # noqa: PLR0911 - one line for each kind of value
    """Return what JSON can say of a transform or a parameter, the same in every process."""
    again = functools.partial(_description, has_version=has_version)
    plain = _plain_description(value, again)
    if plain is not None:
        return plain
    if isinstance(value, functools.partial):
        return ["partial", again(value.func), again(value.args), again(value.keywords)]
    if inspect.ismethod(value):
        return ["method", again(value.__self__), value.__name__]
    if inspect.isfunction(value):
        held = [again(cell.cell_contents) for cell in value.__closure__ or ()]
        return ["function", value.__module__, value.__qualname__, _code(value), again(value.__defaults__), held]
    if isinstance(value, type) or inspect.isbuiltin(value):
        return ["name", value.__module__, value.__qualname__]
    if hasattr(value, "__dict__"):
        return ["object", *_class_description(type(value)), again(vars(value))]
    if has_version:
        return ["opaque", type(value).__module__, type(value).__qualname__]
    raise ConfigError(
        f"CacheTransform cannot tell whether {value!r} ({type(value).__qualname__}) stays the same from run to run: "
        "give version=, and change it when what it does changes"
    )


def _plain_description(value: Any, again: Callable[[Any], Any]) -> Any:  # noqa: PLR0911 - as above
    """Return the description of a value that is no code; None if it is something else."""
    if value is None or isinstance(value, bool | int | float | str):
        return [type(value).__name__, value.value if isinstance(value, enum.Enum) else value]
    if isinstance(value, enum.Enum | torch.dtype | np.dtype | np.generic | PurePath | Decimal | UUID):
        return [type(value).__name__, str(value)]
    if isinstance(value, date | time | timedelta):
        return [type(value).__name__, repr(value)]
    if isinstance(value, bytes):
        return ["bytes", hashlib.blake2b(value, digest_size=16).hexdigest()]
    if isinstance(value, torch.Tensor | np.ndarray):
        array = np.ascontiguousarray(value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value)  # [...]
        return ["array", str(array.dtype), list(array.shape), hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()]
    if isinstance(value, Mapping):
        return ["mapping", sorted(([again(key), again(item)] for key, item in value.items()), key=json.dumps)]
    if isinstance(value, set | frozenset):
        return ["set", sorted((again(item) for item in value), key=json.dumps)]
    if isinstance(value, list | tuple):
        return ["list", [again(item) for item in value]]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: again(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return ["dataclass", *_class_description(type(value)), fields]
    return None


def _class_description(kind: type) -> list[Any]:
    """Return a class's name and, if it is the user's, the byte code of its methods, its bases included."""
    users = [base for base in kind.__mro__ if base is not object and not base.__module__.startswith("sqlstream.")]
    code = {
        f"{base.__qualname__}.{name}": _code(item) for base in users for name, item in vars(base).items() if _has_code(item)
    }
    return [kind.__module__, kind.__qualname__, code]


def _has_code(item: Any) -> bool:
    return hasattr(getattr(item, "__func__", item), "__code__")


def _code(function: Any) -> str:
    return hashlib.blake2b(_code_bytes(getattr(function, "__func__", function).__code__), digest_size=16).hexdigest()


def _code_bytes(code: CodeType) -> bytes:
    """Return byte code, names and constants; constants that are code themselves (lambdas) by the same rule, sets in order."""
    constants = [
        _code_bytes(constant).hex()
        if isinstance(constant, CodeType)
        else repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
        for constant in code.co_consts
    ]
    return b"\0".join((code.co_code, repr(code.co_names).encode(), repr(constants).encode()))
