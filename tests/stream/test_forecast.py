"""When rows come again: the forecast beside brute force, and what the cache makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError
from sqlstream.order import Int64Array, Plan, Tail, Weighted
from sqlstream.order.blocks import BlockLayout
from sqlstream.stream.engine.forecast import next_uses, next_uses_of_blocks
from sqlstream.stream.run.shares import EpochShare
from sqlstream.stream.run.weighting import Weighting
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.world import World
from tests.cache.session import Session
from tests.cache.simulations import lru_hits, next_uses_of
from tests.stream import shards
from tests.stream.kit import rows_in_order
from tests.stream.sources import Photos, check_bytes

NUM_ROWS, BATCH_SIZE = 64, 2


def share_of(plan: Plan, world: World, num_rows: int | None = None) -> EpochShare:
    weighting = Weighting(num_rows or plan.num_samples, plan.num_samples, lambda weights: pytest.fail("no weights here"), None)
    steps = replace(plan.steps, order=Weighted(order=plan.order, weights=weighting, seed=plan.seed))
    return EpochShare(epoch=0, steps=steps, partition=steps.partition(0, world), fingerprint=steps.order.fingerprint)


def positions_of(plan: Plan, epoch: int, rows: Int64Array) -> Int64Array:
    positions = plan.order.positions_of(epoch, rows)
    assert positions is not None
    return positions


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("blocks", [None, BlockLayout.of_size(7, num_rows=NUM_ROWS, window=3)])
def test_on_one_node_a_row_comes_again_after_as_many_samples_as_lie_between(
    seed: int | None, blocks: BlockLayout | None
) -> None:
    plan = Plan(num_samples=NUM_ROWS, seed=seed, batch_size=BATCH_SIZE, blocks=blocks)
    order = [row for epoch in (0, 1) for row in plan.rows(epoch, 0, NUM_ROWS).tolist()]
    found = next_uses(share_of(plan, World()), np.arange(NUM_ROWS))
    assert found is not None
    assert found.tolist() == next_uses_of(order)[:NUM_ROWS]


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_block_comes_again_with_its_next_sample_behind_those_that_are_planned(num_nodes: int) -> None:
    plan = Plan(num_samples=NUM_ROWS, seed=5, batch_size=BATCH_SIZE, blocks=BlockLayout.of_size(7, num_rows=NUM_ROWS, window=3))
    worlds = [World(rank=node, world_size=num_nodes, local_rank=0, node=node, num_nodes=num_nodes) for node in range(num_nodes)]
    order = [row for epoch in (0, 1) for row in plan.rows(epoch, 0, NUM_ROWS).tolist()]
    for world in worlds:
        taken = plan.partition(world).positions(0, NUM_ROWS // num_nodes).tolist()
        later = [*taken, *(NUM_ROWS + position for position in taken)]
        for start in range(0, len(taken), 10):
            planned = taken[start : start + 10]
            expected = []
            for position in planned:
                same = (at for at in later if at > planned[-1] and order[at] // 7 == order[position] // 7)
                expected.append((next(same, 2 * NUM_ROWS) - position) // num_nodes)
            found = next_uses_of_blocks(share_of(plan, world), np.array(planned))
            assert found is not None
            assert found.tolist() == expected
    assert next_uses_of_blocks(share_of(replace(plan, blocks=None), World()), np.arange(4)) is None


def test_whole_shards_that_are_mixed_stay_until_their_last_sample_with_belady(server: FaultyHttpServer, tmp_path: Path) -> None:
    num_shards, window = 12, 6
    expected = shards.serve(server, num_shards, 12)
    limit = (window + 1) * -(-len(server.objects["/data/s-000.tar"]) // 4096) * 4096
    options: dict[str, Any] = {"shuffle_seed": 3, "shuffle_window": window, "prefetch": 4, "eviction_policy": "belady"}
    src = f"{server.url}/data/s-{{000..{num_shards - 1:03}}}.tar"
    with shards.opened(src, tmp_path, shards="whole", cache_limit=limit, **options) as dataset:
        num_before = sum(len(shards.ranges(server, number)) for number in range(num_shards))
        for _ in range(2):
            assert sorted(sample["__key__"] for sample in dataset) == sorted(one["__key__"].decode() for one in expected)
        num_requests = sum(len(shards.ranges(server, number)) for number in range(num_shards)) - num_before
    assert num_requests <= 2 * num_shards, "by the next epoch of the samples used last, shards went between two samples"


@pytest.mark.parametrize("num_rows", [NUM_ROWS, NUM_ROWS - 3, NUM_ROWS + 2])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_on_several_nodes_only_what_this_node_takes_again_counts(parts: int, num_rows: int) -> None:
    plan = Plan(num_samples=num_rows, seed=5, batch_size=BATCH_SIZE, num_canonical_nodes=parts)
    worlds = [World(rank=r, world_size=4, local_rank=r % 2, local_world_size=2, node=r // 2, num_nodes=2) for r in range(4)]
    for node in (0, 1):
        taken = {p for w in worlds if w.node == node for p in plan.partition(w).positions(0, num_rows).tolist()}
        again = positions_of(plan, 1, plan.rows(0, 0, num_rows)).tolist()
        expected = [(num_rows - p + q if q in taken else 2 * num_rows) // 2 for p, q in enumerate(again)]
        found = next_uses(share_of(plan, worlds[2 * node]), np.arange(num_rows))
        assert found is not None
        assert found.tolist() == expected


def test_what_the_next_epoch_drops_counts_as_two_epochs_away() -> None:
    plan = Plan(num_samples=NUM_ROWS, seed=5, batch_size=60, tail=Tail.DROP)
    found = next_uses(share_of(plan, World()), np.arange(60))
    assert found is not None
    is_dropped = positions_of(plan, 1, plan.rows(0, 0, 60)) >= 60
    assert is_dropped.sum() > 0
    assert ((found == 2 * NUM_ROWS) == is_dropped).all()


def test_there_is_no_forecast_where_the_order_has_no_inverse() -> None:
    plan = Plan(num_samples=2 * NUM_ROWS, seed=5, batch_size=BATCH_SIZE)
    assert next_uses(share_of(plan, World(), NUM_ROWS), np.arange(4)) is None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_squeezed_dataset_downloads_less_with_belady_than_lru_must(photos: Photos, tmp_path: Path, num_workers: int) -> None:
    options: dict[str, Any] = {"columns_to_download": ["image"], "shuffle_seed": 3, "prefetch": 4, "transforms": [check_bytes]}
    limit = photos.total_bytes * 3 // 10
    with StreamingDataset(photos.src, tmp_path / "cache", cache_limit=limit, eviction_policy="belady", **options) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=4, num_workers=num_workers, collate_fn=list)
        for _ in range(2):
            assert all(sample["is_right"] for batch in loader for sample in batch)
        order = [row for epoch in (0, 1) for row in rows_in_order(dataset, epoch, 0, photos.num).tolist()]
        assert dataset.cache.statistics().eviction_policy == "belady"
    must = len(order) - lru_hits(order, photos.num * 3 // 10)
    assert photos.num < sum(photos.num_gets().values()) < 0.95 * must  # 0.87 by simulation


def test_stored_and_downloaded_objects_carry_the_forecast(photos: Photos, tmp_path: Path) -> None:
    with StreamingDataset(
        photos.src, tmp_path / "cache", columns_to_download=["image"], shuffle_seed=3, eviction_policy="belady"
    ) as dataset:
        samples = iter(dataset)
        next(samples)
        ranks = Session(dataset.cache).read("SELECT count(*), count(rank), max(rank) FROM entry")
        assert ranks[0][0] == ranks[0][1] > 1
        assert ranks[0][2] < 0
        del samples


def test_a_forecast_that_cannot_be_made_is_named(photos: Photos, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"columns_to_download": ["image"], "shuffle_seed": 3, "eviction_policy": "belady"}
    with StreamingDataset(photos.src, tmp_path / "cache", weights="score", max_size=8, **options) as dataset:
        next(iter(dataset))
    assert "evicts by belady, but with weights" in caplog.text
    with pytest.raises(ConfigError, match=r"eviction_policy='belady' needs one order.*unaligned_worker_index"):
        StreamingDataset(photos.src, tmp_path / "cache", unaligned_worker_index=True, **options)
    with pytest.raises(ConfigError, match="eviction_policy='best' is unknown"):
        StreamingDataset(photos.src, tmp_path / "cache", eviction_policy="best")
