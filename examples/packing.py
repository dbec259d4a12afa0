"""Texts of many lengths in packs of one: hardly any padding, each text once an epoch, and a run goes on where it was stopped.

python examples/packing.py
torchrun --nproc-per-node=4 examples/packing.py      # the same global batches, divided among four ranks
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from small_data import run, write_index

from sqlstream import Packs, StreamingDataLoader, StreamingDataset
from sqlstream.distributed import read_world
from sqlstream.transforms.base import Sample

GLOBAL_BATCH = 4
"""Packs of a step of the whole job."""


def tokenize(sample: Sample) -> Sample:
    """Stands in for a tokenizer: a token for each byte."""
    sample["input_ids"] = np.frombuffer(sample.pop("text").encode(), np.uint8)  # [n]
    return sample


def main(directory: Path) -> None:
    """Make 300 texts of log-normal lengths, stream them, stop after two steps and go on."""
    lengths = np.clip(np.random.RandomState(0).lognormal(4, 0.8, 300), 8, 256).astype(int)
    texts = [f"text {number:<3}".ljust(length, "x") for number, length in enumerate(lengths.tolist())]
    index = write_index(directory, text=texts)
    dataset = StreamingDataset(
        str(index),
        str(directory / "cache"),
        shuffle_seed=123,
        batches=Packs("length(text)", capacity=512),  # SQL over the row; with tokens: a column such as num_tokens
        transforms=[tokenize],
    )
    world = read_world()
    loader = StreamingDataLoader(dataset, batch_size=GLOBAL_BATCH // world.world_size, num_workers=2)
    batches = iter(loader)
    for step in range(2):
        show(step, next(batches))
    state = json.dumps(loader.state_dict())
    del batches
    loader.load_state_dict(json.loads(state))
    for step, batch in enumerate(loader, start=2):
        show(step, batch)


def show(step: int, batch: Sample) -> None:
    """Print what a batch holds."""
    num_packs, capacity = batch["input_ids"].shape
    filled = (batch["labels"] != -100).sum().item() + sum(map(len, batch["__rows__"]))  # first tokens have no label
    print(f"step {step}: {num_packs} x {capacity}, {filled / num_packs / capacity:.1%} full, rows {batch['__rows__']}")


if __name__ == "__main__":
    run(main)
