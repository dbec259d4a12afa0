"""The cache point: its key, and samples as bytes."""

from __future__ import annotations

import functools
import io
import os
import pickle
import re
import subprocess
import sys
from pathlib import PurePath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from sqlstream.errors import ConfigError, DecodeError, TransformError
from sqlstream.transforms import rng
from sqlstream.transforms.cached import CacheTransform, chain_key
from sqlstream.transforms.codec import decode_sample, encode_sample
from sqlstream.transforms.presets import (
    AddConstantFieldTransform,
    DecodeResizedImageTransform,
    create_standard_image_pipeline,
)
from sqlstream.transforms.rng import PRIVATE_FIELDS, begin

from .media import photo

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner) | st.dictionaries(st.integers(), inner)
    ),
    max_leaves=8,
)


def add_one(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "n": sample["n"] + 1}


def add_two(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "n": sample["n"] + 2}


class Scale:
    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample


def test_without_an_engine_the_transforms_just_run_and_later_draws_start_anew() -> None:
    def draw(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "drawn": rng(sample).random()}

    sample: dict[str, Any] = {"n": 1}
    begin(sample, (1, 2, 3))
    hit: dict[str, Any] = {}
    begin(hit, (1, 2, 3), stage=2)
    result = CacheTransform("c", [add_one, draw])(sample)
    assert isinstance(result, dict)
    assert result["n"] == 2
    assert rng(result).random() == rng(hit).random(), "a hit and a miss must draw the same afterwards"


def key(*transforms: Any, name: str = "c", version: str = "") -> str:
    return chain_key(CacheTransform(name, transforms, version))


def test_any_change_of_the_chain_is_another_key() -> None:
    base = key(Scale(2))
    assert base == key(Scale(2))
    others = [
        key(Scale(3)),
        key(Scale(2.0)),
        key(Scale("2")),
        key(Scale(2), Scale(2)),
        key(),
        key(Scale(2), name="d"),
        key(Scale(2), version="1"),
        key(Scale(torch.zeros(2))),
        key(Scale(torch.ones(2))),
        key(Scale(torch.float16)),
        key(Scale([1, 2])),
        key(Scale({2, 1})),
        key(Scale({"a": 1})),
        key(Scale(PurePath("a"))),
        key(add_one),
        key(add_two),
        key(functools.partial(add_one)),
        key(lambda sample: {**sample, "n": 1}),
        key(lambda sample: {**sample, "n": 2}),
        key(*create_standard_image_pipeline("jpg", (8, 8))),
        key(*create_standard_image_pipeline("jpg", (8, 9))),
        key(*create_standard_image_pipeline("jpg", (8, 8), resize_kwargs={"fit": "letterbox"})),
        key(DecodeResizedImageTransform("jpg", resolution=(8, 8), background=(0, 0, 0))),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_samples_are_made_again_where_one_of_our_transforms_changes_what_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [CacheTransform("c", [made]) for made in (AddConstantFieldTransform("a", 1), _Subclass("x", resolution=(8, 8)))]
    before = [*map(chain_key, points)]
    monkeypatch.setattr(DecodeResizedImageTransform, "values_format", 99)
    after = [*map(chain_key, points)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False]


class _Subclass(DecodeResizedImageTransform):
    """One that a user makes of ours."""


def test_the_key_is_the_same_in_another_process_whatever_its_hash_seed() -> None:
    code = (
        "from sqlstream.transforms.cached import *; from sqlstream.transforms.presets import *;"
        "chain = [*create_standard_image_pipeline('a', (8, 8)), AddConstantFieldTransform('x', {'p', 'q', 'r'})];"
        "print(chain_key(CacheTransform('c', chain)))"
    )
    constant = AddConstantFieldTransform("x", {"p", "q", "r"})
    ours = chain_key(CacheTransform("c", [*create_standard_image_pipeline("a", (8, 8)), constant]))
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": seed}).stdout
    assert other == f"{ours}\n"


def test_a_parameter_that_cannot_be_described_needs_a_version() -> None:
    with pytest.raises(ConfigError, match="give version="):
        key(Scale(iter([1])))
    assert key(Scale(iter([1])), version="1") != key(Scale(iter([1])), version="2")
    with pytest.raises(ConfigError, match="name=''"):
        CacheTransform("", [])


@given(st.dictionaries(st.text().filter(lambda name: name not in PRIVATE_FIELDS), JSON, max_size=4))
def test_json_values_come_back_equal_and_of_the_same_types(sample: dict[str, Any]) -> None:
    def typed(value: Any) -> Any:
        if isinstance(value, dict):
            return [(typed(k), typed(v)) for k, v in value.items()]
        return [type(value), [typed(v) for v in value]] if isinstance(value, list | tuple) else (type(value), value)

    assert typed(decode_sample(encode_sample(sample))) == typed(sample)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_tensors_of_every_type_and_layout_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    whole = torch.arange(24).reshape(2, 3, 4).to(dtype)  # [t, h, w]
    views = {
        "whole": whole,
        "turned": whole.permute(2, 0, 1),
        "part": whole[:, 1],
        "scalar": whole[0, 0, 0],
        "empty": whole[:0],
    }
    back = decode_sample(encode_sample({"nested": [views, (whole,)]}))["nested"]
    for name, tensor in views.items():
        assert torch.equal(back[0][name], tensor), name
        assert back[0][name].dtype == dtype
    assert isinstance(back[1], tuple)


def test_bytes_arrays_images_and_special_numbers_come_back() -> None:
    image = photo(5, 7)
    sample = {"b": b"\0\xff", "e": b"", "a": np.arange(3, dtype=np.int16), "s": np.float32(1.5), "i": image, "n": float("inf")}
    back = decode_sample(encode_sample(sample))
    assert (back["b"], back["e"], back["n"]) == (b"\0\xff", b"", float("inf"))
    assert (back["a"].dtype, back["a"].tolist()) == (np.int16, [0, 1, 2])
    assert (back["s"], type(back["s"])) == (1.5, np.float32)
    assert (back["i"].mode, back["i"].tobytes()) == ("RGB", image.tobytes())


@pytest.mark.parametrize("mode", "1 L P PA LA I I;16 F RGB RGBA RGBa CMYK YCbCr LAB HSV".split())
def test_an_image_of_every_mode_comes_back_with_its_colours(mode: str) -> None:
    whole = photo(5, 7)
    through = {"P": whole.quantize(8), "PA": whole.quantize(8), "I;16": whole.convert("L"), "RGBa": whole.convert("RGBA")}
    image = through.get(mode, whole).convert(mode)
    back = decode_sample(encode_sample({"image": image}))["image"]
    assert (back.mode, back.size, back.tobytes()) == (mode, (7, 5), image.tobytes())
    assert back.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


def test_an_image_comes_back_with_what_turns_it_and_shows_through_it() -> None:
    turned, animation = io.BytesIO(), io.BytesIO()
    exif = Image.Exif()
    exif[274] = 6
    photo(5, 7).save(turned, "JPEG", exif=exif)
    photo(5, 7).quantize(8).save(animation, "GIF", transparency=2)
    for file in (turned, animation):
        image = Image.open(file)
        back = decode_sample(encode_sample({"image": image}))["image"]
        assert ImageOps.exif_transpose(back).size == ImageOps.exif_transpose(image).size
        assert back.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


def test_an_image_whose_colours_an_earlier_version_lost_is_made_again() -> None:
    stored = encode_sample({"image": Image.new("RGBA", (2, 2))}).replace(b'\\"RGBA\\"', b'\\"CMYK\\"')
    with pytest.raises(DecodeError, match="mode CMYK that an earlier version stored"):
        decode_sample(stored)


def test_complex_numbers_of_every_width_come_back_and_types_that_safetensors_lacks_are_named() -> None:
    turned = torch.tensor([3 - 1j], dtype=torch.complex128).conj()  # [1]
    back = decode_sample(encode_sample({"x": np.array([1 + 2j]), "y": turned, "z": np.complex128(5j)}))
    assert (back["x"].dtype, back["x"].tolist(), back["z"], type(back["z"])) == (complex, [1 + 2j], 5j, np.complex128)
    assert torch.equal(back["y"], turned.resolve_conj())
    for name in ("bits8", "int4", "float4_e2m1fn_x2", "float8_e8m0fnu"):
        kind = getattr(torch, name)
        with pytest.raises(TransformError, match=rf"field 'x' cannot be stored: safetensors has no tensors of {kind}, whose"):
            encode_sample({"x": torch.zeros(2, dtype=torch.uint8).view(kind)})
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.uint64):
        kept = torch.arange(8, dtype=torch.uint8).view(kind)  # [n]
        found = decode_sample(encode_sample({"x": kept}))["x"]  # [n]
        assert (found.dtype, found.view(torch.uint8).tolist()) == (kind, [*range(8)])


def test_the_generator_is_not_stored_and_what_cannot_be_is_named() -> None:
    sample: dict[str, Any] = {"n": 1}
    begin(sample, (1, 2, 3))
    rng(sample)
    assert decode_sample(encode_sample(sample)) == {"n": 1}
    with pytest.raises(TransformError, match=r"field 'reader' cannot be stored: object is neither"):
        encode_sample({"reader": object()})


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        ({1: "a"}, "field 1 cannot be stored: its name is int"),
        ({"x": np.ma.masked_equal([1, 2], 1)}, "field 'x' cannot be stored: MaskedArray"),
        ({"x": torch.eye(2).to_sparse()}, "field 'x' cannot be stored: a tensor that is sparse"),
    ],
    ids=["name", "mask", "sparse"],
)
def test_what_would_come_back_as_something_else_is_refused(sample: dict[Any, Any], says: str) -> None:
    with pytest.raises(TransformError, match=re.escape(says)):
        encode_sample(sample)


def test_damaged_bytes_are_a_decode_error_and_pickles_are_never_loaded() -> None:
    data = encode_sample({"x": torch.zeros(100), "s": "text"})
    for bad in (b"", data[:20], data[:-1], b"\xff" * 50, pickle.dumps({"x": 1})):
        with pytest.raises(DecodeError, match="no stored sample"):
            decode_sample(bad)
