"""Trains a classifier of pictures on shards with an index of wids, as its ResNet example does, with a sampler of chunks."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
import wids
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

NUM_PICTURES, NUM_VALIDATION, BATCH_SIZE, NUM_CLASSES = 96, 32, 8, 4


def write(place: Path, name: str, num_shards: int, seed: int) -> None:
    """Writes pictures whose brightest quarter is their class, and the index of their shards."""
    rng, shards = np.random.default_rng(seed), []
    for shard in range(num_shards):
        with wds.TarWriter(f"{place}/{name}-{shard:06}.tar") as sink:
            for number in range(16 * shard, 16 * shard + 16):
                values, label = rng.integers(0, 128, (8, 8, 3), np.uint8), number % NUM_CLASSES  # [h, w, c]
                values[4 * (label // 2) :, 4 * (label % 2) :][:4, :4] += 100
                sink.write({"__key__": f"{number:06}", "png": Image.fromarray(values), "cls": label})
        shards.append({"url": f"{place}/{name}-{shard:06}.tar", "nsamples": 16})
    (place / f"{name}.json").write_text(json.dumps({"wids_version": 1, "name": name, "shardlist": shards}))


def make_sample(sample: dict[str, Any], val: bool = False) -> tuple[torch.Tensor, int, int]:  # [c, h, w]
    """Returns a picture, its label and its number."""
    image = torch.from_numpy(np.array(sample[".png"], np.float32)).permute(2, 0, 1) / 255  # [c, h, w]
    return image - (0.25 if val else 0.2), sample[".cls"], sample["__index__"]


def train(place: Path, num_workers: int) -> dict[str, Any]:
    """Returns the loss of each step of three epochs, what came in each, and the accuracy at the end."""
    torch.manual_seed(0)
    trainset = wids.ShardListDataset(f"{place}/train.json", cache_dir=f"{place}/cache", keep=True)
    valset = wids.ShardListDataset(f"{place}/val.json", cache_dir=f"{place}/cache", keep=True)
    trainset.add_transform(make_sample)
    valset.add_transform(partial(make_sample, val=True))
    sampler = wids.DistributedChunkedSampler(trainset, num_replicas=1, rank=0, chunksize=20, shuffle=True)
    trainloader = DataLoader(trainset, batch_size=BATCH_SIZE, num_workers=num_workers, sampler=sampler)
    valloader = DataLoader(valset, batch_size=BATCH_SIZE, shuffle=False, num_workers=0)
    model = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(32, NUM_CLASSES))
    optimizer, losses, seen = torch.optim.Adam(model.parameters(), lr=0.02), [], []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        numbers: list[int] = []
        for image, label, number in trainloader:
            loss = nn.functional.cross_entropy(model(image), label)  # []
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            numbers += number.tolist()
        seen.append(numbers)
    num_right = sum(int((model(image).argmax(1) == label).sum()) for image, label, _ in valloader)  # []
    return {"losses": losses, "seen": seen, "accuracy": num_right / NUM_VALIDATION}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    write(place, "train", NUM_PICTURES // 16, 0)
    write(place, "val", NUM_VALIDATION // 16, 1)
    print(json.dumps({"in_order": train(place, 1)}))
