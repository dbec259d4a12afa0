"""Whether shards are fetched whole or by members: the rule, and what a dataset does by it."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from sqlstream import World
from sqlstream.cli.main import main
from sqlstream.config import ShardUnit
from sqlstream.stream.engine.units import ShardUse, choose_unit
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import FaultyHttpServer
from tests.stream.shards import content, opened, ranges, serve

USE = ShardUse(num_bytes=1000, window_bytes=100, wanted_share=1.0, num_nodes=1)
LIMIT_BYTES = 300


@pytest.mark.parametrize(
    ("changes", "unit", "reason"),
    [
        ({}, "whole", "fit half of the limit"),
        ({"window_bytes": 151}, "members", "do not fit half"),
        ({"window_bytes": 1000, "limit_bytes": 1000}, "whole", "all .* fit the limit"),
        ({"window_bytes": 1000, "limit_bytes": None}, "whole", "no limit"),
        ({"wanted_share": 0.49}, "members", "49%"),
        ({"num_nodes": 2}, "whole", "half of the limit"),
        ({"num_nodes": 3, "limit_bytes": None}, "members", "33%"),
    ],
)
def test_whole_shards_are_chosen_where_they_fit_and_most_of_them_is_taken(
    changes: dict[str, Any], unit: str, reason: str
) -> None:
    limit_bytes = changes.get("limit_bytes", LIMIT_BYTES)
    use = replace(USE, **{name: value for name, value in changes.items() if name != "limit_bytes"})
    chosen = choose_unit(ShardUnit.AUTO, use, limit_bytes)
    assert chosen.unit == unit
    assert re.search(reason, chosen.reason)
    assert choose_unit(ShardUnit.MEMBERS, use, limit_bytes).unit == "members"


def test_a_dataset_takes_the_unit_of_its_limit_its_columns_and_its_nodes(server: FaultyHttpServer, tmp_path: Path) -> None:
    expected = serve(server, 4, 10, num_bytes=40_000)
    src = f"{server.url}/data/s-{{000..003}}.tar"
    cases: list[tuple[dict[str, Any], int]] = [
        ({"cache_limit": "10mb"}, 1),
        ({"cache_limit": "1mb", "shuffle_seed": 1, "shuffle_window": 1}, 1),
        ({"cache_limit": "1mb", "shuffle_seed": 1}, 10),
        ({"cache_limit": "10mb", "columns_to_download": ["cls"]}, 10),
        ({"cache_limit": "10mb", "where": "__key__ LIKE '%/00001'"}, 1),
        ({"cache_limit": "10mb", "world": World(rank=1, world_size=3, node=1, num_nodes=3)}, 5),
    ]
    for number, (options, num_requests) in enumerate(cases):
        dataset = opened(src, tmp_path / str(number), **options)
        before = len(ranges(server, 1))
        found = [content(sample) for sample in dataset]
        asked = ranges(server, 1)[before:]
        assert len(asked) <= num_requests, options
        assert (asked == []) == (number == 0), "all of them fit: they came whole for the index"
        assert any(size > 200_000 for size in asked) == (number == 1), options
        if number < 3:
            assert sorted(map(str, found)) == sorted(map(str, expected))


def test_shards_of_small_parts_come_whole_though_most_of_their_bytes_are_headers(
    server: FaultyHttpServer, tmp_path: Path
) -> None:
    expected = serve(server, 3, 100, num_bytes=300)
    src = f"{server.url}/data/s-{{000..002}}.tar"
    for columns, unit in ((None, "whole"), (["cls"], "members")):
        options: dict[str, Any] = {"shuffle_seed": 1, "shuffle_window": 1, "columns_to_download": columns}
        with opened(src, tmp_path / unit, cache_limit=int(2.5 * len(server.objects["/data/s-000.tar"])), **options) as dataset:
            before = [len(ranges(server, shard)) for shard in range(3)]
            found = [content(sample) for sample in dataset]
            assert [use.unit for use in dataset.cache.statistics().shard_units] == [unit]
        if unit == "whole":
            assert sorted(map(str, found)) == sorted(map(str, expected))
            assert [len(ranges(server, shard)) - num for shard, num in enumerate(before)] == [1, 1, 1]


def test_explain_says_which_unit_and_why(server: FaultyHttpServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve(server, 2, 3)
    with opened(f"{server.url}/data/s-00{{0,1}}.tar", tmp_path):
        pass
    assert main(["index", "explain", str(tmp_path / "cache"), "SELECT * FROM dataframe"]) == 0
    assert "shards: whole, since all" in capsys.readouterr().out
    assert main(["index", "explain", str(tmp_path / "cache"), "SELECT * FROM dataframe WHERE cls = 5000"]) == 0
    assert "shards: members, since this node takes 0%" in capsys.readouterr().out


def test_datasets_that_choose_differently_share_one_unit(server: FaultyHttpServer, tmp_path: Path) -> None:
    expected = sorted(map(str, serve(server, 3, 20, num_bytes=20_000)))
    src = f"{server.url}/data/s-{{000..002}}.tar"

    def read(sample: dict[str, Any]) -> dict[str, Any]:
        check_invariants(tmp_path / "cache")
        return sample

    transforms = [read]
    with (
        opened(src, tmp_path, shards="members", transforms=transforms, shuffle_seed=1, name="a") as members,
        opened(src, tmp_path, shards="whole", transforms=transforms, shuffle_seed=2, name="b") as wholes,
    ):
        for _ in range(2):
            found: dict[str, list[str]] = {"a": [], "b": []}
            for one, other in zip_longest(members, wholes):
                found["a"].append(str(content(one)))
                found["b"].append(str(content(other)))
            assert [sorted(some) for some in found.values()] == [expected, expected]
    check_invariants(tmp_path / "cache", at_rest=True)


def test_a_unit_that_is_chosen_anew_takes_over_in_the_next_epoch(server: FaultyHttpServer, tmp_path: Path) -> None:
    expected = sorted(map(str, serve(server, 3, 20, num_bytes=20_000)))
    src = f"{server.url}/data/s-{{000..002}}.tar"
    options: dict[str, Any] = {"shuffle_seed": 1, "shuffle_window": 2, "name": "a"}
    with opened(src, tmp_path, cache_limit="1mb", **options) as dataset:
        assert sorted(str(content(sample)) for sample in dataset) == expected
        assert [use.unit for use in dataset.cache.statistics().shard_units] == ["members"]
    with opened(src, tmp_path, cache_limit="10mb", **options) as dataset:
        dataset.set_epoch(1)
        assert sorted(str(content(sample)) for sample in dataset) == expected
        (use,) = dataset.cache.statistics().shard_units
        assert (use.dataset, use.epoch, use.unit) == ("a", 1, "whole")
        assert "all 1.3 MiB of them fit" in use.reason
        assert dataset.cache.statistics().entries == 3
    check_invariants(tmp_path / "cache", at_rest=True)


@pytest.mark.parametrize(("num_canonical_nodes", "limit"), [(2, "10mb"), (1, "10mb")], ids=["whole shards", "members"])
def test_two_nodes_fetch_the_data_once_between_them(
    server: FaultyHttpServer, tmp_path: Path, num_canonical_nodes: int, limit: str
) -> None:
    expected = sorted(map(str, serve(server, 8, 20, num_bytes=20_000)))
    src = f"{server.url}/data/s-{{000..007}}.tar"
    num_bytes = sum(map(len, server.objects.values()))
    datasets = [
        opened(
            src,
            tmp_path / str(node),
            cache_limit=limit,
            shuffle_seed=1,
            shuffle_window=2,
            batch_size=8,
            num_canonical_nodes=num_canonical_nodes,
            world=World(rank=node, world_size=2, node=node, num_nodes=2),
        )
        for node in range(2)
    ]
    before = [len(ranges(server, shard)) for shard in range(8)]
    found = [str(content(sample)) for dataset in datasets for sample in dataset]
    assert sorted(found) == expected
    asked = [size for shard in range(8) for size in ranges(server, shard)[before[shard] :]]
    assert sum(asked) <= 1.05 * num_bytes
    units = {use.unit for dataset in datasets for use in dataset.cache.statistics().shard_units}
    assert units == {"whole" if num_canonical_nodes == 2 else "members"}
    for dataset in datasets:
        dataset.close()
