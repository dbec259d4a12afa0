"""Whether shards are fetched whole or by members: the rule, and what a dataset does by it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sqlstream import World
from sqlstream.cli.main import main
from sqlstream.config import ShardUnit
from sqlstream.stream.engine.units import ShardUse, choose_unit
from sqlstream.testing.servers import FaultyHttpServer
from tests.stream.shards import content, opened, ranges, serve

USE = ShardUse(num_bytes=1000, window_bytes=100, wanted_share=1.0, limit_bytes=300, num_nodes=1)


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
    chosen = choose_unit(ShardUnit.AUTO, replace(USE, **changes))
    assert chosen.unit == unit
    assert re.search(reason, chosen.reason)
    assert choose_unit(ShardUnit.MEMBERS, replace(USE, **changes)).unit == "members"


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
        assert any(size > 200_000 for size in asked) == (number < 2), options
        if number < 3:
            assert sorted(map(str, found)) == sorted(map(str, expected))


def test_explain_says_which_unit_and_why(server: FaultyHttpServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve(server, 2, 3)
    with opened(f"{server.url}/data/s-00{{0,1}}.tar", tmp_path):
        pass
    assert main(["index", "explain", str(tmp_path / "cache"), "SELECT * FROM dataframe"]) == 0
    assert "shards: whole, since all" in capsys.readouterr().out
    assert main(["index", "explain", str(tmp_path / "cache"), "SELECT * FROM dataframe WHERE cls = 5000"]) == 0
    assert "shards: members, since this node takes 0%" in capsys.readouterr().out
