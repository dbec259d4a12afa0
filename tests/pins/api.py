"""What users write: import paths, parameters, options of the command line, keys of its JSON."""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib
import inspect
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODULES = (
    *("sqlstream", "sqlstream.cache", "sqlstream.errors", "sqlstream.distributed"),
    *("sqlstream.transforms", "sqlstream.transforms.presets", "sqlstream.transforms.collate"),
    *("sqlstream.testing.servers", "sqlstream.testing.storage", "sqlstream.testing.faults", "sqlstream.testing.clock"),
    *(
        "sqlstream.testing.reference",
        "sqlstream.testing.invariants",
        "sqlstream.testing.disk",
        "sqlstream.testing.system_calls",
    ),
)
"""Public ones; without `__all__`, what they define and do not begin with an underscore."""
OBJECTS = (
    "sqlstream.config:IndexOptions",
    "sqlstream.config:StorageOptions",
    "sqlstream.config:OnCacheError",
    "sqlstream.config:OnError",
    "sqlstream.config:default_cache_directory",
    "sqlstream.config:parse_bytes",
    "sqlstream.config:parse_duration",
    "sqlstream.transforms.cached:CacheTransform",
    "sqlstream.transforms.cached:chain_key",
    "sqlstream.transforms.rng:rng",
    "sqlstream.stream.maps:EpochBatches",
    "sqlstream.stream.maps:MapView",
    "sqlstream.index.weights:open_weights",
    "sqlstream.index.build.build:open_index",
    "sqlstream.order.weights:WeightedRows",
    "sqlstream.order:Plan",
    "sqlstream.order:Partition",
    "sqlstream.storage.fetcher:Fetcher",
)
"""Beside them, what pages of docs/ import or name: import path and constructor."""
DATASET_JSON = ("cache stats", "cache verify", "cache failures", "cache top --once", "index info", "index info --ranges")
"""Commands whose JSON is looked at, with a cache directory behind them."""


def public_names(module: Any) -> list[str]:
    """Return what a module offers."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return sorted(own)


def parameters_of(function: Any) -> dict[str, str] | None:
    """Return kind, and default if there is one, of each parameter by its name, in order; None where Python does not tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    return {
        parameter.name: parameter.kind.name + ("" if parameter.default is parameter.empty else f" = {shown(parameter.default)}")
        for parameter in signature.parameters.values()
    }


def shown(default: object) -> str:
    """Return a default as text without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(default))


def describe(value: Any) -> dict[str, Any]:
    """Return what users may rely on of a public name."""
    if inspect.isclass(value):
        if issubclass(value, enum.Enum):
            return {"kind": "enum", "members": {name: str(member.value) for name, member in value.__members__.items()}}
        if issubclass(value, BaseException):
            return {"kind": "error", "bases": [base.__name__ for base in value.__mro__[1:-1]]}
        return {"kind": "class", "parameters": parameters_of(value), "members": dict(members_of(value))}
    if callable(value) and not isinstance(value, type):
        return {"kind": "function", "parameters": parameters_of(value)}
    return {"kind": "value"}


def members_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods of a class with their parameters, its properties and fields with None."""
    for name in sorted(dir(cls)):
        if name.startswith("_") or not any(
            name in vars(base) for base in cls.__mro__ if base.__module__.startswith("sqlstream")
        ):
            continue
        yield name, parameters_of(getattr(cls, name)) if callable(getattr(cls, name, None)) else None


def commands_of(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each command with its arguments: option strings or place, number of words, default, choices."""
    arguments: dict[str, Any] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands_of(child, (*words, name))
            continue
        kind, number = type(action).__name__.strip("_"), action.nargs
        key = " ".join(action.option_strings) or action.dest
        arguments[key] = {"action": kind, "nargs": number, "default": shown(action.default), "required": action.required}
    yield " ".join(words), arguments


def json_keys(document: object, path: str = "") -> Iterator[str]:
    """Yield where values are in a JSON document; of a list, those of all its items."""
    if isinstance(document, dict):
        for name, value in document.items():
            yield f"{path}.{name}"
            yield from json_keys(value, f"{path}.{name}")
    elif isinstance(document, list):
        for value in document:
            yield from json_keys(value, f"{path}[]")


def make_directory(directory: Path) -> Path:
    """Return a cache at rest, with an index, an entry and a download that failed."""
    from sqlstream import StreamingDataset
    from sqlstream.testing.servers import FaultyHttpServer

    with FaultyHttpServer({"/a.bin": b"data"}) as server:
        (directory / "rows.csv").write_text(f"index,url\na,{server.url}/a.bin\nb,{server.url}/missing.bin\n")
        with StreamingDataset(
            directory / "rows.csv",
            directory / "cache",
            columns_to_download=["url"],
            max_failure_ratio=1.0,
            show_progress=False,
            num_downloading_retries=0,
        ) as dataset:
            assert len(list(dataset)) == 2
    return directory / "cache"


def command_line(*words: str) -> Any:
    """Return what a command prints as JSON."""
    from sqlstream.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*words, "--json"]) in (0, 1)
    return json.loads(printed.getvalue())


def resolve(place: str) -> dict[str, Any] | None:
    """Return what a `module:name` is; None where there is none."""
    module, _, name = place.partition(":")
    try:
        value = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None
    return describe(value)


def documents(directory: Path) -> dict[str, list[str]]:
    """Return the keys of the JSON that each command prints."""
    cache = make_directory(directory)
    printed = {words: command_line(*words.split(), str(cache)) for words in DATASET_JSON}
    printed["index query"] = command_line("index", "query", str(cache), "SELECT * FROM dataframe")
    printed["index explain"] = command_line("index", "explain", str(cache), "SELECT * FROM dataframe")
    printed["cache clear"] = command_line("cache", "clear", str(cache), "--yes")
    return {words: sorted(set(json_keys(document))) for words, document in printed.items()}


def compute(directory: Path) -> dict[str, Any]:
    """Return all of it."""
    from sqlstream.cli.main import build_parser

    names: dict[str, Any] = {}
    for module in MODULES:
        names |= {f"{module}:{name}": resolve(f"{module}:{name}") for name in public_names(importlib.import_module(module))}
    for place in OBJECTS:
        found = resolve(place)
        assert found is not None
        names[place] = found if found["kind"] == "enum" else {**found, "members": {}}
    return {"names": names, "commands": dict(commands_of(build_parser())), "json": documents(directory)}
