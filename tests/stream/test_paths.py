"""A path that was handed out stays valid, also when the worker that gave it away has ended."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, get_worker_info

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.cache import Cache
from sqlstream.stream.frameworks import plain_loader
from sqlstream.stream.maps import EpochBatches, MapView
from tests.cache.actors import wait_for_helpers
from tests.stream.sources import Photos

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


def slow_in_the_first_worker(sample: dict[str, Any]) -> dict[str, Any]:
    info = get_worker_info()
    if info is not None and info.id == 0:
        time.sleep(0.004)
    return sample


def paths(samples: list[dict[str, Any]]) -> list[str]:
    return [sample["image"] for sample in samples]


def open_photos(photos: Photos, dst: Path, **options: Any) -> StreamingDataset:
    options.setdefault("transforms", [slow_in_the_first_worker])
    return StreamingDataset(photos.src, dst, columns_to_download=["image"], show_progress=False, **options)


def gone_of(loader: Any, dataset: StreamingDataset) -> list[str]:
    """Paths that are gone as their batch is in hand, while all that may go is removed again and again."""
    gone: list[str] = []
    for batch in loader:
        dataset.cache.clear()
        gone += [path for path in batch if not os.path.exists(path)]
    return gone


@pytest.mark.parametrize(
    ("kind", "start", "is_persistent"),
    [
        ("streaming", "fork", False),
        ("streaming", "fork", True),
        ("plain", "fork", False),
        ("plain", "spawn", False),
        ("map", "fork", False),
    ],
    ids=["streaming", "persistent", "plain", "plain-spawn", "by-row"],
)
def test_batches_of_a_worker_that_has_ended_keep_their_paths(
    photos: Photos, tmp_path: Path, kind: str, start: str, is_persistent: bool
) -> None:
    with open_photos(photos, tmp_path / "cache", batch_size=None if kind == "map" else 4) as dataset:
        options: dict[str, Any] = {
            "num_workers": 2,
            "multiprocessing_context": start,
            "collate_fn": paths,
            "persistent_workers": is_persistent,
        }
        loader: Any = (
            StreamingDataLoader(dataset, batch_size=4, **options)
            if kind == "streaming"
            else DataLoader(dataset, batch_size=4, **options)
            if kind == "plain"
            else DataLoader(MapView(dataset), batch_sampler=EpochBatches(dataset, 4), **options)
        )
        num_epochs = 1 if start == "spawn" else 2
        assert [gone_of(loader, dataset) for _ in range(num_epochs)] == [[]] * num_epochs
        del loader
        gc.collect()


def test_what_ended_workers_left_goes_with_the_next_iteration_and_with_the_dataset(photos: Photos, tmp_path: Path) -> None:
    with Cache(tmp_path / "cache") as cache:
        with open_photos(photos, tmp_path / "cache") as dataset:
            loader = StreamingDataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork", collate_fn=paths)
            list(loader)
            assert 12 <= cache.statistics().pinned_entries <= 24, "three batches of each worker"
            assert [owner.pid for owner in cache.statistics().owners].count(0) == 2
            batches = iter(loader)
            next(batches)
            assert [owner.pid for owner in cache.statistics().owners].count(0) == 0
            del batches
        cache.clear()
        assert cache.statistics().entries == 0


def test_what_the_workers_of_one_loader_left_stays_when_another_begins(photos: Photos, tmp_path: Path) -> None:
    with open_photos(photos, tmp_path / "cache") as dataset:

        def new_loader() -> StreamingDataLoader:
            return StreamingDataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork", collate_fn=paths)

        def num_ended() -> int:
            return [owner.pid for owner in dataset.cache.statistics().owners].count(0)

        one, other = new_loader(), new_loader()
        *_, last = one
        list(other)
        assert num_ended() == 2
        dataset.cache.clear()
        assert all(map(os.path.exists, last))
        list(one)
        assert num_ended() == 2, "what it left before is gone"
        del one
        gc.collect()
        assert num_ended() == 2, "its last batch may be in hand"
        list(other)
        assert num_ended() == 1


def test_a_rebuilt_ledger_still_has_what_ended_workers_left(photos: Photos, tmp_path: Path) -> None:
    with open_photos(photos, tmp_path / "cache") as dataset:
        loader = StreamingDataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork", collate_fn=paths)
        *_, last = loader
        (tmp_path / "cache/ledger.sqlite").write_bytes(b"damaged" * 1000)
        for suffix in ("-wal", "-shm"):
            (tmp_path / f"cache/ledger.sqlite{suffix}").unlink(missing_ok=True)
        dataset.cache.clear()
        assert all(map(os.path.exists, last))
        assert [owner.pid for owner in dataset.cache.statistics().owners].count(0) == 2


def test_the_batch_in_hand_keeps_its_paths_when_the_loop_is_left(photos: Photos, tmp_path: Path) -> None:
    with open_photos(photos, tmp_path / "cache") as dataset:
        for batch in StreamingDataLoader(
            dataset, batch_size=4, num_workers=2, multiprocessing_context="fork", collate_fn=paths
        ):
            in_hand = batch
            break
        gc.collect()
        dataset.cache.clear()
        assert all(map(os.path.exists, in_hand))


@pytest.mark.parametrize("kind", [DataLoader, StreamingDataLoader])
def test_a_loader_without_workers_keeps_the_paths_of_its_last_batch(kind: Any, photos: Photos, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 7, "collate_fn": paths}  # it ends before an incomplete batch is collated
    with open_photos(photos, tmp_path / "cache") as dataset, Cache(tmp_path / "cache") as other:
        for _ in range(2):
            assert gone_of(kind(dataset, **options), dataset) == []
        assert dataset.cache.statistics().pinned_entries > 0
        in_hand = next(iter(kind(dataset, **options)))
        gc.collect()
        other.clear()
        assert all(map(os.path.exists, in_hand))
        dataset.close()
        assert other.clear().kept_pinned_entries == 0


def test_what_iterations_without_workers_left_goes_with_a_view_that_is_collected(photos: Photos, tmp_path: Path) -> None:
    with open_photos(photos, tmp_path / "cache") as dataset:
        view = dataset.view(transforms=[])
        in_hand = paths([sample for _, sample in zip(range(5), view, strict=False)])
        dataset.cache.clear()
        assert all(map(os.path.exists, in_hand))
        del view
        gc.collect()
        assert dataset.cache.clear().kept_pinned_entries == 0


def kill_worker_at_the_end(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__row__"] == 60 and get_worker_info() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def test_a_worker_that_is_killed_leaves_no_pin(photos: Photos, tmp_path: Path) -> None:
    with open_photos(photos, tmp_path / "cache", transforms=[kill_worker_at_the_end]) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork", collate_fn=paths)
        with pytest.raises(RuntimeError, match=r"killed|exited unexpectedly"):
            list(loader)
        assert dataset.cache.clear().kept_pinned_entries == 0
        wait_for_helpers(tmp_path / "cache")  # what it was downloading stays as long as its helper may write
        dataset.cache.clear()
        assert dataset.cache.statistics().entries == 0


def test_who_needs_the_room_takes_what_ended_workers_left(
    photos: Photos, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = 12 * 32768
    with open_photos(photos, tmp_path / "cache", cache_limit=limit) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork", collate_fn=paths)
        list(loader)
        assert dataset.cache.statistics().pinned_entries > 8
        with Cache(tmp_path / "cache", limit=limit) as cache:
            wanted = [photos.server.url + photos.path(number) for number in range(10)]
            assert len(cache.acquire_many(wanted)) == 10
            cache.release_many(wanted)
        assert "too small to keep the paths" in caplog.text


@pytest.mark.parametrize("options", [{"batch_size": 100}, {"retained_samples": 300}], ids=["batch-size", "retained-samples"])
def test_a_plain_loader_keeps_the_paths_of_large_batches_when_it_is_told(
    server: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    photos = make_small(server, tmp_path, 700)
    with open_photos(photos, tmp_path / "cache", transforms=[], **options) as dataset:
        loader = DataLoader(dataset, batch_size=100, num_workers=1, multiprocessing_context="fork", collate_fn=paths)
        assert gone_of(slowly(loader), dataset) == []


def slowly(batches: Any) -> Iterator[Any]:
    """As a trainer takes them: the worker has made what it may make ahead by then."""
    for batch in batches:
        time.sleep(0.3)
        yield batch


def make_small(server: Any, folder: Path, num: int) -> Photos:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number in range(num):
        server.objects[f"/photos/images/{number:04d}.jpg"] = b"x" * (100 + number)
    table = pa.table({"index": list(range(num)), "image": [f"images/{number:04d}.jpg" for number in range(num)]})
    pq.write_table(table, folder / "small.parquet")
    server.objects["/photos/index.parquet"] = (folder / "small.parquet").read_bytes()
    return Photos(server=server, num=num)


def test_a_plain_loader_of_which_nothing_is_known_says_once_how_many_paths_it_keeps(server: Any, tmp_path: Path) -> None:
    photos, log = make_small(server, tmp_path, 600), tmp_path / "log"
    handler = logging.FileHandler(log)
    plain_loader.logger.addHandler(handler)
    with open_photos(photos, tmp_path / "cache", transforms=[]) as dataset:
        options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork", "collate_fn": paths}
        for num_workers in (2, 3):  # each iteration has workers of its own
            list(DataLoader(dataset, batch_size=8, **options | {"num_workers": num_workers}))
        assert log.read_text().count("samples leave the transforms with paths") == 1
        list(StreamingDataLoader(dataset, batch_size=8, **options))
        assert log.read_text().count("samples leave the transforms with paths") == 1
    plain_loader.logger.removeHandler(handler)
    handler.close()


def test_a_plain_loader_without_workers_says_so_too_and_a_loop_over_samples_does_not(
    server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    photos = make_small(server, tmp_path, 300)
    with open_photos(photos, tmp_path / "cache", transforms=[]) as dataset:
        assert len(list(dataset)) == 300
        assert "samples leave the transforms with paths" not in caplog.text
        assert sum(gone_of(DataLoader(dataset, batch_size=250, collate_fn=paths), dataset) != [] for _ in range(2)) == 2
        assert caplog.text.count("samples leave the transforms with paths") == 1


def test_all_rows_of_one_access_keep_their_paths(server: Any, tmp_path: Path) -> None:
    photos = make_small(server, tmp_path, 300)
    with open_photos(photos, tmp_path / "cache", transforms=[]) as dataset:
        accesses = [paths(dataset.__getitems__(range(start, start + 100))) for start in (0, 100, 200)]
        single = dataset[5]["image"]
        dataset.cache.clear()
        assert all(os.path.exists(path) for access in accesses for path in access)
        for row in range(6, 69):
            dataset[row]
        dataset.cache.clear()
        assert os.path.exists(single)
        assert not os.path.exists(accesses[0][99])


def test_paths_that_the_limit_has_no_room_for_are_given_up_with_a_warning(
    photos: Photos, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_photos(photos, tmp_path / "cache", cache_limit=10 * 32768) as dataset:
        for row in range(8):
            dataset[row]
        assert "too small to keep the paths" not in caplog.text
        for row in range(8, 20):
            dataset[row]
        assert caplog.text.count("too small to keep the paths") == 1


def test_two_datasets_of_a_process_keep_paths_apart(server: Any, tmp_path: Path) -> None:
    photos = make_small(server, tmp_path, 200)
    with open_photos(photos, tmp_path / "cache", transforms=[]) as first, open_photos(photos, tmp_path / "cache") as second:
        many = paths(first.__getitems__(range(100)))
        for row in range(100, 180):
            second[row]
        first.cache.clear()
        assert all(map(os.path.exists, many))
