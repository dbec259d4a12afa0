"""Describes a transform as JSON, by all that decides its result; the description is the same in every process.

Classes and functions count by name and byte code, with the constants, functions and classes of the user's own modules that they
refer to, and so on from there. Not seen: names that are made at run time, the code of installed packages, the contents of files
and models, and objects in global variables (for these there is `CacheTransform(version=)`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from types import CodeType, ModuleType
from typing import Any
from uuid import UUID

import numpy as np
import torch

from sqlstream.errors import ConfigError

_NUMBERS = (bool, int, float, complex, np.generic, Decimal)
_BY_REPR = (date, time, timedelta, complex, range, slice)
_NAMES = (str, bytes, enum.Enum, torch.dtype, np.dtype, PurePath, UUID, re.Pattern, *_BY_REPR)
_FIXED = (*_NUMBERS, *_NAMES)
"""Types of values that nothing changes in place."""
_INSTALLED = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_MAIN = ("__main__", "__mp_main__")  # the same script in the trainer and in a worker that was spawned


class Describer:
    """Describes values; there is one for each key, since it remembers the functions that it has met.

    Args:
        has_version: The user gives a version for values without a stable description.
    """

    def __init__(self, *, has_version: bool) -> None:
        self._has_version = has_version
        self._met: set[int] = set()

    def describe(self, value: Any) -> Any:  # noqa: PLR0911 - one line for each kind of value
        """Return a transform or a parameter as JSON.

        Raises:
            ConfigError: It has no stable description, and there is no version.
        """
        plain = self._plain(value)
        if plain is not None:
            return plain
        if isinstance(value, functools.partial):
            return ["partial", *map(self.describe, (value.func, value.args)), self._attributes(value.keywords)]
        if inspect.ismethod(value):
            return ["method", self.describe(value.__self__), value.__name__]
        if inspect.isfunction(value):
            return self._function(value)
        if isinstance(value, type) and _is_users(_module_of(value)):
            return ["class", *self._class(value)]
        if isinstance(value, type) or inspect.isbuiltin(value):
            return ["name", _module_of(value), value.__qualname__]
        if (attributes := _attributes_of(value)) is not None:
            return ["object", *self._class(type(value)), self._attributes(attributes)]
        return self._opaque(value)

    def _opaque(self, value: Any) -> Any:
        """Return the description of a value whose content is not known."""
        if self._has_version:
            return ["opaque", _module_of(type(value)), type(value).__qualname__]
        raise ConfigError(
            f"CacheTransform cannot tell whether {value!r} ({type(value).__qualname__}) stays the same from run to run: "
            "give version=, and change it when what it does changes"
        )

    def _plain(self, value: Any) -> Any:  # noqa: PLR0911 - as above
        """Return the description of a value that is no code; None if it is something else."""
        if value is None or isinstance(value, bool | int | float | str):
            return [type(value).__name__, value.value if isinstance(value, enum.Enum) else value]
        if isinstance(value, enum.Enum):
            return [type(value).__name__, str(value), self._try(value.value)]
        if isinstance(value, torch.dtype | np.dtype | np.generic | PurePath | Decimal | UUID):
            return [type(value).__name__, str(value)]
        if isinstance(value, _BY_REPR):
            return [type(value).__name__, repr(value)]
        if isinstance(value, re.Pattern):
            return ["pattern", self.describe(value.pattern), value.flags]
        if isinstance(value, bytes):
            return ["bytes", _digest(value)]
        if isinstance(value, torch.Tensor | np.ndarray):
            array = self._array(value)
            return [*array, self._attributes(vars(value))] if getattr(value, "__dict__", None) else array
        if isinstance(value, Mapping | set | frozenset | list | tuple):
            kind, items = type(value), self._items(value)
            if not _is_users(_module_of(kind)):
                return items
            return [*items, *self._class(kind), self._attributes(_attributes_of(value) or {})]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: self.describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return ["dataclass", *self._class(type(value)), fields]
        return None

    def _items(self, value: Any) -> list[Any]:
        """Return the description of a container: a mapping's pairs in its order, which loops over it see."""
        if isinstance(value, Mapping):
            return ["mapping", [[self.describe(key), self.describe(item)] for key, item in value.items()]]
        if isinstance(value, set | frozenset):
            return ["set", sorted(map(self.describe, value), key=json.dumps)]
        return ["list", list(map(self.describe, value))]

    def _attributes(self, values: Mapping[str, Any]) -> list[Any]:
        """Return the description of what is found by its name alone, in the order of the names."""
        pairs = ([self.describe(key), self.describe(item)] for key, item in values.items())
        return ["mapping", sorted(pairs, key=json.dumps)]

    def _array(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_quantized:
                return self._opaque(value)
            tensor = value.detach().cpu().resolve_conj().resolve_neg()  # [...]
            try:
                value = tensor.numpy()
            except TypeError:  # bfloat16
                data = tensor.contiguous().view(-1).view(torch.uint8)  # [n]
                return ["array", str(tensor.dtype), list(tensor.shape), _digest(data.numpy().tobytes())]
        array = np.ascontiguousarray(value)
        content = self.describe(array.tolist()) if array.dtype.hasobject else _digest(array.tobytes())
        return ["array", str(array.dtype), list(array.shape), content]

    def _function(self, function: Any) -> list[Any]:
        held = [self.describe(cell.cell_contents) for cell in function.__closure__ or ()]
        named = ["function", _module_of(function), function.__qualname__]
        described = [*named, code_digest(function), self.describe(function.__defaults__), held]
        if function.__kwdefaults__:
            described.append(self._attributes(function.__kwdefaults__))
        return described + self._reach(function)

    def _class(self, kind: type) -> list[Any]:
        """Return a class's name and, if it is the user's, the code of its methods and its constants, its bases included."""
        described: list[Any] = [_module_of(kind), kind.__qualname__, {}]
        users = [base for base in kind.__mro__ if base is not object and not base.__module__.startswith("sqlstream.")]
        constants: dict[str, Any] = {}
        reach: dict[str, Any] = {}
        for base in users:
            for name, item in vars(base).items():
                label = f"{base.__qualname__}.{name}"
                for suffix, function in _functions_of(item):
                    described[2][label + suffix] = code_digest(function)
                    if found := self._reach(function):
                        reach[label + suffix] = found
                if not name.startswith("__") and _is_constant(name, item):
                    constants[label] = self._try(item)
        ours = [vars(base)["values_format"] for base in kind.__mro__ if base not in users and "values_format" in vars(base)]
        added = (("constants", constants), ("reach", reach), ("values_format", ours[0] if ours else 0))
        return described + [{key: value} for key, value in added if value]

    def _reach(self, function: Any) -> list[Any]:
        """Return the user's own values, functions and classes that a function refers to by global names; `[]`: none."""
        if id(function) in self._met or not _is_users(_module_of(function)):
            return []
        self._met.add(id(function))
        found: dict[str, Any] = {}
        names = sorted(_names_in(function.__code__))
        own = function.__globals__
        for name in names:
            if isinstance(value := own.get(name), ModuleType):
                if _is_users(value.__name__):
                    for inner in names:
                        if inner in vars(value):
                            self._refer(found, inner, vars(value)[inner], f"{name}.{inner}")
            elif name in own:
                self._refer(found, name, value, name)
        return [found] if found else []

    def _refer(self, found: dict[str, Any], name: str, value: Any, label: str) -> None:
        """Add the description of a global name's value, if that is a constant, or a function or class of the user."""
        if _is_constant(name, value):
            if (described := self._try(value)) is not None:
                found[label] = described
        elif inspect.isfunction(value) and _is_users(_module_of(value)):
            found[label] = ["again"] if id(value) in self._met else self._function(value)
        elif isinstance(value, type) and _is_users(_module_of(value)):
            found[label] = self._class(value)
        elif isinstance(value, functools.partial):
            self._refer(found, name, value.func, f"{label}.func")
        elif inspect.isfunction(wrapped := getattr(value, "__wrapped__", None)):  # of functools.cache
            self._refer(found, name, wrapped, f"{label}.__wrapped__")

    def _try(self, value: Any) -> Any:
        """Return the description of a constant; None if it has none."""
        try:
            return self.describe(value)
        except ConfigError:
            return None


def code_digest(function: Any) -> str:
    """Return a hash of a function's byte code."""
    return _digest(_code_bytes(function.__code__))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object, those in slots as well; None: it has none, or keeps more than these."""
    if isinstance(value, random.Random):
        return None
    state = object.__getstate__(value)
    if isinstance(state, tuple):
        own, in_slots = state
        return {**(own or {}), **in_slots}
    return vars(value) if hasattr(value, "__dict__") else None


def _functions_of(item: Any) -> list[tuple[str, Any]]:
    """Return the functions behind an attribute of a class (of a property, of a wrapper), with what to add to its name."""
    inner = getattr(item, "__func__", item)
    found = [("", inner), (".__wrapped__", getattr(inner, "__wrapped__", None))]
    if isinstance(item, property):
        found = [(".get", item.fget), (".set", item.fset)]
    elif isinstance(item, functools.cached_property):
        found = [(".get", item.func)]
    return [(suffix, function) for suffix, function in found if hasattr(function, "__code__")]


def _is_constant(name: str, value: Any) -> bool:
    """Return whether a variable of a module or class is a constant: by its type, or by a name in capitals."""
    if isinstance(value, tuple | frozenset):
        return all(_is_constant(name, item) for item in value)
    return isinstance(value, _FIXED) or (name.isupper() and isinstance(value, list | dict | set | torch.Tensor | np.ndarray))


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names in byte code, and in the code within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _module_of(value: Any) -> str:
    module = str(value.__module__)
    return _MAIN[0] if module in _MAIN else module


@functools.lru_cache(maxsize=1024)
def _is_users(name: str) -> bool:
    """Return whether a module is the user's own: neither ours, nor installed."""
    if name in _MAIN:
        return True
    if name.partition(".")[0] == "sqlstream" or name.partition(".")[0] in sys.stdlib_module_names:
        return False
    path = getattr(sys.modules.get(name), "__file__", None)
    return path is None or not str(path).startswith(_INSTALLED)


def _code_bytes(code: CodeType) -> bytes:
    """Return byte code, names and constants; constants that are code themselves (lambdas) by the same rule, sets in order.

    Instructions do not say what a `try` guards, what arguments are called, by which a call may give them, and that `*args` are
    some.
    """
    constants = [
        _code_bytes(constant).hex()
        if isinstance(constant, CodeType)
        else repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
        for constant in code.co_consts
    ]
    parts = [code.co_code, repr(code.co_names).encode(), repr(constants).encode()]
    arguments = [name for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if name not in ("self", "cls")]
    if code.co_exceptiontable:
        parts.append(b"guards" + code.co_exceptiontable)
    if len(arguments) > 1:
        parts.append(repr(arguments).encode())
    if gathered := code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        parts.append(b"gathers%d" % gathered)
    return b"\0".join(parts)
