"""Finds paths into the cache in samples that are yielded: the files of such paths must stay."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Set
from datetime import date, datetime
from decimal import Decimal
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any
from uuid import UUID

import numpy as np
import torch

_NO_PATHS = frozenset((bytes, int, float, bool, NoneType, torch.Tensor))
"""Types of most values; they are compared first, since every value of every sample is looked at."""
_SEQUENCES = (list, tuple)
_LOOKED_INTO = "OUV"
"""Kinds of numpy's types that may hold text: objects, text, records."""
_NEVER_LOOKED_INTO = (
    *(bytearray, memoryview, complex, date, datetime, Decimal, UUID, np.generic, np.dtype, torch.dtype, torch.device, range),
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, torch.nn.Module),
)
"""Types that hold no paths which a trainer would open, or that take long to look through."""
MAX_LOOKED_AT = 10_000
"""Containers and objects of a sample; a sample with more counts as one with a path, and its files are kept."""


def holds_path(value: Any, directories: tuple[str, ...]) -> bool:
    """Return whether a value of a sample is, or contains, a path below a directory: in any container, attribute or array."""
    kind = type(value)
    if kind in _NO_PATHS:
        return False
    if kind is str:
        return bool(value.startswith(directories))
    if kind is dict:
        rest = []
        for item in value.values():  # most fields end in this loop, without a call
            kind = type(item)
            if kind is str:
                if item.startswith(directories):
                    return True
            elif kind not in _NO_PATHS:
                if kind is np.ndarray:
                    if item.dtype.kind not in _LOOKED_INTO:
                        continue
                elif kind in _SEQUENCES and set(map(type, item)) <= _NO_PATHS:
                    continue
                rest.append(item)
        return bool(rest) and _any_holds(rest, directories)
    return _any_holds([value], directories)


def _any_holds(values: list[Any], directories: tuple[str, ...]) -> bool:
    """Look through values, and what they contain, without recursion: each container and object once."""
    seen: dict[int, Any] = {}
    while values:
        value = values.pop()
        if isinstance(value, str):
            if value.startswith(directories):
                return True
            continue
        if isinstance(value, _NEVER_LOOKED_INTO) or id(value) in seen:
            continue
        if len(seen) == MAX_LOOKED_AT:
            return True
        seen[id(value)] = value
        items = _items_of(value)
        kinds = set(map(type, items))  # in C: a list may have a million numbers
        if kinds <= _NO_PATHS:
            continue
        if kinds == {str}:
            if any(item.startswith(directories) for item in items):
                return True
            continue
        values += [item for item in items if type(item) not in _NO_PATHS]
    return False


def _items_of(value: Any) -> Iterable[Any]:
    """Return what a value contains; for a path, its text."""
    if isinstance(value, list | tuple | Set | deque):
        return value
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, np.ndarray):
        return value.ravel().tolist() if value.dtype.kind in _LOOKED_INTO else ()
    if isinstance(value, os.PathLike):
        return (os.fsdecode(value),)
    items = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            items.append(getattr(value, f"_{kind.__name__.lstrip('_')}{name}" if is_private else name, None))
    return items
