"""Transforms on one field: they read it, take options, and raise errors that name transform, field and sample.

Functions of the other modules do the work on values and raise plain errors; the classes here add the names.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from sqlstream.errors import ConfigError, DecodeError, MissingDependencyError, TransformError, text_of
from sqlstream.transforms.base import Sample
from sqlstream.transforms.optional import import_ahead
from sqlstream.transforms.rng import PRIVATE_FIELDS

_MAX_FIELDS = 30  # arbitrary: an error is read by a person


def summary(value: Any) -> str:
    """Return a value's type, with shape, length or text, for a message."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{type(value).__name__} of {len(value)} bytes"
    if isinstance(value, dict | list | tuple | set):
        return f"{type(value).__name__} of {len(value)}"
    if value is None or isinstance(value, str | int | float | bool):
        return f"{type(value).__name__} {reprlib.repr(value)}" if value is not None else "None"
    return type(value).__name__


def holds(sample: Mapping[str, Any]) -> str:
    """Return the sample's key and a summary of its fields, for a message."""
    fields = [f"{name}: {summary(value)}" for name, value in sample.items() if name not in PRIVATE_FIELDS]
    more = f", and {len(fields) - _MAX_FIELDS} more" if len(fields) > _MAX_FIELDS else ""
    return f"sample {sample.get('__sample_key__')!r} holds {', '.join(fields[:_MAX_FIELDS]) or 'no field'}{more}"


def failure(transform: object, sample: Mapping[str, Any], text: str) -> TransformError:
    """Return the TransformError of `transform` on `sample`."""
    name = type(transform).__name__
    return TransformError(f"{name}: {text}; {holds(sample)}", transform=name)


def read_field(transform: object, sample: Mapping[str, Any], field: str) -> Any:
    """Return a field's value.

    Raises:
        TransformError: The sample has no such field.
    """
    if field not in sample:
        raise missing(transform, sample, field)
    return sample[field]


def missing(transform: object, sample: Mapping[str, Any], field: str) -> TransformError:
    """Return the error for a field that the sample does not have."""
    return failure(transform, sample, f"field {field!r} is missing")


def dummy_reason(sample: Mapping[str, Any], field: str) -> str | None:  # noqa: PLR0911 - one line for each case
    """Return why a field holds no value: it is absent, None, '', NaN or a tensor with NaN; None if it does hold one."""
    if field not in sample:
        return "absent"
    value = sample[field]
    if value is None:
        return "None"
    if isinstance(value, str | bytes) and len(value) == 0:
        return "empty"
    if isinstance(value, float | np.floating) and math.isnan(value):
        return "NaN"
    if isinstance(value, torch.Tensor) and value.is_floating_point() and bool(torch.isnan(value).any()):
        return "a tensor with NaN"
    if isinstance(value, np.ndarray) and value.dtype.kind in "fc" and bool(np.isnan(value).any()):
        return "an array with NaN"
    return None


def field_names(owner: str, option: str, given: Sequence[str]) -> tuple[str, ...]:
    """Return names of fields.

    Raises:
        ConfigError: It is one text, whose characters are no names.
    """
    if isinstance(given, str):
        raise ConfigError(f"{owner}: {option}={given!r} is a text: give a list of field names")
    return tuple(given)


def parse_options(options_type: type[Any], given: Mapping[str, Any], owner: str) -> Any:
    """Return the frozen options of keyword arguments.

    Raises:
        ConfigError: A name is unknown, or a value is out of its range.
    """
    known = [field.name for field in dataclasses.fields(options_type)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(f"{owner} has no option {', '.join(map(repr, unknown))}: it knows {', '.join(known) or 'none'}")
    try:
        return options_type(**given)
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"{owner}: {error}") from None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """Options of a transform that has none."""


class BaseTransform:
    """A transform from one field to one field; subclasses implement `transform`.

    Args:
        input_field: The field that is read.
        output_field: The field that gets the result; None: the input field.
        transform_kwargs: Options, checked against `options_type` in the constructor.
    """

    options_type: ClassVar[type[Any]] = NoOptions
    options: Any
    optional_modules: ClassVar[tuple[str, ...]] = ()
    """What it uses beside the package: imported, where it is there, as the transform is made."""
    values_format: ClassVar[int] = 0
    """Part of the key of stored samples: raised when the class changes what it gives."""

    def __init__(self, input_field: str, output_field: str | None = None, **transform_kwargs: Any) -> None:
        import_ahead(*self.optional_modules)
        self.input_field = input_field
        self.output_field = input_field if output_field is None else output_field
        for name, field in (("input_field", self.input_field), ("output_field", self.output_field)):
            if not isinstance(field, str):
                raise ConfigError(
                    f"{type(self).__name__}: {name}={field!r} is no name of a field: give one text, a transform each"
                )
        self.options = parse_options(self.options_type, transform_kwargs, type(self).__name__)

    def __call__(self, sample: Sample) -> Sample:
        """Put the transformed field into the sample and return it.

        Raises:
            DecodeError: The field's bytes do not decode.
            TransformError: The field is missing or does not fit.
        """
        value = read_field(self, sample, self.input_field)
        with naming(self, sample, self.input_field):
            sample[self.output_field] = self.transform(value, sample)
        return sample

    def transform(self, value: Any, sample: Sample) -> Any:
        """Return the transformed value; `sample` gives access to its generator and to other fields."""
        raise NotImplementedError(f"{type(self).__name__} must define transform(value, sample)")

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"


class naming:  # noqa: N801 - reads as a word in `with naming(...)`
    """Context in which errors get the names of transform and field, and a summary of the sample.

    Two errors stay as they are, since no sample is at fault: a missing package, and a transform that is not written yet.
    """

    def __init__(self, transform: object, sample: Mapping[str, Any], field: str) -> None:
        self._transform = transform
        self._sample = sample
        self._field = field

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            named = with_names(error, self._transform, self._sample, self._field)
            if named is not error:
                raise named from error


def with_names(error: Exception, transform: object, sample: Mapping[str, Any], field: str) -> Exception:
    """Return the error that `naming` raises: `error` with the names of transform and field in it."""
    if isinstance(error, MissingDependencyError | NotImplementedError):
        return error
    if isinstance(error, TransformError | DecodeError) and error.context.get("transform"):
        return error
    name = type(transform).__name__
    is_plain = isinstance(error, TransformError | DecodeError | ConfigError)
    text = str(error) if is_plain else text_of(error)
    kind_of = DecodeError if isinstance(error, DecodeError) else TransformError
    return kind_of(f"{name}: field {field!r}: {text}; {holds(sample)}", transform=name, field=field)
