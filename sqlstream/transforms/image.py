"""Transforms of images: decode, resize, to tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from sqlstream.errors import TransformError
from sqlstream.transforms.base import Sample
from sqlstream.transforms.content import read_bytes
from sqlstream.transforms.field import BaseTransform, parse_options, summary
from sqlstream.transforms.image_decode import ImageOptions, decode_image, decode_resized
from sqlstream.transforms.optional import PILLOW
from sqlstream.transforms.pixels import image_to_tensor, resize_image, resize_tensor, size_of
from sqlstream.transforms.resize import SDS_INTERPOLATION, ResizeOptions, plan_resize
from sqlstream.transforms.rng import rng

IMAGE_FRAMERATE = 960.0
"""Frames per second that an image as a video claims, as in `sds`."""


class DecodeImageTransform(BaseTransform):
    """Bytes, a path, or a struct of both → upright RGB Pillow image.

    Args:
        input_field: Encoded image.
        output_field: None: into the input field.
        transform_kwargs: `background=(r, g, b)`: composite transparent pixels on it; default: alpha is dropped.
    """

    options_type = ImageOptions
    options: ImageOptions
    optional_modules = PILLOW

    def transform(self, value: Any, sample: Sample) -> Any:  # noqa: ARG002
        """Return the Pillow image."""
        return decode_image(read_bytes(value), self.options)


class DecodeResizedImageTransform(BaseTransform):
    """Bytes, a path, or a struct of both → uint8 tensor `[c, h, w]` at the target's size, in one step, on the fast path.

    Args:
        input_field: Encoded image.
        output_field: None: into the input field.
        transform_kwargs: The `resize` keywords (`ResizeOptions`), and `background` (`ImageOptions`).
    """

    optional_modules = (*PILLOW, "simplejpeg")
    values_format = 1

    def __init__(self, input_field: str, output_field: str | None = None, **transform_kwargs: Any) -> None:
        super().__init__(input_field, output_field)
        image_names = {field.name for field in dataclasses.fields(ImageOptions)}
        image_kwargs = {name: value for name, value in transform_kwargs.items() if name in image_names}
        resize_kwargs = {name: value for name, value in transform_kwargs.items() if name not in image_names}
        owner = type(self).__name__
        self.image_options: ImageOptions = parse_options(ImageOptions, image_kwargs, owner)
        self.options: ResizeOptions = parse_options(ResizeOptions, resize_kwargs, owner)

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:
        """Return the tensor."""
        generator = rng(sample) if self.options.random_resize else None
        return decode_resized(read_bytes(value), self.options, self.image_options, generator)


class ResizeImageTransform(BaseTransform):
    """Pillow image → Pillow image, or tensor `[..., c, h, w]` → tensor, at the target's size.

    Args:
        input_field: Decoded image.
        output_field: None: into the input field.
        resize_kwargs: The `resize` keywords (`ResizeOptions`); `interpolation_mode` is bilinear if not given, as in `sds`.
    """

    options_type = ResizeOptions
    options: ResizeOptions

    def __init__(self, input_field: str, output_field: str | None = None, **resize_kwargs: Any) -> None:
        super().__init__(input_field, output_field, **{"interpolation_mode": SDS_INTERPOLATION, **resize_kwargs})

    def transform(self, value: Any, sample: Sample) -> Any:
        """Return the resized image."""
        generator = rng(sample) if self.options.random_resize else None
        plan = plan_resize(self.options, size_of(value), generator)
        if isinstance(value, torch.Tensor):
            return resize_tensor(value, plan, self.options.interpolation_mode)
        if isinstance(value, list | tuple):
            raise TransformError(f"expected one image, got {summary(value)}: ResizeVideoTransform resizes lists of frames")
        return resize_image(value, plan, self.options.interpolation_mode)


class ConvertImageToByteTensorTransform(BaseTransform):
    """Pillow image or array `[h, w, c]` → uint8 tensor `[c, h, w]`; grey becomes 3 channels."""

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:  # noqa: ARG002
        """Return the tensor; one that is a uint8 tensor already stays."""
        if isinstance(value, torch.Tensor):
            if value.dtype != torch.uint8:
                raise TransformError(f"expected an image, got {summary(value)}: floats have no agreed range to convert from")
            return value
        if not isinstance(value, np.ndarray) and not hasattr(value, "getbands"):
            raise TransformError(f"expected a Pillow image, got {summary(value)}: decode it first (DecodeImageTransform)")
        return image_to_tensor(value)


class ReshapeImageAsVideoTransform(BaseTransform):
    """Tensor `[c, h, w]` → video of one frame `[1, c, h, w]`; the sample's `framerate` becomes 960."""

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:
        """Return the video."""
        if not isinstance(value, torch.Tensor) or value.ndim != 3:
            raise TransformError(f"expected a tensor [c, h, w], got {summary(value)}")
        sample["framerate"] = IMAGE_FRAMERATE
        return value.unsqueeze(0)


class NormalizeFramesTransform(BaseTransform):
    """uint8 tensor of 0 to 255 → float32 of -1 to 1, by x / 127.5 - 1."""

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:  # noqa: ARG002
        """Return the normalised frames."""
        if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8:
            raise TransformError(f"expected a uint8 tensor, got {summary(value)}")
        return value.to(torch.float32).div_(127.5).sub_(1.0)
