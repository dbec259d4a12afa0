"""A directory of MosaicML Streaming, without that package: values come decoded, as its index.json says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small_data import run, write_mds

from sqlstream import StreamingDataLoader, StreamingDataset


def with_tensor(sample: dict[str, Any]) -> dict[str, Any]:
    """Arrays of shards are read-only: take a copy."""
    return {**sample, "tokens": torch.tensor(sample["tokens"])}  # [n]


def main(directory: Path) -> None:
    """Write 2 shards of 6 samples and stream them."""
    write_mds(directory / "mds/train", num_shards=2, num_samples=6)
    dataset = StreamingDataset(directory / "mds/train", directory / "cache", shuffle_seed=1, transforms=[with_tensor])
    for batch in StreamingDataLoader(dataset, batch_size=4, num_workers=2):
        print(batch["tokens"].shape, batch["label"].tolist(), batch["caption"][0])


if __name__ == "__main__":
    run(main)
