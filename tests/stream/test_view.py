"""Views: the same rows, index and cache, with other transforms or another order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.config import Buckets, Packs
from sqlstream.errors import CacheClosedError, ConfigError
from sqlstream.world import World

ROWS = [{"number": number} for number in range(24)]


def numbered(tmp_path: Path, **options: Any) -> StreamingDataset:
    return StreamingDataset(ROWS, tmp_path / "cache", show_progress=False, **options)


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "number": 2 * sample["number"]}


def numbers(samples: Any) -> list[int]:
    return [sample["number"] for sample in samples]


def test_a_view_has_other_transforms_and_an_epoch_and_a_state_of_its_own(tmp_path: Path) -> None:
    with numbered(tmp_path, shuffle_seed=3) as dataset:
        view = dataset.view([doubled])
        first = numbers(dataset)
        assert numbers(view) == [2 * number for number in first]
        assert numbers(view) != numbers(dataset.view([doubled])), "the second epoch, and the first one"
        assert (view.epoch, dataset.epoch) == (2, 1)
        again = view.view()
        again.load_state_dict(dataset.state_dict())
        assert numbers(again) == [2 * number for number in numbers(dataset)], "of the same rows, seed and order"


def test_a_view_has_the_order_that_it_is_given(tmp_path: Path) -> None:
    with numbered(tmp_path, shuffle_seed=3) as dataset:
        assert numbers(dataset.view(shuffle_seed=None)) == list(range(24))
        with numbered(tmp_path, shuffle_seed=4) as other:
            assert numbers(dataset.view(shuffle_seed=4)) == numbers(other)
        halves = [numbers(dataset.view(world=World(rank=rank, world_size=2))) for rank in range(2)]
        assert sorted(halves[0] + halves[1]) == list(range(24))
        batches = StreamingDataLoader(dataset.view(batch_size=5, drop_last=True), batch_size=5, drop_last=True)
        assert [len(batch["number"]) for batch in batches] == [5] * 4
        endless = iter(dataset.view(infinite_iteration=True))
        assert sorted(next(endless)["number"] for _ in range(48)) == sorted([*range(24)] * 2)
        with pytest.raises(ConfigError, match="batch_size=4"):
            StreamingDataLoader(dataset.view(batch_size=5), batch_size=4)


@pytest.mark.parametrize("other", [{"batches": Packs("number + 1", 32)}, {"weights": "number"}, {"shuffle": True}])
def test_what_a_view_cannot_have_is_refused(other: dict[str, Any], tmp_path: Path) -> None:
    """Batches were left out in silence, and what no dataset has was a TypeError of another class."""
    with (
        numbered(tmp_path) as dataset,
        pytest.raises(ConfigError, match=rf"another {next(iter(other))}: it takes transforms, and"),
    ):
        dataset.view(**other)


def test_closing_a_view_closes_all_that_share_its_cache(tmp_path: Path) -> None:
    dataset = numbered(tmp_path)
    dataset.view().close()
    with pytest.raises(CacheClosedError):
        next(iter(dataset))
    with pytest.raises(CacheClosedError):
        dataset.view()


def test_rows_that_change_and_buckets_have_no_views(tmp_path: Path) -> None:
    buckets = Buckets("number % 2", global_batch_size=4)
    with numbered(tmp_path, batches=buckets) as dataset, pytest.raises(ConfigError, match="batches="):
        dataset.view()
