"""The default collate: samples → batch, without surprises on strings and ragged fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from sqlstream.errors import TransformError
from sqlstream.transforms.field import summary
from sqlstream.transforms.rng import PRIVATE_FIELDS

_MAX_SHOWN = 8  # arbitrary: an error is read by a person


def collate(samples: Sequence[Mapping[str, Any]], ragged_fields: Collection[str] = ()) -> dict[str, Any]:
    """Return a batch: tensors and arrays stacked, numbers as a tensor, dicts of the same keys as a dict, the rest as lists.

    Strings, bytes, lists, None (also when only some samples have it) and objects stay a list with one entry for each sample.

    Args:
        samples: At least one; all with the same fields.
        ragged_fields: Fields that stay lists, e.g. of tensors of different lengths.

    Raises:
        TransformError: Tensors of one field differ in shape or dtype, or samples differ in their fields; it names them.

    Example:
        >>> collate([{"x": torch.ones(2), "caption": "a"}, {"x": torch.zeros(2), "caption": "b"}])["caption"]
        ['a', 'b']
    """
    if not samples:
        raise TransformError("collate: there are no samples to make a batch of")
    fields = [field for field in samples[0] if field not in PRIVATE_FIELDS]
    for number, sample in enumerate(samples):
        differing = {*fields} ^ {field for field in sample if field not in PRIVATE_FIELDS}
        if differing:
            raise TransformError(
                f"collate: samples 0 and {number} of the batch do not have the same fields: "
                f"{sorted(map(str, differing))} are in one of them only "
                "(EnsureFieldsTransform(…, drop_others=True) keeps the ones that you name)"
            )
    return {
        field: [sample[field] for sample in samples]
        if field in ragged_fields
        else _collate_field(field, [sample[field] for sample in samples])
        for field in fields
    }


def _collate_field(field: str, values: list[Any]) -> Any:
    first = values[0]
    if all(isinstance(value, torch.Tensor | np.ndarray) for value in values):
        return _stack(field, values)
    if all(isinstance(value, bool | int | float | np.generic) for value in values) and not isinstance(
        first, np.str_ | np.bytes_
    ):
        return _tensor_of(field, values)
    if isinstance(first, Mapping) and all(isinstance(v, Mapping) and v.keys() == first.keys() for v in values):
        return {name: _collate_field(f"{field}.{name}", [value[name] for value in values]) for name in first}
    return values


def _tensor_of(field: str, values: list[Any]) -> Any:
    """Return numbers as a tensor; times, which torch does not have, as they are.

    Raises:
        TransformError: No type of torch has them all.
    """
    array = np.array(values)  # [b]
    if array.dtype.kind in "mM":
        return values
    are_whole = all(isinstance(value, bool | int | np.integer | np.bool_) for value in values)
    if are_whole and array.dtype.kind not in "biu":  # numpy makes floats, or objects, of integers that no type of its has
        least, most = min(map(int, values)), max(map(int, values))
        fitting = [kind for kind in (np.int64, np.uint64) if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max]
        if not fitting:
            raise TransformError(
                f"collate: field {field!r} has integers of {least} to {most}, for which torch has no type: make them "
                "smaller, or name the field in ragged_fields to keep it a list",
                field=field,
            )
        array = np.array(values, fitting[0])  # [b]
    return _as_tensor(field, array)  # [b]


def _as_tensor(field: str, value: Any) -> torch.Tensor:  # [...]
    """Return an array, or a tensor, as a tensor.

    Raises:
        TransformError: torch has no such type.
    """
    try:
        return torch.as_tensor(_native(value))
    except TypeError as error:
        raise TransformError(
            f"collate: field {field!r} has values of {value.dtype}, for which torch has no type: make them another one, or "
            "name the field in ragged_fields to keep it a list",
            field=field,
        ) from error


def _native(array: Any) -> Any:
    """Return an array, or a tensor, as torch takes it: in this machine's order of bytes, read forwards, and writable."""
    if not isinstance(array, np.ndarray):
        return array
    if not array.dtype.isnative or not array.flags.writeable or any(stride < 0 for stride in array.strides):
        return array.astype(array.dtype.newbyteorder("="), order="C")  # [...]
    return array


def _stack(field: str, values: list[Any]) -> Any:
    if any(isinstance(value, np.ndarray) and value.dtype.kind not in "biufc" for value in values):
        return values
    tensors = [_as_tensor(field, value) for value in values]
    if len({(tensor.shape, tensor.dtype) for tensor in tensors}) > 1:
        shown = "; ".join(summary(value) for value in values[:_MAX_SHOWN])
        more = f"; and {len(values) - _MAX_SHOWN} more" if len(values) > _MAX_SHOWN else ""
        raise TransformError(
            f"collate: field {field!r} cannot be stacked: {shown}{more}. Make them alike with a transform, or name the field "
            "in ragged_fields to keep it a list",
            field=field,
        )
    return default_collate(tensors)
