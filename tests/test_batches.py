"""Buckets as values: their lists, the nearest one, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sqlstream.config import AspectBuckets, Buckets, Lengths, VideoBuckets
from sqlstream.errors import ConfigError

KOHYA_512 = [
    *[(256, 832), (256, 896), (256, 960), (256, 1024), (320, 704), (320, 768), (384, 640), (448, 576), (512, 512), (576, 448)],
    *[(640, 384), (704, 320), (768, 320), (832, 256), (896, 256), (960, 256), (1024, 256)],
]
"""What kohya's `make_bucket_resolutions((512, 512))` gives."""


def test_the_lists_are_those_of_their_makers() -> None:
    assert list(AspectBuckets.kohya(512 * 512).sizes) == KOHYA_512
    assert len(AspectBuckets.kohya(1024 * 1024, 256, 2048).sizes) == 41
    assert len(AspectBuckets.kohya(1024 * 1024, 512, 2048).sizes) == 33
    assert len(AspectBuckets.novelai().sizes) == 19
    sdxl = AspectBuckets.sdxl().sizes
    assert len(set(sdxl)) == 40
    assert all(width % 64 == height % 64 == 0 and min(width, height) >= 512 for width, height in sdxl)


@pytest.mark.parametrize(
    ("size", "bucket"),
    [((1000, 1000), (1024, 1024)), ((1920, 1080), (1344, 768)), ((640, 480), (1152, 896)), ((300, 3000), (512, 2048))],
)
def test_the_nearest_bucket_is_that_of_the_least_ratio(size: tuple[int, int], bucket: tuple[int, int]) -> None:
    sdxl = AspectBuckets.sdxl()
    ratios = [max(size[0] * h, size[1] * w) / min(size[0] * h, size[1] * w) for w, h in sdxl.sizes]
    found = sdxl.bucket_of(size)
    assert ratios[sdxl.sizes.index(found)] == min(ratios)
    assert found == bucket
    turned = AspectBuckets.of([(h, w) for w, h in sdxl.sizes])
    assert turned.bucket_of(size[::-1]) == found[::-1], "a picture on its side is in the bucket on its side"


def test_of_two_buckets_as_near_the_earlier_one_is_taken() -> None:
    assert AspectBuckets.of([(2, 1), (1, 2)]).bucket_of((5, 5)) == (2, 1)
    assert AspectBuckets.of([(1, 2), (2, 1)]).bucket_of((5, 5)) == (1, 2)
    huge = 10**20
    assert AspectBuckets.of([(1, 1), (huge, huge + 1)]).bucket_of((huge, huge + 1)) == (huge, huge + 1), "integers, not floats"


def test_the_crop_is_the_share_that_is_cut_away() -> None:
    assert AspectBuckets.of([(1, 1)]).crop_of((4, 1)) == 0.75
    assert AspectBuckets.of([(4, 3)]).crop_of((640, 480)) == 0


def test_a_clip_belongs_to_the_most_frames_that_it_has_then_to_the_nearest_aspect() -> None:
    sizes = VideoBuckets.of_aspects((1, 33, 65), AspectBuckets.of([(80, 48), (48, 80)]))
    assert len(sizes.sizes) == 6
    assert sizes.bucket_of((64, 720, 1280)) == (33, 48, 80)
    assert sizes.bucket_of((65, 1280, 720)) == (65, 80, 48)
    assert sizes.bucket_of((2, 100, 99)) == (1, 80, 48)
    assert sizes.crop_of((65, 48, 80)) == 0
    assert sizes.crop_of((65, 48, 160)) == 0.5
    with pytest.raises(ValueError, match="has fewer frames than each bucket"):
        VideoBuckets.of([(9, 8, 8)]).bucket_of((8, 8, 8))
    with pytest.raises(ValueError, match="takes frames, height and width"):
        sizes.bucket_of((3, 4))


def test_a_batch_of_a_budget_is_the_largest_multiple_of_the_ranks_that_fits() -> None:
    pictures = Buckets("w, h", AspectBuckets.sdxl(), global_batch_tokens=100_000, rank_multiple=8)
    assert pictures.tokens_of((1024, 1024)) == 4096
    assert pictures.tokens_of((1032, 1024)) == 65 * 64
    assert pictures.sizes_of(((1024, 1024), (2048, 512)), 3) == (24, 24)
    pixels = Buckets("w, h", AspectBuckets.sdxl(), global_batch_tokens=2**22, tokens=lambda size: size[0] * size[1])
    assert pixels.sizes_of(((1024, 1024), (1024, 960)), 3) == (3, 3)
    clips = Buckets("f, h, w", VideoBuckets.of([(1, 64, 64), (33, 64, 64)]), global_batch_tokens=1000)
    assert [clips.tokens_of(size) for size in ((1, 64, 64), (33, 64, 64), (34, 64, 64))] == [16, 9 * 16, 10 * 16]
    assert clips.sizes_of(((1, 64, 64), (33, 64, 64)), 4) == (60, 4)


REFUSED: list[tuple[Any, str]] = [
    (lambda: Buckets("width"), "global_batch_size"),
    (lambda: Buckets("", global_batch_size=4), "by=''"),
    (lambda: Buckets("n", 7, global_batch_size=4), "into=7"),  # type: ignore[arg-type]  # what a user may do
    (lambda: Buckets("n", global_batch_size=0), "global_batch_size=0"),
    (lambda: Buckets("n", global_batch_size=4, leftovers="keep"), "leftovers='keep' is unknown: give 'carry'"),
    (lambda: Buckets("n", global_batch_size=4, leftovers="short"), "a short batch would be of a size that ranks do not divide"),
    (
        lambda: Buckets("n", global_batch_size=4, sync="rank"),
        "sync='rank' is unknown: give 'step', one bucket for all ranks, or",
    ),
    (lambda: Buckets("n", global_batch_size=4, sync="lane"), "sync='lane' gives ranks batches of several.*global_batch_tokens"),
    (lambda: Buckets("n", global_batch_size=4, unknown="keep"), "unknown='keep'"),
    (lambda: Buckets("n", global_batch_size=4, max_crop=0.2), "max_crop=0.2 is for pictures"),
    (lambda: Buckets("n", AspectBuckets.sdxl(), 4, max_crop=1.5), "max_crop=1.5 is out of range"),
    (lambda: AspectBuckets.of([]), "no size"),
    (lambda: AspectBuckets.of([(1, 2), (1, 2)]), "twice"),
    (lambda: AspectBuckets.of([(1, 0)]), r"a side of \(1, 0\)"),
    (lambda: AspectBuckets.of([(1, 2, 3)]), "no list of pairs"),  # type: ignore[list-item]  # what a user may do
    (lambda: AspectBuckets.kohya(0), "area=0"),
    (lambda: Buckets("n", global_batch_size=4, global_batch_tokens=8), "give one of them"),
    (lambda: Buckets("n", global_batch_size={1: 0}), "global_batch_size of 1=0"),
    (lambda: Buckets("n", global_batch_size=4, rank_multiple=2), "rank_multiple= is for a budget"),
    (lambda: Buckets("n", global_batch_tokens=4, rank_multiple=0), "rank_multiple=0"),
    (lambda: Buckets("n", global_batch_size={1: 2}).sizes_of((1, 5), 1), "has no size of 5"),
    (lambda: Buckets("n", global_batch_tokens=4).sizes_of(("a",), 1), "of bucket 'a' are 0, no whole number.*give tokens="),
    (lambda: VideoBuckets.of([]), "no size"),
    (lambda: VideoBuckets.of([(1, 2, 3), (1, 2, 3)]), "twice"),
    (lambda: VideoBuckets.of([(1, 2)]), "no list of"),  # type: ignore[list-item]  # what a user may do
    (lambda: VideoBuckets.of([(0, 2, 3)]), r"a number of \(0, 2, 3\)"),
    (lambda: Lengths(()), "at least one"),
    (lambda: Lengths((4, 4)), "each above"),
    (lambda: Lengths((0, 4)), "a bound=0"),
]


@pytest.mark.parametrize(("make", "problem"), REFUSED, ids=[problem for _, problem in REFUSED])
def test_wrong_values_are_refused(make: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()
