"""Trains a classifier of pictures on shards of WebDataset: the fluid interface, validation, a loader that batches again."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from PIL import Image
from torch import nn

NUM_PICTURES, NUM_VALIDATION, BATCH_SIZE, NUM_CLASSES = 96, 24, 8, 4


def write(pattern: str, num_pictures: int, seed: int) -> None:
    """Writes pictures whose brightest quarter is their class."""
    rng = np.random.default_rng(seed)
    with wds.ShardWriter(pattern, maxcount=16, verbose=0) as sink:
        for number in range(num_pictures):
            values, label = rng.integers(0, 128, (8, 8, 3), np.uint8), number % NUM_CLASSES  # [h, w, c]
            values[4 * (label // 2) :, 4 * (label % 2) :][:4, :4] += 100
            sink.write({"__key__": f"{number:06}", "png": Image.fromarray(values), "cls": label, "json": {"n": number}})


def make_sample(sample: dict[str, Any]) -> tuple[torch.Tensor, int, int]:  # [c, h, w]
    """Returns a picture, its label and its number."""
    image = torch.from_numpy(np.array(sample["png"], np.float32)).permute(2, 0, 1) / 255 - 0.25  # [c, h, w]
    return image, sample["cls"], sample["json"]["n"]


def loader_of(urls: str, shuffle: bool, num_workers: int) -> wds.WebLoader:
    """Returns the loader of the training, or of the validation."""
    dataset = wds.WebDataset(urls, shardshuffle=100 if shuffle else False, nodesplitter=wds.split_by_node)
    if shuffle:
        dataset = dataset.shuffle(1000)
    dataset = dataset.decode("pil", handler=wds.warn_and_continue).map(make_sample).batched(BATCH_SIZE)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=num_workers)
    return loader.unbatched().shuffle(1000).batched(BATCH_SIZE) if shuffle else loader


def train(place: Path, shuffle: bool, num_workers: int) -> dict[str, Any]:
    """Returns the loss of each step, what came in each epoch, and the accuracy at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(32, NUM_CLASSES))
    optimizer, losses, seen = torch.optim.Adam(model.parameters(), lr=0.02), [], []
    loader = loader_of(f"{place}/train-{{000000..000005}}.tar", shuffle, num_workers)
    for _ in range(3):
        numbers: list[int] = []
        for image, label, number in loader:
            loss = nn.functional.cross_entropy(model(image), label)  # []
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            numbers += number.tolist()
        seen.append(sorted(numbers) if shuffle else numbers)
    valloader = loader_of(f"{place}/val-{{000000..000001}}.tar", shuffle=False, num_workers=0)
    num_right = sum(int((model(image).argmax(1) == label).sum()) for image, label, _ in valloader)  # []
    return {"losses": losses, "seen": seen, "accuracy": num_right / NUM_VALIDATION}


if __name__ == "__main__":
    os.environ["WDS_VERBOSE_CACHE"] = "0"
    place = Path(sys.argv[1])
    write(f"{place}/train-%06d.tar", NUM_PICTURES, 0)
    write(f"{place}/val-%06d.tar", NUM_VALIDATION, 1)
    print(
        json.dumps(
            {"in_order": train(place, shuffle=False, num_workers=1), "shuffled": train(place, shuffle=True, num_workers=0)}
        )
    )
