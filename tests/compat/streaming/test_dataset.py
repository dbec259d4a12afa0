"""The drop-in's StreamingDataset: places, samples by number and in an iteration, sizes."""

from __future__ import annotations

import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from sqlstream import StreamingDataset as OurDataset
from sqlstream.compat.streaming import LocalDataset, MDSWriter, StreamingDataLoader, StreamingDataset
from sqlstream.compat.streaming.base.util import clean_stale_shared_memory
from sqlstream.compat.streaming.translation.items import MakeItem, methods_of
from sqlstream.errors import ConfigError, TransformError
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.transforms.base import Chain
from tests.compat.streaming.kit import Pairs, Sums, copied, golden, keys, served
from tests.goldens import FIXTURES, as_json

NAMES = ["plain", "empty_shard", "fixed_only", "bypass", "merged", "jsonl", "csv", "tsv", "xsv", "zstd", "jsonl_zstd"]


@pytest.mark.parametrize("name", NAMES)
def test_shards_in_local_are_read_in_place_in_their_order(name: str, tmp_path: Path) -> None:
    local = copied(name, tmp_path)
    before = {path.relative_to(local) for path in local.rglob("*")}
    with StreamingDataset(local=str(local), batch_size=2) as dataset:
        assert [as_json(sample) for sample in dataset] == golden(name)
        assert [as_json(dataset[number]) for number in range(dataset.size)] == golden(name)
    after = {path.relative_to(local) for path in local.rglob("*") if ".sqlstream" not in path.parts}
    assert after == before
    assert (local / ".sqlstream/FORMAT").exists()


def test_remote_shards_come_into_a_cache_below_local(server: FaultyHttpServer, tmp_path: Path) -> None:
    remote, local = served(server, "zstd").removesuffix("/zstd"), tmp_path / "local"
    with StreamingDataset(remote=remote, local=str(local), split="zstd", batch_size=2, cache_limit="10mb") as dataset:
        assert [as_json(sample) for sample in dataset] == golden("zstd")
        assert dataset.cache_usage > 0
    assert [path.name for path in local.iterdir()] == [".sqlstream"]


def test_a_local_that_holds_all_shards_is_read_in_place_of_its_remote(tmp_path: Path) -> None:
    local = copied("plain", tmp_path / "local")
    remote = str(tmp_path / "not there")
    with StreamingDataset(remote=remote, local=str(local.parent), split="plain", batch_size=2) as dataset:
        assert [as_json(sample) for sample in dataset] == golden("plain")
    next(local.glob("*.mds")).unlink()
    with pytest.raises(FileNotFoundError, match="not there"):
        StreamingDataset(remote=remote, local=str(local.parent), split="plain", batch_size=2)


def test_a_local_without_an_index_needs_a_remote(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"index\.json is not there: give remote="):
        StreamingDataset(local=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"index\.json is not there: give remote="):
        LocalDataset(str(tmp_path / "nowhere"))


def test_samples_by_number_by_slices_lists_and_arrays_are_theirs(tmp_path: Path) -> None:
    dataset, there = StreamingDataset(local=str(copied("plain", tmp_path))), golden("plain")
    indices = [-1, 3, [2, -4], slice(-1, -6, -2), np.array([1, -2]), [[0], [1, [2]]], slice(None)]
    want = [
        *(there[-1], there[3], [there[2], there[-4]], there[-1:-6:-2], [there[1], there[-2]]),
        *([[there[0]], [there[1], [there[2]]]], there),
    ]
    assert [as_json(dataset[at]) for at in indices] == want
    for number in (dataset.size, -dataset.size - 1):
        with pytest.raises(IndexError, match=str(number)):
            dataset[number]
    with pytest.raises(ConfigError, match="str"):
        dataset["plain"]


def test_numbers_of_shards_and_samples_have_their_names(tmp_path: Path) -> None:
    dataset = StreamingDataset(local=str(copied("empty_shard", tmp_path)), shuffle_seed=3, batch_size=2)
    assert dataset.size == dataset.num_samples == len(dataset) == len(golden("empty_shard"))
    assert dataset.samples_per_shard.tolist() == [len(shard) for shard in dataset.shards]
    assert dataset.num_shards == len(dataset.shards)
    assert (dataset.shuffle_seed, dataset.shuffle, dataset.batch_size, dataset.next_epoch) == (3, False, 2, 0)
    dataset.next_epoch = 4
    assert dataset.epoch == 4
    clean_stale_shared_memory()


def test_len_is_of_this_rank_and_size_is_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = StreamingDataset(local=str(copied("plain", tmp_path)), batch_size=2)
    for name, value in {"RANK": 1, "WORLD_SIZE": 5, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 5}.items():
        monkeypatch.setenv(name, str(value))
    assert (len(dataset), dataset.size) == (3, 12)
    assert len(DataLoader(dataset, batch_size=2)) == 2
    assert len(list(dataset)) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_subclass_makes_the_items_of_an_iteration_the_same_with_any_number_of_workers(workers: int, tmp_path: Path) -> None:
    texts = [sample["str"] for sample in golden("plain")]
    dataset = Pairs(transform=len, local=str(copied("plain", tmp_path)), batch_size=3, shuffle=True)
    alone: list[Any] = list(dataset)
    assert [number for number, _, _ in alone] != list(range(12))
    assert sorted((number, length) for number, length, _ in alone) == [(n, len(text)) for n, text in enumerate(texts)]
    dataset.set_epoch(0)
    batches = DataLoader(dataset, batch_size=3, num_workers=workers, collate_fn=list)
    assert [item for batch in batches for item in batch] == alone
    assert dataset[4][:2] == (4, len(texts[4]))


def test_an_item_may_be_made_of_other_samples(tmp_path: Path) -> None:
    dataset = Sums(local=str(copied("plain", tmp_path)), batch_size=3)
    numbers = [sample["u8"]["value"] for sample in golden("plain")]
    want = [first + second for first, second in zip(numbers, [*numbers[1:], numbers[0]], strict=True)]
    assert list(dataset) == want
    assert [dataset[3], dataset[[1, 2]]] == [want[3], want[1:3]]


def test_an_error_of_a_subclass_ends_the_iteration_and_names_it(tmp_path: Path) -> None:
    def fails(text: str) -> None:
        raise ValueError(f"no {text!r}")

    dataset = Pairs(transform=fails, local=str(copied("plain", tmp_path)), batch_size=3)
    with pytest.raises(TransformError, match=r"Pairs\.__getitem__ failed"):
        list(dataset)


def test_a_missing_shard_is_an_error_and_no_short_epoch(tmp_path: Path) -> None:
    local = copied("plain", tmp_path)
    dataset = StreamingDataset(local=str(local), batch_size=2)
    sorted(local.glob("*.mds"))[3].unlink()
    with pytest.raises(FileNotFoundError, match=r"00003\.mds"):
        list(dataset)


def test_a_dataset_pickles_with_its_class_and_makes_the_same_items(tmp_path: Path) -> None:
    dataset = Pairs(local=str(copied("plain", tmp_path)), batch_size=3, shuffle=True)
    again = pickle.loads(pickle.dumps(dataset))
    assert list(again) == list(dataset)


def test_several_datasets_read_one_local_at_once(tmp_path: Path) -> None:
    local = str(copied("plain", tmp_path))
    first, second = (StreamingDataset(local=local, batch_size=2) for _ in range(2))
    together = list(zip(first, second, strict=True))
    assert keys(one for one, _ in together) == keys(other for _, other in together)


def test_a_local_dataset_is_a_map(tmp_path: Path) -> None:
    dataset = LocalDataset(str(copied("plain", tmp_path).parent), "plain")
    assert len(dataset) == dataset.size == 12
    loader: Any = DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=list)
    assert sorted(keys(sample for batch in loader for sample in batch)) == sorted(keys(dataset[:]))


def test_a_loader_takes_torchs_parameters_by_position_and_refuses_another_order(tmp_path: Path) -> None:
    dataset = StreamingDataset(local=str(copied("fixed_only", tmp_path)))
    loader = StreamingDataLoader(dataset, 2, False, None, None, 0, list)
    assert keys(sample for batch in loader for sample in batch) == keys(dataset[:])
    for name, value in {"shuffle": True, "sampler": [0], "batch_sampler": [[0]], "in_order": False}.items():
        with pytest.raises(ConfigError, match=name):
            StreamingDataLoader(dataset, **{name: value})
    with pytest.raises(ConfigError, match="not list"):
        StreamingDataLoader([1, 2])


def test_shards_that_are_not_theirs_are_refused(tmp_path: Path) -> None:
    local = shutil.copytree(FIXTURES / "wds", tmp_path / "wids")
    with pytest.raises(ConfigError, match="no shards of MosaicML Streaming"):
        StreamingDataset(local=str(local))


def calls_of(samples: Iterator[Any]) -> int:
    """Calls of Python and C that the next samples take."""
    next(samples)  # the engine is made, the first window is planned
    num_calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for _ in range(160):
            next(samples)
    finally:
        sys.setprofile(None)
    return num_calls


def test_a_sample_takes_as_many_calls_as_with_our_own_dataset(tmp_path: Path) -> None:
    """At most 5 % more; what a subclass makes is compared with a transform that makes it."""
    with MDSWriter(out=str(tmp_path / "mds"), columns={"n": "int", "str": "str"}) as writer:
        for number in range(200):
            writer.write({"n": number, "str": "text"})
    options: dict[str, Any] = {"cache_limit": None, "shuffle_seed": 9176, "batch_size": 4}
    theirs: dict[str, Any] = {"local": str(tmp_path / "mds"), "shuffle": True, "batch_size": 4}
    with OurDataset(tmp_path / "mds", tmp_path / "cache", show_progress=False, **options) as ours:
        assert calls_of(iter(StreamingDataset(**theirs))) <= 1.05 * calls_of(iter(ours))

    def make(sample: dict[str, Any]) -> dict[str, Any]:
        return {"item": (sample["n"], sample["str"], int(np.random.randint(1 << 30)))}

    with OurDataset(tmp_path / "mds", tmp_path / "cache", show_progress=False, transforms=[make], **options) as ours:
        assert calls_of(iter(Pairs(**theirs))) <= 1.05 * calls_of(iter(ours))


class Titles(StreamingDataset):
    """Items of which the code shows that they draw nothing, until a function is given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.transform: Any = None

    def __getitem__(self, at: Any) -> Any:
        sample = super().__getitem__(at)
        return sample["n"], sample["str"].title() if self.transform is None else self.transform(sample["str"])


def drawing(text: str) -> int:
    return int(np.random.randint(1 << 30))


def test_items_are_seeded_from_the_moment_on_that_their_code_may_draw(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "mds"), columns={"n": "int", "str": "str"}) as writer:
        for number in range(8):
            writer.write({"n": number, "str": "a text"})
    with Titles(local=str(tmp_path / "mds"), shuffle=True, batch_size=2) as dataset:
        chain = Chain([MakeItem(dataset, methods_of(StreamingDataset))], seed=1, stage=1)
        assert chain.cannot_draw(), "its samples are not seeded"
        first: list[Any] = list(dataset)
        assert sorted(first) == [(number, "A Text") for number in range(8)]
        dataset.transform = drawing
        assert not chain.cannot_draw()
        items = []
        for seed in (1, 2):
            np.random.seed(seed)
            dataset.set_epoch(1)
            items.append(list(dataset))
        assert items[0] == items[1]


def test_a_method_that_a_class_is_given_later_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MDSWriter(out=str(tmp_path / "mds"), columns={"n": "int"}) as writer:
        writer.write({"n": 1})
    with Titles(local=str(tmp_path / "mds"), shuffle=False, batch_size=1) as dataset:
        chain = Chain([MakeItem(dataset, methods_of(StreamingDataset))], seed=1, stage=1)
        assert chain.cannot_draw()
        monkeypatch.setattr(Titles, "__getitem__", lambda self, at: np.random.randint(8))
        assert not chain.cannot_draw()
        monkeypatch.undo()
        assert chain.cannot_draw()
        monkeypatch.setattr(Titles, "get_item", lambda self, at: np.random.randint(8), raising=False)
        assert not chain.cannot_draw()
        monkeypatch.undo()
        monkeypatch.setattr(Titles, "size", property(lambda self: np.random.randint(8)), raising=False)
        assert not chain.cannot_draw(), "methods of ours ask for it"
