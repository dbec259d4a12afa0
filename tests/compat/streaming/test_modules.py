"""Modules below MosaicML's packages: users' scripts import from them, too."""

from __future__ import annotations

import hashlib
import importlib
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from sqlstream.compat import streaming
from sqlstream.compat.streaming.base import distributed
from sqlstream.compat.streaming.base.format.index import get_index_basename
from sqlstream.compat.streaming.base.hashing import get_hash, get_hashes, is_hash
from sqlstream.compat.streaming.base.world import World
from sqlstream.errors import ConfigError
from tests.compat.imports import with_our_imports


@pytest.mark.parametrize(
    "line",
    [
        "from streaming.base.array import Array",
        "from streaming.base.dataloader import StreamingDataLoader",
        "from streaming.base.dataset import StreamingDataset",
        "from streaming.base.distributed import all_gather, all_gather_object, barrier, broadcast, get_local_rank",
        "from streaming.base.distributed import get_local_world_size, get_rank, get_world_size, maybe_init_dist",
        "from streaming.base.format import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter",
        "from streaming.base.format.index import get_index_basename",
        "from streaming.base.format.json import JSONWriter",
        "from streaming.base.format.json.writer import JSONWriter",
        "from streaming.base.format.mds import MDSWriter",
        "from streaming.base.format.mds.encodings import Encoding, _encodings, get_mds_encodings, is_mds_encoding",
        "from streaming.base.format.mds.writer import MDSWriter",
        "from streaming.base.format.xsv import CSVWriter, TSVWriter, XSVWriter",
        "from streaming.base.format.xsv.writer import CSVWriter, TSVWriter, XSVWriter",
        "from streaming.base.hashing import get_hash, get_hashes, is_hash",
        "from streaming.base.local import LocalDataset",
        "from streaming.base.stream import Stream",
        "from streaming.base.util import clean_stale_shared_memory, merge_index, retry",
        "from streaming.base.world import World",
        "from streaming.multimodal.webvid import StreamingInsideWebVid",
        "from streaming.text.c4 import StreamingC4",
        "from streaming.text.enwiki import StreamingEnWiki",
        "from streaming.text.pile import StreamingPile",
        "from streaming.vision.ade20k import StreamingADE20K",
        "from streaming.vision.base import StreamingVisionDataset",
        "from streaming.vision.cifar10 import StreamingCIFAR10",
        "from streaming.vision.coco import StreamingCOCO",
        "from streaming.vision.imagenet import StreamingImageNet",
    ],
)
def test_scripts_import_from_where_theirs_has_a_name(line: str) -> None:
    exec(with_our_imports(line))


def test_classes_are_the_same_wherever_they_are_imported_from() -> None:
    for name in ("text.c4.StreamingC4", "vision.imagenet.StreamingImageNet", "base.format.mds.writer.MDSWriter"):
        module, _, kind = name.rpartition(".")
        package = streaming if kind == "MDSWriter" else getattr(streaming, module.partition(".")[0])
        assert getattr(importlib.import_module(f"{streaming.__name__}.{module}"), kind) is getattr(package, kind)


def test_hashes_are_those_of_hashlib_and_xxhash() -> None:
    assert get_hash("sha1", b"abc") == hashlib.sha1(b"abc").hexdigest()
    assert get_hash("xxh64", b"") == "ef46db3751d8e999"
    assert {"md5", "sha256", "xxh3_128"} <= get_hashes()
    assert all(map(is_hash, get_hashes()))
    assert not is_hash("shake_128")
    with pytest.raises(ValueError, match="'sha0', which is unknown"):
        get_hash("sha0", b"")


def test_the_index_is_called_as_there() -> None:
    assert get_index_basename() == "index.json"


# -- the place of a process ----


class Places(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return World.detect().to_json()


def launched(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int, local_world_size: int) -> None:
    """Variables as torchrun sets them."""
    place = {"RANK": rank, "LOCAL_RANK": rank % local_world_size, "WORLD_SIZE": world_size}
    place |= {"LOCAL_WORLD_SIZE": local_world_size, "GROUP_RANK": rank // local_world_size}
    for name, number in place.items():
        monkeypatch.setenv(name, str(number))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_worker_is_one_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 5, 8, 4)
    assert [distributed.get_rank(), distributed.get_world_size()] == [5, 8]
    assert [distributed.get_local_rank(), distributed.get_local_world_size()] == [1, 4]
    world = World.detect()
    assert (world.node, world.num_nodes, world.rank, world.rank_of_node, world.num_workers) == (1, 2, 5, 1, 8)
    assert not world.is_leader
    loader: Any = DataLoader(Places(), batch_size=2, num_workers=2, collate_fn=list, multiprocessing_context="fork")
    found = [batch[0] for batch in loader]
    names = ("worker", "num_workers", "worker_of_node", "workers_per_node", "worker_of_rank", "workers_per_rank", "rank")
    assert [[place[name] for name in names] for place in found] == [[10, 16, 2, 8, 0, 2, 5], [11, 16, 3, 8, 1, 2, 5]]


def test_replicated_ranks_count_as_one() -> None:
    world = World(num_nodes=2, ranks_per_node=4, workers_per_rank=1, worker=5)
    assert world.copy().to_json() == world.to_json()
    pairs = world.replicate(2)
    assert (pairs.num_ranks, pairs.rank, pairs.num_nodes, pairs.ranks_per_node) == (4, 2, 1, 4)
    assert world.replicate(8).is_leader
    with pytest.raises(ConfigError, match="replication=3 does not divide 8 ranks"):
        world.replicate(3)


def gathered(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    number = torch.tensor([rank + 1])  # [1]
    distributed.broadcast(number, 1)
    both = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    distributed.all_gather(both, torch.tensor([rank]))
    found = [number.item(), [one.item() for one in both], distributed.all_gather_object(f"rank {rank}")]
    distributed.barrier()
    Path(folder, str(rank)).write_text(repr([*found, distributed.maybe_init_dist()]))
    torch.distributed.destroy_process_group()


def test_ranks_gather_what_each_has(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=gathered, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    expected = repr([2, [0, 1], ["rank 0", "rank 1"], False])
    assert [(tmp_path / name).read_text() for name in "01"] == [expected, expected]


def test_without_a_group_one_rank_is_all_and_several_are_told_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.endswith(("RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)
    distributed.barrier()
    assert distributed.all_gather_object("alone") == ["alone"]
    assert not distributed.maybe_init_dist()
    launched(monkeypatch, 1, 2, 2)
    with pytest.raises(ConfigError, match="all_gather_object on 2 ranks without a process group: call"):
        distributed.all_gather_object("one of two")
