"""Pictures scaled to cover their bucket, and cropped."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sqlstream.errors import ConfigError, TransformError
from sqlstream.transforms.presets import DecodeVideoToBucket, ResizeToBucket
from sqlstream.transforms.to_bucket import covering_size
from tests.transforms.clips import HEIGHT, WIDTH, video


def gradient(width: int, height: int) -> Image.Image:
    """A picture whose red grows to the right and green downwards."""
    pixels = np.zeros((height, width, 3), np.uint8)  # [h, w, c]
    pixels[..., 0] = np.linspace(0, 255, width)[None, :]
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    return Image.fromarray(pixels)


def encoded(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def sample_of(image: Any, bucket: Any, position: int = 0) -> dict[str, Any]:
    return {"image": image, "__bucket__": bucket, "__rng_key__": (1, 0, position)}


@pytest.mark.parametrize("size", [(640, 480), (480, 640), (33, 900), (1, 1), (1000, 1000), (97, 89)])
@pytest.mark.parametrize("target", [(64, 48), (48, 64), (50, 50)])
def test_the_scaled_picture_covers_the_bucket_and_no_more(size: tuple[int, int], target: tuple[int, int]) -> None:
    inner = covering_size(size, target)
    assert inner[0] >= target[0]
    assert inner[1] >= target[1]
    assert target[0] == inner[0] or target[1] == inner[1]
    assert abs(inner[0] * size[1] - inner[1] * size[0]) <= max(size), "its aspect is kept to the pixel"


def test_bytes_images_and_tensors_give_the_same_places() -> None:
    image, transform = gradient(120, 80), ResizeToBucket()
    tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1)  # [c, h, w]
    made = [transform(sample_of(value, (48, 48))) for value in (encoded(image), image, tensor)]
    for sample in made:
        assert sample["image"].shape == (3, 48, 48)
        assert sample["image"].dtype == torch.uint8
        assert (sample["original_size"], sample["target_size"]) == ((80, 120), (48, 48))
        assert sample["crop_top_left"] == made[0]["crop_top_left"]
        difference = (sample["image"].int() - made[0]["image"].int()).abs()  # [c, h, w]
        assert int(difference.max()) <= 2


def test_a_bucket_is_width_and_height_and_the_tensor_height_and_width() -> None:
    sample = ResizeToBucket()(sample_of(gradient(640, 480), (64, 32)))
    assert sample["image"].shape == (3, 32, 64)
    assert sample["target_size"] == (32, 64)


def test_the_centre_is_cut_out_of_the_middle_and_random_crops_move_by_the_generator_of_the_sample() -> None:
    image = gradient(300, 100)
    centre = ResizeToBucket(crop="centre")(sample_of(image, (50, 50)))
    assert centre["crop_top_left"] == (0, 50)
    assert abs(int(centre["image"][0, 25, 25]) - 127) <= 4
    offsets = [ResizeToBucket()(sample_of(image, (50, 50), position))["crop_top_left"] for position in range(200)]
    assert offsets == [ResizeToBucket()(sample_of(image, (50, 50), position))["crop_top_left"] for position in range(200)]
    assert {top for top, _ in offsets} == {0}
    assert min(left for _, left in offsets) < 5
    assert max(left for _, left in offsets) > 95


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ConfigError, match="crop='left'"):
        ResizeToBucket(crop="left")
    with pytest.raises(ConfigError, match="interpolation_mode='best'"):
        ResizeToBucket(interpolation_mode="best")
    with pytest.raises(TransformError, match=r"field '__bucket__' is missing: give the dataset batches=Buckets"):
        ResizeToBucket()({"image": gradient(8, 8)})
    for bucket in (None, "x", 512, (4.5, 4)):
        with pytest.raises(TransformError, match="is no size"):
            ResizeToBucket()(sample_of(gradient(8, 8), bucket))


def test_a_clip_has_the_frames_and_the_size_of_its_bucket() -> None:
    for bucket in ((9, 24, 40), (1, 32, 32)):
        transform = DecodeVideoToBucket("video", crop="centre")
        sample = transform({"video": video(), "__bucket__": bucket, "__rng_key__": (1, 0, 5)})
        frames, height, width = bucket
        assert sample["video"].shape == (frames, 3, height, width)
        assert sample["video"].dtype == torch.uint8
        assert (sample["original_size"], sample["target_size"]) == ((HEIGHT, WIDTH), (height, width))
    with pytest.raises(TransformError, match=r"no size of a clip: give the dataset batches=Buckets\('frames, height, width'"):
        DecodeVideoToBucket("video")({"video": video(), "__bucket__": (4, 4)})
    with pytest.raises(ConfigError, match="DecodeVideoToBucket: crop='left'"):
        DecodeVideoToBucket("video", crop="left")
