"""One window serves several datasets: samples of a mixture, and of packs, are those of each dataset alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from sqlstream import StreamingDataset
from sqlstream.order import Order, Steps, is_counted
from sqlstream.stream.engine.engine import Engine
from sqlstream.stream.run.shares import EpochShare, ShareProgress
from sqlstream.transforms import rng
from sqlstream.transforms.base import Sample
from sqlstream.world import World
from tests.order.several import Packed, mixed
from tests.stream.kit import Refuse
from tests.stream.sources import Photos, check_bytes

BATCH_SIZE = 4


def draw(sample: Sample) -> Sample:
    """Draws from the sample's own generator."""
    sample["drawn"] = int(rng(sample).integers(1 << 60))
    return sample


@pytest.fixture
def opened(photos: Photos, tmp_path: Path) -> Iterator[Any]:
    """Opens datasets of photos in one directory."""
    with ExitStack() as stack:

        def opened(*transforms: Any, **options: Any) -> StreamingDataset:
            return stack.enter_context(
                StreamingDataset(
                    photos.src,
                    tmp_path / "cache",
                    columns_to_download=["image"],
                    transforms=[*transforms, check_bytes, draw],
                    show_progress=False,
                    **options,
                )
            )

        yield opened


@pytest.fixture
def pair(opened: Any) -> tuple[StreamingDataset, StreamingDataset]:
    """Two datasets of 60 and 36 rows, with another seed and another field each."""
    low = opened(lambda sample: {**sample, "is_low": True}, where="score < 0.5", shuffle_seed=3)
    high = opened(where="score >= 0.7", shuffle_seed=8, weights="1 + (score > 0.9)")
    return low, high


def order_of(dataset: StreamingDataset) -> Order:
    return dataset.schedule.steps.order


def engine_of(*datasets: StreamingDataset) -> Engine:
    pipelines = [dataset._pipeline for dataset in datasets]
    makers, options = [pipeline.recipe for pipeline in pipelines], pipelines[0].options.samples
    return Engine(makers, [dataset.cache for dataset in datasets], options, num_retained=64)


def share_of(order: Order, epoch: int = 0, world: World | None = None, consumed: int = 0) -> EpochShare:
    steps = Steps(order=order, batch_size=BATCH_SIZE)
    partition = steps.partition(epoch, world or World(), consumed)
    return EpochShare(epoch=epoch, steps=steps, partition=partition, fingerprint=order.fingerprint)


def stream(engine: Engine, share: EpochShare, progress: ShareProgress | None = None) -> Iterator[Sample]:
    progress = progress or ShareProgress(share, share.taken)
    return engine.stream(iter([share]), progress, is_endless=False, note_several=lambda: None)


def alone(dataset: StreamingDataset, num_epochs: int) -> dict[tuple[int, int], Sample]:
    """All samples of a dataset that is iterated alone, by epoch and position."""
    return {(epoch, position): sample for epoch in range(num_epochs) for position, sample in enumerate(dataset)}


def expected(order: Order, epoch: int, datasets: tuple[StreamingDataset, ...], num_epochs: int = 4) -> list[Sample]:
    """What a share of all positions must give, by what each dataset gives alone."""
    samples = [alone(dataset, num_epochs) for dataset in datasets]
    draws = order.rows_at(epoch, np.arange(order.num_positions(epoch)))
    places = zip(*(array.tolist() for array in (draws.stream, draws.epoch, draws.position)), strict=True)
    return [samples[stream][own_epoch, position] for stream, own_epoch, position in places]


def test_a_mixture_gives_what_each_stream_gives_alone_over_all_its_epochs(
    pair: tuple[StreamingDataset, StreamingDataset],
) -> None:
    order = mixed(list(map(order_of, pair)), (2, 3), 150)
    engine = engine_of(*pair)
    for epoch in (0, 1):
        wanted = expected(order, epoch, pair, num_epochs=6)
        for dataset in pair:
            dataset.set_epoch(0)
        found = list(stream(engine, share_of(order, epoch)))
        assert found == wanted
        assert all(sample["is_right"] for sample in found)
    assert {sample["__epoch__"] for sample in found if "is_low" not in sample} == {2, 3, 4}
    engine.close()


def test_ranks_and_workers_share_a_mixture_as_any_order(pair: tuple[StreamingDataset, StreamingDataset]) -> None:
    order = mixed(list(map(order_of, pair)), (2, 1), 96)
    wanted = expected(order, 0, pair)
    for world in (World(rank=1, world_size=2), World(rank=1, world_size=3, worker=1, num_workers=2)):
        share = share_of(order, world=world, consumed=2 * world.world_size * BATCH_SIZE)
        positions = share.partition.positions(0, share.partition.num_samples).tolist()
        engine = engine_of(*pair)
        assert list(stream(engine, share)) == [wanted[position] for position in positions]
        engine.close()


def test_a_pack_gives_its_rows_one_after_the_other(opened: Any) -> None:
    dataset = opened(where="score < 0.5", shuffle_seed=3)
    order = Packed(order=order_of(dataset))
    (wanted,) = [list(alone(dataset, 1).values())]
    engine, share = engine_of(dataset), share_of(order)
    progress = ShareProgress(share, 0)
    samples, places = [], []
    for sample in stream(engine, share, progress):
        samples.append(sample)
        places.append((progress.taken, progress.offset))
    assert samples == wanted
    assert places[:4] == [(0, 1), (1, 0), (1, 1), (2, 0)]
    for stop in (1, 4, 11, 58):  # go on anywhere, in the middle of a pack, too
        taken, offset = places[stop - 1]
        rest = replace(share, taken=taken, offset=offset)
        assert list(stream(engine, rest, ShareProgress(rest, taken, offset))) == wanted[stop:]
    engine.close()


def test_packs_of_a_mixture_hold_rows_of_both_streams(pair: tuple[StreamingDataset, StreamingDataset]) -> None:
    inner = mixed(list(map(order_of, pair)), (1, 1), 60)
    engine = engine_of(*pair)
    assert list(stream(engine, share_of(Packed(order=inner)))) == expected(inner, 0, pair)
    engine.close()


def test_what_fails_is_replaced_within_its_stream_and_counted_under_its_name(opened: Any) -> None:
    low = opened(where="score < 0.5", shuffle_seed=3, name="low", max_failure_ratio=0.5)
    high = opened(Refuse(70, 71, 80), where="score >= 0.5", shuffle_seed=8, name="high")
    order = mixed([order_of(low), order_of(high)], (1, 1), 120)
    for packed in (False, True):
        engine = engine_of(low, high)
        found = list(stream(engine, share_of(Packed(order=order) if packed else order)))
        assert [sample["__row__"] >= 60 for sample in found] == [False, True] * 60
        assert not {70, 71, 80} & {sample["__row__"] for sample in found}
        failed = np.flatnonzero(np.isin(order.rows_at(0, np.arange(120)).row[1::2] + 60, (70, 71, 80))) * 2 + 1
        again = [next(order.replacements(0, position)) + 60 for position in failed.tolist()]
        assert [found[position]["__row__"] for position in failed.tolist()] == again
        engine.close()
    assert {record.url for record in low.failures()} == {f"high row {row}" for row in (70, 71, 80)}


def test_transforms_and_rows_of_another_stream_are_never_used(opened: Any) -> None:
    low = opened(Refuse(*range(60, 120)), where="score < 0.5", shuffle_seed=3, on_error="raise")
    high = opened(Refuse(*range(60)), where="score >= 0.5", shuffle_seed=8)
    engine = engine_of(low, high)
    assert len(list(stream(engine, share_of(mixed([order_of(low), order_of(high)], (1, 1), 120))))) == 120
    engine.close()


def test_chunks_of_a_filtered_stream_are_counted_when_a_mixture_needs_them(opened: Any, photos: Photos, tmp_path: Path) -> None:
    table = pq.read_table(tmp_path / "index.parquet")
    pq.write_table(table, tmp_path / "groups.parquet", row_group_size=5)
    photos.server.objects["/photos/groups.parquet"] = (tmp_path / "groups.parquet").read_bytes()
    options: dict[str, Any] = {"show_progress": False, "columns_to_download": ["image"], "transforms": [check_bytes, draw]}
    src, cache = f"{photos.server.url}/photos/groups.parquet", tmp_path / "cache"
    filtered = {**options, "where": "row % 3 = 0", "lazy_index_chunk_size": 5, "shuffle_seed": 4}
    high = opened(where="score >= 0.5", shuffle_seed=8)
    with StreamingDataset(src, cache, **filtered) as lazy:
        order = mixed((order_of(high), order_of(lazy)), (2, 1), 30)
        engine = engine_of(high, lazy)
        samples = stream(engine, share_of(order))
        found = [next(samples)]
        assert not is_counted(order_of(lazy), 0)
        found += samples
        assert not is_counted(order_of(lazy), 0), "ten draws need the first windows only"
        engine.close()
        assert found == expected(order, 0, (high, lazy), num_epochs=1)


def test_a_stream_is_opened_when_it_is_drawn_first(pair: tuple[StreamingDataset, StreamingDataset]) -> None:
    engine = engine_of(*pair)
    samples = stream(engine, share_of(mixed(list(map(order_of, pair)), (400, 1), 401)))
    assert [engine._recipes.made[stream] is None for stream in (0, 1)] == [True, True]
    next(samples)
    assert [engine._recipes.made[stream] is None for stream in (0, 1)] == [False, True]
    assert len(list(samples)) == 400
    assert engine._recipes.made[1] is not None
    engine.close()


def test_streams_of_two_directories_keep_their_objects_in_their_own(photos: Photos, tmp_path: Path) -> None:
    options: dict[str, Any] = {"columns_to_download": ["image"], "show_progress": False, "cache_limit": "1mb"}
    with (
        StreamingDataset(photos.src, tmp_path / "one", where="score < 0.5", shuffle_seed=3, **options) as one,
        StreamingDataset(photos.src, tmp_path / "two", where="score >= 0.5", shuffle_seed=8, **options) as two,
    ):
        engine = engine_of(one, two)
        folders = [f"{dataset.cache.path}/" for dataset in (one, two)]
        for number, sample in enumerate(stream(engine, share_of(mixed([order_of(one), order_of(two)], (1, 1), 120)))):
            assert sample["image"].startswith(folders[number % 2])
            assert Path(sample["image"]).stat().st_size  # a path is kept by a pin of its own directory
        for dataset in (one, two):
            assert 0 < dataset.cache.statistics().used_bytes <= 1 << 20
        engine.close()
        engine.release_kept()
        assert [dataset.cache.statistics().pinned_entries for dataset in (one, two)] == [0, 0]
