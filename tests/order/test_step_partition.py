"""Streams with batches of their own: global steps are equal on any ranks and workers, from any step on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqlstream.errors import ConfigError, StateError
from sqlstream.order import Even, MicroBatch, Mixture, ScheduleType, StepPartition, StreamBatches, group_streams
from sqlstream.world import World
from tests.order.mixtures import mixture

Draw = tuple[int, int]
Share = Callable[[World, int, int], StepPartition]

STREAMS = tuple(
    StreamBatches(name=name, global_batch=batch, micro_batch=micro)
    for name, batch, micro in (("a", 96, 4), ("b", 48, 2), ("c", 24, 1))
)
RANKS, WORKERS = (1, 2, 3, 4, 6, 8, 12, 24), (1, 2, 5)


def plain(world: World, first_step: int = 0, first_round: int = 0) -> StepPartition:
    """Return shares of steps of one stream."""
    return StepPartition(schedule=Even((7, 2, 1)), streams=STREAMS, world=world, first_step=first_step, first_round=first_round)


CHANGES = ((0, (7, 2, 1)), (20, (1, 3, 2)))
GROUPED = group_streams(
    Mixture(num_streams=3, changes=CHANGES, schedule=ScheduleType.RANDOM_ORDER, seed=5), (0, 0, 1), num_lanes=24
)


def in_groups(world: World, first_step: int = 0, first_round: int = 0) -> StepPartition:
    """Return shares of steps of 24 lanes, of streams in two groups, with weights that change."""
    return StepPartition(
        schedule=GROUPED.groups,
        lanes=GROUPED.lanes,
        streams=STREAMS,
        world=world,
        first_step=first_step,
        first_round=first_round,
    )


def made_by(share: StepPartition, stop_step: int) -> list[MicroBatch]:
    """Return what a worker makes before a step."""
    made: list[MicroBatch] = []
    for batch in share:
        if batch.step >= stop_step:
            return made
        made.append(batch)
    raise AssertionError("the sequence has no end")


def global_steps(share: Share, ranks: int, workers: int, first: int = 0, stop: int = 60) -> dict[int, list[Draw]]:
    """Return the draws of all ranks and workers by step."""
    steps: dict[int, list[Draw]] = {step: [] for step in range(first, stop)}
    for rank in range(ranks):
        for worker in range(workers):
            world = World(rank=rank, world_size=ranks, worker=worker, num_workers=workers)
            for batch in made_by(share(world, first, 0), stop):
                steps[batch.step] += [(batch.stream, draw) for draw in range(batch.first_draw, batch.stop_draw)]
    return {step: sorted(draws) for step, draws in steps.items()}


@pytest.mark.parametrize("share", [plain, in_groups])
@pytest.mark.parametrize("ranks", RANKS)
def test_m5_global_steps_are_equal_on_any_ranks_and_workers_from_any_step(share: Share, ranks: int) -> None:
    whole = global_steps(share, 1, 1)
    for workers in WORKERS:
        assert global_steps(share, ranks, workers) == whole
        assert global_steps(share, ranks, workers, 37) == {step: whole[step] for step in range(37, 60)}


@pytest.mark.parametrize("share", [plain, in_groups])
def test_each_draw_comes_once_and_draws_count_up(share: Share) -> None:
    seen = [draw for draws in global_steps(share, 1, 1, 0, 200).values() for draw in draws]
    assert len(set(seen)) == len(seen)
    for stream in range(3):
        own = sorted(draw for of, draw in seen if of == stream)
        assert own == list(range(len(own)))


@pytest.mark.parametrize("share", [plain, in_groups])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_all_ranks_make_as_many_rounds_in_a_step_and_count_them_down(share: Share, ranks: int) -> None:
    by_rank = [made_by(share(World(rank=rank, world_size=ranks), 0, 0), 40) for rank in range(ranks)]
    for together in zip(*by_rank, strict=True):
        assert len({(batch.step, batch.round, batch.num_rounds_left) for batch in together}) == 1
        samples = sum(batch.stop_draw - batch.first_draw for batch in together)
        assert {batch.num_samples_in_round for batch in together} == {samples}
    for step in range(40):
        rounds = [batch for batch in by_rank[0] if batch.step == step]
        assert [batch.round for batch in rounds] == list(range(len(rounds)))
        assert [batch.num_rounds_left for batch in rounds] == list(range(len(rounds)))[::-1]
        of_step = [batch for made in by_rank for batch in made if batch.step == step]
        samples = sum(batch.stop_draw - batch.first_draw for batch in of_step)
        assert {batch.num_samples_in_step for batch in of_step} == {samples}


@pytest.mark.parametrize("share", [plain, in_groups])
def test_m6_going_on_at_a_round_equals_not_having_stopped(share: Share) -> None:
    whole = made_by(share(World(rank=1, world_size=2), 0, 0), 30)
    for stopped in range(0, len(whole), 7):
        at = whole[stopped]
        worlds = [World(rank=1, world_size=2, worker=worker, num_workers=3) for worker in range(3)]
        shares = [share(world, at.step, at.round) for world in worlds]
        going_on = [shares[number % 3].micro_batch(number // 3) for number in range(len(whole) - stopped)]
        assert going_on == whole[stopped:]
        assert {shares[0].worker_of(at.step, at.round), shares[1].worker_of(at.step, at.round)} == {0}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**12), st.integers(0, 4), st.lists(st.integers(0, 5000), min_size=1, max_size=8))
def test_a_micro_batch_is_found_alone_far_in_the_run(first_step: int, worker: int, indices: list[int]) -> None:
    world = World(rank=2, world_size=4, worker=worker, num_workers=5)
    share, other = plain(world, first_step), plain(world, first_step)
    in_order = {index: other.micro_batch(index) for index in sorted(indices)}
    for index in indices:
        batch = share.micro_batch(index)
        assert batch == in_order[index]
        assert share.num_before(batch.step) + batch.round == share.num_before(first_step) + worker + 5 * index
        assert Even((7, 2, 1)).at(np.array([batch.step])).stream[0] == batch.stream


def test_lookup_far_away_asks_the_schedule_a_logarithm_of_times() -> None:
    class Counted:
        total = 10
        num_asked = 0

        def __init__(self) -> None:
            self.even = Even((7, 2, 1))

        def at(self, numbers: np.ndarray[tuple[int], np.dtype[np.int64]]) -> object:
            self.num_asked += len(numbers)
            return self.even.at(numbers)

        def counts(self, number: int) -> tuple[int, ...]:
            self.num_asked += 1
            return self.even.counts(number)

    counted = Counted()
    share = StepPartition(schedule=counted, streams=STREAMS, world=World(world_size=2), first_step=10**7)  # type: ignore[arg-type]
    share.micro_batch(10**9)
    assert counted.num_asked < 300


def test_micro_batches_and_ranks_may_change_and_the_step_stays() -> None:
    whole = global_steps(plain, 1, 1)
    smaller = tuple(
        StreamBatches(name=old.name, global_batch=old.global_batch, micro_batch=micro)
        for old, micro in zip(STREAMS, (1, 24, 3), strict=True)
    )

    def other(world: World, first_step: int, first_round: int) -> StepPartition:
        return StepPartition(schedule=Even((7, 2, 1)), streams=smaller, world=world, first_step=first_step)

    assert global_steps(other, 2, 3) == whole


def test_no_mixing_gives_rank_r_the_micro_batches_r_and_world_size_further() -> None:
    share = plain(World(rank=3, world_size=8))
    first = share.micro_batches(0, 3)
    assert [(batch.first_draw, batch.stop_draw) for batch in first] == [(12, 16), (44, 48), (76, 80)]
    assert share.num_rounds(0) == 3


def test_shares_in_a_group_are_exact_and_defect_3_of_sds_no_stream_is_left_out() -> None:
    for ranks in (1, 2, 4):
        streams = mixture(1, 1, 1, 1, schedule=ScheduleType.RANDOM)
        grouped = group_streams(streams, (0, 0, 1, 1), num_lanes=4)
        batches = tuple(StreamBatches(name=name, global_batch=8, micro_batch=2) for name in "abcd")
        share = StepPartition(
            schedule=grouped.groups, lanes=grouped.lanes, streams=batches, world=World(rank=ranks - 1, world_size=ranks)
        )
        seen = np.bincount([batch.stream for batch in made_by(share, 2000)], minlength=4) * ranks / 4
        steps = np.array(grouped.groups.counts(2000))
        assert np.abs(seen - np.repeat(steps / 2, 2)).max() <= 0.1 * steps.max()
        at = [schedule.counts(int(count) * 4) for schedule, count in zip(grouped.lanes.schedules, steps, strict=True)]
        assert [at[0][0], at[0][1], at[1][2], at[1][3]] == np.repeat(steps * 2, 2).tolist()


def test_groups_weigh_what_their_streams_weigh_and_keep_their_counts_over_changes() -> None:
    streams = Mixture(
        num_streams=4,
        changes=((0, (3, 1, 2, 0)), (60, (0, 0, 1, 1)), (90, (1, 1, 1, 1))),
        schedule=ScheduleType.PROPORTIONAL,
        seed=0,
    )
    grouped = group_streams(streams, (0, 0, 1, 1), num_lanes=3)
    assert grouped.groups.changes == ((0, (2, 1)), (60, (0, 1)), (90, (1, 1)))
    assert grouped.groups.counts(60) == (40, 20)
    assert grouped.lanes.schedules[0].counts(120) == (90, 30, 0, 0)  # 40 steps of 3 lanes
    assert grouped.lanes.schedules[1].counts(60) == (0, 0, 60, 0)
    paused = grouped.lanes.schedules[0].counts(grouped.groups.counts(90)[0] * 3)
    assert paused == (90, 30, 0, 0)


def test_a_group_without_a_weight_has_no_turn_until_a_change_gives_it_one() -> None:
    paused = group_streams(mixture(1, 0), (0, 1), num_lanes=2)
    assert paused.groups.counts(100) == (100, 0)
    later = group_streams(mixture(1, 0).with_change(100, (1, 1)), (0, 1), num_lanes=2)
    assert later.groups.counts(100) == (100, 0)
    assert later.groups.counts(110) == (105, 5)
    assert later.lanes.schedules[1].counts(10) == (0, 10)


def test_two_groups_of_like_streams_have_orders_of_their_own() -> None:
    grouped = group_streams(mixture(*[9] * 8), (0, 0, 0, 0, 1, 1, 1, 1), num_lanes=4)
    first, second = (schedule.at(np.arange(400)).stream for schedule in grouped.lanes.schedules)
    assert 0.15 < (first == second - 4).mean() < 0.35  # by chance a quarter


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "text"),
    [
        (96, 5, 4, "stream 'x': batch_size=96 is not divisible by batch_gpu=5 x 4 ranks: give batch_size=80 or 100,"),
        (3, 2, 4, "stream 'x': batch_size=3 is not divisible by batch_gpu=2 x 4 ranks: give batch_size=8,"),
    ],
)
def test_a_batch_that_ranks_do_not_divide_names_the_nearest_that_works(batch: int, micro: int, ranks: int, text: str) -> None:
    streams = (StreamBatches(name="x", global_batch=batch, micro_batch=micro),)
    with pytest.raises(ConfigError) as refused:
        StepPartition(schedule=Even((1,)), streams=streams, world=World(world_size=ranks))
    assert str(refused.value).startswith(text)


def test_lanes_that_ranks_do_not_divide_name_the_nearest_ranks() -> None:
    with pytest.raises(ConfigError, match="24 lanes are not divisible by 5 ranks: run on 4 or 6 ranks"):
        in_groups(World(world_size=5))
    with pytest.raises(ConfigError, match="24 lanes are not divisible by 48 ranks: run on 24 ranks"):
        in_groups(World(world_size=48))


def test_defect_7_of_sds_rounds_that_differ_in_a_group_are_refused() -> None:
    batches = tuple(StreamBatches(name=name, global_batch=8, micro_batch=micro) for name, micro in (("a", 1), ("b", 2)))
    grouped = group_streams(mixture(1, 1), (0, 0), num_lanes=2)
    with pytest.raises(
        ConfigError, match=r"streams of mixing group 0 take different numbers of rounds in a lane \('a' 4, 'b' 2\)"
    ):
        StepPartition(schedule=grouped.groups, lanes=grouped.lanes, streams=batches, world=World())


def test_a_round_that_a_step_does_not_have_is_refused() -> None:
    with pytest.raises(StateError, match="cannot go on at round 3 of step 0: it has 3 rounds on 8 ranks"):
        plain(World(world_size=8), 0, 3)


def test_a_stream_with_batch_size_0_has_empty_steps_and_others_go_on() -> None:
    batches = (StreamBatches(name="a", global_batch=0, micro_batch=0), StreamBatches(name="b", global_batch=2, micro_batch=1))
    share = StepPartition(schedule=Even((1, 1)), streams=batches, world=World(world_size=2))
    assert [(batch.step, batch.stream) for batch in share.micro_batches(0, 3)] == [(1, 1), (3, 1), (5, 1)]
    only = StepPartition(schedule=Even((1, 0)), streams=batches, world=World())
    with pytest.raises(ConfigError, match="no stream that has turns has a batch"):
        only.micro_batch(0)
