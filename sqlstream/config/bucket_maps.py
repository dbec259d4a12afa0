"""From values of a row to the bucket that it belongs to: sizes of pictures, ranges of lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from sqlstream.config.checks import check_at_least
from sqlstream.errors import ConfigError

BucketValue: TypeAlias = int | float | str | tuple[Any, ...]
"""What names a bucket: a number, a text, or a tuple of these."""
AspectSize: TypeAlias = tuple[int, int]
"""(width, height), as tables of pictures have them."""
VideoSize: TypeAlias = tuple[int, int, int]
"""(frames, height, width), as decoded clips have them."""
PATCH = 16
"""Side of the patch that is a token: 8 pixels to a latent and 2 latents to a patch, as in most diffusion transformers."""
FRAMES_OF_LATENT = 4
"""Frames that make one of latents, behind the first, which makes one by itself: as in most causal video autoencoders."""

# Sides of the report on SDXL, Table 2, as (height, width) in its order; PixArt has the same list.
_SDXL = (
    *((512, 2048), (512, 1984), (512, 1920), (512, 1856), (576, 1792), (576, 1728), (576, 1664), (640, 1600), (640, 1536)),
    *((704, 1472), (704, 1408), (704, 1344), (768, 1344), (768, 1280), (832, 1216), (832, 1152), (896, 1152), (896, 1088)),
    *((960, 1088), (960, 1024), (1024, 1024), (1024, 960), (1088, 960), (1088, 896), (1152, 896), (1152, 832), (1216, 832)),
    *((1280, 768), (1344, 768), (1408, 704), (1472, 704), (1536, 640), (1600, 640), (1664, 576), (1728, 576), (1792, 576)),
    *((1856, 512), (1920, 512), (1984, 512), (2048, 512)),
)
# What NovelAI's `gen_buckets` gives with its defaults, as (width, height) in its order.
_NOVELAI = (
    *((256, 1024), (320, 1024), (384, 1024), (384, 960), (384, 896), (448, 832), (512, 768), (512, 704), (512, 512)),
    *((576, 640), (640, 576), (704, 512), (768, 512), (832, 448), (896, 384), (960, 384), (1024, 384), (1024, 320)),
    (1024, 256),
)


def _checked_sizes(name: str, sizes: object, form: str, what: str) -> list[tuple[int, ...]]:
    """Return sizes, each with as many numbers as `form` names.

    Args:
        name: What has them.
        sizes: As they were given.
        form: How one is written, such as `(width, height)`.
        what: What one of its numbers is called.

    Raises:
        ConfigError: They are no such sizes, none, or one of them twice.
    """
    num = form.count(",") + 1
    try:
        found = [tuple(size) for size in sizes]  # type: ignore[attr-defined]  # what else is given is an error
    except TypeError:
        found = [()]
    if any(len(size) != num for size in found):
        raise ConfigError(f"{name}: sizes={sizes!r} is no list of {'pairs ' if num == 2 else ''}{form}")
    if not found:
        raise ConfigError(f"{name} has no size: give at least one {form}")
    # most=inf: a side is compared, and counts nothing
    found = [
        tuple(check_at_least(f"{name}: a {what} of {size}", number, 1, most=math.inf) for number in size) for size in found
    ]
    if len(set(found)) < len(found):
        twice = next(size for size in found if found.count(size) > 1)
        raise ConfigError(f"{name} has {twice} twice: give each size once")
    return found


@dataclass(frozen=True, slots=True)
class AspectBuckets:
    """Sizes of pictures; a picture belongs to the one whose aspect is nearest to its own.

    Nearest is least max(wH, hW) / min(wH, hW), compared as integers; of two as near, the earlier one.

    Example:
        >>> AspectBuckets.of([(1024, 1024), (1152, 896)]).bucket_of((640, 480))
        (1152, 896)
    """

    sizes: tuple[AspectSize, ...]
    """(width, height) of each bucket."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        sizes = tuple(
            (width, height) for width, height in _checked_sizes("AspectBuckets", self.sizes, "(width, height)", "side")
        )
        object.__setattr__(self, "sizes", sizes)

    @classmethod
    def of(cls, sizes: Sequence[AspectSize]) -> AspectBuckets:
        """Return the buckets of these (width, height)."""
        return cls(sizes)  # type: ignore[arg-type]  # a list, which `__post_init__` checks

    @classmethod
    def sdxl(cls) -> AspectBuckets:
        """Return the 40 sizes near 1024 x 1024 of the report on SDXL."""
        return cls(tuple((width, height) for height, width in _SDXL))

    @classmethod
    def novelai(cls) -> AspectBuckets:
        """Return the 19 sizes of NovelAI, at most 512 x 768 pixels each."""
        return cls(_NOVELAI)

    @classmethod
    def kohya(cls, area: int, min_side: int = 256, max_side: int = 1024, step: int = 64) -> AspectBuckets:
        """Return the sizes that kohya's scripts make.

        Args:
            area: Most pixels, such as `1024 * 1024`.
            min_side: Least side.
            max_side: Largest side.
            step: All sides are multiples of it.
        """
        area, step = check_at_least("area", area, 1), check_at_least("step", step, 1)
        min_side, max_side = check_at_least("min_side", min_side, 1), check_at_least("max_side", max_side, 1)
        square = math.isqrt(area) // step * step
        sizes = {(square, square)} if square else set[AspectSize]()
        for width in range(min_side, max_side + 1, step):
            height = min(max_side, area // width // step * step)
            if height >= min_side:
                sizes |= {(width, height), (height, width)}
        return cls(tuple(sorted(sizes)))

    @property
    def fingerprint(self) -> object:
        """What decides buckets, JSON-able."""
        return {"aspect": [list(size) for size in self.sizes]}

    def bucket_of(self, value: BucketValue) -> AspectSize:
        """Return the nearest size.

        Raises:
            ValueError: The value is no size.
        """
        width, height = _as_size(value)
        nearest, least = self.sizes[0], (0, 0)
        for number, (wide, high) in enumerate(self.sizes):
            small, large = sorted((width * high, height * wide))
            if not number or large * least[0] < least[1] * small:
                nearest, least = (wide, high), (small, large)
        return nearest

    def tokens_of(self, bucket: BucketValue) -> int:
        """Return the patches of 16 x 16 pixels that cover a bucket."""
        width, height = _as_size(bucket)
        return -(-width // PATCH) * -(-height // PATCH)

    def crop_of(self, value: BucketValue) -> float:
        """Return the share of a picture that is cut away when it is scaled to cover its bucket.

        Raises:
            ValueError: The value is no size.
        """
        width, height = _as_size(value)
        wide, high = self.bucket_of(value)
        small, large = sorted((width * high, height * wide))
        return (large - small) / large


@dataclass(frozen=True, slots=True)
class VideoBuckets:
    """Sizes of clips; a clip belongs to one of the most frames that it has, and of these to the one whose aspect is nearest.

    Nearest is as for `AspectBuckets`: least max(wH, hW) / min(wH, hW), compared as integers; of two as near, the earlier one.

    Example:
        >>> VideoBuckets.of([(1, 64, 64), (33, 48, 80), (33, 80, 48)]).bucket_of((40, 720, 1280))
        (33, 48, 80)
    """

    sizes: tuple[VideoSize, ...]
    """(frames, height, width) of each bucket."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        sizes = tuple(
            (frames, height, width)
            for frames, height, width in _checked_sizes("VideoBuckets", self.sizes, "(frames, height, width)", "number")
        )
        object.__setattr__(self, "sizes", sizes)

    @classmethod
    def of(cls, sizes: Sequence[VideoSize]) -> VideoBuckets:
        """Return the buckets of these (frames, height, width)."""
        return cls(sizes)  # type: ignore[arg-type]  # a list, which `__post_init__` checks

    @classmethod
    def of_aspects(cls, frames: Sequence[int], aspects: AspectBuckets) -> VideoBuckets:
        """Return a bucket for each number of frames and each size of pictures; 1 frame is a picture."""
        if not isinstance(aspects, AspectBuckets):
            raise ConfigError(
                f"VideoBuckets: aspects={aspects!r} are no AspectBuckets: give AspectBuckets.of([(width, height), …])"
            )
        try:
            return cls(tuple((count, height, width) for count in frames for width, height in aspects.sizes))
        except TypeError:
            raise ConfigError(f"VideoBuckets: frames={frames!r} is no list of whole numbers: give (1, 33, 65)") from None

    @property
    def fingerprint(self) -> object:
        """What decides buckets, JSON-able."""
        return {"video": [list(size) for size in self.sizes]}

    def bucket_of(self, value: BucketValue) -> VideoSize:
        """Return the size of a clip's bucket.

        Raises:
            ValueError: The value is no size, or has fewer frames than each bucket.
        """
        frames, height, width = _as_video_size(value)
        most = max((size[0] for size in self.sizes if size[0] <= frames), default=0)
        if not most:
            raise ValueError("has fewer frames than each bucket: give one of fewer, or leave such rows out with where=")
        wide, high = AspectBuckets.of([(size[2], size[1]) for size in self.sizes if size[0] == most]).bucket_of((width, height))
        return most, high, wide

    def crop_of(self, value: BucketValue) -> float:
        """Return the share of a frame that is cut away when it is scaled to cover its bucket.

        Raises:
            ValueError: The value is no size, or has fewer frames than each bucket.
        """
        _, height, width = _as_video_size(value)
        _, high, wide = self.bucket_of(value)
        small, large = sorted((width * high, height * wide))
        return (large - small) / large

    def tokens_of(self, bucket: BucketValue) -> int:
        """Return the patches of 16 x 16 pixels of all latent frames of a bucket."""
        frames, height, width = _as_video_size(bucket)
        return -(-width // PATCH) * -(-height // PATCH) * (1 - (1 - frames) // FRAMES_OF_LATENT)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Ranges of lengths; a row belongs to the first bound that its length does not exceed, which is the bucket's value.

    Example:
        >>> Lengths((128, 512, 2048)).bucket_of(129)
        512
    """

    bounds: tuple[int, ...]
    """Largest length of each bucket, rising."""

    def __post_init__(self) -> None:
        """Check the bounds."""
        try:
            given = tuple(self.bounds)
        except TypeError:
            raise ConfigError(f"Lengths: bounds={self.bounds!r} is no list of numbers") from None
        bounds = tuple(check_at_least("Lengths: a bound", bound, 1, most=math.inf) for bound in given)
        object.__setattr__(self, "bounds", bounds)
        if not self.bounds or any(low >= high for low, high in pairwise(self.bounds)):
            raise ConfigError(f"Lengths: bounds={self.bounds!r} must be at least one, each above the one before")

    @property
    def fingerprint(self) -> object:
        """What decides buckets, JSON-able."""
        return {"lengths": list(self.bounds)}

    def bucket_of(self, value: BucketValue) -> int:
        """Return the bound of a length.

        Raises:
            ValueError: The value is no length, or beyond the last bound.
        """
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ValueError("is no length: Lengths takes one number of 0 or more")
        for bound in self.bounds:
            if value <= bound:
                return bound
        raise ValueError(f"is beyond the last bound, {self.bounds[-1]}: give a larger one, or leave such rows out with where=")


def _as_video_size(value: BucketValue) -> VideoSize:
    if isinstance(value, tuple) and len(value) == 3:
        frames, height, width = value
        if all(
            isinstance(count, int | float) and not isinstance(count, bool) and count >= 1 and count % 1 == 0 for count in value
        ):
            return int(frames), int(height), int(width)
    raise ValueError("is no size: VideoBuckets takes frames, height and width, whole numbers of 1 or more")


def _as_size(value: BucketValue) -> AspectSize:
    if isinstance(value, tuple) and len(value) == 2:
        width, height = value
        if all(map(_is_count, value)):
            return int(width), int(height)
    raise ValueError("is no size: AspectBuckets takes width and height, whole numbers of 1 or more")


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 and value % 1 == 0
