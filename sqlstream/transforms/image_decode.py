"""From encoded images to pixels.

Two ways, with one meaning:

- `decode_image`: bytes → RGB Pillow image of the full size.
- `decode_resized`: bytes → uint8 tensor `[c, h, w]` of the target's size, faster: JPEG is decoded at a reduced scale (in the
  DCT) when the target is much smaller, by simplejpeg where that imports, and torch resizes. Where nothing was reduced, pixels
  are within `EXACT_TOLERANCE` of Pillow's decode, crop, resize; where JPEG was reduced, within `REDUCED_TOLERANCE` (both are
  tested).

Rules: EXIF orientation is applied. 16 bit and float greys are scaled to 8 bit, not clipped. Alpha is dropped, as `sds` and
Pillow's `convert('RGB')` do, or composited on `background`. CMYK goes through Pillow, which knows Adobe's inverted form.
Animations give their first frame. PostScript is refused: Pillow would run a program on it.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from sqlstream.errors import ConfigError, DecodeError, MissingDependencyError
from sqlstream.transforms.jpeg import plain_size
from sqlstream.transforms.optional import find, require
from sqlstream.transforms.pixels import TORCH_MODES, image_to_tensor, resize_image, resize_tensor, rgb_view
from sqlstream.transforms.resize import ResizeOptions, ResizePlan, Size, plan_resize, scale_plan

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far pixels may be from Pillow's, in levels of 255."""

    mean: float
    """Mean of the absolute differences."""
    most: int
    """Largest difference."""


EXACT_TOLERANCE = Tolerance(mean=0.5, most=2)
"""Decoded at full size: torch and Pillow round their filter weights differently."""
REDUCED_TOLERANCE = Tolerance(mean=1.5, most=32)
"""JPEG decoded at a reduced scale: the DCT's box filter comes before the resize. The largest differences lie at hard edges."""

MIN_REDUCED_RATIO = 2.0
"""A reduced decode keeps the crop at least this many times as large as the target in both axes; at 1 pixels err by 2.3
levels in the mean instead of 0.9."""

_ORIENTATION = 0x0112
_MIRRORED = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}
"""Axes of [c, h, w] to flip after the sides have changed places, where they do (from 5 on)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """How pixels of other forms become RGB."""

    background: tuple[int, int, int] | None = None
    """Colour under transparent pixels; None: alpha is dropped, as in `sds`."""

    def __post_init__(self) -> None:
        """Check the colour."""
        colour = self.background
        if colour is not None and (len(colour) != 3 or not all(isinstance(c, int) and 0 <= c <= 255 for c in colour)):
            raise ConfigError(f"background={colour!r} is not three levels of 0 to 255, such as (255, 255, 255)")


def open_image(data: bytes) -> Image:
    """Return an image whose header is read, and nothing more.

    Raises:
        DecodeError: Not an image that Pillow reads, or too large, or PostScript.
    """
    pillow = require("PIL.Image", "image", "to decode images")
    try:
        image: Image = pillow.open(io.BytesIO(data))
    except Exception as error:
        raise _undecodable(data, error) from error
    if image.format == "EPS":
        raise DecodeError("PostScript is not decoded: Pillow would run Ghostscript on it")
    if min(image.size) < 1:
        raise DecodeError(f"the {image.format} image has {image.width}x{image.height} pixels")
    return image


def decode_image(data: bytes, options: ImageOptions | None = None) -> Image:
    """Return the RGB image, upright.

    Raises:
        DecodeError: The bytes do not decode.
    """
    image = open_image(data)
    try:
        image.load()
        return to_rgb(_upright(image, orientation_of(image)), options or ImageOptions())
    except MissingDependencyError:
        raise
    except Exception as error:
        raise _undecodable(data, error, _name_of(image)) from error


def decode_resized(
    data: bytes,
    resize: ResizeOptions,
    options: ImageOptions | None = None,
    rng: np.random.Generator | None = None,
) -> torch.Tensor:  # [c, h, w]
    """Return the image at the target's size.

    Args:
        data: Encoded image.
        resize: Target size, and how it is reached.
        options: How other forms become RGB.
        rng: Draws the resolution, if it is random.

    Returns:
        uint8, contiguous. # [c, h, w]

    Raises:
        DecodeError: The bytes do not decode.
    """
    plain = plain_size(data) if resize.interpolation_mode in TORCH_MODES else None
    if plain is not None and find("simplejpeg") is not None:
        try:
            return _decode_plain(data, plain, 1, plan_resize(resize, plain, rng), resize.interpolation_mode)
        except Exception as error:
            raise _undecodable(data, error, f"JPEG image of {plain[1]}x{plain[0]}") from error
    image = open_image(data)
    what = _name_of(image)
    options = options or ImageOptions()
    try:
        if image.format != "JPEG":
            image.load()  # before the orientation is read: Pillow turns TIFF itself while loading
        orientation = orientation_of(image)
        turned = orientation >= 5
        size = (image.width, image.height) if turned else (image.height, image.width)
        plan = plan_resize(resize, size, rng)
        if resize.interpolation_mode not in TORCH_MODES:
            image.load()
            rgb = to_rgb(_upright(image, orientation), options)
            return image_to_tensor(resize_image(rgb, plan, resize.interpolation_mode))
        if image.format == "JPEG" and image.mode in ("RGB", "L") and find("simplejpeg") is not None:
            return _decode_plain(data, size, orientation, plan, resize.interpolation_mode)
        if image.format == "JPEG":
            reduced = _reduced_size((image.height, image.width), _least_size(plan, size, turned))
            image.draft(None, (reduced[1], reduced[0]))
            image.load()
        frame = rgb_view(_upright(to_rgb(image, options), orientation))  # [3 or 4, h, w]
        plan = scale_plan(plan, size, (frame.shape[1], frame.shape[2]), _MIRRORED.get(orientation, ()))
        return resize_tensor(frame, plan, resize.interpolation_mode)[:3].clone()  # a view would keep the fourth channel
    except MissingDependencyError:
        raise
    except Exception as error:
        raise _undecodable(data, error, what) from error


def _name_of(image: Image) -> str:
    return f"{image.format} image of {image.width}x{image.height}"


def _undecodable(data: bytes, error: Exception, what: str = "an image") -> DecodeError:
    if isinstance(error, DecodeError):
        return error
    return DecodeError(f"{len(data)} bytes do not decode as {what}: {type(error).__name__}: {error}")


def _least_size(plan: ResizePlan, size: Size, turned: bool) -> Size:
    """Return the least (height, width), in the file's orientation, at which the crop still covers the target."""
    crop = plan.crop.size
    least = tuple(
        min(full, math.ceil(full * MIN_REDUCED_RATIO * inner / cropped))
        for full, inner, cropped in zip(size, plan.inner, crop, strict=True)
    )
    return (least[1], least[0]) if turned else (least[0], least[1])


def _decode_plain(data: bytes, size: Size, orientation: int, plan: ResizePlan, mode: str) -> torch.Tensor:  # [c, h, w]
    """Return a grey or three-channel JPEG by simplejpeg, resized by torch; `size` is its upright one, which `plan` is for."""
    turned = orientation >= 5
    coded = (size[1], size[0]) if turned else size
    least = _reduced_size(coded, _least_size(plan, size, turned))
    pixels = require("simplejpeg", "fast", "to decode JPEG").decode_jpeg(
        data, colorspace="RGB", min_height=least[0], min_width=least[1], min_factor=1
    )  # [h, w, c]
    frame = _turn(torch.from_numpy(pixels).permute(2, 0, 1), orientation)  # [c, h, w]
    plan = scale_plan(plan, size, (frame.shape[1], frame.shape[2]), _MIRRORED.get(orientation, ()))
    return resize_tensor(frame, plan, mode)


def _reduced_size(size: Size, least: Size) -> Size:
    """Return `size` halved up to three times, not below `least`: the scales that libjpeg-turbo has fast code for."""
    factor = max(
        factor for factor in (1, 2, 4, 8) if factor == 1 or all(s // factor >= m for s, m in zip(size, least, strict=True))
    )
    return -(-size[0] // factor), -(-size[1] // factor)


# -- colours ----------------------------------------------------------------------------------------------------------


def to_rgb(image: Image, options: ImageOptions) -> Image:
    """Return a loaded image of any mode as RGB."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F" or image.mode.startswith("I"):
        return _from_deep_grey(image).convert("RGB")
    has_alpha = image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info
    if not has_alpha:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    if options.background is None:
        return rgba.convert("RGB")
    canvas: Image = require("PIL.Image", "image", "to decode images").new("RGBA", rgba.size, (*options.background, 255))
    canvas.alpha_composite(rgba)
    return canvas.convert("RGB")


def _from_deep_grey(image: Image) -> Image:
    """Return 16 bit greys divided by 257; float greys times 255 when none is above 1, else as they are."""
    values = np.asarray(image).astype(np.float64)  # [h, w]
    if image.mode == "F":
        values = np.nan_to_num(values, nan=0.0, posinf=255.0, neginf=0.0)  # [h, w]
        scaled = values * 255 if values.max() <= 1 else values  # [h, w]
    else:
        scaled = values / 257  # [h, w]
    levels = np.clip(np.rint(scaled), 0, 255).astype(np.uint8)  # [h, w]
    grey: Image = require("PIL.Image", "image", "to decode images").fromarray(levels)
    return grey


# -- orientation ------------------------------------------------------------------------------------------------------


def orientation_of(image: Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 when there is none, or the EXIF block cannot be read."""
    if "exif" not in image.info and image.format == "JPEG":
        return 1  # without asking Pillow, which would read the whole header
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # with a broken EXIF block the pixels may still be whole
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _upright(image: Image, orientation: int) -> Image:
    if orientation == 1:
        return image
    transpose = require("PIL.Image", "image", "to decode images").Transpose
    method = {
        2: transpose.FLIP_LEFT_RIGHT,
        3: transpose.ROTATE_180,
        4: transpose.FLIP_TOP_BOTTOM,
        5: transpose.TRANSPOSE,
        6: transpose.ROTATE_270,
        7: transpose.TRANSVERSE,
        8: transpose.ROTATE_90,
    }[orientation]
    return image.transpose(method)


def _turn(frame: torch.Tensor, orientation: int) -> torch.Tensor:  # [c, h, w]
    if orientation >= 5:
        frame = frame.transpose(1, 2)  # [c, w, h]
    mirrored = _MIRRORED.get(orientation)
    return frame.flip(mirrored) if mirrored else frame
