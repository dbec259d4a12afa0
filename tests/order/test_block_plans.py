"""Plans over blocks: each row once, blocks together, windows mixed, parts on their nodes; how good the shuffle is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstream.errors import ConfigError
from sqlstream.order import BlockLayout, Plan
from sqlstream.world import World


def plan_of(sizes: list[int], window: int, seed: int = 1, parts: int = 1) -> Plan:
    layout = BlockLayout(bounds=np.cumsum([0, *sizes]), window=window)
    return Plan(num_samples=sum(sizes), seed=seed, batch_size=4, num_canonical_nodes=parts, blocks=layout)


@given(
    sizes=st.lists(st.integers(0, 40), max_size=30),
    window=st.integers(1, 8),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 99),
    parts=st.integers(1, 5),
)
def test_an_epoch_holds_each_row_once(sizes: list[int], window: int, seed: int, epoch: int, parts: int) -> None:
    rows = plan_of(sizes, window, seed, parts).rows(epoch, 0, sum(sizes))
    assert sorted(rows.tolist()) == list(range(sum(sizes)))


def test_no_block_comes_back_once_its_window_is_over() -> None:
    blocks = plan_of([10] * 50, window=4).rows(0, 0, 500) // 10
    windows = [set(blocks[start : start + 40].tolist()) for start in range(0, 500, 40)]
    assert [len(window) for window in windows] == [4] * 12 + [2]
    assert sorted(block for window in windows for block in window) == list(range(50))


def test_rows_of_a_window_are_mixed_over_its_blocks() -> None:
    blocks = plan_of([100] * 40, window=10).rows(0, 0, 1000) // 100
    assert len(set(blocks[:50].tolist())) == 10
    assert np.count_nonzero(blocks[1:] == blocks[:-1]) < 160  # 99 expected, 900 if blocks stayed whole


@pytest.mark.parametrize("parts", [1, 3])
def test_epochs_differ_in_blocks_and_in_rows(parts: int) -> None:
    first, second = (plan_of([10] * 50, 4, parts=parts).rows(epoch, 0, 500) for epoch in (0, 1))
    assert (first // 10).tolist() != (second // 10).tolist()
    assert np.mean(first == second) < 0.05


def test_a_node_needs_its_own_blocks_only_in_every_epoch() -> None:
    """6 nodes, 60 blocks: each keeps about 10 of them; no more than 5 are cut in two."""
    plan = plan_of([17] * 60, window=3, parts=6)
    kept: list[set[int]] = []
    for node in range(6):
        world = World(rank=node, world_size=6, local_rank=0, local_world_size=1, node=node, num_nodes=6)
        positions = np.concatenate(list(plan.partition(world).blocks()))
        epochs = [set((plan.order.rows_at(epoch, positions).row // 17).tolist()) for epoch in range(3)]
        assert epochs[0] == epochs[1] == epochs[2]
        kept.append(epochs[0])
    assert set().union(*kept) == set(range(60))
    assert sum(map(len, kept)) <= 60 + 5


def test_replacements_come_from_the_window_so_that_no_other_block_is_fetched() -> None:
    for parts in (1, 3):
        plan = plan_of([8] * 40, window=2, parts=parts)
        for position in range(0, 320, 7):
            failed = plan.rows(2, position, position + 1)[0]
            replacements = list(plan.replacements(2, position))
            assert failed not in replacements
            assert len(set(replacements)) == len(replacements) == 5
            blocks = {row // 8 for row in [failed, *replacements]}
            assert len(blocks) <= 2 + (parts > 1), "a window has two blocks; with parts, one may be a piece"


@pytest.mark.parametrize("parts", [1, 2])
def test_a_window_of_few_rows_has_replacements_from_a_window_beside_it(parts: int) -> None:
    for seed in range(20):
        plan = plan_of([8, 8, 0, 8, 8, 1], window=1, seed=seed, parts=parts)
        for position in range(33):
            failed = plan.rows(2, position, position + 1)[0]
            replacements = list(plan.replacements(2, position))
            assert replacements == list(plan.replacements(2, position))
            assert failed not in replacements
            assert len(set(replacements)) == len(replacements) == 5


def test_the_order_never_changes_within_a_version() -> None:
    assert plan_of([4, 0, 3, 5], window=2, seed=42).rows(1, 0, 12).tolist() == [1, 3, 2, 11, 10, 9, 7, 0, 8, 6, 5, 4]
    assert plan_of([4, 0, 3, 5], window=2, seed=42, parts=2).rows(1, 0, 12).tolist() == [10, 0, 7, 3, 11, 1, 4, 6, 8, 5, 9, 2]


def test_without_a_seed_blocks_come_as_written() -> None:
    layout = BlockLayout.of_size(4, num_rows=10, window=2)
    plan = Plan(num_samples=10, seed=None, batch_size=4, blocks=layout)
    assert plan.rows(3, 0, 10).tolist() == list(range(10))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="block 1 has bounds 5 to 3"):
        BlockLayout(bounds=np.array([0, 5, 3]), window=1)
    with pytest.raises(ConfigError, match="window=0"):
        BlockLayout(bounds=np.array([0, 5]), window=0)
    with pytest.raises(ConfigError, match="block_size=2 makes 500000000 blocks"):
        BlockLayout.of_size(2, num_rows=10**9, window=1)
    with pytest.raises(ConfigError, match="the blocks hold 5 rows, the plan 6"):
        Plan(num_samples=6, seed=1, batch_size=4, blocks=BlockLayout(bounds=np.array([0, 5]), window=1))
    with pytest.raises(IndexError, match=r"5 to 5 are not within \[0, 5\)"):
        plan_of([5], 1).order.rows_at(0, np.array([5]))


def test_the_shuffle_comes_nearer_to_a_whole_one_with_every_larger_window() -> None:
    """The figures of the documentation: 1 is a whole shuffle, 0 is none."""
    path = Path(__file__).parents[2] / "benchmarks" / "order.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_order", path)
    assert spec is not None
    assert spec.loader is not None
    benchmark: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    figures = [benchmark.shuffle_quality(100, window, size=20_000) for window in (1, 4, 16, 64)]
    mixing, noise = ([figure[name] for figure in figures] for name in ("mixing", "noise"))
    assert mixing == sorted(mixing)
    assert noise == sorted(noise, reverse=True)
    assert mixing[0] < 0.05
    assert mixing[-1] > 0.7
    assert noise[0] > 30
    assert noise[-1] < 3
    coarse, fine = (benchmark.shuffle_quality(size, 2_000 // size, size=20_000) for size in (1000, 10))
    assert fine["mixing"] > coarse["mixing"], "of as many rows in a window, smaller blocks mix better"
    assert fine["noise"] < coarse["noise"]
