"""Streams of the drop-in: order without a shuffle, how often each comes, batches of one stream."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sqlstream.compat.streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError


def written(directory: Path, first: int, stop: int, **options: Any) -> str:
    """Shards of 4 numbers each."""
    with MDSWriter(out=str(directory), columns={"n": "int"}, size_limit=100, **options) as writer:
        for number in range(first, stop):
            writer.write({"n": number})
    return str(directory)


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """12 numbers from 0 on, 24 from 100 on."""
    return [written(tmp_path / "small", 0, 12), written(tmp_path / "large", 100, 124)]


def numbers(dataset: StreamingDataset) -> list[int]:
    return [sample["n"] for sample in dataset]


def num_small(found: list[int]) -> int:
    return sum(number < 100 for number in found)


def test_without_a_shuffle_streams_follow_one_another(two: list[str]) -> None:
    dataset = StreamingDataset(streams=[Stream(local=local) for local in two], batch_size=4)
    assert numbers(dataset) == [*range(12), *range(100, 124)]
    assert (dataset.size, dataset.epoch_size, len(dataset), dataset.num_streams) == (36, 36, 36, 2)
    assert [dataset[at]["n"] for at in (0, 11, 12, -1)] == [0, 11, 100, 123]
    assert dataset.samples_per_stream.tolist() == [12, 24]
    num_shards = dataset.shards_per_stream.tolist()
    assert dataset.stream_per_shard.tolist() == [0] * num_shards[0] + [1] * num_shards[1]
    assert min(num_shards) > 1


def test_shuffled_streams_come_mixed_each_sample_once_an_epoch(two: list[str]) -> None:
    dataset = StreamingDataset(streams=[Stream(local=local) for local in two], batch_size=4, shuffle=True)
    epochs = [numbers(dataset) for _ in range(2)]
    for found in epochs:
        assert sorted(found) == [*range(12), *range(100, 124)]
        assert 0 < num_small(found[:18]) < 12
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_canonical_nodes", [2, 3, 12])
def test_canonical_nodes_have_each_sample_of_all_streams_once_an_epoch(
    num_canonical_nodes: int, shuffle: bool, two: list[str]
) -> None:
    streams = [Stream(local=local) for local in two]
    given: dict[str, Any] = {"streams": streams, "batch_size": 12, "shuffle": shuffle}
    dataset = StreamingDataset(num_canonical_nodes=num_canonical_nodes, **given)
    epochs = [numbers(dataset) for _ in range(3)]
    assert [sorted(found) for found in epochs] == [[*range(12), *range(100, 124)]] * 3
    other = StreamingDataset(**given)
    for number in (2, 1):
        dataset.set_epoch(number)
        other.load_state_dict(dataset.state_dict(12, from_beginning=True))
        assert (numbers(other), other.num_canonical_nodes) == (epochs[number][12:], num_canonical_nodes)


@pytest.mark.parametrize(
    ("shares", "epoch_size", "want"),
    [
        ([{"proportion": 0.75}, {"proportion": 0.25}], 40, (30, 10)),
        ([{"proportion": 3}, {"proportion": 1}], None, (27, 9)),
        ([{"repeat": 2.5}, {"choose": 6}], None, (30, 6)),
        ([{}, {"repeat": 0.5}], None, (12, 12)),
        ([{}, {}], "18", (6, 12)),
    ],
)
def test_shares_of_streams_are_exact_in_each_epoch(shares: Any, epoch_size: Any, want: tuple[int, int], two: list[str]) -> None:
    streams = [Stream(local=local, **share) for local, share in zip(two, shares, strict=True)]
    for shuffle in (False, True):
        dataset = StreamingDataset(streams=streams, epoch_size=epoch_size, batch_size=2, shuffle=shuffle)
        epochs = [numbers(dataset) for _ in range(2)]
        assert [(num_small(found), len(found) - num_small(found)) for found in epochs] == [want, want]
        counts = Counter(epochs[0] + epochs[1])
        for stream in (range(12), range(100, 124)):
            times = [counts[number] for number in stream]
            assert max(times) - min(times) <= 1, "a stream goes on where it was"


def test_one_stream_may_be_repeated_or_cut(two: list[str]) -> None:
    for share, want in (({"repeat": 2}, 24), ({"choose": 5}, 5)):
        assert len(numbers(StreamingDataset(streams=[Stream(local=two[0], **share)], batch_size=1))) == want  # type: ignore[arg-type]  # either
    assert len(numbers(StreamingDataset(local=two[1], epoch_size=10, batch_size=1, shuffle=True))) == 10


def test_on_two_nodes_each_rank_has_batches_of_one_stream(two: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"batching_method": "device_per_stream", "batch_size": 3, "shuffle": True}
    found: list[int] = []
    for rank in range(2):
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
            monkeypatch.setenv(name, str(value))
        dataset = StreamingDataset(streams=[Stream(local=local) for local in two], **options)
        batches = [batch["n"].tolist() for batch in StreamingDataLoader(dataset, batch_size=3)]
        assert all(len({number < 100 for number in batch}) == 1 for batch in batches)
        found += [number for batch in batches for number in batch]
    assert sorted(found) == [*range(12), *range(100, 124)]


@pytest.mark.parametrize("method", ["per_stream", "device_per_stream"])
def test_batches_come_of_one_stream_each(method: str, two: list[str]) -> None:
    dataset = StreamingDataset(
        streams=[Stream(local=local) for local in two], shuffle=True, batch_size=4, batching_method=method
    )
    batches = [batch["n"].tolist() for batch in StreamingDataLoader(dataset, batch_size=4)]
    assert sorted(number for batch in batches for number in batch) == [*range(12), *range(100, 124)]
    assert {num_small(batch) for batch in batches} == {0, 4}


@pytest.mark.parametrize("method", ["per_stream", "device_per_stream"])
def test_an_epoch_of_batches_of_one_stream_has_as_many_as_hold_the_samples_that_are_asked_for(
    method: str, two: list[str]
) -> None:
    streams = [Stream(local=local, proportion=share) for local, share in zip(two, (1, 3), strict=True)]
    dataset = StreamingDataset(streams=streams, batch_size=4, batching_method=method, epoch_size=30)
    assert len(numbers(dataset)) == len(dataset) == 32
    assert len(StreamingDataLoader(dataset, batch_size=4)) == 8


@pytest.mark.parametrize(
    ("shares", "epoch_size", "want"),
    [
        ([{}, {}], None, [(12 / 36, 1, 12), (24 / 36, 1, 24)]),
        ([{}, {}], 18, [(12 / 36, 0.5, 6), (24 / 36, 0.5, 12)]),
        ([{"proportion": 3}, {"proportion": 1}], None, [(0.75, 27 / 12, 27), (0.25, 9 / 24, 9)]),
        ([{"proportion": 3}, {"proportion": 1}], 40, [(0.75, 30 / 12, 30), (0.25, 10 / 24, 10)]),
        ([{"repeat": 2}, {"choose": 6}], None, [(0.8, 2, 24), (0.2, 0.25, 6)]),
    ],
)
def test_open_streams_say_what_their_shares_come_to(shares: Any, epoch_size: Any, want: Any, two: list[str]) -> None:
    given = [Stream(local=local, **share) for local, share in zip(two, shares, strict=True)]
    dataset = StreamingDataset(streams=given, batch_size=4, epoch_size=epoch_size)
    assert [(one.proportion, one.repeat, one.choose) for one in dataset.streams] == want  # as MosaicML's do
    assert [stream.share for stream in given] == shares, "the user's own stay as they are"
    again = StreamingDataset(streams=dataset.streams, batch_size=4, epoch_size=epoch_size)
    assert [(one.proportion, one.repeat, one.choose) for one in again.streams] == want
    assert numbers(again) == numbers(dataset)


def test_a_stratified_batch_has_its_share_of_each_stream(two: list[str]) -> None:
    streams = [Stream(local=local) for local in two]
    dataset = StreamingDataset(streams=streams, shuffle=True, batch_size=6, batching_method="stratified")
    assert {num_small(batch["n"].tolist()) for batch in StreamingDataLoader(dataset, batch_size=6)} == {2}


def test_streams_take_what_the_dataset_says_and_stay_as_they_are(tmp_path: Path) -> None:
    written(tmp_path / "a/train", 0, 4)
    written(tmp_path / "b/val", 4, 8)
    streams = [Stream(local=str(tmp_path / "a")), Stream(local=str(tmp_path / "b"), split="val", download_retry=7)]
    dataset = StreamingDataset(streams=streams, split="train", batch_size=1)
    assert numbers(dataset) == [*range(8)]
    assert [stream.split for stream in dataset.streams] == ["train", "val"]
    assert [stream.download_retry for stream in dataset.streams] == [2, 7]
    assert [stream.split for stream in streams] == ["", "val"]


def test_a_loader_goes_on_with_a_mixture(two: list[str]) -> None:
    dataset = StreamingDataset(streams=[Stream(local=local) for local in two], shuffle=True, batch_size=4)
    loader = StreamingDataLoader(dataset, batch_size=4, num_workers=1)
    batches = iter(loader)
    next(batches)
    state, rest = loader.state_dict(), [batch["n"].tolist() for batch in batches]
    again = StreamingDataset(streams=[Stream(local=local) for local in two], shuffle=True, batch_size=4)
    other = StreamingDataLoader(again, batch_size=4)
    other.load_state_dict(state)
    assert [batch["n"].tolist() for batch in other] == rest


def test_contradictions_of_shares_are_refused(two: list[str]) -> None:
    with pytest.raises(ConfigError, match="proportion and repeat are given"):
        Stream(local=two[0], proportion=1, repeat=1)
    with pytest.raises(ConfigError, match="choose=-1 is out of range: give 0 or more"):
        Stream(local=two[0], choose=-1)
    for name in ("proportion", "repeat", "choose", "download_retry", "download_timeout"):
        wrong: dict[str, Any] = {name: "1"}
        with pytest.raises(ConfigError, match=f"{name}='1' is no .*number: give 0"):
            Stream(local=two[0], **wrong)
    with pytest.raises(ConfigError, match="streams has 3, which is no stream: give Stream"):
        StreamingDataset(streams=[3])  # type: ignore[list-item]  # as a caller without types does
    with pytest.raises(ConfigError, match=r"Stream\(local='.*large'\) has no proportion"):
        StreamingDataset(streams=[Stream(local=two[0], proportion=1), Stream(local=two[1])])
    with pytest.raises(ConfigError, match="epoch_size=5 and repeat= or choose="):
        StreamingDataset(streams=[Stream(local=two[0], choose=3), Stream(local=two[1])], epoch_size=5)
    with pytest.raises(ConfigError, match="sampling_method='fixed'"):
        StreamingDataset(streams=[Stream(local=two[0], choose=3)], sampling_method="fixed")
    assert len(StreamingDataset(local=two[0], sampling_method="fixed")) == 12, "nothing is sampled"


def test_hashes_that_are_asked_for_must_be_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    local = written(tmp_path / "hashed", 0, 4, hashes=["sha1"], compression="gz")
    with caplog.at_level(logging.WARNING):
        assert numbers(StreamingDataset(local=local, validate_hash="sha1")) == [0, 1, 2, 3]
    assert caplog.text == ""
    with pytest.raises(ConfigError, match=r"validate_hash='md5' is no hash of .* there are 'sha1'"):
        StreamingDataset(local=local, validate_hash="md5")
