"""The permutation: a bijection for any size and key, stable over versions, without visible pattern."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqlstream.errors import ConfigError
from sqlstream.order import MAX_SIZE, PERMUTATION_VERSION, Int64Array, Permutation, forward_each

GOLDEN = {
    (1, 0, 0): [0],
    (2, 0, 0): [1, 0],
    (10, 42, 0): [1, 5, 2, 0, 7, 8, 9, 6],
    (10, 42, 1): [6, 0, 7, 3, 5, 4, 1, 2],
    (117, 7, 3): [60, 6, 40, 69, 98, 27, 45, 75],
    (65_535, 1, 0): [49848, 36918, 23114, 6437, 15407, 23903, 41215, 57770],
    (65_536, 1, 0): [45716, 744, 40029, 40859, 16831, 7410, 47188, 53904],
    (10**9, 1, 0): [708123003, 923962063, 476694816, 814192543, 725598301, 801791072, 81729394, 463674519],
    (MAX_SIZE, (1 << 64) - 1, 10**6): [
        97946331778930,
        161083592625596,
        42039134231802,
        49386667547754,
        219243054761870,
        21893283683293,
        101688156998072,
        96506623456072,
    ],
}


def deviation(counts: Int64Array) -> float:
    """How far counts are from equal, by chi-square, in its standard deviations (0 on average; beyond 6 is no accident)."""
    expected = counts.sum() / counts.size
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.size - 1
    return (chi_square - freedom) / math.sqrt(2 * freedom)


def orders(size: int, count: int) -> Int64Array:
    """`count` independent permutations of `[0, size)`: [count, size]."""
    numbers = np.tile(np.arange(size), count)
    return Permutation.keyed(size, 5).forward(numbers, tweak=np.repeat(np.arange(count), size)).reshape(count, size)


@pytest.mark.parametrize("case", GOLDEN)
def test_the_first_rows_of_an_order_never_change_within_a_version(case: tuple[int, int, int]) -> None:
    size, *key = case
    images = Permutation.keyed(size, *key).forward(np.arange(min(size, 8)))
    assert PERMUTATION_VERSION == 1
    assert images.tolist() == GOLDEN[case]


@given(size=st.integers(0, 3000), key=st.integers(-(2**100), 2**100))
def test_every_number_is_hit_exactly_once(size: int, key: int) -> None:
    images = Permutation.keyed(size, key).forward(np.arange(size))
    assert sorted(images.tolist()) == list(range(size))


@settings(max_examples=20)
@given(size=st.integers(1 << 16, 1 << 18), key=st.integers(0, 2**64))
def test_every_number_is_hit_exactly_once_with_few_rounds(size: int, key: int) -> None:
    images = Permutation.keyed(size, key).forward(np.arange(size))
    assert np.array_equal(np.bincount(images, minlength=size), np.ones(size, dtype=np.int64))


@given(size=st.integers(1, MAX_SIZE), key=st.integers(0, 2**64), data=st.data())
def test_inverse_undoes_forward_at_any_size(size: int, key: int, data: st.DataObject) -> None:
    numbers = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=50)), dtype=np.int64)
    permutation = Permutation.keyed(size, key)
    images = permutation.forward(numbers)
    assert np.all((images >= 0) & (images < size))
    assert np.array_equal(permutation.inverse(images), numbers)


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8), key=st.integers(0, 2**64))
def test_each_tweak_permutes_its_own_size(sizes: list[int], key: int) -> None:
    tweak = np.repeat(np.arange(len(sizes)), sizes)
    numbers, bounds = np.concatenate([np.arange(size) for size in sizes]), np.array(sizes)[tweak]
    permutation = Permutation.keyed(max(sizes), key)
    images = permutation.forward(numbers, tweak=tweak, sizes=bounds)
    for which, size in enumerate(sizes):
        assert sorted(images[tweak == which].tolist()) == list(range(size))
    assert np.array_equal(permutation.inverse(images, tweak=tweak, sizes=bounds), numbers)


def test_one_number_alone_has_the_image_that_it_has_among_others() -> None:
    permutation = Permutation.keyed(70_001, 3)
    images = permutation.forward(np.arange(70_001))
    for number in (0, 1, 263, 264, 265, 35_000, 70_000):
        assert permutation.forward(np.array([number])).tolist() == [images[number]]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
def test_all_orders_of_few_elements_are_equally_likely(size: int) -> None:
    drawn = orders(size, 40_000)
    codes = drawn @ (size ** np.arange(size))
    possible = [sum(value * size**place for place, value in enumerate(order)) for order in itertools.permutations(range(size))]
    counts = np.bincount(np.searchsorted(np.sort(possible), codes), minlength=math.factorial(size))
    assert abs(deviation(counts)) < 6, f"{deviation(counts):.1f} standard deviations from equal"


@pytest.mark.parametrize("size", [9, 17, 25, 64, 121])
def test_adjacent_pairs_of_small_orders_show_no_pattern(size: int) -> None:
    drawn = orders(size, 1_000_000 // size)
    steps = (drawn[:, 1:] - drawn[:, :-1]) % size  # never 0
    assert abs(deviation(np.bincount(steps.ravel(), minlength=size)[1:])) < 6
    positions = np.arange(size) * size + drawn
    assert abs(deviation(np.bincount(positions.ravel(), minlength=size * size))) < 6


@pytest.mark.parametrize("stride", [1, 2, 1000, 1024])
def test_pairs_of_a_large_order_show_no_pattern(stride: int) -> None:
    size, bins = 1 << 20, 1 << 10
    order = orders(size, 2)
    steps = (order[:, stride:] - order[:, :-stride]) % size * bins // size
    assert abs(deviation(np.bincount(steps.ravel(), minlength=bins))) < 6


def test_each_position_of_a_large_order_takes_rows_from_everywhere() -> None:
    size, bins = 1 << 18, 1 << 5
    order = orders(size, 4)
    cells = (np.arange(size) * bins // size) * bins + order * bins // size
    assert abs(deviation(np.bincount(cells.ravel(), minlength=bins * bins))) < 6


def test_keys_that_differ_in_one_bit_give_unrelated_orders() -> None:
    first, second = (Permutation.keyed(10_000, seed).forward(np.arange(10_000)) for seed in (6, 7))
    assert np.count_nonzero(first == second) < 10  # 1 expected
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


@pytest.mark.parametrize("size", [-1, MAX_SIZE + 1])
def test_a_size_beyond_the_range_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=str(size)):
        Permutation.keyed(size, 1)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, MAX_SIZE), st.integers(0, 2**64 - 1)), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, MAX_SIZE)), max_size=80),
)
def test_many_permutations_at_once_give_the_images_of_each(
    made_of: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    permutations = [Permutation.keyed(size, seed) for size, seed in made_of]
    which = np.array([index % len(permutations) for index, _ in asked], np.int64)
    numbers = np.array([number % made_of[index][0] for index, (_, number) in zip(which.tolist(), asked, strict=True)], np.int64)
    images = forward_each(permutations, which, numbers)
    alone = [int(permutations[i].forward(np.array([n]))[0]) for i, n in zip(which.tolist(), numbers.tolist(), strict=True)]
    assert images.tolist() == alone


def test_small_and_large_permutations_may_stand_together() -> None:
    permutations = [Permutation.keyed(size, 3) for size in (1, 2, 7, 65_535, 65_536, 10**9)]
    which = np.repeat(np.arange(6), 2)
    images = forward_each(permutations, which, np.zeros(12, np.int64))
    assert images.tolist() == [int(permutations[index].forward(np.zeros(1, np.int64))[0]) for index in which.tolist()]


@pytest.mark.parametrize("size", [1, 2, 6, 120, 70_000, 10**9])
def test_a_single_image_is_that_of_an_array(size: int) -> None:
    shuffle, numbers = Permutation.keyed(size, 3, 4), np.arange(min(size, 40))
    assert [shuffle.image(number) for number in numbers.tolist()] == shuffle.forward(numbers).tolist()
