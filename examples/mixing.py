"""Three datasets as one run: killed, then resumed on other ranks and workers, with one stream added and one removed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from small_data import run, write_index

from sqlstream import MixedDataset, Stream, StreamingDataLoader, World

STEP = 12
"""Samples of a global batch."""
WEIGHTS = {"web": 6, "code": 3, "av": 1}
LATER = {"web": 2, "code": 1, "math": 1}
"""The streams after the resumption: `av` is gone, `math` is new."""
SIZES = {"web": 400, "code": 90, "av": 30, "math": 50}


def samples_of(batch: list[dict[str, Any]]) -> list[str]:
    """A collate function: stream, epoch and row of each sample."""
    return [f"{sample['__stream__']} {sample['__epoch__']} {sample['__row__']}" for sample in batch]


def loader_of(directory: Path, weights: dict[str, int], rank: int, num_ranks: int, num_workers: int) -> StreamingDataLoader:
    """The loader of one rank."""
    streams = {
        name: Stream(directory / name / "index.parquet", directory / "cache", shuffle_seed=number, show_progress=False)
        for number, name in enumerate(SIZES)
        if name in weights
    }
    mixed = MixedDataset(streams, weights, epoch_size=600, world=World(rank=rank, world_size=num_ranks))
    return StreamingDataLoader(mixed, STEP // num_ranks, num_workers, collate_fn=samples_of)


def train(directory: Path, num_workers: int) -> None:
    """One rank that saves its state and what it has got after each step, until it is killed."""
    loader = loader_of(directory, WEIGHTS, 0, 1, num_workers)
    for batch in loader:
        with (directory / "log.jsonl").open("a") as log:
            log.write(json.dumps({"batch": batch, "state": loader.state_dict()}) + "\n")


def kill_after(directory: Path, num_steps: int) -> list[dict[str, Any]]:
    """Run `train` in a process, kill it after some steps, and return what it has written down."""
    log = directory / "log.jsonl"
    log.touch()
    process = subprocess.Popen([sys.executable, __file__, "train", str(directory)])
    while log.read_text().count("\n") < num_steps and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}}")]


def global_batches(loaders: list[StreamingDataLoader]) -> Iterator[list[str]]:
    """The batches of all ranks together."""
    for batches in zip(*loaders, strict=True):
        yield [sample for batch in batches for sample in batch]


def by_plan(loader: StreamingDataLoader, first: int, stop: int) -> list[dict[str, int]]:
    """What the plan says of some steps."""
    return [dict(step.num_samples) for step in loader.plan(first, stop)]


def main(directory: Path) -> None:
    """Print a table of steps: what came, and what the plan says."""
    for name, size in SIZES.items():
        (directory / name).mkdir()
        write_index(directory / name, number=list(range(size)))
    written = kill_after(directory, random.randint(2, 12))
    num_steps, state = len(written), written[-1]["state"]
    whole = loader_of(directory, WEIGHTS, 0, 1, 0)
    uninterrupted = list(global_batches([whole]))
    rows = [(line["batch"], plan) for line, plan in zip(written, by_plan(whole, 0, num_steps), strict=True)]
    assert [batch for batch, _ in rows] == uninterrupted[:num_steps]

    loaders = [loader_of(directory, LATER, rank, num_ranks=2, num_workers=1) for rank in range(2)]
    for loader in loaders:
        loader.load_state_dict(state, streams="continue")
    given = [batch for _, batch in zip(range(8), global_batches(loaders), strict=False)]
    rows += zip(given, by_plan(loaders[0], num_steps, num_steps + 8), strict=True)

    print(f"{'step':>4}  {'ranks x workers':<16} {'came':<34} plan")
    for step, (batch, plan) in enumerate(rows):
        came = dict(sorted(Counter(sample.split()[0] for sample in batch).items()))
        assert came == dict(sorted(plan.items()))
        layout = "1 x 2, killed" if step < num_steps else "2 x 1, resumed"
        print(f"{step:>4}  {layout:<16} {came!s:<34} {dict(sorted(plan.items()))}")

    before, after = ([sample for batch in part for sample in batch] for part in (uninterrupted[:num_steps], given))
    for name in ("web", "code"):  # each goes on with the very next sample of its own order
        alone = [sample for batch in uninterrupted for sample in batch if sample.startswith(f"{name} ")]
        mine = [sample for sample in before + after if sample.startswith(f"{name} ")]
        assert sorted(mine) == sorted(alone[: len(mine)])
    print("web and code have gone on with the next rows of their own orders; math has begun with its first, av has stopped")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(Path(sys.argv[2]), num_workers=2)
        os._exit(0)
    run(main)
