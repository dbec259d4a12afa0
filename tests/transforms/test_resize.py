"""Geometry of resizing: pure functions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstream.errors import ConfigError, TransformError
from sqlstream.transforms.resize import (
    ResizeOptions,
    centre_crop,
    choose_resolution,
    plan_resize,
    scale_plan,
    undistorted_size,
)

SIDES = st.integers(1, 5000)
SIZES = st.tuples(SIDES, SIDES)


@given(SIZES, SIZES)
def test_a_centre_crop_lies_inside_touches_two_sides_and_has_the_target_aspect(
    size: tuple[int, int], target: tuple[int, int]
) -> None:
    box = centre_crop(size, target)
    assert 0 <= box.top < box.bottom <= size[0]
    assert 0 <= box.left < box.right <= size[1]
    height, width = box.size
    is_as_high = width == size[1] and abs(height - max(1.0, width * target[0] / target[1])) <= 0.5
    is_as_wide = height == size[0] and abs(width - max(1.0, height * target[1] / target[0])) <= 0.5
    assert is_as_high or is_as_wide
    assert abs((box.top + box.bottom) - size[0]) <= 1
    assert abs((box.left + box.right) - size[1]) <= 1


@given(SIZES, SIZES, st.sampled_from(["crop", "letterbox", "stretch"]))
def test_every_plan_fits_its_target_and_its_input(size: tuple[int, int], target: tuple[int, int], fit: str) -> None:
    plan = plan_resize(ResizeOptions(resolution=target, fit=fit), size)
    assert plan.outer == target
    assert all(1 <= inner <= outer for inner, outer in zip(plan.inner, plan.outer, strict=True))
    assert fit == "letterbox" or plan.inner == target


@given(SIZES, SIZES, st.sampled_from([1, 2, 4, 8]))
def test_a_plan_scaled_to_a_reduced_decode_stays_inside_it(size: tuple[int, int], target: tuple[int, int], factor: int) -> None:
    decoded = (-(-size[0] // factor), -(-size[1] // factor))
    plan = scale_plan(plan_resize(ResizeOptions(resolution=target), size), size, decoded)
    assert 0 <= plan.crop.top < plan.crop.bottom <= decoded[0]
    assert 0 <= plan.crop.left < plan.crop.right <= decoded[1]
    assert plan.inner == target


@given(SIZES, SIZES)
def test_undistorted_frames_have_the_original_aspect_and_lose_no_pixels(
    size: tuple[int, int], original: tuple[int, int]
) -> None:
    height, width = undistorted_size(size, original)
    assert height >= size[0]
    assert width >= size[1]
    assert height == size[0] or width == size[1]
    assert abs(height * original[1] / original[0] - width) <= 0.5 + original[1] / original[0]


def test_crop_before_resize_off_means_stretch_and_fit_wins_over_it() -> None:
    assert plan_resize(ResizeOptions(resolution=(10, 10), crop_before_resize=False), (50, 100)).crop.size == (50, 100)
    assert plan_resize(ResizeOptions(resolution=(10, 10)), (50, 100)).crop.size == (50, 50)
    assert plan_resize(ResizeOptions(resolution=(10, 10), crop_before_resize=False, fit="crop"), (50, 100)).crop.size == (
        50,
        50,
    )


def test_random_resolutions_are_drawn_by_probability_among_those_that_fit() -> None:
    options = ResizeOptions(resolution=(8, 8), random_resize={(16, 16): 0.75, (32, 32): 0.25, (999, 9): 0.5, (4, 4): 0.0})
    rng = np.random.default_rng(0)
    drawn = Counter(choose_resolution(options, (64, 64), rng) for _ in range(2000))
    assert drawn.keys() == {(16, 16), (32, 32)}
    assert abs(drawn[16, 16] / 2000 - 0.75) < 0.04
    assert choose_resolution(options, (15, 64), rng) == (8, 8), "none fits: the resolution holds"


def test_bad_resize_options_are_refused_with_name_and_value() -> None:
    wrong: list[dict[str, Any]] = [
        {"resolution": 8},
        {"resolution": (0, 8)},
        {"resolution": (1, 2, 3)},
        {"resolution": (8, 8), "fit": "zoom"},
    ]
    for bad in wrong:
        with pytest.raises(ConfigError, match=r"resolution|fit='zoom'"):
            ResizeOptions(**bad)
    with pytest.raises(ConfigError, match="random_resize"):
        ResizeOptions(resolution=(8, 8), random_resize={(8, 8): -1.0})
    with pytest.raises(TransformError, match="0x5"):
        plan_resize(ResizeOptions(resolution=(8, 8)), (0, 5))
