"""A place in a training job is valid or refused by name."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from sqlstream.errors import ConfigError
from sqlstream.world import World


def test_the_default_is_a_single_process() -> None:
    assert World() == World(
        rank=0, world_size=1, local_rank=0, local_world_size=1, node=0, num_nodes=1, worker=0, num_workers=1
    )
    assert World().is_even


def test_a_worker_of_a_rank_keeps_the_rank() -> None:
    world = World(rank=5, world_size=8, local_rank=1, local_world_size=4, node=1, num_nodes=2)
    assert world.with_worker(2, 3) == World(
        rank=5, world_size=8, local_rank=1, local_world_size=4, node=1, num_nodes=2, worker=2, num_workers=3
    )


def test_a_place_survives_the_way_into_a_spawned_worker() -> None:
    world = World(rank=1, world_size=2, worker=1, num_workers=2)
    assert pickle.loads(pickle.dumps(world)) == world


def test_a_place_may_be_a_text_or_a_number_of_numpy() -> None:
    given: Any = {"rank": "1", "world_size": np.int64(2), "local_world_size": 1.0}
    assert World(**given) == World(rank=1, world_size=2)
    assert type(World(**given).world_size) is int


def test_nodes_with_unequal_ranks_are_allowed_and_known() -> None:
    assert not World(rank=4, world_size=5, local_rank=1, local_world_size=2, node=1, num_nodes=2).is_even


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "world_size": 2}, r"rank=2 does not fit world_size=2"),
        ({"rank": -1}, r"rank=-1 does not fit world_size=1"),
        ({"world_size": 0}, r"rank=0 does not fit world_size=0"),
        ({"local_rank": 1}, r"local_rank=1 does not fit local_world_size=1"),
        ({"node": 3, "num_nodes": 3}, r"node=3 does not fit num_nodes=3"),
        ({"worker": 0, "num_workers": 0}, r"worker=0 does not fit num_workers=0"),
        ({"world_size": 2, "local_world_size": 3}, r"local_world_size=3 is more than world_size=2"),
        ({"world_size": 2, "num_nodes": 3}, r"num_nodes=3 is more than world_size=2"),
        ({"rank": 0.5}, r"rank=0.5 is no whole number"),
        ({"rank": "first"}, r"rank='first' is no whole number"),
        ({"world_size": None}, r"world_size=None is no whole number"),
        ({"num_nodes": float("nan")}, r"num_nodes=nan is no whole number"),
        ({"num_workers": [2]}, r"num_workers=\[2\] is no whole number"),
    ],
)
def test_an_impossible_place_is_refused_with_both_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        World(**options)


@pytest.mark.parametrize(
    ("replication", "expected"),
    [
        (1, World(rank=6, world_size=8, local_rank=2, local_world_size=4, node=1, num_nodes=2)),
        (2, World(rank=3, world_size=4, local_rank=1, local_world_size=2, node=1, num_nodes=2)),
        (4, World(rank=1, world_size=2, local_rank=0, local_world_size=1, node=1, num_nodes=2)),
        (8, World(rank=0, world_size=1)),
    ],
)
def test_ranks_that_take_the_same_samples_count_as_one(replication: int, expected: World) -> None:
    place = World(rank=6, world_size=8, local_rank=2, local_world_size=4, node=1, num_nodes=2)
    assert place.replicated(replication) == expected


@pytest.mark.parametrize("replication", [2, 4, 8])
def test_ranks_that_were_dealt_to_nodes_in_turn_share_a_place_with_their_neighbours(replication: int) -> None:
    ranks = [
        World(rank=rank, world_size=8, local_rank=rank // 2, local_world_size=4, node=rank % 2, num_nodes=2)
        for rank in range(8)
    ]
    places = [world.replicated(replication) for world in ranks]
    groups = [places[first : first + replication] for first in range(0, 8, replication)]
    assert all(place == group[0] for group in groups for place in group)
    assert len({(group[0].node, group[0].local_rank) for group in groups}) == len(groups)


@pytest.mark.parametrize(
    ("world", "replication", "message"),
    [
        (World(world_size=8), 3, "replication=3 does not divide world_size=8"),
        (World(world_size=8), 0, "replication=0 does not divide"),
        (World(world_size=6, local_world_size=3, num_nodes=2), 2, "replication=2 does not fit nodes of 3 ranks"),
    ],
)
def test_a_replication_that_does_not_fit_is_refused(world: World, replication: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        world.replicated(replication)
