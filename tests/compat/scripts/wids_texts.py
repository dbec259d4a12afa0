"""Trains a classifier of texts on a list of shards, with wids: a transformation of its own, a sampler of shards."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from torch import nn
from torch.utils.data import DataLoader
from wids import ShardedSampler, ShardListDataset

BATCH_SIZE, NUM_WORDS, LENGTHS = 8, 50, (30, 12, 40)


def write(place: Path) -> list[dict[str, Any]]:
    """Writes texts of even or odd tokens, and returns the list of their shards."""
    rng, shards = np.random.default_rng(0), []
    for shard, length in enumerate(LENGTHS):
        with wds.TarWriter(f"{place}/texts-{shard}.tar") as sink:
            for number in range(length):
                tokens = 2 * rng.integers(0, NUM_WORDS // 2, 10) + number % 2  # [n]
                sample = {"txt": " ".join(map(str, tokens)), "cls": number % 2, "tokens.npy": tokens.astype(np.int64)}
                sink.write({"__key__": f"{shard}/{number:04}", **sample})
        shards.append({"url": f"{place}/texts-{shard}.tar", "nsamples": length, "dataset": "texts"})
    return shards


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    """Reads the streams of a sample: transformations of one's own in place of theirs."""
    tokens = np.load(io.BytesIO(sample[".tokens.npy"].read()))  # [n]
    text = sample[".txt"].read().decode()
    assert text.split() == [str(token) for token in tokens]
    label = int(sample[".cls"].read())
    return {"tokens": torch.from_numpy(tokens), "label": label, "index": sample["__index__"], "key": sample["__key__"]}


def train(shards: list[dict[str, Any]], place: Path, num_workers: int) -> dict[str, Any]:
    """Returns the loss of each step of three epochs, and what came in each."""
    torch.manual_seed(0)
    dataset = ShardListDataset(shards, cache_dir=f"{place}/cache", dataset_name="texts", transformations=[decode])
    sampler = ShardedSampler(dataset, seed=3, shufflefirst=True)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, num_workers=num_workers, drop_last=True)
    model = nn.Sequential(nn.EmbeddingBag(NUM_WORDS, 8), nn.Linear(8, 2))
    optimizer, losses, seen = torch.optim.SGD(model.parameters(), lr=1.0), [], []
    for _ in range(3):
        keys: list[str] = []
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch["tokens"]), batch["label"])  # []
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            keys += batch["key"]
        seen.append(keys)
    return {"losses": losses, "seen": seen}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    print(json.dumps({"in_order": train(write(place), place, 0)}))
