"""Transforms of metadata: JSON, dicts, class labels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError, DecodeError, TransformError
from sqlstream.transforms.base import Sample
from sqlstream.transforms.content import is_struct, read_bytes
from sqlstream.transforms.field import BaseTransform, failure, naming, read_field, summary


class LoadJsonMetadataTransform(BaseTransform):
    """A JSON file (path, bytes, or struct of both), or JSON text → the value in it; a dict or list is taken as it is."""

    def transform(self, value: Any, sample: Sample) -> Any:  # noqa: ARG002
        """Return the value."""
        if isinstance(value, dict | list) and not is_struct(value):
            return value
        is_text = isinstance(value, str) and value.lstrip()[:1] in ("{", "[")
        return parse_json(value if is_text else read_bytes(value))


def parse_json(document: str | bytes) -> Any:
    """Return the value of a JSON document.

    Raises:
        DecodeError: Not JSON, or nested too deep.
    """
    try:
        return json.loads(document)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"{summary(document)} is not JSON: {error}") from error


class MergeDictFieldTransform:
    """Makes each item of a dict a field of the sample.

    Args:
        input_field: Holds the dict.
        skip_if_exists: Where the sample has such a field, its value stays.
        overwrite: Where the sample has such a field, the dict's value wins.
        cleanup: Remove the dict from the sample.
    """

    def __init__(self, input_field: str, skip_if_exists: bool = False, overwrite: bool = False, cleanup: bool = False) -> None:
        if skip_if_exists and overwrite:
            raise ConfigError("MergeDictFieldTransform: skip_if_exists and overwrite exclude each other")
        self.input_field = input_field
        self.skip_if_exists = skip_if_exists
        self.overwrite = overwrite
        self.cleanup = cleanup

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with the dict's items.

        Raises:
            TransformError: Not a dict, or a field exists already and neither option says what to do.
        """
        value = read_field(self, sample, self.input_field)
        if not isinstance(value, Mapping):
            raise failure(self, sample, f"field {self.input_field!r} is no dict but {summary(value)}")
        items = dict(value)
        if self.cleanup:
            del sample[self.input_field]
        taken = [name for name in items if name in sample]
        if taken and not (self.skip_if_exists or self.overwrite):
            raise failure(
                self, sample, f"fields {taken!r} of {self.input_field!r} exist already: set skip_if_exists or overwrite"
            )
        sample.update({name: item for name, item in items.items() if self.overwrite or name not in sample})
        return sample


class ExtractMetadataSubfieldTransform:
    """Copies one entry of a dict field to a field of its own.

    Args:
        metadata_subfield: The entry's key; `'a.b'` goes into nested dicts where no key has that very name.
        output_field: Gets the value.
        metadata_field: Holds the dict.
    """

    def __init__(self, metadata_subfield: str, output_field: str, metadata_field: str = "meta") -> None:
        self.metadata_subfield = metadata_subfield
        self.output_field = output_field
        self.metadata_field = metadata_field

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with the entry.

        Raises:
            TransformError: No dict, or no such entry.
        """
        value = read_field(self, sample, self.metadata_field)
        with naming(self, sample, self.metadata_field):
            sample[self.output_field] = extract(value, self.metadata_subfield)
        return sample


def extract(value: Any, path: str) -> Any:
    """Return the entry of a dict under a key, or under a dotted path of keys.

    Raises:
        TransformError: There is none; the message has the keys that are there.

    Example:
        >>> extract({"a": {"b": 1}}, "a.b")
        1
    """
    if isinstance(value, Mapping) and path in value:
        return value[path]
    head, dot, rest = path.partition(".")
    if dot and isinstance(value, Mapping) and head in value:
        return extract(value[head], rest)
    there = f"it has {', '.join(map(repr, value)) or 'no keys'}" if isinstance(value, Mapping) else f"it is {summary(value)}"
    raise TransformError(f"there is no entry {path!r}: {there}")


class ClassNameToIDTransform(BaseTransform):
    """Class name → number.

    Args:
        input_field: The name.
        class_name_to_id_mapping: Numbers by names.
        output_field: None: into the input field.
    """

    def __init__(self, input_field: str, class_name_to_id_mapping: Mapping[Any, int], output_field: str | None = None) -> None:
        super().__init__(input_field, output_field)
        self.class_name_to_id_mapping = dict(class_name_to_id_mapping)

    def transform(self, value: Any, sample: Sample) -> int:  # noqa: ARG002
        """Return the number."""
        return look_up(self.class_name_to_id_mapping, value)


class NameToIndexTransform(BaseTransform):
    """Name → index, in place.

    Args:
        field: The name, or a list of names.
        name_to_index_mapping: Indexes by names.
    """

    def __init__(self, field: str, name_to_index_mapping: Mapping[Any, int]) -> None:
        super().__init__(field)
        self.field = field
        self.name_to_index_mapping = dict(name_to_index_mapping)

    def transform(self, value: Any, sample: Sample) -> int | list[int]:  # noqa: ARG002
        """Return the index, or the indexes."""
        if isinstance(value, list | tuple):
            return [look_up(self.name_to_index_mapping, name) for name in value]
        return look_up(self.name_to_index_mapping, value)


def look_up(mapping: Mapping[Any, int], name: Any) -> int:
    """Return the number of a name.

    Raises:
        TransformError: The mapping does not have it.
    """
    try:
        return mapping[name]
    except (KeyError, TypeError):
        known = ", ".join(repr(key) for key in list(mapping)[:5])
        raise TransformError(f"{name!r} is none of the {len(mapping)} known names ({known}, …)") from None


class OneHotEncodeTransform(BaseTransform):
    """Class number → float32 vector with a 1 at its place.

    Args:
        input_field: A number, or a tensor of numbers.
        num_classes: Length of the vector.
        output_field: None: into the input field.
    """

    def __init__(self, input_field: str, num_classes: int, output_field: str | None = None) -> None:
        super().__init__(input_field, output_field)
        check_at_least("OneHotEncodeTransform: num_classes", num_classes, 1)
        self.num_classes = num_classes

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:  # noqa: ARG002
        """Return the vector. # [..., num_classes]."""
        if isinstance(value, bool) or not isinstance(value, int | np.integer | np.ndarray | torch.Tensor | Sequence):
            raise TransformError(f"expected a class number, got {summary(value)}")
        ids = torch.as_tensor(np.asarray(value) if isinstance(value, np.generic) else value)  # [...]
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TransformError(f"expected a class number, got {summary(value)}")
        ids = ids.to(torch.int64)  # [...]  torch compares none of uint16 to uint64
        if ids.numel() and not bool(((ids >= 0) & (ids < self.num_classes)).all()):
            raise TransformError(f"class {ids.tolist()} is out of range: num_classes={self.num_classes}")
        return torch.nn.functional.one_hot(ids, self.num_classes).to(torch.float32)
