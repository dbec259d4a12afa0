"""Trains a classifier of texts on two streams of MosaicML Streaming, as scripts that train on tokens do."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming import MDSWriter, Stream, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch import nn
from torch.utils.data import DataLoader

NUM_TOKENS, LENGTH, BATCH_SIZE = 50, 12, 8


class Tokens(StreamingDataset):
    """Tokens that are stored as bytes."""

    def __init__(self, *, max_seq_len: int, **options: Any) -> None:
        super().__init__(**options)
        self.max_seq_len = max_seq_len

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        tokens = np.frombuffer(sample["tokens"], np.int64)[: self.max_seq_len].copy()  # [n]
        return {"tokens": torch.from_numpy(tokens), "label": sample["label"]}  # [n]


def write(directory: Path, first: int, num_texts: int) -> None:
    """Writes texts of even or odd tokens."""
    rng = np.random.default_rng(first)
    with MDSWriter(out=str(directory), columns={"tokens": "bytes", "label": "int"}, size_limit=2048) as out:
        for number in range(first, first + num_texts):
            tokens = 2 * rng.integers(0, NUM_TOKENS // 2, LENGTH) + number % 2  # [n]
            out.write({"tokens": tokens.astype(np.int64).tobytes(), "label": number % 2})


def train(directory: Path, shuffle: bool, num_workers: int) -> list[float]:
    """Returns the loss of each step of two epochs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(NUM_TOKENS, 8), nn.Linear(8, 2))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), []
    streams = [Stream(remote=str(directory / name), local=str(directory / f"local/{name}")) for name in ("web", "books")]
    dataset = Tokens(streams=streams, shuffle=shuffle, batch_size=BATCH_SIZE, max_seq_len=10)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=num_workers, drop_last=False)
    for _ in range(2):
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch["tokens"]), batch["label"])  # []
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    clean_stale_shared_memory()
    place = Path(sys.argv[1])
    write(place / "web", 0, 64)
    write(place / "books", 100, 40)
    print(json.dumps({"in_order": train(place, False, 1), "shuffled": train(place, True, 0)}))
