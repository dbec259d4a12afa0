"""Stages that make one sample, or none, of each one: the engine runs them."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from sqlstream.compat.webdataset.autodecode import Decoder
from sqlstream.compat.webdataset.handlers import Handler, reraise_exception
from sqlstream.compat.webdataset.stages.base import EachSample, Outcome


def getfirst(a: Mapping[str, Any], keys: str | Sequence[str], default: Any = None, missing_is_error: bool = True) -> Any:
    """Return the value of the first of `keys` (a text with `;` between them, or a list) that a dict has.

    Raises:
        ValueError: It has none of them.
    """
    for key in keys.split(";") if isinstance(keys, str) else keys:
        if key in a:
            return a[key]
    if missing_is_error:
        raise ValueError(f"none of {keys!r} is in the sample: it has {', '.join(map(repr, a))}")
    return default


def transform_with(sample: Sequence[Any], transformers: Sequence[Callable[[Any], Any] | None] | None) -> Sequence[Any]:
    """Return a list of values, each after the function at its place; None leaves it."""
    if not transformers:
        return sample
    if len(transformers) > len(sample):
        raise ValueError(f"{len(transformers)} functions for {len(sample)} values: give as many as values, or fewer")
    made = list(sample)
    for place, function in enumerate(transformers):
        if function is not None:
            made[place] = function(made[place])
    return made


class Map(EachSample):
    """Calls a function for each sample; None drops it."""

    name = "map"
    shown = ("f",)

    def __init__(self, f: Callable[[Any], Any], handler: Handler = reraise_exception) -> None:
        super().__init__(handler)
        self.f = f
        self._call = f.decode if isinstance(f, Decoder) else f
        self.calls_given_code = getattr(f, "calls_given_code", True)

    def __repr__(self) -> str:
        """Return its function; a decoder names itself."""
        return repr(self.f) if isinstance(self.f, Decoder) else super().__repr__()

    @property
    def given(self) -> tuple[Callable[..., Any], ...]:
        """Its function; of a decoder those of the user."""
        return self.f.given if type(self.f) is Decoder else (self.f,)

    def take(self, sample: Any) -> Any:
        """Return what the function makes of a sample; a dict keeps its key."""
        made = self._call(sample)
        if made is sample:
            return made
        if made is None:
            return Outcome.DROPPED
        if isinstance(sample, dict) and isinstance(made, dict):
            made["__key__"] = sample.get("__key__")
        return made


class Select(EachSample):
    """Drops samples."""

    name = "select"
    shown = ("predicate",)

    def __init__(self, predicate: Callable[[Any], Any]) -> None:
        super().__init__()
        self.predicate = predicate

    @property
    def given(self) -> tuple[Callable[..., Any], ...]:
        """Its predicate."""
        return (self.predicate,)

    def take(self, sample: Any) -> Any:
        """Return a sample of which the predicate is true."""
        return sample if self.predicate(sample) else Outcome.DROPPED


class Rename(EachSample):
    """Renames fields: new name → names of which the first one present is taken."""

    name = "rename"
    shown = ("names",)
    calls_given_code = False

    def __init__(self, names: Mapping[str, str | Sequence[str]], keep: bool, handler: Handler) -> None:
        super().__init__(handler)
        self.names, self.keep = dict(names), keep
        self._old = {old for given in names.values() for old in (given.split(";") if isinstance(given, str) else given)}

    def take(self, sample: Any) -> Any:
        """Return a sample with the new names."""
        renamed = {new: getfirst(sample, old) for new, old in self.names.items()}
        if not self.keep:
            return renamed
        return {**{name: value for name, value in sample.items() if name not in self._old}, **renamed}


class Associate(EachSample):
    """Adds fields by the key of a sample: of a dict, or what a function returns."""

    name = "associate"

    def __init__(self, associator: Any) -> None:
        super().__init__()
        self.associator = associator

    @property
    def given(self) -> tuple[Callable[..., Any], ...] | None:
        """Its function; what a dict has may be of any class."""
        return (self.associator,) if callable(self.associator) else None

    def take(self, sample: Any) -> Any:
        """Return a sample with what belongs to its key."""
        key = sample["__key__"]
        sample.update(self.associator(key) if callable(self.associator) else self.associator.get(key, {}))
        return sample


class MapDict(EachSample):
    """Calls a function for the value of each named field."""

    name = "map_dict"
    shown = ("functions",)

    def __init__(self, functions: Mapping[str, Callable[[Any], Any]], handler: Handler) -> None:
        super().__init__(handler)
        if not functions or not all(map(callable, functions.values())):
            raise ValueError(f"map_dict({functions!r}): name fields with functions, map_dict(jpg=f)")
        self.functions = dict(functions)

    @property
    def given(self) -> tuple[Callable[..., Any], ...]:
        """Its functions."""
        return tuple(self.functions.values())

    def take(self, sample: Any) -> Any:
        """Return a sample with other values."""
        for name, function in self.functions.items():
            sample[name] = function(sample[name])
        return sample


class ToTuple(EachSample):
    """Makes a tuple of named fields."""

    name = "to_tuple"
    shown = ("fields",)
    calls_given_code = False

    def __init__(
        self, fields: Sequence[str | Sequence[str]], handler: Handler, missing_is_error: bool, none_is_error: bool | None
    ) -> None:
        super().__init__(handler)
        if len(fields) == 1 and isinstance(fields[0], str) and " " in fields[0]:
            fields = fields[0].split()
        self.fields = tuple(fields)
        self.missing_is_error = missing_is_error
        self._none_is_error = missing_is_error if none_is_error is None else none_is_error

    def take(self, sample: Any) -> Any:
        """Return the values of a sample."""
        try:
            values = [sample[field] for field in self.fields]
        except (KeyError, TypeError):  # of several names for a field, or a list of them, the first one that there is
            values = [getfirst(sample, field, None, self.missing_is_error) for field in self.fields]
        if self._none_is_error:
            for value in values:
                if value is None:
                    raise ValueError(f"to_tuple{self.fields} finds None in a sample of {', '.join(map(repr, sample))}")
        return tuple(values)


class MapTuple(EachSample):
    """Calls a function for each value of a tuple; None leaves it."""

    name = "map_tuple"
    shown = ("functions",)

    def __init__(self, functions: Sequence[Callable[[Any], Any] | None], handler: Handler) -> None:
        super().__init__(handler)
        if wrong := [function for function in functions if function is not None and not callable(function)]:
            raise ValueError(f"map_tuple: {wrong[0]!r} is no function: give one, or None")
        self.functions = tuple(functions)

    @property
    def given(self) -> tuple[Callable[..., Any], ...]:
        """Its functions."""
        return tuple(function for function in self.functions if function is not None)

    def take(self, sample: Any) -> Any:
        """Return a tuple with other values."""
        made = list(sample)
        for place, function in enumerate(self.functions[: len(made)]):
            if function is not None:
                made[place] = function(made[place])
        return tuple(made)


class RandomSample(EachSample):
    """Keeps samples by chance."""

    name = "rsample"
    shown = ("p",)

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"rsample(p={p}) is no probability: give a number from 0 to 1")
        self.p = p

    def take(self, sample: Any) -> Any:
        """Return a sample, or drop it; the engine seeds the generator by (seed, epoch, position)."""
        return sample if random.uniform(0.0, 1.0) < self.p else Outcome.DROPPED


class ExtractKeys(EachSample):
    """Makes a tuple of the fields whose names match patterns."""

    name = "extract_keys"
    shown = ("patterns",)
    calls_given_code = False

    def __init__(self, patterns: Sequence[str | Sequence[str]], duplicate_is_error: bool, ignore_missing: bool) -> None:
        super().__init__()
        self.patterns = [pattern.split(";") if isinstance(pattern, str) else list(pattern) for pattern in patterns]
        self._duplicate_is_error, self._ignore_missing = duplicate_is_error, ignore_missing

    def take(self, sample: Any) -> Any:
        """Return the values of a sample."""
        values = []
        for patterns in self.patterns:
            matches = [name for name in sample if any(fnmatch("." + name, some) or fnmatch(name, some) for some in patterns)]
            if not matches and self._ignore_missing:
                continue
            if not matches or (len(matches) > 1 and self._duplicate_is_error):
                what = "several fields match" if matches else "no field matches"
                raise ValueError(f"{what} {';'.join(patterns)!r} in a sample of {', '.join(map(repr, sample))}")
            values.append(sample[matches[0]])
        return tuple(values)


class RenameKeys(EachSample):
    """Renames the fields whose names match patterns; the last pattern that matches counts."""

    name = "rename_keys"
    shown = ("patterns",)
    calls_given_code = False

    def __init__(
        self, patterns: Sequence[tuple[str, str]], keep_unselected: bool, must_match: bool, duplicate_is_error: bool
    ) -> None:
        super().__init__()
        self.patterns = list(patterns)
        self._keep, self._must_match, self._duplicate_is_error = keep_unselected, must_match, duplicate_is_error

    def take(self, sample: Any) -> Any:
        """Return a sample with the new names."""
        made: dict[str, Any] = {}
        matched: set[str] = set()
        for path, value in sample.items():
            name = path.rpartition("/")[2].lower()
            pattern, new = next((some for some in self.patterns[::-1] if fnmatch(name, some[0])), (None, None))
            if pattern is None or new is None:
                if self._keep:
                    made[path] = value
                continue
            matched.add(pattern)
            if new not in made:
                made[new] = value
            elif self._duplicate_is_error:
                raise ValueError(f"rename_keys: two fields become {new!r} in a sample of {', '.join(map(repr, sample))}")
        if self._must_match and (missing := [pattern for pattern, _ in self.patterns if pattern not in matched]):
            raise ValueError(f"rename_keys: nothing matches {missing[0]!r} in a sample of {', '.join(map(repr, sample))}")
        return made


class DecodePatterns(EachSample):
    """Decodes the fields whose names match patterns, from a stream; the last pattern that matches counts."""

    name = "xdecode"
    shown = ("decoders",)

    def __init__(self, decoders: Sequence[tuple[str, Any]], must_decode: bool) -> None:
        super().__init__()
        self.decoders = list(decoders)
        self.must_decode = must_decode

    def take(self, sample: Any) -> Any:
        """Return a sample with its fields decoded."""
        return {path: self._decoded(path, data) for path, data in sample.items()}

    def _decoded(self, path: str, data: Any) -> Any:
        name = path.rpartition("/")[2].lower()
        if name.startswith("__"):
            return data
        matching = (decode for some, decode in self.decoders[::-1] if fnmatch(name, some) or fnmatch("." + name, some))
        decode = next(matching, None)
        if decode is None and self.must_decode:
            raise ValueError(f"xdecode: no pattern matches {path!r}: give one, or must_decode=False")
        return decode(io.BytesIO(data) if isinstance(data, bytes) else data) if decode else data
