"""Trains a classifier of pictures on shards of MosaicML Streaming, stops in the middle of an epoch and goes on."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from torch import nn

NUM_PICTURES, BATCH_SIZE, NUM_CLASSES = 96, 8, 4


class Pictures(StreamingDataset):
    """Pictures as tensors, with their labels."""

    def __init__(self, transform: Callable[[torch.Tensor], torch.Tensor] | None = None, **options: Any) -> None:  # [c, h, w]
        super().__init__(**options)
        self.transform = transform

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        image = torch.from_numpy(np.array(sample["image"], np.float32)).permute(2, 0, 1) / 255  # [c, h, w]
        return (image if self.transform is None else self.transform(image)), sample["label"]


def write(directory: Path) -> None:
    """Writes pictures whose brightest quarter is their class."""
    rng = np.random.default_rng(0)
    with MDSWriter(out=str(directory), columns={"image": "png", "label": "int"}, size_limit="8kb") as out:
        for number in range(NUM_PICTURES):
            values, label = rng.integers(0, 128, (8, 8, 3), np.uint8), number % NUM_CLASSES  # [h, w, c]
            values[4 * (label // 2) :, 4 * (label % 2) :][:4, :4] += 100
            out.write({"image": Image.fromarray(values), "label": label})


def loader_of(directory: Path, shuffle: bool) -> StreamingDataLoader:
    """Returns the loader of the training."""
    options = {"remote": str(directory / "remote"), "local": str(directory / "local"), "split": "train"}
    dataset = Pictures(**options, shuffle=shuffle, batch_size=BATCH_SIZE, transform=lambda image: image - 0.25)
    return StreamingDataLoader(dataset, batch_size=BATCH_SIZE)


def train(directory: Path, shuffle: bool) -> list[float]:
    """Returns the loss of each step of three epochs; the second one is interrupted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(32, NUM_CLASSES))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.02), []

    def run(batches: Iterable[Any], num_steps: int) -> None:
        for _, (image, label) in zip(range(num_steps), batches, strict=False):
            loss = nn.functional.cross_entropy(model(image), label)  # []
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    loader = loader_of(directory, shuffle)
    run(loader, 100)
    run(loader, 5)
    state = json.loads(json.dumps(loader.state_dict()))
    del loader
    loader = loader_of(directory, shuffle)
    loader.load_state_dict(state)
    run(loader, 100)
    run(loader, 100)
    return losses


if __name__ == "__main__":
    place = Path(sys.argv[1])
    write(place / "remote/train")
    print(json.dumps({"in_order": train(place, False), "shuffled": train(place, True)}))
