"""Samples at the size of their bucket: pictures and clips scaled to cover it, then cropped; sequences padded."""

from __future__ import annotations

from typing import Any

import torch

from sqlstream.errors import ConfigError, TransformError
from sqlstream.transforms.base import BUCKET, Sample
from sqlstream.transforms.content import read_bytes
from sqlstream.transforms.field import BaseTransform, failure, summary
from sqlstream.transforms.image_decode import decode_image
from sqlstream.transforms.pixels import image_to_tensor, resize_image, resize_tensor, size_of
from sqlstream.transforms.resize import INTERPOLATIONS, Box, ResizePlan, Size
from sqlstream.transforms.rng import rng
from sqlstream.transforms.video import DecodeVideoTransform


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
        _check_options("ResizeToBucket", crop, interpolation_mode)
        self.crop = crop
        self.interpolation_mode = interpolation_mode

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:
        """Return the tensor; put sizes and offset into the sample."""
        if BUCKET not in sample:
            raise _without_bucket(self, sample)
        target = _as_size(sample[BUCKET])
        is_decoded = isinstance(value, torch.Tensor) or hasattr(value, "getbands")
        picture = value if is_decoded else decode_image(read_bytes(value))
        size = size_of(picture)
        if min(size) < 1:
            raise TransformError(f"a picture of {size[0]}x{size[1]} pixels cannot be resized")
        inner = covering_size(size, target)
        free = inner[0] - target[0], inner[1] - target[1]
        top, left = corner_of(free, self.crop, sample)
        sample["original_size"], sample["crop_top_left"], sample["target_size"] = size, (top, left), target
        plan = ResizePlan(crop=Box(0, 0, *size), inner=inner, outer=inner)
        if isinstance(picture, torch.Tensor):
            scaled = resize_tensor(picture, plan, self.interpolation_mode)  # [c, h, w]
        else:
            scaled = image_to_tensor(resize_image(picture, plan, self.interpolation_mode))  # [c, h, w]
        return scaled[..., top : top + target[0], left : left + target[1]].clone()


class DecodeVideoToBucket(DecodeVideoTransform):
    """Path, bytes, a struct of both, or a `VideoReader` → uint8 tensor `[t, c, h, w]` of the size that `__bucket__` says.

    As many frames are decoded as the bucket has, of a clip that the options choose (a random one, `framerate=` apart), scaled
    until they cover the bucket, and cropped alike. The sample also gets `original_size`, `crop_top_left` and `target_size`.

    Args:
        input_field: The video.
        output_field: None: into the input field.
        crop: Where the bucket lies in the scaled frames: `'random'`, by the sample's generator, or `'centre'`.
        interpolation_mode: One of `INTERPOLATIONS`.
        decode_kwargs: Those of `DecodeVideoTransform`, but for the number of frames.

    Raises:
        ConfigError: `crop` or `interpolation_mode` is unknown.
    """

    def __init__(
        self,
        input_field: str = "video",
        output_field: str | None = None,
        *,
        crop: str = "random",
        interpolation_mode: str = "bilinear",
        **decode_kwargs: Any,
    ) -> None:
        super().__init__(input_field, 1, output_field, **decode_kwargs)
        _check_options("DecodeVideoToBucket", crop, interpolation_mode)
        self.crop = crop
        self.interpolation_mode = interpolation_mode

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:
        """Return the frames; put sizes and offset into the sample."""
        if BUCKET not in sample:
            raise _without_bucket(self, sample)
        num_frames, *sides = _as_video_size(sample[BUCKET])
        clip = self.decode(value, sample, self.effective_options(sample), num_frames)
        frames = clip.frames.pixels  # [t, c, h, w]
        size, target = (frames.shape[-2], frames.shape[-1]), (sides[0], sides[1])
        inner = covering_size(size, target)
        top, left = corner_of((inner[0] - target[0], inner[1] - target[1]), self.crop, sample)
        sample["original_size"], sample["crop_top_left"], sample["target_size"] = size, (top, left), target
        plan = ResizePlan(crop=Box(0, 0, *size), inner=inner, outer=inner)
        scaled = resize_tensor(frames, plan, self.interpolation_mode)  # [t, c, h, w]
        return scaled[..., top : top + target[0], left : left + target[1]].clone()


class PadToBucket(BaseTransform):
    """Sequence (a tensor or array, or a list of numbers) → tensor whose first dimension is the length that `__bucket__` says.

    Args:
        input_field: The sequence.
        output_field: None: into the input field.
        value: What it is padded with.
        mask_field: Gets a bool tensor `[length]`, True where the sequence is; None: none.
        side: Where the padding is: `'right'` or `'left'`.

    Raises:
        ConfigError: `side` is unknown.
    """

    def __init__(
        self,
        input_field: str,
        output_field: str | None = None,
        *,
        value: float = 0,
        mask_field: str | None = None,
        side: str = "right",
    ) -> None:
        super().__init__(input_field, output_field)
        if side not in ("right", "left"):
            raise ConfigError(f"PadToBucket: side={side!r} is unknown: give 'right' or 'left'")
        self.value = value
        self.mask_field = mask_field
        self.side = side

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:
        """Return the padded sequence; put its mask into the sample."""
        if BUCKET not in sample:
            raise _without_bucket(self, sample)
        length = sample[BUCKET]
        if isinstance(length, bool) or not isinstance(length, int):
            raise TransformError(
                f"{BUCKET} is {summary(length)}, which is no length: give the dataset batches=Buckets('num_tokens', "
                "Lengths(…), …)"
            )
        sequence = torch.as_tensor(value)  # [n, ...]
        if not sequence.ndim or len(sequence) > length:
            raise TransformError(
                f"a sequence of shape {list(sequence.shape)} does not fit its bucket of length {length}: what batches= goes by "
                "does not say how long it is"
            )
        own = slice(0, len(sequence)) if self.side == "right" else slice(length - len(sequence), length)
        padded = sequence.new_full((length, *sequence.shape[1:]), self.value)  # [length, ...]
        padded[own] = sequence
        if self.mask_field is not None:
            mask = torch.zeros(length, dtype=torch.bool)  # [length]
            mask[own] = True
            sample[self.mask_field] = mask
        return padded


def corner_of(free: Size, crop: str, sample: Sample) -> Size:
    """Return where a bucket lies in a scaled picture, as (top, left).

    Args:
        free: What the picture has beyond the bucket, as (height, width).
        crop: `'random'` or `'centre'`.
        sample: The sample, whose generator draws the place.
    """
    if crop == "centre":
        return free[0] // 2, free[1] // 2
    top, left = (int(offset) for offset in rng(sample).integers(0, [free[0] + 1, free[1] + 1]))
    return top, left


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


def _without_bucket(transform: BaseTransform, sample: Sample) -> TransformError:
    return failure(transform, sample, f"field {BUCKET!r} is missing: give the dataset batches=Buckets(…), which fills it")


def _as_size(bucket: Any) -> Size:
    """Return (height, width) of a bucket of pictures, whose value is (width, height)."""
    is_pair = isinstance(bucket, tuple) and len(bucket) == 2 and all(isinstance(side, int) and side > 0 for side in bucket)
    if not is_pair:
        raise TransformError(
            f"{BUCKET} is {summary(bucket)}, which is no size: give the dataset batches=Buckets('width, height', "
            "into=AspectBuckets…); a row that these leave out has None"
        )
    return bucket[1], bucket[0]


def _as_video_size(bucket: Any) -> tuple[int, int, int]:
    is_size = isinstance(bucket, tuple) and len(bucket) == 3 and all(isinstance(count, int) and count > 0 for count in bucket)
    if not is_size:
        raise TransformError(
            f"{BUCKET} is {summary(bucket)}, which is no size of a clip: give the dataset batches=Buckets('frames, height, "
            "width', into=VideoBuckets…); a row that these leave out has None"
        )
    return bucket[0], bucket[1], bucket[2]


def _check_options(owner: str, crop: str, interpolation_mode: str) -> None:
    if crop not in ("random", "centre"):
        raise ConfigError(f"{owner}: crop={crop!r} is unknown: give 'random' or 'centre'")
    if interpolation_mode not in INTERPOLATIONS:
        raise ConfigError(f"{owner}: interpolation_mode={interpolation_mode!r} is not one of {', '.join(INTERPOLATIONS)}")
