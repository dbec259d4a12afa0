"""Trains a classifier of texts on shards of WebDataset: a pipeline of stages, with a tokenizer and a collation of its own."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from torch import nn
from torch.utils.data import DataLoader

NUM_TEXTS, BATCH_SIZE, NUM_WORDS = 96, 8, 50


def write(place: Path) -> None:
    """Writes texts of even or odd words; some have no text."""
    rng = np.random.default_rng(0)
    for shard in range(4):
        with wds.TarWriter(f"{place}/texts-{shard}.tar") as sink:
            for number in range(shard * NUM_TEXTS // 4, (shard + 1) * NUM_TEXTS // 4):
                words = 2 * rng.integers(0, NUM_WORDS // 2, rng.integers(4, 17)) + number % 2  # [n]
                sample = {"__key__": f"doc/{number:04}", "json": {"label": number % 2, "id": number}}
                sink.write(sample if number % 31 == 30 else {**sample, "txt": " ".join(map(str, words))})


def is_short(sample: dict[str, Any]) -> bool:
    """Whether a text has at most 14 words."""
    return len(sample["txt"].split()) <= 14


def tokens_of(text: str) -> torch.Tensor:  # [n]
    """Returns the numbers of the words of a text."""
    return torch.tensor([int(word) for word in text.split()])


def with_label(about: dict[str, Any]) -> tuple[int, int]:
    """Returns what is to be learned, and which text it is."""
    return about["label"], about["id"]


def with_text(source: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Leaves out samples without a text: a stage of the user's own."""
    for sample in source:
        if "txt" in sample:
            yield sample


def collate(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Returns tokens in one, where each text starts, labels and numbers."""
    texts = [tokens for tokens, _ in samples]
    starts = torch.tensor([0, *map(len, texts)]).cumsum(0)[:-1]  # [b]
    return torch.cat(texts), starts, torch.tensor([label for _, (label, _) in samples]), [number for _, (_, number) in samples]


def train(place: Path, shuffle: bool, num_workers: int) -> dict[str, Any]:
    """Returns the loss of each step of three epochs, and what came in each."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.EmbeddingBag(NUM_WORDS, 8), nn.Linear(8, 2)])
    optimizer, losses, seen = torch.optim.SGD(model.parameters(), lr=1.0), [], []
    dataset = wds.DataPipeline(
        wds.SimpleShardList(f"{place}/texts-{{0..3}}.tar"),
        *([wds.shuffle(100)] if shuffle else []),
        wds.split_by_node,
        wds.split_by_worker,
        wds.tarfile_to_samples(handler=wds.warn_and_continue),
        *([wds.shuffle(1000, initial=100)] if shuffle else []),
        with_text,
        wds.decode(),
        wds.select(is_short),
        wds.to_tuple("txt", "json"),
        wds.map_tuple(tokens_of, with_label),
        wds.batched(BATCH_SIZE, collation_fn=collate, partial=True),
    )
    for _ in range(3):
        numbers: list[int] = []
        for tokens, starts, label, number in DataLoader(dataset, batch_size=None, num_workers=num_workers):
            loss = nn.functional.cross_entropy(model[1](model[0](tokens, starts)), label)  # []
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            numbers += number
        seen.append(sorted(numbers) if shuffle else numbers)
    return {"losses": losses, "seen": seen}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    write(place)
    print(json.dumps({"in_order": train(place, False, 1), "shuffled": train(place, True, 0)}))
