"""Moves pixels as a `ResizePlan` says: on torch tensors (fast, no copy through Pillow) and on Pillow images."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch.nn import functional

from sqlstream.errors import TransformError
from sqlstream.transforms.field import summary
from sqlstream.transforms.optional import require
from sqlstream.transforms.resize import Box, ResizePlan

if TYPE_CHECKING:
    from PIL.Image import Image

TORCH_MODES = {"bilinear": "bilinear", "bicubic": "bicubic"}
"""Modes that torch computes on uint8 with antialias as Pillow does (within 1 level); the others go through Pillow."""


def resize_tensor(frames: torch.Tensor, plan: ResizePlan, interpolation: str) -> torch.Tensor:  # [..., c, h, w]
    """Return frames cropped, resized and padded.

    Args:
        frames: uint8 or float; any number of leading axes. # [..., c, h, w]
        plan: Made for their height and width.
        interpolation: One of `resize.INTERPOLATIONS`.

    Returns:
        Same dtype, contiguous. # [..., c, h, w]
    """
    if frames.ndim < 3:
        raise TransformError(f"expected frames of shape [..., c, h, w], got {summary(frames)}")
    if not all(float(edge).is_integer() for edge in plan.crop):
        return _resize_between(frames, plan, interpolation)
    top, left, bottom, right = map(int, plan.crop)
    cropped: torch.Tensor = frames[..., top:bottom, left:right]  # [..., c, h, w]
    if cropped.shape[-2:] != plan.inner:
        cropped = _scale(cropped.reshape(-1, *cropped.shape[-3:]), plan, interpolation)  # [n, c, h, w]
        cropped = cropped.reshape(*frames.shape[:-2], *plan.inner)  # [..., c, h, w]
    if plan.outer != plan.inner:
        padded = torch.zeros((*frames.shape[:-2], *plan.outer), dtype=frames.dtype)  # [..., c, h, w]
        y, x = plan.offset
        padded[..., y : y + plan.inner[0], x : x + plan.inner[1]] = cropped
        return padded
    return cropped.contiguous()


def _resize_between(
    frame: torch.Tensor,  # [3 or 4, h, w]
    plan: ResizePlan,
    interpolation: str,
) -> torch.Tensor:
    """Resize a frame by Pillow, which takes a crop whose edges lie between pixels; torch does not."""
    top, left, bottom, right = plan.crop
    resampling = require("PIL.Image", "image", "to resize images").Resampling[interpolation.upper()]
    image = tensor_to_image(frame[:3]).resize(plan.inner[::-1], resampling, box=(left, top, right, bottom))
    whole = dataclasses.replace(plan, crop=Box(0, 0, *plan.inner))
    return resize_tensor(image_to_tensor(image), whole, interpolation)


def _scale(
    frames: torch.Tensor,  # [n, c, h, w]
    plan: ResizePlan,
    interpolation: str,
) -> torch.Tensor:
    if interpolation in TORCH_MODES:
        return functional.interpolate(
            frames, size=plan.inner, mode=TORCH_MODES[interpolation], antialias=True, align_corners=False
        )
    if interpolation == "nearest":
        return functional.interpolate(frames, size=plan.inner, mode="nearest-exact")
    if frames.dtype != torch.uint8 or frames.shape[1] not in (1, 3):
        raise TransformError(
            f"interpolation_mode={interpolation!r} needs uint8 frames of 1 or 3 channels, got {summary(frames)}"
        )
    images = [_scale_image(tensor_to_image(frame), plan, interpolation) for frame in frames]
    return torch.stack([image_to_tensor(image, frames.shape[1]) for image in images])


def resize_image(image: Image, plan: ResizePlan, interpolation: str) -> Image:
    """Return a Pillow image cropped, resized and padded."""
    top, left, bottom, right = plan.crop
    if (top, left) != (0, 0) or (right, bottom) != image.size:
        image = image.crop((left, top, right, bottom))
    image = _scale_image(image, plan, interpolation)
    if plan.outer == plan.inner:
        return image
    padded: Image = require("PIL.Image", "image", "to resize images").new(image.mode, (plan.outer[1], plan.outer[0]))
    padded.paste(image, plan.offset[::-1])
    return padded


def _scale_image(image: Image, plan: ResizePlan, interpolation: str) -> Image:
    if (image.height, image.width) == plan.inner:
        return image
    resampling = require("PIL.Image", "image", "to resize images").Resampling[interpolation.upper()]
    return image.resize((plan.inner[1], plan.inner[0]), resampling)


def image_to_tensor(image: Any, num_channels: int = 3) -> torch.Tensor:  # [c, h, w]
    """Return an image of Pillow, or an array [h, w, c] or [h, w], as uint8, a grey one with its channel repeated.

    Raises:
        TransformError: It has another number of channels, or values that are no levels of these: of a palette, say.
    """
    array = np.array(image)  # [h, w, c] or [h, w]
    if array.ndim == 2:
        array = np.repeat(array[:, :, None], num_channels, axis=2)  # [h, w, c]
    has_levels = array.dtype == np.uint8 and getattr(image, "mode", "RGB") in ("L", "RGB")
    if not has_levels or array.ndim != 3 or array.shape[2] != num_channels:
        found = f"mode {image.mode}" if hasattr(image, "mode") else summary(image)
        raise TransformError(f"expected an image of {num_channels} channels of 8 bits, got {found}: decode it to RGB first")
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def rgb_view(image: Image) -> torch.Tensor:  # [3 or 4, h, w]
    """Return an RGB image as uint8, without a copy where Pillow lets us look at its memory.

    There, a fourth channel without meaning follows the three; torch resizes four as fast as three.
    """
    if hasattr(image, "__arrow_c_array__"):  # since Pillow 11.3
        with contextlib.suppress(ValueError):  # more than 4 million pixels: it lies in several pieces
            exported: Any = image  # Pillow's types do not tell
            levels: torch.Tensor = torch.utils.dlpack.from_dlpack(pa.array(exported).flatten())  # [n]
            return levels.view(image.height, image.width, 4).permute(2, 0, 1)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def tensor_to_image(frame: torch.Tensor) -> Image:  # [c, h, w]
    """Return a uint8 frame of 1 or 3 channels as a Pillow image."""
    pillow = require("PIL.Image", "image", "to make images")
    array: Any = frame.permute(1, 2, 0).numpy()  # [h, w, c]
    image: Image = pillow.fromarray(np.ascontiguousarray(array[:, :, 0] if array.shape[2] == 1 else array))
    return image


def size_of(value: Any) -> tuple[int, int]:
    """Return (height, width) of a Pillow image, a tensor [..., c, h, w], or a list of either.

    Raises:
        TransformError: It is none of these, or empty.
    """
    if isinstance(value, torch.Tensor) and value.ndim >= 3:
        return int(value.shape[-2]), int(value.shape[-1])
    if isinstance(value, list | tuple) and value:
        return size_of(value[0])
    if hasattr(value, "height") and hasattr(value, "width"):
        return int(value.height), int(value.width)
    raise TransformError(f"expected an image, frames or a tensor [..., c, h, w], got {summary(value)}")
