"""A point of a chain at which samples are stored: the second epoch skips what lies before it.

`CacheTransform` is a marker that the stream engine looks for; called without one, it just runs its transforms. The engine
stores `encode_sample(sample)` under a name made of `chain_key(transform)`, the row and the source's fingerprint, in the same
ledger and under the same limit as every object; and starts the next stage of the sample's generator (`rng.next_stage`) after
it, so that later draws do not depend on a hit. Random transforms inside are drawn once and stay as they fell.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from types import CodeType
from typing import Any

import numpy as np
import torch

from sqlstream.errors import ConfigError
from sqlstream.transforms.base import Sample, Transform, apply
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
        """Return the transformed sample, without looking for a stored one."""
        result = apply(self.transforms, sample)
        if isinstance(result, dict):
            next_stage(result)
        return result


def chain_key(transform: CacheTransform) -> str:
    """Return a hash of everything that decides what the transforms inside make of a sample: 32 hex digits.

    Classes and functions count by name and byte code (those of sqlstream by name and `CHAIN_FORMAT`), with their parameters.

    Raises:
        ConfigError: A parameter has no stable description and `version` is not given either.
    """
    describe = functools.partial(_description, has_version=bool(transform.version))
    parts = [CHAIN_FORMAT, transform.name, transform.version, [describe(part) for part in transform.transforms]]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


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
    if isinstance(value, enum.Enum | torch.dtype | np.dtype | PurePath):
        return [type(value).__name__, str(value)]
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
