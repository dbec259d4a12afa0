"""Mixtures: exact proportions, draws that count up, weights that change, ends. M1 to M4 and M8 of the contract."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqlstream.errors import ConfigError, StateError
from sqlstream.order import (
    Even,
    IndependentDraws,
    Int64Array,
    Mixture,
    ReorderedBlocks,
    ScheduleType,
    all_exhausted,
    first_exhausted,
    ramp,
    whole_weights,
)
from sqlstream.order.streams.schedules import DEFAULT_BLOCK, MAX_PERIOD
from tests.order.mixtures import BLOCKED, DESIGN, SDS, WEIGHTS, digits, mixture, mixtures

FAR = (1 << 48) - 1


@settings(max_examples=60, deadline=None)
@given(mixtures(), st.lists(st.integers(0, 2000), min_size=1, max_size=60))
def test_m1_a_turn_depends_on_its_number_alone(mixed: Mixture, numbers: list[int]) -> None:
    whole = mixed.at(np.arange(2001))
    some = pickle.loads(pickle.dumps(mixed)).at(np.array(numbers))
    assert some.stream.tolist() == whole.stream[numbers].tolist()
    assert some.draw.tolist() == whole.draw[numbers].tolist()
    alone = mixed.at(np.array(numbers[-1:]))
    assert (alone.stream[0], alone.draw[0]) == (whole.stream[numbers[-1]], whole.draw[numbers[-1]])


def test_m1_another_process_has_the_same_turns() -> None:
    program = (
        "import numpy as np; from sqlstream.order import *\n"
        "for kind in ScheduleType:\n"
        "    mixed = Mixture(num_streams=3, changes=((0, (7, 2, 1)), (500, (0, 1, 3))), schedule=kind, seed=7)\n"
        "    turns = mixed.at(np.arange(1000)); print((turns.stream * np.arange(1000)).sum(), (turns.draw % 97).sum())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = iter(done.stdout.splitlines())
    for kind in ScheduleType:
        mixed = Mixture(num_streams=3, changes=((0, (7, 2, 1)), (500, (0, 1, 3))), schedule=kind, seed=7)
        turns = mixed.at(np.arange(1000))
        assert next(lines) == f"{(turns.stream * np.arange(1000)).sum()} {(turns.draw % 97).sum()}"


@settings(max_examples=60, deadline=None)
@given(mixtures(), st.integers(1, 1500))
def test_m2_draws_of_a_stream_count_up_from_0(mixed: Mixture, stop: int) -> None:
    turns = mixed.at(np.arange(stop))
    for stream in range(mixed.num_streams):
        own = turns.draw[turns.stream == stream]
        assert own.tolist() == list(range(len(own)))
    assert mixed.counts(stop) == tuple(np.bincount(turns.stream, minlength=mixed.num_streams).tolist())


@settings(max_examples=150, deadline=None)
@given(WEIGHTS, st.lists(st.integers(0, FAR), min_size=1, max_size=20))
def test_m3_even_counts_are_within_2_of_the_ideal_everywhere(weights: tuple[int, ...], numbers: list[int]) -> None:
    even = Even(weights)
    for number in [*numbers, *range(60)]:
        counts = even.counts(number)
        assert sum(counts) == number
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count * even.total - number * weight) < 2 * even.total


@settings(max_examples=80, deadline=None)
@given(WEIGHTS, st.sampled_from(BLOCKED), st.integers(1, 500), st.integers(0, 2**40))
def test_m3_counts_of_blocks_are_within_a_quarter_block_and_2(
    weights: tuple[int, ...], kind: ScheduleType, block: int, number: int
) -> None:
    mixed = mixture(*weights, schedule=kind, block=block)
    for at in (number, number + block // 2, number % 1000):
        for count, weight in zip(mixed.counts(at), weights, strict=True):
            assert abs(count - at * weight / mixed.total) <= block / 4 + 2


@settings(max_examples=100, deadline=None)
@given(WEIGHTS, st.integers(0, 10**6))
def test_m4_counts_are_exact_at_multiples_of_the_sum_of_weights(weights: tuple[int, ...], periods: int) -> None:
    total = sum(weights)
    exact = tuple(periods * weight for weight in weights)
    assert Even(weights).counts(periods * total) == exact
    for kind in BLOCKED:
        assert mixture(*weights, schedule=kind).counts(periods * total) == exact


@settings(max_examples=60, deadline=None)
@given(mixtures(), st.integers(0, 400), st.data())
def test_m8_a_change_keeps_the_counts_of_all_streams(mixed: Mixture, start: int, data: st.DataObject) -> None:
    weights = data.draw(st.tuples(*[st.integers(0, 20)] * mixed.num_streams).filter(any))
    changed = mixed.with_change(start, weights)
    assert changed.counts(start) == mixed.counts(start)
    before, after = changed.at(np.arange(start)), mixed.at(np.arange(start))
    assert before.stream.tolist() == after.stream.tolist()
    assert changed.weights_at(start) == weights
    turns = changed.at(np.arange(start + 500))
    for stream in range(mixed.num_streams):
        own = turns.draw[turns.stream == stream]
        assert own.tolist() == list(range(len(own)))


def test_m8_a_stream_that_pauses_goes_on_with_its_own_next_draw() -> None:
    named = [(0, (7, 3, 0)), (1000, (5, 3, 2)), (1500, (1, 0, 1)), (1700, (0, 1, 1))]
    mixed = Mixture(num_streams=3, changes=tuple(named), schedule=ScheduleType.PROPORTIONAL, seed=0)
    assert dict(zip("abc", mixed.counts(2000), strict=True)) == DESIGN["draws after 2000 turns of four changes"]
    paused = mixed.at(np.arange(1500, 1700))
    assert 1 not in paused.stream
    later = mixed.at(np.arange(1700, 2000))
    assert later.draw[later.stream == 1][0] == mixed.counts(1500)[1]


@pytest.mark.parametrize(("weights", "first"), DESIGN["even"].items())
def test_even_turns_are_the_golden_ones(weights: str, first: str) -> None:
    assert digits(Even(ast.literal_eval(weights))) == first


@pytest.mark.parametrize(("kind", "first"), DESIGN["blocks of weights 2 3 4, seed 42"].items())
def test_turns_of_blocks_are_the_golden_ones(kind: str, first: str) -> None:
    assert digits(mixture(2, 3, 4, schedule=ScheduleType(kind))) == first


@pytest.mark.parametrize("key", SDS["consecutive schedules, first 40"])
def test_consecutive_schedules_equal_those_of_sds_where_its_counts_are_right(key: str) -> None:
    ratios, kind, _ = key.split(" | ")
    shares = [int(ratio[0]) / int(ratio[2]) if "/" in ratio else float(ratio) for ratio in ratios.split(",")]
    counts, whole = SDS["counts(precision=6)"][str(shares)], whole_weights(shares)
    assert digits(mixture(*counts, schedule=ScheduleType(kind))) == SDS["consecutive schedules, first 40"][key]
    assert (whole == tuple(counts)) == (ratios in ("0.7,0.2,0.1", "0.5,0.5"))  # the others sds rounds to other proportions


def test_random_kinds_have_golden_turns_too() -> None:
    assert digits(mixture(7, 2, 1, schedule=ScheduleType.RANDOM)) == RANDOM
    assert digits(mixture(7, 2, 1, schedule=ScheduleType.RANDOM_ORDER, block=16)) == RANDOM_ORDER
    later = Mixture(num_streams=2, changes=((0, (1, 0)), (8, (1, 1))), schedule=ScheduleType.RANDOM_ORDER, seed=3, block=8)
    assert digits(later) == LATER


RANDOM = "0001010000101020110000000000000121000000"
RANDOM_ORDER = "0001201002100000101100001000200002000010"
LATER = "0000000010011010010111000100011110010011"


@pytest.mark.parametrize("scale", [1, 1 << 20, 1 << 36])
def test_wide_weights_are_the_same_turns_as_narrow_ones(scale: int) -> None:
    weights = (700, 211, 93, 0, 5, 1)
    numbers = np.concatenate([np.arange(2000), np.arange(2000) + (1 << 47)])
    wide = Even(tuple(weight * scale for weight in weights))
    turns = wide.at(numbers)
    assert turns.stream.tolist() == Even(weights).at(numbers).stream.tolist()
    for number, stream, draw in list(zip(numbers.tolist(), turns.stream.tolist(), turns.draw.tolist(), strict=True))[::97]:
        assert wide.counts(number)[stream] == draw
        assert wide.counts(number + 1)[stream] == draw + 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1 << 40), min_size=2, max_size=40).filter(any), st.lists(st.integers(0, FAR), min_size=1))
def test_vectors_agree_with_integers_of_any_size(weights: list[int], numbers: list[int]) -> None:
    even = Even(tuple(weights))
    turns = even.at(np.array(numbers))
    for number, stream, draw in zip(numbers, turns.stream.tolist(), turns.draw.tolist(), strict=True):
        before, after = even.counts(number), even.counts(number + 1)
        assert (before[stream], after[stream]) == (draw, draw + 1)


def test_a_thousand_streams_in_a_chain_need_no_recursion() -> None:
    chain = [1, 1]
    while len(chain) < 66:
        chain.append(sum(chain[-2:]))
    even = Even((*[0] * 934, *chain))  # Fibonacci's weights make the deepest tree
    assert even.counts(even.total) == even.weights
    deep = Even((1,) * 2000)
    assert deep.counts(4000) == (2,) * 2000


def test_a_single_stream_and_streams_of_weight_0_are_no_special_case() -> None:
    assert digits(Even((5,)), 5) == "00000"
    turns = Even((0, 3, 0)).at(np.array([4, 0]))
    assert (turns.stream.tolist(), turns.draw.tolist()) == ([1, 1], [4, 0])
    for kind in ScheduleType:
        assert 0 not in mixture(0, 2, 1, schedule=kind).at(np.arange(300)).stream
        assert mixture(0, 2, 1, schedule=kind).at(np.arange(0)).stream.tolist() == []


def test_a_period_that_is_too_long_for_a_block_has_blocks_of_the_default_size() -> None:
    short, long = (1, MAX_PERIOD - 1), (1, MAX_PERIOD)
    for weights, size in ((short, MAX_PERIOD), (long, DEFAULT_BLOCK)):
        mixed = mixture(*weights, schedule=ScheduleType.CONSECUTIVE)
        assert digits(mixed, 3) == digits(mixture(*weights, schedule=ScheduleType.CONSECUTIVE, block=size), 3)
    with pytest.raises(ConfigError, match=r"block=1048577 is out of range"):
        mixture(1, 2, schedule=ScheduleType.RANDOM_ORDER, block=(1 << 20) + 1)


def test_random_orders_differ_by_block_and_seed_and_fixed_ones_do_not() -> None:
    weights = (30, 20, 10)
    fixed = digits(mixture(*weights, schedule=ScheduleType.FIXED_RANDOM_ORDER), 120)
    assert fixed[:60] == fixed[60:]
    shuffled = digits(mixture(*weights, schedule=ScheduleType.RANDOM_ORDER), 120)
    assert shuffled[:60] != shuffled[60:]
    assert sorted(shuffled[:60]) == sorted(shuffled[60:])
    assert digits(mixture(*weights, schedule=ScheduleType.RANDOM_ORDER, seed=43), 60) != shuffled[:60]


def test_defect_6_of_sds_another_seed_is_no_shift_of_the_first() -> None:
    numbers = np.arange(5000)
    streams = {seed: mixture(1, 1, 1, schedule=ScheduleType.RANDOM, seed=seed).at(numbers).stream for seed in (0, 1)}
    for shift in (1007, 1, 1008):
        same = (streams[1][: 5000 - shift] == streams[0][shift:]).mean()
        assert 0.28 < same < 0.39  # by chance a third


def test_a_change_with_the_same_weights_begins_with_another_block_and_other_draws() -> None:
    for kind in (ScheduleType.RANDOM_ORDER, ScheduleType.RANDOM):
        changes = ((0, (7, 2, 1)), (64, (7, 2, 1)))
        turns = digits(Mixture(num_streams=3, changes=changes, schedule=kind, seed=1, block=64), 128)
        assert turns[:64] != turns[64:]


def test_independent_draws_drift_like_chance_and_count_over_chunks() -> None:
    draws = IndependentDraws(weights=(7, 2, 1), seed=5)
    counts = draws.counts(200_000)
    for count, share in zip(counts, (0.7, 0.2, 0.1), strict=True):
        assert abs(count - 200_000 * share) < 5 * (200_000 * share * (1 - share)) ** 0.5
    far = draws.at(np.array([199_999, 5, 70_000]))
    for number, stream, draw in zip((199_999, 5, 70_000), far.stream.tolist(), far.draw.tolist(), strict=True):
        assert draws.counts(number)[stream] == draw
    with pytest.raises(ConfigError, match=r"independent draws take fewer than 2\*\*31 in all"):
        IndependentDraws(weights=(1 << 30, 1 << 30), seed=0)


def test_independent_draws_go_on_from_the_counts_of_a_state() -> None:
    numbers = np.arange(199_990, 200_010)
    for changes in (((0, (7, 2, 1)),), ((0, (7, 2, 1)), (1000, (1, 1, 0)))):
        whole = Mixture(num_streams=3, changes=changes, schedule=ScheduleType.RANDOM, seed=5)
        resumed = Mixture(num_streams=3, changes=changes, schedule=ScheduleType.RANDOM, seed=5)
        resumed.remember(200_000, whole.counts(200_000))
        assert resumed.at(numbers).draw.tolist() == whole.at(numbers).draw.tolist()
        assert resumed.counts(270_000) == whole.counts(270_000)
        assert resumed.counts(100) == whole.counts(100)
    known, true = mixture(7, 2, 1, schedule=ScheduleType.RANDOM), 10**12
    known.remember(true, (7 * 10**11, 2 * 10**11, 10**11))  # would take hours to count
    assert sum(known.counts(true + 5)) == true + 5
    with pytest.raises(StateError, match=r"the state's draws \[1, 2, 3\] are not those of 7 turns"):
        known.remember(7, (1, 2, 3))


def test_independent_draws_that_go_on_from_a_state_draw_nothing_again_that_its_counts_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, number = (7, 2, 1), 10**7 + 1234
    drawn: list[int] = []

    def arange(*bounds: int) -> Int64Array:
        drawn.append(len(range(*bounds)))
        return real(*bounds)

    known, numbers, real = IndependentDraws(weights=weights, seed=3), np.arange(number, number + 64), np.arange
    known.remember(number, (6_000_000, 3_000_000, 1_001_234))
    monkeypatch.setattr(np, "arange", arange)
    assert known.counts(number) == (6_000_000, 3_000_000, 1_001_234)
    assert len(known.at(numbers).draw) == 64
    assert sum(drawn) <= 2 * 64
    known.at(numbers + 100_000)
    assert max(drawn) <= 1 << 13


def test_schedules_travel_without_their_tables() -> None:
    blocks = ReorderedBlocks(weights=(7, 2, 1), schedule=ScheduleType.RANDOM_ORDER, seed=1, size=4096)
    draws = IndependentDraws(weights=(7, 2, 1), seed=1)
    for schedule in (blocks, draws):
        before = len(pickle.dumps(schedule))
        schedule.at(np.arange(100_000))
        assert len(pickle.dumps(schedule)) == before


ENDS = [(*key.removeprefix("weights ").split(", sizes "), *ends) for key, ends in DESIGN["ends"].items()]


@pytest.mark.parametrize(("weights", "sizes", "first", "last"), ENDS)
def test_ends_are_the_golden_ones(weights: str, sizes: str, first: int, last: int) -> None:
    mixed = mixture(*ast.literal_eval(weights))
    assert first_exhausted(mixed, ast.literal_eval(sizes)) == first
    assert all_exhausted(mixed, ast.literal_eval(sizes)) == last


@settings(max_examples=40, deadline=None)
@given(mixtures().filter(lambda mixed: mixed.schedule is not ScheduleType.RANDOM), st.data())
def test_ends_are_those_found_turn_by_turn(mixed: Mixture, data: st.DataObject) -> None:
    sizes = data.draw(st.tuples(*[st.integers(0, 60)] * mixed.num_streams))
    first = first_exhausted(mixed, sizes)
    assert all(count <= size for count, size in zip(mixed.counts(first), sizes, strict=True))
    assert any(count > size for count, size in zip(mixed.counts(first + 1), sizes, strict=True))
    drawn = [stream for stream in range(mixed.num_streams) if any(weights[stream] for _, weights in mixed.changes)]
    start, weights = mixed.changes[-1]
    if any(not weights[stream] and mixed.counts(start)[stream] < sizes[stream] for stream in drawn):
        with pytest.raises(ConfigError, match="never comes"):
            all_exhausted(mixed, sizes)
        return
    last = all_exhausted(mixed, sizes)
    assert all(mixed.counts(last)[stream] >= sizes[stream] for stream in drawn)
    assert last == 0 or any(mixed.counts(last - 1)[stream] < sizes[stream] for stream in drawn)


def test_ends_that_are_not_known_are_refused() -> None:
    random = mixture(1, 2, schedule=ScheduleType.RANDOM)
    for end in (first_exhausted, all_exhausted):
        with pytest.raises(ConfigError, match=r"is not known in advance with schedule='random': give epoch_size="):
            end(random, (5, 5))
        with pytest.raises(ConfigError, match="1 sizes for 2 streams"):
            end(mixture(1, 2), (5,))
    paused = mixture(1, 2).with_change(30, (0, 1))
    with pytest.raises(ConfigError, match="stream 0 has weight 0 from turn 30 on and was drawn 10 times of 11"):
        all_exhausted(paused, (11, 5))
    assert all_exhausted(paused, (10, 25)) == 35


def test_a_ramp_is_a_staircase_of_at_most_64_changes_from_the_first_to_the_last_weights() -> None:
    changes = ramp(100, 10_100, [0.9, 0.1], [0.5, 0.5])
    assert len(changes) == 64
    assert (changes[0], changes[-1]) == ((100, (9, 1)), (10_100, (1, 1)))
    shares = [weights[0] / sum(weights) for _, weights in changes]
    assert all(later < earlier for earlier, later in pairwise(shares))
    assert [start for start, _ in ramp(5, 8, [1, 0], [0, 1])] == [5, 6, 7, 8]
    mixed = Mixture(num_streams=2, changes=tuple(ramp(0, 640, [1, 0], [0, 1])), schedule=ScheduleType.PROPORTIONAL, seed=0)
    assert abs(mixed.counts(640)[0] - 320) < 15
    with pytest.raises(ConfigError, match="a ramp from 8 to 8 has no steps"):
        ramp(8, 8, [1], [1])
    with pytest.raises(ConfigError, match="a ramp from 1 weights to 2"):
        ramp(0, 8, [1], [1, 2])


def test_changes_are_checked() -> None:
    for changes in ((), ((5, (1, 1)),), ((0, (1, 1)), (9, (1, 0)), (9, (1, 2)))):
        with pytest.raises(ConfigError, match="give the first at 0 and each later than the one before"):
            Mixture(num_streams=2, changes=changes, schedule=ScheduleType.PROPORTIONAL, seed=0)
    with pytest.raises(ConfigError, match="3 weights from 0 on for 2 streams"):
        Mixture(num_streams=2, changes=((0, (1, 1, 1)),), schedule=ScheduleType.PROPORTIONAL, seed=0)
    for weights in ((0, 0), (1, -1), (1 << 47, 1)):
        for kind in ScheduleType:
            with pytest.raises(ConfigError, match="give none below 0, at least one above 0"):
                Mixture(num_streams=2, changes=((0, weights),), schedule=kind, seed=0)


def test_a_change_at_the_same_turn_replaces_and_later_changes_stay() -> None:
    mixed = mixture(1, 1).with_change(50, (1, 2)).with_change(10, (3, 1)).with_change(50, (1, 5))
    assert mixed.changes == ((0, (1, 1)), (10, (3, 1)), (50, (1, 5)))


def test_the_fingerprint_tells_mixtures_apart() -> None:
    others = [
        mixture(7, 2, 1),
        mixture(7, 1, 2),
        mixture(7, 2, 1, seed=1),
        mixture(7, 2, 1, block=8),
        mixture(7, 2, 1, schedule=ScheduleType.RANDOM),
        mixture(7, 2, 1).with_change(5, (1, 1, 1)),
    ]
    assert len({mixed.fingerprint for mixed in others}) == len(others)
    assert others[0].fingerprint == mixture(7, 2, 1).fingerprint
    assert others[0].fingerprint.startswith("mixture 1 of 3 streams, proportional, block None, seed 42, weights ")
