"""Transforms on fields of any kind: load, rename, keep, drop, gather, check."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sqlstream.errors import ConfigError, TransformError
from sqlstream.transforms.base import Sample
from sqlstream.transforms.content import read_bytes, read_text
from sqlstream.transforms.draw_free import GivenCode
from sqlstream.transforms.field import (
    BaseTransform,
    dummy_reason,
    failure,
    field_names,
    missing,
    naming,
    read_field,
    summary,
    with_names,
)
from sqlstream.transforms.harmless import is_data
from sqlstream.transforms.reading import read_file
from sqlstream.transforms.rng import PRIVATE_FIELDS


class IdentityTransform(BaseTransform):
    """Copies a reference of the input field to the output field."""

    def transform(self, value: Any, sample: Sample) -> Any:  # noqa: ARG002
        """Return the value as it is."""
        return value


class LoadFromDiskTransform:
    """Replaces paths by the contents of their files; fields that hold the content already, as bytes or in a struct, too.

    Args:
        fields_to_load: Fields that hold paths, bytes, or structs of both (`transforms.content`).
        mode: `'rb'` for bytes, `'r'` for text (UTF-8).
    """

    def __init__(self, fields_to_load: Sequence[str], mode: str = "rb") -> None:
        if mode not in ("rb", "r", "rt"):
            raise ConfigError(f"LoadFromDiskTransform: mode={mode!r} is not one of 'rb', 'r'")
        self.fields_to_load = field_names("LoadFromDiskTransform", "fields_to_load", fields_to_load)
        self.mode = mode

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with the files' contents.

        Raises:
            TransformError: A field is missing.
            DecodeError: A field holds no content, or it cannot be read, or is no UTF-8 text.
        """
        for field in self.fields_to_load:
            if field not in sample:
                raise missing(self, sample, field)
            value = sample[field]
            try:  # not `with naming(...)`, which would cost a small file as much as its open
                if self.mode != "rb":
                    sample[field] = read_text(value)
                elif type(value) is str and value:  # a path, with a call less
                    sample[field] = read_file(value)
                else:
                    sample[field] = read_bytes(value)
            except Exception as error:
                raise with_names(error, self, sample, field) from error
        return sample


class RenameFieldsTransform:
    """Renames fields, all at once (so two can be swapped).

    Args:
        old_to_new_mapping: New names by old names.
        strict: A missing field is an error; False: it is skipped.

    Raises:
        ConfigError: Two fields, which are both there, get one name.
    """

    def __init__(self, old_to_new_mapping: Mapping[str, str], strict: bool = True) -> None:
        self.old_to_new_mapping = dict(old_to_new_mapping)
        self.strict = strict
        news = list(self.old_to_new_mapping.values())
        if strict and (twice := [new for new in news if news.count(new) > 1]):
            raise ConfigError(
                f"RenameFieldsTransform: two fields get the name {twice[0]!r}, so one of them would be lost: give each its "
                "own, or strict=False where samples have one of them"
            )

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with the new names.

        Raises:
            TransformError: A field is missing and `strict` is on.
        """
        present = {old: new for old, new in self.old_to_new_mapping.items() if self.strict or old in sample}
        moved = {new: read_field(self, sample, old) for old, new in present.items()}
        for old in present:
            sample.pop(old, None)
        sample.update(moved)
        return sample


class FieldsFilteringTransform:
    """Keeps the named fields, or removes the named ones.

    Args:
        fields_to_keep: All other fields are removed; a name that the sample lacks is skipped.
        fields_to_remove: These fields are removed.
    """

    def __init__(self, fields_to_keep: Sequence[str] | None = None, fields_to_remove: Sequence[str] | None = None) -> None:
        if (fields_to_keep is None) == (fields_to_remove is None):
            raise ConfigError("FieldsFilteringTransform: give either fields_to_keep or fields_to_remove")
        owner = "FieldsFilteringTransform"
        self.fields_to_keep = None if fields_to_keep is None else field_names(owner, "fields_to_keep", fields_to_keep)
        self.fields_to_remove = None if fields_to_remove is None else field_names(owner, "fields_to_remove", fields_to_remove)

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with fewer fields."""
        if self.fields_to_keep is not None:
            return _keep(sample, self.fields_to_keep)
        for field in self.fields_to_remove or ():
            sample.pop(field, None)
        return sample


def _keep(sample: Sample, fields: Sequence[str]) -> Sample:
    keep = {*fields, *PRIVATE_FIELDS}
    for field in [name for name in sample if name not in keep]:
        del sample[field]
    return sample


class EnsureFieldsTransform:
    """Checks that fields are there.

    Args:
        fields_whitelist: Fields that the sample must have.
        check_dummy_values: They must also hold a value: not None, '', NaN or a tensor with NaN.
        drop_others: Remove all other fields.
    """

    def __init__(self, fields_whitelist: Sequence[str], check_dummy_values: bool = False, drop_others: bool = False) -> None:
        self.fields_whitelist = field_names("EnsureFieldsTransform", "fields_whitelist", fields_whitelist)
        self.check_dummy_values = check_dummy_values
        self.drop_others = drop_others

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample, checked.

        Raises:
            TransformError: It lacks a field, or a value.
        """
        for field in self.fields_whitelist:
            read_field(self, sample, field)
            reason = dummy_reason(sample, field) if self.check_dummy_values else None
            if reason is not None:
                raise failure(self, sample, f"field {field!r} holds no value ({reason})")
        return _keep(sample, self.fields_whitelist) if self.drop_others else sample


class FindNonDummyValueTransform:
    """Takes the first of several fields that holds a value.

    Args:
        input_fields: The fields, in the order in which they are tried.
        output_field: Gets the value.
    """

    def __init__(self, input_fields: Sequence[str], output_field: str) -> None:
        self.input_fields = field_names("FindNonDummyValueTransform", "input_fields", input_fields)
        self.output_field = output_field

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with the value.

        Raises:
            TransformError: None of the fields holds one.
        """
        reasons = {}
        for field in self.input_fields:
            reason = dummy_reason(sample, field)
            if reason is None:
                sample[self.output_field] = sample[field]
                return sample
            reasons[field] = reason
        found = ", ".join(f"{field!r} is {reason}" for field, reason in reasons.items())
        raise failure(self, sample, f"no field holds a value: {found}")


class AddConstantFieldTransform:
    """Puts the same value into every sample.

    Args:
        output_field: Gets the value.
        value: Shared by all samples, not copied.
    """

    def __init__(self, output_field: str, value: Any) -> None:
        self.output_field = output_field
        self.value = value

    @property
    def calls_given_code(self) -> bool:
        """The value may draw where a later transform calls its methods, such as a generator."""
        return not is_data(self.value)

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with the constant."""
        sample[self.output_field] = self.value
        return sample


class AugmentNewFieldsTransform:
    """Adds several constant fields that the sample must not have yet.

    Args:
        new_fields: Values by names; each sample gets its own copy.
    """

    def __init__(self, new_fields: Mapping[str, Any]) -> None:
        self.new_fields = dict(new_fields)

    @property
    def calls_given_code(self) -> bool:
        """A value may draw where a later transform calls its methods, or as it is copied."""
        return not is_data(self.new_fields)

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with the new fields.

        Raises:
            TransformError: It has one of them already.
        """
        for field, value in self.new_fields.items():
            if field in sample:
                raise failure(self, sample, f"field {field!r} exists already")
            sample[field] = copy.deepcopy(value)
        return sample


class GatherFieldsTransform:
    """Gathers fields into one.

    Args:
        input_fields: The fields; they stay in the sample.
        output_field: Gets the collection.
        output_type: `dict` (by field name), or a type made of the values in order: `list`, `tuple`, `torch.stack`, …
    """

    def __init__(self, input_fields: Sequence[str], output_field: str, output_type: Any = dict) -> None:
        if not callable(output_type):
            raise ConfigError(f"GatherFieldsTransform: output_type={output_type!r} is not a type: give dict, list or tuple")
        self.input_fields = field_names("GatherFieldsTransform", "input_fields", input_fields)
        self.output_field = output_field
        self.output_type = output_type

    @property
    def calls_given_code(self) -> bool:
        """What makes the collection may be any function."""
        return self.output_type not in (dict, list, tuple)

    @property
    def given_code(self) -> GivenCode:
        """What makes the collection."""
        return GivenCode(called=(self.output_type,))

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with the collection.

        Raises:
            TransformError: A field is missing, or the type cannot be made of the values.
        """
        values = {field: read_field(self, sample, field) for field in self.input_fields}
        is_mapping = isinstance(self.output_type, type) and issubclass(self.output_type, dict)
        with naming(self, sample, self.output_field):
            sample[self.output_field] = self.output_type(values if is_mapping else list(values.values()))
        return sample


class ConvertDTypeTransform(BaseTransform):
    """Converts a tensor, array or number to a tensor of another dtype.

    Args:
        input_field: The value.
        output_field: None: into the input field.
        output_dtype: A torch dtype.
    """

    def __init__(self, input_field: str, output_field: str | None = None, output_dtype: torch.dtype = torch.float32) -> None:
        super().__init__(input_field, output_field)
        if not isinstance(output_dtype, torch.dtype):
            raise ConfigError(f"ConvertDTypeTransform: output_dtype={output_dtype!r} is not a torch dtype")
        self.output_dtype = output_dtype

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:  # noqa: ARG002
        """Return the tensor in the other dtype."""
        if isinstance(value, np.ndarray | list | tuple | int | float | bool | np.generic):
            value = torch.as_tensor(np.asarray(value) if isinstance(value, np.generic) else value)  # [...]  else no np.uint64
        if not isinstance(value, torch.Tensor):
            raise TransformError(f"expected a tensor, an array or a number, got {summary(value)}")
        return value.to(self.output_dtype)
