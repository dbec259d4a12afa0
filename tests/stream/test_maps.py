"""The dataset as a map, with samplers of batches: the order of the stream through `__getitems__`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from sqlstream import Packs, StreamingDataset
from sqlstream.errors import ConfigError
from sqlstream.stream.maps import EpochBatches, MapView
from sqlstream.world import World
from tests.stream.sources import Photos, check_bytes
from tests.stream.tables import make_table

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def rows_only(samples: list[dict[str, int]]) -> list[int]:
    return [sample["__row__"] for sample in samples]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_by_index_have_the_order_of_the_stream(tmp_path: Path, num_workers: int) -> None:
    for rank in range(2):
        world = World(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
        with StreamingDataset(
            make_table(tmp_path, 22), tmp_path / "cache", shuffle_seed=5, batch_size=4, world=world, show_progress=False
        ) as dataset:
            streamed = [list(DataLoader(dataset, batch_size=4, collate_fn=rows_only)) for _ in range(2)]
            sampler = EpochBatches(dataset, batch_size=4)
            loader = DataLoader(MapView(dataset), batch_sampler=sampler, num_workers=num_workers, collate_fn=rows_only)
            assert len(loader) == 3
            assert [list(loader) for _ in range(2)] == streamed
            sampler.set_epoch(1)
            assert list(loader) == streamed[1]


def test_any_sampler_of_torch_works_on_the_map(photos: Photos, tmp_path: Path) -> None:
    with StreamingDataset(photos.src, tmp_path / "cache", columns_to_download=["image"], transforms=[check_bytes]) as dataset:
        batches = BatchSampler(RandomSampler(range(len(dataset))), batch_size=16, drop_last=False)
        rows = []
        for batch in DataLoader(MapView(dataset), batch_sampler=batches, num_workers=2):
            assert all(batch["is_right"])
            rows += batch["__row__"].tolist()
        assert sorted(rows) == list(range(photos.num))


def test_paths_of_forked_workers_stay_valid_though_their_trainer_has_accessed_rows_before(
    photos: Photos, tmp_path: Path
) -> None:
    with StreamingDataset(photos.src, tmp_path / "cache", columns_to_download=["image"], max_size=24) as dataset:
        sample = dataset[0]
        loader = DataLoader(MapView(dataset), batch_size=4, num_workers=2, collate_fn=list, multiprocessing_context="fork")
        samples = [sample, *(one for batch in loader for one in batch)]
        dataset.cache.clear()
        assert [one["__row__"] for one in samples if not Path(one["image"]).exists()] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"lazy_index_chunk_size": 8, "where": "score > 0.2"}, "found out on the way", id="lazy filter"),
        pytest.param({"batches": Packs("1", 10)}, r"Packs\(…\) makes samples of several rows", id="packs"),
    ],
)
def test_batches_that_are_no_rows_by_number_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Numbers of a lazy filter were those of its chunks: other rows came, or IndexErrors. Packs came row by row."""
    with (
        StreamingDataset(
            make_table(tmp_path, 22), tmp_path / "cache", shuffle_seed=5, show_progress=False, **options
        ) as dataset,
        pytest.raises(ConfigError, match=message),
    ):
        EpochBatches(dataset, batch_size=4)
