"""Ranks that are spawned with a dataset, or a loader, of the process that begins them, as Lightning's `ddp_spawn` does."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from sqlstream import Buckets, MultiStreamDataLoader, StreamingDataLoader, StreamingDataset, StreamOptions

NUM_ROWS, NUM_RANKS = 48, 2


def train(rank: int, loader: StreamingDataLoader, directory: str) -> None:
    """Be a rank: write down the rows of its batches."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=rank, world_size=NUM_RANKS)
    rows = [batch["__row__"].tolist() for batch in loader]
    Path(directory, f"{rank}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def train_late(rank: int, loader: StreamingDataLoader, directory: str) -> None:
    """Be a rank that takes an epoch before it joins the group, and with the same workers one behind it."""
    assert sum(len(batch["__row__"]) for batch in loader) == NUM_ROWS, "it is alone"
    train(rank, loader, directory)
    assert sum(len(batch["__row__"]) for batch in loader) == NUM_ROWS, "it is alone again"


def take_streams(rank: int, num_steps: int, directory: str) -> None:
    """Be a rank that takes steps of a stream before it joins the group, in it, and after it, with the same loader."""
    options = StreamOptions.init_group([{"name": "all", "ratio": 1, "batch_size": 8, "batch_gpu": 4}])
    rows = []
    with MultiStreamDataLoader([opened(Path(directory))], options, num_workers=1, epoch_size=num_steps) as loader:
        for is_grouped in (False, True, False):
            if is_grouped:
                dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=rank, world_size=NUM_RANKS)
            rows.append([row for batch in loader for row in batch["__row__"].tolist()])
            if is_grouped:
                dist.destroy_process_group()
    Path(directory, f"{rank}.json").write_text(json.dumps(rows))


def batches_of_ranks(
    loader: StreamingDataLoader, directory: Path, train: Callable[[int, StreamingDataLoader, str], None] = train
) -> list[list[list[int]]]:
    spawn(train, args=(loader, str(directory)), nprocs=NUM_RANKS)  # type: ignore[no-untyped-call]  # torch's
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def opened(directory: Path, **options: Any) -> StreamingDataset:
    table = directory / "t.csv"
    if not table.exists():  # a file written again is another source
        table.write_text("n\n" + "".join(f"{number}\n" for number in range(NUM_ROWS)))
    return StreamingDataset(table, directory / "cache", columns_to_download=[], shuffle_seed=1, **options)


@pytest.mark.parametrize(("num_workers", "context"), [(0, None), (2, "fork"), (2, "spawn")], ids=["alone", "fork", "spawn"])
def test_each_rank_takes_its_own_share(num_workers: int, context: str | None, tmp_path: Path) -> None:
    with opened(tmp_path) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=4, num_workers=num_workers, multiprocessing_context=context)
        found = batches_of_ranks(loader, tmp_path)
        whole = [batch["__row__"].tolist() for batch in StreamingDataLoader(dataset, batch_size=4 * NUM_RANKS)]
    assert [len(batches) for batches in found] == [NUM_ROWS // 4 // NUM_RANKS] * NUM_RANKS
    assert [sorted(chain(*step)) for step in zip(*found, strict=True)] == [sorted(step) for step in whole]


def test_persistent_workers_have_the_place_of_their_trainer(tmp_path: Path) -> None:
    """A process group may be made, and be gone, between two epochs."""
    with opened(tmp_path) as dataset:
        loader = StreamingDataLoader(
            dataset, batch_size=4, num_workers=1, multiprocessing_context="fork", persistent_workers=True
        )
        found = batches_of_ranks(loader, tmp_path, train_late)
    assert [len(batches) for batches in found] == [NUM_ROWS // 4 // NUM_RANKS] * NUM_RANKS
    assert sorted(chain(*chain(*found))) == list(range(NUM_ROWS))


def test_workers_of_streams_have_the_place_of_their_trainer(tmp_path: Path) -> None:
    opened(tmp_path).close()
    spawn(take_streams, args=(2, str(tmp_path)), nprocs=NUM_RANKS)  # type: ignore[no-untyped-call]  # torch's
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(NUM_RANKS))
    assert [len(rows) for rows in first] == [16, 8, 16]
    assert (first[0], first[2]) == (second[0], second[2])
    assert len({*first[0], *first[1], *second[1], *first[2]}) == NUM_ROWS, "steps go on, and no row comes twice"


def test_the_batches_of_buckets_are_dealt_out_to_the_ranks(tmp_path: Path) -> None:
    with opened(tmp_path, batches=Buckets("n % 2", global_batch_size=4)) as dataset:
        found = batches_of_ranks(StreamingDataLoader(dataset), tmp_path)
        whole = [batch["__row__"].tolist() for batch in StreamingDataLoader(dataset)]
    assert [sorted(chain(*step)) for step in zip(*found, strict=True)] == [sorted(step) for step in whole]
