"""Transforms on fields of any kind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sqlstream.errors import ConfigError, DecodeError, TransformError
from sqlstream.transforms.field import BaseTransform, dummy_reason, summary
from sqlstream.transforms.fields import (
    AddConstantFieldTransform,
    AugmentNewFieldsTransform,
    ConvertDTypeTransform,
    EnsureFieldsTransform,
    FieldsFilteringTransform,
    FindNonDummyValueTransform,
    GatherFieldsTransform,
    IdentityTransform,
    LoadFromDiskTransform,
    RenameFieldsTransform,
)
from sqlstream.transforms.text import ChooseFieldTransform

DUMMIES = [None, "", b"", math.nan, np.float32("nan"), torch.tensor([1.0, math.nan]), np.array([math.nan])]
VALUES = [0, False, "a", b"a", 0.0, torch.zeros(2), np.zeros(2), [], {}, torch.zeros(2, dtype=torch.int64)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (LoadFromDiskTransform, {"fields_to_load": "image"}),
        (FieldsFilteringTransform, {"fields_to_remove": "image"}),
        (FieldsFilteringTransform, {"fields_to_keep": "image"}),
        (EnsureFieldsTransform, {"fields_whitelist": "image"}),
        (FindNonDummyValueTransform, {"input_fields": "image", "output_field": "x"}),
        (GatherFieldsTransform, {"input_fields": "image", "output_field": "x"}),
        (ChooseFieldTransform, {"input_fields": "image", "output_field": "x"}),
    ],
)
def test_a_text_is_no_list_of_fields(kind: Any, options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"^{kind.__name__}: {next(iter(options))}='image' is a text: give a list of field"):
        kind(**options)


def test_files_are_loaded_as_bytes_or_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("é", encoding="utf-8")
    assert LoadFromDiskTransform(["x"])({"x": str(path)}) == {"x": "é".encode()}
    assert LoadFromDiskTransform(["x"], mode="r")({"x": path}) == {"x": "é"}
    path.write_bytes(b"\xff\xfe\xfd")
    for value in (str(path), str(tmp_path / "none"), None, 3, b"\xff"):
        with pytest.raises(DecodeError, match=r"LoadFromDiskTransform: field 'x'"):
            LoadFromDiskTransform(["x"], mode="r")({"x": value})
    with pytest.raises(ConfigError, match="mode='w'"):
        LoadFromDiskTransform(["x"], mode="w")


def test_rename_swaps_and_is_strict_by_default() -> None:
    assert RenameFieldsTransform({"a": "b", "b": "a"})({"a": 1, "b": 2}) == {"a": 2, "b": 1}
    assert RenameFieldsTransform({"a": "b", "x": "y"}, strict=False)({"a": 1}) == {"b": 1}
    with pytest.raises(TransformError, match=r"RenameFieldsTransform: field 'x' is missing; sample 'k' holds __sample_key__"):
        RenameFieldsTransform({"x": "y"})({"__sample_key__": "k"})
    with pytest.raises(ConfigError, match="two fields get the name 'image', so one of them would be lost"):
        RenameFieldsTransform({"jpg": "image", "png": "image"})
    assert RenameFieldsTransform({"jpg": "image", "png": "image"}, strict=False)({"png": 1}) == {"image": 1}


def test_filtering_keeps_or_removes() -> None:
    assert FieldsFilteringTransform(fields_to_keep=["a", "z"])({"a": 1, "b": 2}) == {"a": 1}
    assert FieldsFilteringTransform(fields_to_remove=["a", "z"])({"a": 1, "b": 2}) == {"b": 2}
    for options in ({}, {"fields_to_keep": ["a"], "fields_to_remove": ["b"]}):
        with pytest.raises(ConfigError, match="either"):
            FieldsFilteringTransform(**options)


@pytest.mark.parametrize("dummy", DUMMIES, ids=summary)
def test_dummy_values_are_found_wherever_they_are_asked_for(dummy: object) -> None:
    assert dummy_reason({"a": dummy}, "a")
    assert EnsureFieldsTransform(["a"])({"a": dummy, "b": 1}).keys() == {"a", "b"}
    with pytest.raises(TransformError, match=r"EnsureFieldsTransform: field 'a' holds no value"):
        EnsureFieldsTransform(["a"], check_dummy_values=True)({"a": dummy})
    assert FindNonDummyValueTransform(["a", "x", "b"], "c")({"a": dummy, "b": 7})["c"] == 7
    with pytest.raises(TransformError, match=r"'a' is .*'x' is absent"):
        FindNonDummyValueTransform(["a", "x"], "c")({"a": dummy})


@pytest.mark.parametrize("value", VALUES, ids=summary)
def test_zero_false_and_empty_collections_are_no_dummies(value: object) -> None:
    assert dummy_reason({"a": value}, "a") is None


def test_ensure_drops_others_only_when_asked() -> None:
    assert EnsureFieldsTransform(["a"], drop_others=True)({"a": 1, "b": 2}) == {"a": 1}
    assert EnsureFieldsTransform(["a"])({"a": 1, "b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(TransformError, match="field 'c' is missing; sample None holds a: int 1, b: Tensor float32"):
        EnsureFieldsTransform(["c"])({"a": 1, "b": torch.zeros(2)})


def test_constants_and_new_fields() -> None:
    assert AddConstantFieldTransform("c", 3)({"a": 1}) == {"a": 1, "c": 3}
    augment = AugmentNewFieldsTransform({"c": []})
    first, second = augment({}), augment({})
    first["c"].append(1)
    assert second["c"] == [], "samples must not share the value"
    with pytest.raises(TransformError, match="'c' exists already"):
        augment({"c": 0})


def test_gather_makes_the_asked_type_and_leaves_the_inputs() -> None:
    sample = {"a": torch.zeros(2), "b": torch.ones(2)}
    assert GatherFieldsTransform(["a", "b"], "g")(dict(sample))["g"].keys() == {"a", "b"}
    assert len(GatherFieldsTransform(["a", "b"], "g", list)(dict(sample))["g"]) == 2
    assert GatherFieldsTransform(["a", "b"], "g", torch.stack)(dict(sample))["g"].shape == (2, 2)
    with pytest.raises(TransformError, match="'z' is missing"):
        GatherFieldsTransform(["a", "z"], "g")(sample)


def test_dtypes_are_converted_and_identity_copies_the_reference() -> None:
    assert ConvertDTypeTransform("a")({"a": torch.tensor([1, 2])})["a"].dtype == torch.float32
    assert ConvertDTypeTransform("a")({"a": np.uint64(3)})["a"].tolist() == 3
    assert ConvertDTypeTransform("a", "b", torch.int32)({"a": np.array([1.5])})["b"].tolist() == [1]
    with pytest.raises(TransformError, match=r"ConvertDTypeTransform: field 'a': expected a tensor"):
        ConvertDTypeTransform("a")({"a": "x"})
    value = object()
    assert IdentityTransform("a", "b")({"a": value})["b"] is value


def test_a_transform_of_ones_own_needs_only_transform() -> None:
    class Double(BaseTransform):
        def transform(self, value: int, sample: dict[str, object]) -> int:
            return 2 * value

    assert Double("a", "b")({"a": 2}) == {"a": 2, "b": 4}
    with pytest.raises(TransformError, match=r"Double: field 'a': TypeError"):
        Double("a")({"a": None})
    with pytest.raises(ConfigError, match="no option 'k'"):
        Double("a", k=1)
    with pytest.raises(ConfigError, match=r"Double: input_field=\['a', 'b'\] is no name of a field"):
        Double(["a", "b"])  # type: ignore[arg-type]  # as users of sds's lists of fields write it
    with pytest.raises(ConfigError, match=r"Double: output_field=3 is no name of a field"):
        Double("a", 3)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(NotImplementedError):
        BaseTransform("a")({"a": 1})
