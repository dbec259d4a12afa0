"""Pictures at the size of their bucket: scaled to cover it, then cropped."""

from __future__ import annotations

from typing import Any

import torch

from sqlstream.errors import ConfigError, TransformError
from sqlstream.transforms.base import BUCKET, Sample
from sqlstream.transforms.content import read_bytes
from sqlstream.transforms.field import BaseTransform, missing, summary
from sqlstream.transforms.image_decode import decode_image
from sqlstream.transforms.pixels import image_to_tensor, resize_image, resize_tensor, size_of
from sqlstream.transforms.resize import INTERPOLATIONS, Box, ResizePlan, Size
from sqlstream.transforms.rng import rng


class ResizeToBucket(BaseTransform):
    """Picture (encoded, decoded or as a tensor) → uint8 tensor `[c, h, w]` of the size that `__bucket__` says.

    It is scaled until it covers the bucket, and what reaches beyond it is cut off; nothing is padded. The sample also gets what
    SDXL is conditioned on, as (height, width) or (top, left) in pixels: `original_size`, `crop_top_left` (in the scaled
    picture) and `target_size`.

    Args:
        input_field: The picture: bytes, a path, a struct of both, a Pillow image or a tensor `[c, h, w]`.
        output_field: None: into the input field.
        crop: Where the bucket lies in the scaled picture: `'random'`, by the sample's generator, or `'centre'`.
        interpolation_mode: One of `INTERPOLATIONS`.

    Raises:
        ConfigError: `crop` or `interpolation_mode` is unknown.
    """

    def __init__(
        self,
        input_field: str = "image",
        output_field: str | None = None,
        *,
        crop: str = "random",
        interpolation_mode: str = "bicubic",
    ) -> None:
        super().__init__(input_field, output_field)
        if crop not in ("random", "centre"):
            raise ConfigError(f"ResizeToBucket: crop={crop!r} is unknown: give 'random' or 'centre'")
        if interpolation_mode not in INTERPOLATIONS:
            raise ConfigError(
                f"ResizeToBucket: interpolation_mode={interpolation_mode!r} is not one of {', '.join(INTERPOLATIONS)}"
            )
        self.crop = crop
        self.interpolation_mode = interpolation_mode

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:
        """Return the tensor; put sizes and offset into the sample."""
        if BUCKET not in sample:
            raise missing(self, sample, BUCKET)
        target = _as_size(sample[BUCKET])
        is_decoded = isinstance(value, torch.Tensor) or hasattr(value, "getbands")
        picture = value if is_decoded else decode_image(read_bytes(value))
        size = size_of(picture)
        if min(size) < 1:
            raise TransformError(f"a picture of {size[0]}x{size[1]} pixels cannot be resized")
        inner = covering_size(size, target)
        free = inner[0] - target[0], inner[1] - target[1]
        if self.crop == "centre":
            top, left = free[0] // 2, free[1] // 2
        else:
            top, left = (int(offset) for offset in rng(sample).integers(0, [free[0] + 1, free[1] + 1]))
        sample["original_size"], sample["crop_top_left"], sample["target_size"] = size, (top, left), target
        plan = ResizePlan(crop=Box(0, 0, *size), inner=inner, outer=inner)
        if isinstance(picture, torch.Tensor):
            scaled = resize_tensor(picture, plan, self.interpolation_mode)  # [c, h, w]
        else:
            scaled = image_to_tensor(resize_image(picture, plan, self.interpolation_mode))  # [c, h, w]
        return scaled[..., top : top + target[0], left : left + target[1]].clone()


def covering_size(size: Size, target: Size) -> Size:
    """Return the least size with the aspect of `size`, to the nearest pixel, that covers `target`; (height, width) all.

    Example:
        >>> covering_size((480, 640), (896, 1152))
        (896, 1195)
    """
    height, width = size
    if target[0] * width >= target[1] * height:  # at the target's height it is at least as wide
        return target[0], max(target[1], round(width * target[0] / height))
    return max(target[0], round(height * target[1] / width)), target[1]


def _as_size(bucket: Any) -> Size:
    """Return (height, width) of a bucket of pictures, whose value is (width, height)."""
    is_pair = isinstance(bucket, tuple) and len(bucket) == 2 and all(isinstance(side, int) and side > 0 for side in bucket)
    if not is_pair:
        raise TransformError(
            f"{BUCKET} is {summary(bucket)}, which is no size: give the dataset batches=Buckets('width, height', "
            "into=AspectBuckets…); a row that these leave out has None"
        )
    return bucket[1], bucket[0]
