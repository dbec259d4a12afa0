"""JSON, dicts and class labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sqlstream.errors import ConfigError, DecodeError, TransformError
from sqlstream.transforms.metadata import (
    ClassNameToIDTransform,
    ExtractMetadataSubfieldTransform,
    LoadJsonMetadataTransform,
    MergeDictFieldTransform,
    NameToIndexTransform,
    OneHotEncodeTransform,
)


def test_json_comes_from_a_path_bytes_or_text(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, null, "é"]}', encoding="utf-8")
    for value in (str(path), path, path.read_bytes(), path.read_text(encoding="utf-8"), {"a": [1, None, "é"]}):
        assert LoadJsonMetadataTransform("m")({"m": value}) == {"m": {"a": [1, None, "é"]}}
    for bad in (b"{", b"\xff", str(tmp_path / "none"), None, "[" * 100_000):
        with pytest.raises(DecodeError, match=r"LoadJsonMetadataTransform: field 'm'"):
            LoadJsonMetadataTransform("m")({"m": bad})


def test_merge_says_what_to_do_with_fields_that_exist() -> None:
    def sample() -> dict[str, Any]:
        return {"a": 1, "m": {"a": 2, "b": 3}}

    assert MergeDictFieldTransform("m", skip_if_exists=True)(sample()) == {**sample(), "b": 3}
    assert MergeDictFieldTransform("m", overwrite=True)(sample()) == {**sample(), "a": 2, "b": 3}
    assert MergeDictFieldTransform("m", overwrite=True, cleanup=True)(sample()) == {"a": 2, "b": 3}
    with pytest.raises(TransformError, match=r"\['a'\] of 'm' exist already"):
        MergeDictFieldTransform("m")(sample())
    with pytest.raises(TransformError, match="no dict but int 1"):
        MergeDictFieldTransform("a")(sample())
    with pytest.raises(ConfigError, match="exclude"):
        MergeDictFieldTransform("m", skip_if_exists=True, overwrite=True)


def test_subfields_are_extracted_by_key_or_path() -> None:
    meta = {"a": {"b": 1}, "a.c": 2}
    assert ExtractMetadataSubfieldTransform("a.b", "x")({"meta": meta})["x"] == 1
    assert ExtractMetadataSubfieldTransform("a.c", "x", metadata_field="m")({"m": meta})["x"] == 2
    with pytest.raises(TransformError, match=r"no entry 'z'.*'b'"):
        ExtractMetadataSubfieldTransform("a.z", "x")({"meta": meta})


def test_names_become_numbers_and_unknown_ones_are_named() -> None:
    assert ClassNameToIDTransform("c", {"cat": 3}, "id")({"c": "cat"}) == {"c": "cat", "id": 3}
    assert NameToIndexTransform("c", {"cat": 3, "dog": 4})({"c": ["dog", "cat"]}) == {"c": [4, 3]}
    for transform in (ClassNameToIDTransform("c", {"cat": 3}), NameToIndexTransform("c", {"cat": 3})):
        with pytest.raises(TransformError, match=r"'cow' is none of the 1 known names \('cat'"):
            transform({"c": "cow"})


@pytest.mark.parametrize("name", ["int8", "uint8", "uint16", "uint32", "uint64"])
def test_labels_of_any_type_of_integers_become_one_hot_vectors(name: str) -> None:
    one = OneHotEncodeTransform("c", 3)
    array = np.array([0, 2], name)  # [2]
    assert one({"c": array[1]})["c"].tolist() == [0, 0, 1]
    for value in (array, torch.from_numpy(array)):
        assert one({"c": value})["c"].tolist() == [[1, 0, 0], [0, 0, 1]]
    with pytest.raises(TransformError, match="is out of range: num_classes=3"):
        one({"c": np.array([np.iinfo(name).max], name)})


@pytest.mark.parametrize("label", [2, np.int64(2), torch.tensor(2)])
def test_labels_become_one_hot_vectors(label: object) -> None:
    vector = OneHotEncodeTransform("c", 4)({"c": label})["c"]
    assert (vector.dtype, vector.tolist()) == (torch.float32, [0, 0, 1, 0])


@pytest.mark.parametrize("label", [4, -1, 1.5, "cat", None, True])
def test_labels_that_are_no_class_are_refused(label: object) -> None:
    with pytest.raises(TransformError, match=r"OneHotEncodeTransform: field 'c'"):
        OneHotEncodeTransform("c", 4)({"c": label})
