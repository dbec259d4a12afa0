"""Pipelines end to end, and what they need installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sqlstream.transforms import apply
from sqlstream.transforms.presets import (
    EnsureFieldsTransform,
    create_standard_image_latent_pipeline,
    create_standard_image_pipeline,
    create_standard_metadata_pipeline,
    create_standard_video_latent_pipeline,
)

from .media import encode, photo


def through(transforms: list[Any], **fields: Any) -> dict[str, Any]:
    sample = apply(transforms, fields)
    assert isinstance(sample, dict)
    return {name: value for name, value in sample.items() if not name.startswith("__rng")}


@pytest.fixture
def image(tmp_path: Path) -> str:
    path = tmp_path / "a.jpg"
    path.write_bytes(encode(photo(80, 120), "JPEG"))
    return str(path)


def test_the_image_pipeline_gives_bytes_or_floats_or_a_video(image: str) -> None:
    plain = through(create_standard_image_pipeline("url", (32, 48)), url=image)
    assert (plain["image"].dtype, plain["image"].shape) == (torch.uint8, (3, 32, 48))
    assert isinstance(plain["url"], bytes), "as in sds: the field holds the file's bytes afterwards"
    normal = through(create_standard_image_pipeline("url", (32, 48), normalize=True, output_field="x"), url=image)
    assert torch.equal(normal["x"], plain["image"].float() / 127.5 - 1)
    video = through(create_standard_image_pipeline("url", (32, 48), return_image_as_single_frame_video=True), url=image)
    assert (video["video"].shape, video["framerate"]) == ((1, 3, 32, 48), 960.0)
    assert torch.equal(video["video"][0], plain["image"])
    stretched = through(create_standard_image_pipeline("url", (32, 48), resize_kwargs={"crop_before_resize": False}), url=image)
    assert stretched["image"].shape == (3, 32, 48)


def test_a_random_resolution_is_drawn_from_the_options(image: str) -> None:
    chain = create_standard_image_pipeline("url", (32, 32), resize_kwargs={"random_resize": {(16, 16): 0.5, (8, 24): 0.5}})
    shapes = {tuple(through(chain, url=image, __rng_key__=(0, 0, position))["image"].shape) for position in range(20)}
    assert shapes == {(3, 16, 16), (3, 8, 24)}


def test_the_metadata_pipeline_gives_the_dict_and_the_label(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"class": 2, "info": {"author": "me"}}))
    sample = through(create_standard_metadata_pipeline("m", "class", one_hot_encode_to_size=4), m=str(path))
    assert sample["meta"]["info"] == {"author": "me"}
    assert sample["class_label"].tolist() == [0, 0, 1, 0]
    bare = create_standard_metadata_pipeline("m", "class", return_raw_metadata=False, class_label_target_field="label")
    assert through(bare, m=str(path)) == {"m": str(path), "label": 2}


def test_the_latent_pipelines_sample_in_place(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, mean=np.zeros((4, 8, 8), np.float32), logvar=np.zeros((4, 8, 8), np.float32))
    assert through(create_standard_image_latent_pipeline("x"), x=str(path))["x"].shape == (4, 8, 8)
    video = through(create_standard_image_latent_pipeline("x", return_image_as_single_frame_video=True), x=str(path))
    assert (video["x"].shape, video["framerate"]) == ((1, 4, 8, 8), 960.0)
    latents = {"mean": torch.zeros(8, 4, 2, 2), "logvar": torch.zeros(8, 4, 2, 2), "input_shape": (8, 3), "input_framerate": 24}
    torch.save(latents, tmp_path / "v.pt")
    assert through(create_standard_video_latent_pipeline("x", 12.0), x=str(tmp_path / "v.pt"))["x"].shape == (4, 4, 2, 2)


EXTRA: list[Any] = [EnsureFieldsTransform(["image"], drop_others=True)]


def test_pipelines_are_lists_and_can_be_joined_and_wrapped(image: str) -> None:
    chain = create_standard_image_pipeline("url", (8, 8)) + EXTRA
    assert through(chain, url=image).keys() == {"image"}


OPTIONAL = "PIL simplejpeg soundfile soxr av torchcodec decord torchaudio safetensors msgpack cbor2".split()


def test_without_any_optional_package_presets_import_and_errors_name_the_extra() -> None:
    code = f"""
import sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None
from sqlstream.errors import MissingDependencyError
from sqlstream.transforms import apply, presets
from sqlstream.transforms.cached import CacheTransform
from sqlstream.transforms.codec import encode_sample
import torch
calls = {{
    "image": lambda: apply(presets.create_standard_image_pipeline("x", (8, 8))[1:], {{"x": b"1"}}),
    "video": lambda: apply(presets.create_standard_video_pipeline("x", 8, (8, 8)), {{"x": b"1"}}),
    "audio": lambda: apply(presets.create_standard_audio_pipeline("x", 1.0), {{"x": b"1"}}),
    "latent": lambda: encode_sample({{"x": torch.zeros(1)}}),
    "shards": lambda: presets.DecodeByExtension()({{"mp": b"1"}}),
}}
for extra, call in calls.items():
    try:
        call()
    except MissingDependencyError as error:
        assert f"sqlstream-data[{{extra}}]" in str(error), (extra, str(error))
    else:
        raise AssertionError(extra)
print(presets.LoadJsonMetadataTransform("m")({{"m": "[1]"}})["m"])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[1]\n"), done.stderr
