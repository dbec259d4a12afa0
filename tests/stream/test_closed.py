"""What is used after `close`: one clear error at once, and nothing of it stays behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sqlstream import StreamingDataset
from sqlstream.cache import Cache
from sqlstream.errors import ConfigError
from sqlstream.testing.invariants import check_invariants
from tests.processes import children
from tests.stream.sources import Photos, check_bytes


def open_dataset(photos: Photos, dst: Path) -> StreamingDataset:
    return StreamingDataset(
        photos.src, dst=dst, columns_to_download=["image"], transforms=[check_bytes], shuffle_seed=0, cache_limit="10mb"
    )


CLOSED = r"was closed.*open it again"
USES: dict[str, Callable[[StreamingDataset], object]] = {
    "an access": lambda dataset: dataset[0],
    "a new iteration": lambda dataset: next(iter(dataset)),
    "statistics": lambda dataset: dataset.cache.statistics(),
    "clear": lambda dataset: dataset.cache.clear(),
    "verify": lambda dataset: dataset.cache.verify(),
    "a limit": lambda dataset: setattr(dataset.cache, "limit_bytes", 1),
}


@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("use", USES)
def test_any_use_after_close_is_one_clear_error_at_once(photos: Photos, tmp_path: Path, use: str, is_shared: bool) -> None:
    before = children(os.getpid())
    dst = tmp_path / "dst"
    other = open_dataset(photos, dst) if is_shared else None
    dataset = open_dataset(photos, dst)
    assert dataset[1]["is_right"]
    dataset.close()
    with pytest.raises(ConfigError, match=CLOSED):
        USES[use](dataset)
    if other is not None:
        assert other[0]["is_right"]
        other.close()
    assert children(os.getpid()) <= before
    check_invariants(dst, at_rest=True)


@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "shared"])
def test_a_dataset_closed_in_its_own_loop_ends_it_and_leaves_no_helper(photos: Photos, tmp_path: Path, is_shared: bool) -> None:
    before = children(os.getpid())
    dst = tmp_path / "dst"
    other = open_dataset(photos, dst) if is_shared else None
    dataset = open_dataset(photos, dst)
    iterator = iter(dataset)
    for _ in range(3):
        next(iterator)
    dataset.close()
    with pytest.raises(ConfigError, match=CLOSED):
        next(iterator)
    if other is not None:
        other.close()
    assert children(os.getpid()) <= before
    check_invariants(dst, at_rest=True)


def test_no_helper_outlives_its_dataset_however_many_there_are(photos: Photos, tmp_path: Path) -> None:
    before = children(os.getpid())
    datasets = [open_dataset(photos, tmp_path / "dst") for _ in range(4)]
    iterators = [iter(dataset) for dataset in datasets]
    for dataset, iterator in zip(datasets, iterators, strict=True):
        next(iterator)
        dataset.close()
        assert dataset.cache.fetcher.helper_pid is None
    assert children(os.getpid()) <= before
    del iterators


def test_urls_cannot_be_acquired_of_a_closed_cache(photos: Photos, tmp_path: Path) -> None:
    url = f"{photos.server.url}{photos.path(0)}"
    with Cache(tmp_path / "dst") as cache:
        cache.acquire_many([url])
    with pytest.raises(ConfigError, match=CLOSED):
        cache.acquire_many([url])
    with pytest.raises(ConfigError, match=CLOSED), cache.pinned(url):
        pass
