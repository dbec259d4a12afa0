"""Files of MessagePack maps, one behind another: what JSON can say is SQL, bytes are read by place (extra `shards`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from small_data import caption, run

from sqlstream import StreamingDataLoader, StreamingDataset


def with_tensor(sample: dict[str, Any]) -> dict[str, Any]:
    """Make a tensor of the bytes of a record."""
    return {"text": sample["text"], "tokens": torch.tensor(np.frombuffer(sample["tokens"], np.int32))}  # [n]


def main(directory: Path) -> None:
    """Write 2 files of 8 records, and stream those with a score."""
    for shard in range(2):
        records = [
            {"text": caption(number), "score": number / 16, "tokens": np.arange(8, dtype=np.int32).tobytes()}
            for number in range(8 * shard, 8 * shard + 8)
        ]
        (directory / f"part-{shard}.msgpack").write_bytes(b"".join(map(msgpack.packb, records)))
    with StreamingDataset(
        str(directory / "part-{0..1}.msgpack"),
        directory / "cache",
        where="score >= 0.5",
        shuffle_seed=1,
        transforms=[with_tensor],
    ) as dataset:
        for batch in StreamingDataLoader(dataset, batch_size=4):
            print(batch["tokens"].shape, batch["text"][0])


if __name__ == "__main__":
    run(main)
