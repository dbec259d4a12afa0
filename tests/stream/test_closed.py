"""What is used after `close`: one clear error at once, and nothing of it stays behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataset
from sqlstream.cache import Cache
from sqlstream.cache.acquire.owner import Owner
from sqlstream.errors import CacheClosedError, CacheError, ConfigError
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.processes import children, wait_until
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
    "failures": lambda dataset: dataset.failures(),
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
    with pytest.raises(CacheClosedError, match=CLOSED):
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


@pytest.mark.parametrize("is_bypassed", [False, True], ids=["raise", "bypass"])
def test_one_that_is_closed_while_a_thread_reserves_room_is_the_same_error(
    is_bypassed: bool, photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = StreamingDataset(
        photos.src,
        tmp_path / "dst",
        columns_to_download=["image"],
        transforms=[check_bytes],
        cache_limit="10mb",
        on_cache_error="bypass" if is_bypassed else "raise",
    )
    assert dataset[0]["is_right"]
    begin = Owner.transaction

    def closed_first(owner: Owner, *given: Any, **options: Any) -> Any:
        monkeypatch.undo()
        dataset.close()
        return begin(owner, *given, **options)

    monkeypatch.setattr(Owner, "transaction", closed_first)
    with pytest.raises(CacheClosedError, match=CLOSED):
        dataset[1]
    assert isinstance(CacheClosedError(), ConfigError | CacheError)


def test_a_closed_dataset_pins_nothing_while_another_one_uses_the_cache(photos: Photos, tmp_path: Path) -> None:
    other, closing = open_dataset(photos, tmp_path / "dst"), open_dataset(photos, tmp_path / "dst")
    parts = closing.split(val=0.5)
    assert closing[0]["is_right"]
    iterators = [iter(dataset) for dataset in (closing, *parts.values())]
    for iterator in iterators:
        next(iterator)
    assert other.cache.statistics().pinned_entries > 0
    for dataset in (closing, *parts.values()):
        dataset.close()
    assert other.cache.statistics().pinned_entries == 0
    other.close()
    del iterators
    check_invariants(tmp_path / "dst", at_rest=True)


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


@pytest.mark.parametrize("num_caches", [1, 2])
def test_the_datasets_of_a_process_have_one_helper_on_one_cache_and_on_several(
    photos: Photos, tmp_path: Path, num_caches: int
) -> None:
    before = children(os.getpid())
    datasets = [open_dataset(photos, tmp_path / f"dst{number % num_caches}") for number in range(12)]
    iterators = [iter(dataset) for dataset in datasets]
    for _ in range(20):
        assert all(next(iterator)["is_right"] for iterator in iterators)
        assert len(children(os.getpid()) - before) <= 2, "the helper, and the starter that has forked it"
    for dataset in datasets:
        dataset.close()
    assert children(os.getpid()) <= before
    del iterators


def test_a_dataset_that_rests_or_closes_leaves_the_downloads_of_another_alone(
    photos: Photos, server: FaultyHttpServer, tmp_path: Path
) -> None:
    gate = threading.Event()
    for number in range(photos.num):
        server.script(photos.path(number), *[FaultyAnswer(fault=Fault.HOLD, gate=gate)] * 3)
    resting, closing, reading = (open_dataset(photos, tmp_path / name) for name in ("resting", "closing", "reading"))
    samples: list[list[dict[str, Any]]] = []
    errors: list[BaseException] = []

    def read(dataset: StreamingDataset, rows: list[int]) -> None:
        try:
            samples.append([dataset[row] for row in rows])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(dataset, [0, 1])) for dataset in (resting, closing, reading)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(server.requests(photos.path(0))) == 3)
    pid = reading.cache.fetcher.helper_pid
    resting.cache.rest()
    closing.close()
    threads[1].join(300)
    assert [("closed" in str(error)) for error in errors] == [True]
    assert reading.cache.fetcher.helper_pid == pid
    assert reading.cache.fetcher.num_pending == 1
    gate.set()
    for thread in threads:
        thread.join(300)
    assert [[sample["is_right"] for sample in some] for some in samples] == [[True, True]] * 2, "one of them asked again"
    assert len(server.requests(photos.path(0))) == 4
    for dataset in (resting, reading):
        dataset.close()


def test_urls_cannot_be_acquired_of_a_closed_cache(photos: Photos, tmp_path: Path) -> None:
    url = f"{photos.server.url}{photos.path(0)}"
    with Cache(tmp_path / "dst") as cache:
        cache.acquire_many([url])
    with pytest.raises(ConfigError, match=CLOSED):
        cache.acquire_many([url])
    with pytest.raises(ConfigError, match=CLOSED), cache.pinned(url):
        pass
