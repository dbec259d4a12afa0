"""Whole weights: exact for what people write, near for everything else, never 0 for a stream that has a share."""

from __future__ import annotations

import ast
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqlstream.errors import ConfigError
from sqlstream.order.streams.whole_weights import (
    MAX_WHOLE_TOTAL,
    absolute_choose,
    relative_choose,
    temperature_weights,
    token_weights,
    whole_weights,
)
from tests.order.mixtures import DESIGN, SDS

FLOATS = st.lists(st.floats(0, 1e9, allow_nan=False, allow_subnormal=False), min_size=1, max_size=50).filter(any)
GOLDEN = [(ast.literal_eval(given), tuple(whole)) for given, whole in DESIGN["whole_weights"].items()]


@pytest.mark.parametrize(("weights", "whole"), GOLDEN)
def test_whole_weights_are_the_golden_ones(weights: list[float], whole: tuple[int, ...]) -> None:
    assert whole_weights(weights) == whole


@settings(max_examples=200, deadline=None)
@given(FLOATS)
def test_shares_are_within_half_a_unit_of_the_sixth_decimal_and_no_stream_is_lost(weights: list[float]) -> None:
    whole = whole_weights(weights)
    total = sum(map(Fraction, map(repr, weights)))
    assert [bool(weight) for weight in whole] == [bool(weight) for weight in weights]
    assert sum(whole) <= MAX_WHOLE_TOTAL + len(weights)
    for weight, given_weight in zip(whole, weights, strict=True):
        assert abs(Fraction(weight, sum(whole)) - Fraction(repr(given_weight)) / total) < Fraction(1, 10**6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=40).filter(any))
def test_integers_stay_in_their_exact_proportion(weights: list[int]) -> None:
    divisor = math.gcd(*weights)
    assert whole_weights(weights) == tuple(weight // divisor for weight in weights)


def test_integers_and_fractions_are_never_simplified_as_floats_are() -> None:
    assert whole_weights([1_000_001, 999_999]) == (1_000_001, 999_999)
    assert whole_weights([1.000001, 0.999999]) == (1, 1)
    assert whole_weights([Fraction(1, 1_000_003), 1]) == (1, 1_000_003)
    assert whole_weights(np.array([3, 6]).tolist()) == whole_weights(list(np.array([3, 6]))) == (1, 2)
    assert whole_weights(list(np.array([0.25, 0.75], np.float32))) == (1, 3)


def test_integers_of_numpy_neither_overflow_nor_stay_in_the_weights() -> None:
    weights = whole_weights([np.int8(100), np.float32(0.7), np.uint64(1 << 63)])  # type: ignore[list-item]  # numpy's are taken
    assert weights == whole_weights([100, 0.7, 1 << 63])
    assert {type(weight) for weight in weights} == {int}, "weights go into states, which are JSON"


def test_a_tiny_share_keeps_a_part_of_the_whole() -> None:
    assert whole_weights([1 - 1e-7, 1e-7]) == (10_000_000, 1)  # sds: 1 and 0
    assert whole_weights([1.0, 1e-30])[1] == 1


@pytest.mark.parametrize(("ratios", "counts"), [(ast.literal_eval(r), c) for r, c in SDS["counts(precision=6)"].items()])
def test_defect_1_of_sds_ratios_are_not_rounded_to_other_ratios(ratios: list[float], counts: list[int]) -> None:
    whole = whole_weights(ratios)
    for weight, ratio in zip(whole, ratios, strict=True):
        assert abs(weight / sum(whole) - ratio) < 5e-7
    is_right = all(abs(count / sum(counts) - ratio) < 5e-7 for count, ratio in zip(counts, ratios, strict=True))
    assert (whole == tuple(counts)) or not is_right or 0 in counts


def test_ratios_that_sds_gets_wrong_are_right_here() -> None:
    assert whole_weights([0.6, 0.4]) == (3, 2)
    assert whole_weights([0.45, 0.55]) == (9, 11)
    assert whole_weights([0.55, 0.3, 0.15]) == (11, 6, 3)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ([0, 0.0], "weights=[0, 0.0] are all 0: give at least one stream more than 0"),
        ([], "weights=[] are all 0: give at least one stream more than 0"),
        ([0.5, -1], "weights[1]=-1 is out of range: give a finite number, 0 or more"),
        ([math.nan], "weights[0]=nan is out of range: give a finite number, 0 or more"),
        ([1, math.inf], "weights[1]=inf is out of range: give a finite number, 0 or more"),
        (["1"], "weights[0]='1' is out of range: give a finite number, 0 or more"),
    ],
)
def test_weights_that_are_none_are_refused_by_name_and_value(weights: list[float], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        whole_weights(weights)
    assert str(refused.value) == text


def test_temperature_one_is_by_size_two_by_root_and_infinity_equal() -> None:
    assert temperature_weights([100, 400, 0], 1) == (1, 4, 0)
    assert temperature_weights([100, 400, 0], 2) == (1, 2, 0)
    assert temperature_weights([100, 400], 0.5) == (1, 16)
    assert temperature_weights([100, 400], math.inf) == (1, 1)


def test_weights_and_temperatures_beyond_what_a_float_holds_are_exact_or_refused_by_name() -> None:
    """They were errors of Python's arithmetic."""
    assert whole_weights([10**400, 3 * 10**400]) == (1, 3)
    assert temperature_weights([10**9, 10**6], 0.01) == (1 << 30, 1)
    with pytest.raises(ConfigError, match=r"temperature=1e-05 is too low for a stream of 1000000000, .* give a higher one"):
        temperature_weights([10**9, 10**6], 1e-5)


def test_temperatures_are_the_same_integers_on_every_machine() -> None:
    assert temperature_weights([10**9, 10**6, 12_345], 1.5) == (1_062_548_779, 10_625_488, 567_557)


@pytest.mark.parametrize("temperature", [0, -1, math.nan])
def test_a_temperature_that_is_not_above_0_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match=r"temperature=.* is out of range: give a number above 0"):
        temperature_weights([1, 2], temperature)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=3))
def test_token_weights_give_each_stream_its_share_of_tokens(streams: list[tuple[int, int, int]]) -> None:
    weights, rows, lengths = zip(*streams, strict=True)
    tokens = [count * length for count, length in zip(rows, lengths, strict=True)]
    by_rows = token_weights(weights, rows, tokens)
    by_tokens = [weight * length for weight, length in zip(by_rows, lengths, strict=True)]
    assert whole_weights(by_tokens) == whole_weights(weights)


def test_a_stream_without_tokens_has_no_share_of_them() -> None:
    assert token_weights([1, 0], [5, 0], [50, 0]) == (1, 0)
    with pytest.raises(ConfigError, match="stream 1 has 0 rows with 0 tokens"):
        token_weights([1, 1], [5, 0], [50, 0])
    with pytest.raises(ConfigError, match="2 weights, 1 numbers of rows and 2 of tokens"):
        token_weights([1, 1], [5], [50, 0])


def test_choose_is_exact_where_floats_round_down() -> None:
    assert absolute_choose(0.29, 100) == 29  # MosaicML: int(0.29 * 100) = 28
    assert [absolute_choose(repeat, 50) for repeat in (0, 2, 0.5, Fraction(1, 3))] == [0, 100, 25, 17]
    assert absolute_choose(1.1, 10**12) == 1_100_000_000_000
    with pytest.raises(ConfigError, match=r"repeat=-0\.5 is out of range"):
        absolute_choose(-0.5, 3)


@settings(max_examples=200, deadline=None)
@given(FLOATS, st.integers(0, 10**6))
def test_relative_choose_adds_up_and_leaves_switched_off_streams_at_0(proportions: list[float], total: int) -> None:
    chosen = relative_choose(proportions, total)
    whole = sum(map(Fraction, map(repr, proportions)))
    assert sum(chosen) == total
    for number, proportion in zip(chosen, proportions, strict=True):
        assert abs(number - Fraction(repr(proportion)) / whole * total) < 1
        assert number == 0 or proportion > 0


def test_relative_choose_never_draws_a_stream_of_proportion_0() -> None:
    assert relative_choose([1, 0, 1], 101) == (51, 0, 50)  # MosaicML with seed 1: 50 1 50
