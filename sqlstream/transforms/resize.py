"""Geometry of resizing, for images and videos alike: pure functions on sizes; pixels are moved elsewhere.

Sizes are (height, width), as in `sds`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from sqlstream.errors import ConfigError, TransformError

Size = tuple[int, int]
INTERPOLATIONS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
"""Filters of Pillow. All but `nearest` filter over the whole support when they shrink (antialias)."""


SDS_INTERPOLATION = "bilinear"
"""Default of the classes and pipelines of `sds`: scripts that come from there get the same pixels."""


class Fit(StrEnum):
    """How an input of another aspect fills the target."""

    CROP = "crop"
    """Cut the centre out, then resize: fills the target, loses the margins."""
    LETTERBOX = "letterbox"
    """Resize the whole input into the target, black bars around."""
    STRETCH = "stretch"
    """Resize each axis by its own factor."""


class Box(NamedTuple):
    """A rectangle of pixels, half open; whole ones, but for a plan of `scale_plan`."""

    top: float
    left: float
    bottom: float
    right: float

    @property
    def size(self) -> tuple[float, float]:
        """(height, width)."""
        return self.bottom - self.top, self.right - self.left


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeOptions:
    """The `resize` keywords of `sds`, and `fit`."""

    resolution: Size
    """Target (height, width)."""
    crop_before_resize: bool = True
    """Cut the centre out to the target's aspect first; False: stretch."""
    allow_vertical: bool = False
    """An input that is higher than wide gets the resolution turned."""
    random_resize: Mapping[Size, float] | None = None
    """Probabilities of other resolutions; only those not larger than the input take part; none left: `resolution`."""
    interpolation_mode: str = "bicubic"
    """One of `INTERPOLATIONS`; bicubic keeps most detail. What has its name from `sds` takes `SDS_INTERPOLATION`."""
    fit: Fit | str | None = None
    """'crop', 'letterbox' or 'stretch'; None: as `crop_before_resize` says."""

    def __post_init__(self) -> None:
        """Check values."""
        object.__setattr__(self, "resolution", _checked_size("resolution", self.resolution))
        mode = str(self.interpolation_mode).rpartition(".")[2].lower()  # torchvision's enum reads InterpolationMode.BILINEAR
        object.__setattr__(self, "interpolation_mode", mode)
        if mode not in INTERPOLATIONS:
            raise ConfigError(f"interpolation_mode={self.interpolation_mode!r} is not one of {', '.join(INTERPOLATIONS)}")
        if self.fit is not None and self.fit not in list(Fit):
            raise ConfigError(f"fit={self.fit!r} is not one of {', '.join(Fit)}")
        if self.random_resize is not None:
            checked = {_checked_size("random_resize", size): float(p) for size, p in self.random_resize.items()}
            if any(not p >= 0 for p in checked.values()) or not sum(checked.values()) > 0:
                raise ConfigError(f"random_resize={dict(self.random_resize)!r} needs probabilities of at least 0, not all 0")
            object.__setattr__(self, "random_resize", checked)

    @property
    def how(self) -> Fit:
        """The fit, whichever keyword said it."""
        return Fit(self.fit) if self.fit is not None else (Fit.CROP if self.crop_before_resize else Fit.STRETCH)


def _checked_size(name: str, value: object) -> Size:
    try:
        height, width = (int(side) for side in value)  # type: ignore[attr-defined]  # else the error below
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={value!r} is not a pair (height, width)") from None
    if height < 1 or width < 1:
        raise ConfigError(f"{name}={value!r} is out of range: both sides must be 1 or more")
    return height, width


def choose_resolution(options: ResizeOptions, size: Size, rng: np.random.Generator | None) -> Size:
    """Return the target for an input of `size`.

    Args:
        options: What the user asked for.
        size: Size of the input.
        rng: Draws among `random_resize`; None if it is not used.
    """
    is_vertical = options.allow_vertical and size[0] > size[1]

    def turned(target: Size) -> Size:
        return (target[1], target[0]) if is_vertical else target

    if options.random_resize and rng is not None:
        candidates = {turned(target): p for target, p in options.random_resize.items() if p > 0}
        fitting = [target for target in candidates if target[0] <= size[0] and target[1] <= size[1]]
        if fitting:
            weights = np.array([candidates[target] for target in fitting])  # [n]
            return fitting[int(rng.choice(len(fitting), p=weights / weights.sum()))]
    return turned(options.resolution)


def centre_crop(size: Size, target: Size) -> Box:
    """Return the largest centred box of `size` that has the aspect of `target`, to the nearest whole pixel."""
    height, width = size
    if height * target[1] > width * target[0]:
        height = max(1, round(width * target[0] / target[1]))
    else:
        width = max(1, round(height * target[1] / target[0]))
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return Box(top, left, top + height, left + width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizePlan:
    """What to do with an input of one size."""

    crop: Box
    """Taken out of the input."""
    inner: Size
    """The crop is resized to this."""
    outer: Size
    """Size of the result: `inner` or, with bars, larger."""

    @property
    def offset(self) -> Size:
        """Where `inner` lies in `outer`: (top, left)."""
        return (self.outer[0] - self.inner[0]) // 2, (self.outer[1] - self.inner[1]) // 2


def plan_resize(options: ResizeOptions, size: Size, rng: np.random.Generator | None = None) -> ResizePlan:
    """Return how an input of `size` (height, width) becomes the target.

    Raises:
        TransformError: The input has no pixels.
    """
    if min(size) < 1:
        raise TransformError(f"an input of {size[0]}x{size[1]} pixels cannot be resized")
    target = choose_resolution(options, size, rng)
    whole = Box(0, 0, *size)
    if options.how is Fit.STRETCH:
        return ResizePlan(crop=whole, inner=target, outer=target)
    if options.how is Fit.CROP:
        return ResizePlan(crop=centre_crop(size, target), inner=target, outer=target)
    scale = min(target[0] / size[0], target[1] / size[1])
    inner = (min(target[0], max(1, round(size[0] * scale))), min(target[1], max(1, round(size[1] * scale))))
    return ResizePlan(crop=whole, inner=inner, outer=target)


def scale_plan(plan: ResizePlan, size: Size, decoded: Size, mirrored: Sequence[int] = ()) -> ResizePlan:
    """Return the plan for an input that was decoded at 1 / 2, 1 / 4 or 1 / 8 of its size, rounded up: its crop has fractions.

    Args:
        plan: Made for the input's full `size`.
        size: Full.
        decoded: What the decoder gave.
        mirrored: Axes (1: height, 2: width) that were flipped: there, what was rounded up lies before the picture.
    """
    if decoded == size:
        return plan
    factor = next(factor for factor in (2, 4, 8) if all(-(-s // factor) == d for s, d in zip(size, decoded, strict=True)))
    top, left = (decoded[k] - size[k] / factor if k + 1 in mirrored else 0.0 for k in (0, 1))
    crop = [edge / factor + (left if k % 2 else top) for k, edge in enumerate(plan.crop)]
    return ResizePlan(crop=Box(*crop), inner=plan.inner, outer=plan.outer)


def undistorted_size(size: Size, original: Size) -> Size:
    """Return the smallest size with the aspect of `original` in which neither side of `size` shrinks.

    Raises:
        TransformError: The original resolution is not a size.
    """
    height, width = original
    if not (math.isfinite(height) and math.isfinite(width) and height >= 1 and width >= 1):
        raise TransformError(f"the original resolution {height!r}x{width!r} is not a size")
    if size[0] * width >= size[1] * height:  # at the height of `size`, the original is at least as wide
        return size[0], max(1, round(size[0] * width / height))
    return max(1, round(size[1] * height / width)), size[1]
