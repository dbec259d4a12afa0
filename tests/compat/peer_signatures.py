"""Signatures of a module's public names, as JSON; run with a peer's own packages it writes what the drop-ins are compared with.

    python -P tests/compat/peer_signatures.py webdataset==1.0.2 wids==0.1.11 > tests/compat/webdataset/signatures.json

in a virtual environment that has these versions, which need not have sqlstream; `-P`, since folders beside this file have the
names of packages.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from typing import Any

CURRIED = ("data", "source", "src")
"""First parameters of functions that stages of WebDataset are made of: who makes a stage does not give them."""


def parameters(function: Any) -> dict[str, str]:
    """Return kind and default of each parameter but `self`."""
    try:
        given = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    named = [parameter for parameter in given if parameter.name not in ("self", "cls")]
    if hasattr(function, "__wrapped__") and named and named[0].name in CURRIED:
        named = named[1:]
    return {parameter.name: f"{parameter.kind.name}{_default(parameter.default)}" for parameter in named}


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    if callable(value):
        return f" = {getattr(value, '__name__', type(value).__name__)}"
    return f" = {value!r}" if isinstance(value, bool | int | float | str | None) else f" = {type(value).__name__}"


def signatures(module: Any) -> dict[str, Any]:
    """Return what each public name of a module takes; of a class also its methods."""
    found: dict[str, Any] = {}
    for name in sorted(getattr(module, "__all__", None) or vars(module)):
        value = getattr(module, name)
        if name.startswith("_") or inspect.ismodule(value) or not callable(value):
            continue
        if not str(getattr(value, "__module__", "")).startswith((module.__name__, "builtins")) and not inspect.isclass(value):
            continue
        found[name] = {"parameters": parameters(value)}
        if inspect.isclass(value):
            methods = [some for some in dir(value) if not some.startswith("_") and inspect.isfunction(getattr(value, some))]
            own = [some for some in methods if getattr(value, some).__module__.startswith(module.__name__.split(".")[0])]
            found[name]["methods"] = {some: parameters(getattr(value, some)) for some in own}
    return found


if __name__ == "__main__":
    packages = [argument.partition("==")[::2] for argument in sys.argv[1:]]
    made = {name: {"version": version, "names": signatures(importlib.import_module(name))} for name, version in packages}
    sys.stdout.write(json.dumps(made, indent=1) + "\n")
