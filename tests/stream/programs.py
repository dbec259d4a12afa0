"""Programs that process tests run: small user scripts, in processes of their own."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from sqlstream import MultiStreamDataLoader, StreamingDataLoader, StreamingDataset, StreamOptions
from tests.stream.bucket_runs import BUDGET, LANES, NUM_LANES, drawn, seen
from tests.stream.multi_jobs import SIZES, opened
from tests.stream.sources import check_bytes
from tests.stream.tables import rows_of


def open_dataset(src: str, dst: str, **options: Any) -> StreamingDataset:
    return StreamingDataset(src, dst, columns_to_download=["image"], transforms=[check_bytes], show_progress=False, **options)


def access_then_fork(src: str, dst: str) -> None:
    """The plainest script: look at one sample, then train with forked workers."""
    dataset = open_dataset(src, dst, shuffle_seed=1, batch_size=4)
    assert dataset[0]["is_right"]
    loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork")
    rows: list[int] = []
    for batch in loader:
        assert all(batch["is_right"])
        rows += batch["__row__"].tolist()
    assert sorted(rows) == list(range(len(dataset)))
    print("done", flush=True)


def open_then_fork(src: str, dst: str) -> None:
    """Open a dataset, and another one in a forked process that is no DataLoader worker."""
    for is_child in (False, True):
        pid = os.fork() if is_child else 0
        if pid == 0:
            with StreamingDataset(src, dst, columns_to_download=[], show_progress=False) as dataset:
                assert sum(1 for _ in dataset) == len(dataset)
            if is_child:
                os._exit(0)
        else:
            assert os.waitpid(pid, 0)[1] == 0
    print("done", flush=True)


def train(src: str, dst: str, limit: str, seed: str, num_epochs: str) -> None:
    """Two workers, a few epochs, every byte checked."""
    dataset = open_dataset(src, dst, cache_limit=int(limit) if limit != "none" else None, shuffle_seed=int(seed), batch_size=4)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork")
    for _ in range(int(num_epochs)):
        rows: list[int] = []
        for batch in loader:
            assert all(batch["is_right"])
            rows += batch["__row__"].tolist()
        assert sorted(rows) == list(range(len(dataset))), "an epoch is every row once"
    print("done", flush=True)


def access_at_random(src: str, dst: str, limit: str, num_accesses: str) -> None:
    """Random access, while others stream."""
    dataset = open_dataset(src, dst, cache_limit=int(limit))
    rng = random.Random(0)
    for _ in range(int(num_accesses)):
        row = rng.randrange(len(dataset))
        sample = dataset[row]
        assert sample["__row__"] == row
        assert sample["is_right"]
    print("done", flush=True)


def stream_until_interrupted(src: str, dst: str, num_workers: str) -> None:
    """Streams without end; the test presses Ctrl-C."""
    dataset = open_dataset(src, dst, infinite_iteration=True, batch_size=4, cache_limit=300_000)
    loader = DataLoader(dataset, batch_size=4, num_workers=int(num_workers))
    is_interrupted = False
    try:
        for number, _ in enumerate(loader):
            if number == 3:
                print("streaming", flush=True)
    except KeyboardInterrupt:
        is_interrupted = True
        del loader
        dataset.close()
    assert is_interrupted
    print("ended", threading.active_count(), flush=True)
    os._exit(0)


def train_rank(src: str, folder: str, global_batch_size: str, num_workers: str, last_step: str) -> None:
    """A rank under torchrun: two epochs, each step's rows written down, the state saved when all ranks have done the step.

    After `last_step`, which is written down but not saved, it waits to be killed.
    """
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dataset = StreamingDataset(src, Path(folder) / "cache", shuffle_seed=5, show_progress=False)
    loader = StreamingDataLoader(
        dataset, batch_size=int(global_batch_size) // world_size, num_workers=int(num_workers), collate_fn=rows_of
    )
    state_path, step = Path(folder) / "state.json", 0
    if state_path.exists():
        saved = json.loads(state_path.read_text())
        step = saved["step"]
        loader.load_state_dict(saved["state"])
    dist.barrier()
    with (Path(folder) / f"rank-{rank}-of-{world_size}.jsonl").open("a") as log:
        while dataset.epoch < 2:
            for rows in loader:
                step += 1
                print(json.dumps({"step": step, "rows": rows}), file=log, flush=True)
                while step == int(last_step):
                    time.sleep(1)
                dist.barrier()
                if rank == 0:
                    state_path.with_suffix(".new").write_text(json.dumps({"step": step, "state": loader.state_dict()}))
                    state_path.with_suffix(".new").rename(state_path)
    dist.destroy_process_group()


def train_buckets(src: str, folder: str, sync: str, num_workers: str, last_step: str) -> None:
    """A rank under torchrun: each step's samples written down, the state saved when all ranks have done the step."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    batches = LANES if sync == "lane" else BUDGET
    num_rounds, round_ = NUM_LANES // dist.get_world_size() if sync == "lane" else 1, 0
    dataset = StreamingDataset(
        src, Path(folder) / "cache", shuffle_seed=5, show_progress=False, batches=batches, transforms=[drawn]
    )  # fmt: skip
    loader = StreamingDataLoader(dataset, num_workers=int(num_workers), collate_fn=seen)
    state_path, step = Path(folder) / "state.json", 0
    if state_path.exists():
        saved = json.loads(state_path.read_text())
        step = saved["step"]
        loader.load_state_dict(saved["state"])
    dist.barrier()
    with (Path(folder) / f"rank-{rank}-{os.getpid()}.jsonl").open("a") as log:
        while step < int(last_step):
            for samples in loader:
                print(json.dumps({"step": step + 1, "samples": samples}), file=log, flush=True)
                round_ = (round_ + 1) % num_rounds
                if round_:
                    continue
                step += 1
                dist.barrier()
                if rank == 0:
                    state_path.with_suffix(".new").write_text(json.dumps({"step": step, "state": loader.state_dict()}))
                    state_path.with_suffix(".new").rename(state_path)
                if step == int(last_step):
                    break
    dist.barrier()
    dist.destroy_process_group()


def train_streams(folder: str, num_workers: str, num_steps: str) -> None:
    """A rank under torchrun that takes steps of two streams, writes down what it takes, and leaves its state."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = [StreamOptions(name, 1, index, batch_size=12, batch_gpu=1) for index, name in enumerate("ab")]
    loader = MultiStreamDataLoader(
        [opened(Path(folder), SIZES[one.name]) for one in own], own, num_workers=int(num_workers), collate_fn=stream_rows
    )
    state_path = Path(folder) / "state.json"
    state = json.loads(state_path.read_text()) if state_path.exists() else {"step": 0}
    if state["step"]:
        loader.load_state_dict(state)
    dist.barrier()
    stop = state["step"] + int(num_steps)
    with (Path(folder) / f"rank-{rank}-of-{world_size}.jsonl").open("a") as log:
        for batch in loader:
            print(json.dumps([batch.step, batch.stream_name, batch["rows"]]), file=log, flush=True)
            if batch.step == stop - 1 and not batch.num_accum_rounds_left:
                break
    dist.barrier()
    if rank == 0:
        state_path.write_text(json.dumps(loader.state_dict()))
    loader.close()
    dist.destroy_process_group()


def stream_rows(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A collate function of streams: epoch and row of each sample."""
    return {"rows": rows_of(samples)}


def main(words: list[str]) -> int:
    """Run the program of this name."""
    globals()[words[0]](*words[1:])
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(sys.argv[1:])
