"""Samples stored within the chain: found in later epochs, under the ledger's rules, with the same samples as without."""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.cache import Cache
from sqlstream.cache.acquire.background import BackgroundThread
from sqlstream.cache.model.refs import STORED_SAMPLE_EXTENSION, charged_bytes
from sqlstream.errors import ConfigError, TransformError
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.transforms import rng
from sqlstream.transforms.base import Sample, Transform
from sqlstream.transforms.presets import CacheTransform, ChooseFieldTransform
from tests.cache.session import Session
from tests.stream.kit import SIZE, Decode, num_decoded, opened, with_transforms
from tests.stream.sources import Photos, make_photos


def jitter(sample: Sample) -> Sample:
    """A random transform, by the sample's generator and by a global one."""
    sample["own"], sample["global"] = float(rng(sample).random()), random.random()
    return sample


def comparable(samples: list[Sample]) -> list[dict[str, Any]]:
    return [{**sample, "pixels": bytes(sample["pixels"].numpy())} for sample in samples]


@pytest.fixture
def photos(server: FaultyHttpServer, tmp_path: Path) -> Photos:
    return make_photos(server, tmp_path, num=48)


def test_a_second_epoch_decodes_nothing_and_downloads_nothing(photos: Photos, tmp_path: Path) -> None:
    with opened(photos, tmp_path, jitter) as dataset:
        first = list(dataset)
        assert num_decoded(tmp_path / "log") == photos.num
        dataset.cache.clear(older_than_seconds=None)  # of everything: sources and stored samples
    with opened(photos, tmp_path, jitter) as dataset:
        list(dataset)
        num_gets, num_decodes = sum(photos.num_gets().values()), num_decoded(tmp_path / "log")
        num_removed = sum(remove(dataset.cache, path) for path in data_files(dataset.cache) if path.suffix == ".jpg")
        assert num_removed == photos.num, "the second epoch must do without the sources"
        second = list(dataset)
        assert num_decoded(tmp_path / "log") == num_decodes
        assert sum(photos.num_gets().values()) == num_gets
        assert dataset.cache.statistics().entries == photos.num
        assert {sample["__epoch__"] for sample in second} == {1}
        assert [sample["own"] for sample in first] != [sample["own"] for sample in second]
    check_invariants(tmp_path / "cache", at_rest=True)


def data_files(cache: Cache) -> list[Path]:
    return [path for path in (cache.path / "data").glob("*/*") if path.is_file()]


def remove(cache: Cache, path: Path) -> bool:
    """Remove one entry, as eviction does."""
    from sqlstream.cache.recovery import recover

    with Session(cache).transaction() as tx:
        rows = list(tx.find([bytes.fromhex(path.name[:32])]).values())
        return bool(recover.remove(tx, Session(cache).disk, rows))


def test_samples_are_the_same_with_and_without_and_in_any_epoch(photos: Photos, tmp_path: Path) -> None:
    with opened(photos, tmp_path) as stored, opened(photos, tmp_path, is_stored=False) as plain:
        for _ in range(2):
            assert comparable(list(stored)) == comparable(list(plain))
        assert comparable([stored[5]]) == comparable([plain[5]])
    assert num_decoded(tmp_path / "log") == 3 * photos.num + 1, "one epoch with, two without"


def test_what_is_drawn_behind_a_point_does_not_depend_on_a_hit(photos: Photos, tmp_path: Path) -> None:
    with opened(photos, tmp_path, jitter) as dataset:
        list(dataset)
        dataset.set_epoch(0)
        found = comparable(list(dataset))
    assert num_decoded(tmp_path / "log") == photos.num
    with opened(photos, tmp_path / "other", jitter) as dataset:
        (tmp_path / "other").mkdir(exist_ok=True)
        assert comparable(list(dataset)) == found


@pytest.mark.parametrize("is_persistent", [False, True])
def test_workers_share_what_is_stored(photos: Photos, tmp_path: Path, is_persistent: bool) -> None:
    with opened(photos, tmp_path, jitter) as dataset:
        loader = StreamingDataLoader(
            *(dataset, 4), num_workers=2, multiprocessing_context="fork", persistent_workers=is_persistent
        )
        epochs = [list(loader) for _ in range(2)]
        assert num_decoded(tmp_path / "log") == photos.num
        rows = [[row for batch in epoch for row in batch["__row__"].tolist()] for epoch in epochs]
        assert all(sorted(of_epoch) == list(range(photos.num)) for of_epoch in rows)
        assert all((batch["__epoch__"] == 1).all() for batch in epochs[1])
    check_invariants(tmp_path / "cache", at_rest=not is_persistent)


def test_random_access_finds_what_the_stream_stored_and_the_other_way_round(photos: Photos, tmp_path: Path) -> None:
    with opened(photos, tmp_path) as dataset:
        accessed = [dataset[i] for i in range(10)] + dataset.__getitems__(list(range(10, 20)))
        assert num_decoded(tmp_path / "log") == 20
        streamed = {sample["__row__"]: sample for sample in dataset}
        assert num_decoded(tmp_path / "log") == photos.num
        assert comparable(accessed) == comparable([streamed[i] for i in range(20)])
        assert comparable([dataset[25]]) == comparable([{**streamed[25], "__epoch__": 1}])
    assert num_decoded(tmp_path / "log") == photos.num


def test_a_stream_resumes_in_the_middle_with_the_same_samples(photos: Photos, tmp_path: Path) -> None:
    with opened(photos, tmp_path, jitter) as dataset:
        whole = comparable(list(dataset))
        state = {**dataset.state_dict(), "epoch": 0, "sample_in_epoch": 20}
    with opened(photos, tmp_path, jitter) as dataset:
        dataset.load_state_dict(state)
        assert comparable(list(dataset)) == whole[20:]
    assert num_decoded(tmp_path / "log") == photos.num


def test_the_ledger_is_asked_once_a_window(photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundThread, "wake", lambda thread: None)  # its transactions depend on the clock
    with opened(photos, tmp_path) as dataset:
        ledger = Session(dataset.cache).database
        num_transactions = []
        for _ in range(3):
            before = ledger.num_transactions
            assert len(list(dataset)) == photos.num
            num_transactions.append(ledger.num_transactions - before)
    # Of 48 samples: half windows of 32 are acquired, 32 samples stored, and the end writes what is left.
    assert num_transactions[0] <= 10, "storing costs a transaction for 32 samples, not one for each"
    assert num_transactions[1] == num_transactions[2] <= 5


def test_a_changed_chain_version_row_or_prefix_is_another_sample(photos: Photos, tmp_path: Path) -> None:
    def run(*transforms: Transform) -> int:
        before = num_decoded(tmp_path / "log")
        with with_transforms(photos, tmp_path / "cache", transforms, max_size=3) as dataset:
            list(dataset)
        return num_decoded(tmp_path / "log") - before

    decode = Decode(tmp_path / "log")
    assert run(CacheTransform("decoded", [decode])) == 3
    assert run(CacheTransform("decoded", [decode])) == 0
    assert run(CacheTransform("decoded", [decode], version=2)) == 3
    assert run(CacheTransform("other", [decode])) == 3
    assert run(CacheTransform("decoded", [Decode(tmp_path / "log", 64)])) == 3
    assert run(jitter, CacheTransform("decoded", [decode])) == 3
    assert run(CacheTransform("decoded", [decode]), jitter) == 0, "what follows is no part of it"


def test_the_later_of_two_points_is_taken_and_the_earlier_one_when_that_is_gone(photos: Photos, tmp_path: Path) -> None:
    log = tmp_path / "second"

    def second(sample: Sample) -> Sample:
        with log.open("a") as file:
            file.write("x\n")
        return {**sample, "sum": int(sample["pixels"].sum())}

    with opened(photos, tmp_path, CacheTransform("summed", [second]), jitter, max_size=20) as dataset:
        first = comparable(list(dataset))
        dataset.set_epoch(0)
        assert comparable(list(dataset)) == first
        assert (num_decoded(tmp_path / "log"), num_decoded(log)) == (20, 20)
        with Session(dataset.cache).transaction() as tx:
            rows = tx.connection.execute("SELECT key, url FROM entry WHERE url LIKE 'summed of%'").fetchall()
        for key, _ in rows:
            assert remove(dataset.cache, Path(key.hex()))
        dataset.set_epoch(0)
        assert comparable(list(dataset)) == first
        assert (num_decoded(tmp_path / "log"), num_decoded(log)) == (20, 40)


def test_draws_before_a_point_are_the_row_s_own_in_every_epoch_found_or_not(
    photos: Photos, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drawn: list[dict[int, tuple[float, float]]] = []
    for is_cleared in (False, False, True):
        with opened(photos, tmp_path, CacheTransform("drawn", [jitter]), max_size=20) as dataset:
            dataset.set_epoch(len(drawn))
            with caplog.at_level(logging.WARNING):
                drawn.append({sample["__row__"]: (sample["own"], sample["global"]) for sample in dataset})
            if is_cleared is False and len(drawn) == 2:
                dataset.cache.clear()
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(set(drawn[0].values())) == 20, "each row draws its own"
    warned = [record.message for record in caplog.records if "random numbers drawn before it" in record.message]
    assert len(warned) == 1, "said once"


def test_predownload_choices_are_stored_apart(photos: Photos, tmp_path: Path) -> None:
    choose = ChooseFieldTransform(["first", "second"], "image")

    def both(sample: Sample) -> Sample:
        return {**sample, "first": sample["image"], "second": f"images/{(sample['__row__'] + 1) % 20:04d}.jpg"}

    with opened(photos, tmp_path, max_size=20, predownload_transforms=[both, choose]) as dataset:
        for _ in range(4):
            for sample in dataset:
                chosen = photos.data(int(sample["__row__"]))
                other = photos.data((int(sample["__row__"]) + 1) % 20)
                assert bytes(sample["pixels"][:32].numpy()) in (hashlib.sha256(d).digest() for d in (chosen, other))
    assert 20 < num_decoded(tmp_path / "log") <= 40


def test_what_cannot_be_stored_is_refused_with_the_reason(photos: Photos, tmp_path: Path) -> None:
    def dataset_of(*transforms: Transform, **options: Any) -> StreamingDataset:
        return with_transforms(photos, tmp_path / "cache", transforms, max_size=5, **options)

    with dataset_of(CacheTransform("x", [])) as dataset, pytest.raises(ConfigError, match="'image' holds the path of a cached"):
        list(dataset)
    with dataset_of(CacheTransform("x", [lambda s: [s, s]])) as dataset, pytest.raises(ConfigError, match="several samples"):
        list(dataset)
    bad = CacheTransform("x", [Decode(tmp_path / "log"), lambda sample: {**sample, "reader": object()}])
    with dataset_of(bad, on_error="raise") as dataset, pytest.raises(TransformError, match="'reader' cannot be stored"):
        list(dataset)
    with pytest.raises(ConfigError, match=r"predownload_transforms\[0\] is a CacheTransform"):
        opened(photos, tmp_path, predownload_transforms=[CacheTransform("x", [])])
    with pytest.raises(ConfigError, match="give version="):
        opened(photos, tmp_path, CacheTransform("x", [AnyThing(iter([1]))]))


class AnyThing:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, sample: Sample) -> Sample:
        return sample


def test_a_failing_sample_is_replaced_and_nothing_is_stored_for_it(photos: Photos, tmp_path: Path) -> None:
    class FailsOn:
        def __call__(self, sample: Sample) -> Sample:
            if sample["__row__"] == 3:
                raise ValueError("three")
            return sample

    transforms = [CacheTransform("checked", [FailsOn()])]
    with opened(photos, tmp_path, *transforms, max_size=30) as dataset:
        for _ in range(2):
            samples = list(dataset)
            assert len(samples) == 30
            assert 3 not in {sample["__row__"] for sample in samples}
    assert num_decoded(tmp_path / "log") <= 31, "the failing row was decoded once, and found when it failed again"


def test_a_sample_larger_than_the_limit_is_not_stored_counted_and_said_once(
    photos: Photos, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = 200_000
    large = CacheTransform("large", [Decode(tmp_path / "log", 2 * limit)])
    with with_transforms(photos, tmp_path / "cache", [large], cache_limit=limit, max_size=12) as dataset:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert len(list(dataset)) == 12
        assert dataset.cache.statistics().unstored_samples == 24
        assert dataset.cache.statistics().stored_samples == 0
    assert len([record for record in caplog.records if "are not stored" in record.message]) == 1
    assert "limit is 200000" in caplog.text
    assert num_decoded(tmp_path / "log") == 24
    check_invariants(tmp_path / "cache", at_rest=True)


def test_a_full_cache_evicts_and_keeps_its_limit(photos: Photos, tmp_path: Path) -> None:
    limit = 400_000  # a third of sources and samples together
    with opened(photos, tmp_path, cache_limit=limit) as dataset:
        expected: dict[int, bytes] = {}
        for _ in range(3):
            samples = list(dataset)
            assert len(samples) == photos.num
            for sample in comparable(samples):
                assert expected.setdefault(sample["__row__"], sample["pixels"]) == sample["pixels"]
            check_invariants(tmp_path / "cache")
            assert dataset.cache.statistics().used_bytes <= limit
    check_invariants(tmp_path / "cache", at_rest=True)


def test_a_damaged_stored_sample_is_made_again(photos: Photos, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(photos, tmp_path, max_size=8) as dataset:
        first = comparable(list(dataset))
        stored = [path for path in data_files(dataset.cache) if path.name.endswith(STORED_SAMPLE_EXTENSION)]
        assert len(stored) == 8
        data = stored[0].read_bytes()
        stored[0].write_bytes(b"\xff" * len(data))  # of the same size: only its reader can tell
        stored[1].write_bytes(b"short")
        stored[2].unlink()
        dataset.set_epoch(0)
        with caplog.at_level(logging.WARNING):
            assert comparable(list(dataset)) == first
        assert num_decoded(tmp_path / "log") == 8 + 3
        assert "damaged and made again" in caplog.text
        dataset.set_epoch(0)
        assert comparable(list(dataset)) == first
        assert num_decoded(tmp_path / "log") == 8 + 3, "it was stored again"
        assert dataset.cache.verify() == []
    check_invariants(tmp_path / "cache", at_rest=True)


def test_a_damaged_stored_sample_that_others_hold_is_made_again_and_left(photos: Photos, tmp_path: Path) -> None:
    with opened(photos, tmp_path, max_size=8) as dataset:
        first = comparable(list(dataset))
        stored = next(path for path in data_files(dataset.cache) if path.name.endswith(STORED_SAMPLE_EXTENSION))
        stored.write_bytes(b"\xff" * stored.stat().st_size)
        with Session(dataset.cache).transaction() as tx:
            tx.add_owner("somebody else", pid=1, host="", name="", limit_bytes=None)
            tx.set_pins("somebody else", [bytes.fromhex(stored.name[:32])])
        dataset.set_epoch(0)
        assert comparable(list(dataset)) == first
        assert num_decoded(tmp_path / "log") == 8 + 1
        assert stored.exists()


def test_a_broken_cache_that_is_bypassed_stores_nothing_and_stops_nothing(photos: Photos, tmp_path: Path) -> None:
    with (
        opened(photos, tmp_path, max_size=12, on_cache_error="bypass") as dataset,
        opened(photos, tmp_path, is_stored=False, max_size=12) as plain,
    ):
        expected = comparable(list(plain))
        Session(dataset.cache).failover._left_alone_until = float("inf")  # it has failed, and nobody tries it again
        assert comparable(list(dataset)) == expected
        assert Session(dataset.cache).downloads.leads == {}


def test_statistics_verify_clear_and_a_rebuild_know_stored_samples(photos: Photos, tmp_path: Path) -> None:
    with opened(photos, tmp_path, max_size=10) as dataset:
        first = comparable(list(dataset))
        size = next(path for path in data_files(dataset.cache) if path.name.endswith(STORED_SAMPLE_EXTENSION)).stat().st_size
        statistics = dataset.cache.statistics()
        assert (statistics.stored_samples, statistics.stored_sample_bytes) == (10, 10 * charged_bytes(size))
        assert statistics.datasets[0].entries == 20
        assert dataset.cache.verify() == []
    (tmp_path / "cache/ledger.sqlite").write_bytes(os.urandom(20_000))
    with opened(photos, tmp_path, max_size=10) as dataset:
        assert comparable(list(dataset)) == first
        assert num_decoded(tmp_path / "log") == 10
        assert dataset.cache.statistics().stored_samples == 10
        assert dataset.cache.verify() == []
        (wrong := data_files(dataset.cache)[0]).write_bytes(b"")
        assert [finding.key for finding in dataset.cache.verify(repair=True)] == [wrong.name[:32]]
    with opened(photos, tmp_path, max_size=10) as dataset:
        list(dataset)
        dataset.cache.clear(dataset=dataset.name)
        assert dataset.cache.statistics().stored_samples <= 10
    check_invariants(tmp_path / "cache", at_rest=True)


def test_local_sources_are_decoded_again_when_they_change(photos: Photos, tmp_path: Path) -> None:
    folder = tmp_path / "local"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.jpg").write_bytes(photos.data(number))
    with StreamingDataset(
        folder,
        tmp_path / "cache",
        data_type="image",
        columns_to_download=["jpg"],
        transforms=[CacheTransform("decoded", [rename, Decode(tmp_path / "log")])],
        show_progress=False,
    ) as dataset:
        for _ in range(2):
            assert len(list(dataset)) == 5
        assert num_decoded(tmp_path / "log") == 5
        (folder / "2.jpg").write_bytes(photos.data(7) + b"changed")
        changed = {sample["__row__"]: bytes(sample["pixels"][:32].numpy()) for sample in dataset}
        assert changed[2] == hashlib.sha256(photos.data(7) + b"changed").digest()
        assert num_decoded(tmp_path / "log") == 6


def rename(sample: Sample) -> Sample:
    sample["image"] = sample.pop("jpg")
    return sample


def test_a_plain_loader_batches_found_samples(photos: Photos, tmp_path: Path) -> None:
    with opened(photos, tmp_path, max_size=8) as dataset:
        for _ in range(2):
            batches = list(DataLoader(dataset, batch_size=4))
            assert [tuple(batch["pixels"].shape) for batch in batches] == [(4, SIZE // 32 * 32)] * 2


def loosely_typed(sample: Sample) -> Sample:
    pixels = torch.arange(6.0).reshape(2, 3).t().requires_grad_()  # [3, 2]
    return {"row": sample["row"], "ordered": OrderedDict(a=1), "bytes": bytearray(b"x"), "path": Path("a"), "pixels": pixels}


def test_a_sample_is_of_the_same_types_whether_it_was_found_or_made(tmp_path: Path) -> None:
    with StreamingDataset(
        [{"row": 1}], tmp_path / "cache", transforms=[CacheTransform("loose", [loosely_typed])], show_progress=False
    ) as dataset:
        made, found = (next(iter(dataset)) for _ in range(2))
        assert dataset.cache.statistics().stored_samples == 1
    assert [type(value) for value in found.values()] == [type(value) for value in made.values()]
    assert made["pixels"].stride() == found["pixels"].stride()
    assert made["pixels"].requires_grad == found["pixels"].requires_grad
    assert found["path"].absolute() == Path.cwd() / "a"
