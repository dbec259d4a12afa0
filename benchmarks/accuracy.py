"""A small real training on every kind of shuffle, beside plain torch's: does the order cost accuracy?

    python -m benchmarks.accuracy [--seeds 5] [--epochs 3] [--results accuracy.json]

20 000 generated pictures of 10 classes lie in the table class by class: the hardest case for an order that does not mix enough.
For each seed, a small convolutional network is trained on each order, from the same initial weights. Counted is the accuracy on
2 000 pictures that it has not seen, after each epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sqlstream import StreamingDataLoader, StreamingDataset

NUM_TRAINED, NUM_TESTED, NUM_CLASSES, SIDE = 20_000, 2_000, 10, 16
BATCH_SIZE = 64
NOISE = 1.6
"""Strength of the noise on a picture, whose pattern has strength 1: so that no order reaches 100 %."""
ORDERS: dict[str, dict[str, Any]] = {
    "whole shuffle": {},
    "blocks of 100 rows, 64 at a time": {"shuffle_block_size": 100},
    "blocks of 250 rows, 16 at a time": {"shuffle_block_size": 250, "shuffle_window": 16},
    "8 canonical nodes": {"num_canonical_nodes": 8},
}
"""Options of the dataset, by the order's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """Pictures and their classes."""

    pixels: torch.Tensor
    """[n, 1, h, w]"""
    labels: torch.Tensor
    """[n]"""


def generated(num: int, seed: int) -> Pictures:
    """Return pictures, class by class: a pattern for each class, moved by up to two pixels, under noise."""
    patterns = np.random.default_rng(0).normal(size=(NUM_CLASSES, SIDE, SIDE))  # [classes, h, w]
    rng = np.random.default_rng(seed)
    labels = np.sort(np.arange(num) % NUM_CLASSES)  # [n]
    moves = rng.integers(-2, 3, (num, 2))  # [n, 2]
    moved = [np.roll(patterns[label], tuple(move), (0, 1)) for label, move in zip(labels, moves, strict=True)]
    pixels = np.stack(moved) + NOISE * rng.normal(size=(num, SIDE, SIDE))  # [n, h, w]
    return Pictures(pixels=torch.from_numpy(pixels.astype(np.float32))[:, None], labels=torch.from_numpy(labels))


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * (SIDE // 4) ** 2, NUM_CLASSES))


def train(batches_of: Callable[[int], Iterable[tuple[torch.Tensor, torch.Tensor]]], seed: int, num_epochs: int) -> list[float]:
    """Return the accuracy after each epoch, in percent.

    Args:
        batches_of: Gives the batches of an epoch: pixels [b, 1, h, w] and classes [b].
        seed: Of the initial weights.
        num_epochs: How many.
    """
    model, tested = network(seed), generated(NUM_TESTED, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs * (NUM_TRAINED // BATCH_SIZE))
    curve: list[float] = []
    for epoch in range(num_epochs):
        model.train()
        for pixels, labels in batches_of(epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pixels), labels).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            hits = model(tested.pixels).argmax(1) == tested.labels  # [n]
        curve.append(100 * float(hits.float().mean()))
    return curve


def plain(trained: Pictures, seed: int) -> Callable[[int], Iterable[tuple[torch.Tensor, torch.Tensor]]]:
    """Return torch's own shuffle of the same pictures."""
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(
        TensorDataset(trained.pixels, trained.labels), batch_size=BATCH_SIZE, shuffle=True, drop_last=True, generator=generator
    )
    return lambda epoch: loader


def streamed(loader: StreamingDataLoader) -> Callable[[int], Iterator[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the epochs of a loader."""

    def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        assert loader.dataset.epoch == epoch
        for batch in loader:
            yield batch["pixels"], batch["label"]

    return batches


class Decoded:
    """A transform of one's own: bytes to a tensor."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        pixels = np.frombuffer(sample["pixels"], np.float32).reshape(1, SIDE, SIDE)  # [1, h, w]
        return {"pixels": torch.from_numpy(pixels.copy()), "label": sample["label"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    curves: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="sqlstream-bench-") as directory:
        trained, path = generated(NUM_TRAINED, seed=2), Path(directory) / "pictures.parquet"
        pixels = [picture.numpy().tobytes() for picture in trained.pixels]
        pq.write_table(pa.table({"pixels": pixels, "label": trained.labels.numpy()}), path)
        for seed in range(options.seeds):
            curves.setdefault("plain torch", []).append(train(plain(trained, seed), seed, options.epochs))
            for name, order in ORDERS.items():
                cache = Path(directory) / "cache"
                with StreamingDataset(
                    path, cache, shuffle_seed=seed, drop_last=True, transforms=[Decoded()], show_progress=False, **order
                ) as dataset:
                    loader = StreamingDataLoader(dataset, BATCH_SIZE, drop_last=True)
                    curves.setdefault(name, []).append(train(streamed(loader), seed, options.epochs))
            print(f"seed {seed}:", {name: f"{runs[-1][-1]:.1f}" for name, runs in curves.items()}, flush=True)
    print(
        f"accuracy in percent after each of {options.epochs} epochs: mean of {options.seeds} seeds ± their standard deviation"
    )
    for name, runs in curves.items():
        by_epoch = zip(*runs, strict=True)
        print(name.ljust(36), *(f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}" for values in by_epoch))
    if options.results is not None:
        options.results.write_text(
            json.dumps({"options": {"seeds": options.seeds, "epochs": options.epochs}, "curves": curves})
        )


if __name__ == "__main__":
    main()
