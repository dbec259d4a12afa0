"""TAR shards that are compressed as a whole: unpacked once into the cache; a part that must be a file is a path."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

from PIL import Image
from small_data import run, write_tar

from sqlstream import StreamingDataLoader, StreamingDataset


def with_size(sample: dict[str, Any]) -> dict[str, Any]:
    """Open a picture by its path, as code does that takes files alone."""
    with Image.open(sample["jpg"]) as image:
        return {"size": image.size, "name": Path(sample["jpg"]).suffix}


def main(directory: Path) -> None:
    """Write 2 shards of 6 pictures, compress them, and stream their parts as files."""
    for shard in range(2):
        plain = write_tar(directory / f"plain-{shard}.tar", range(6 * shard, 6 * shard + 6))
        (directory / f"train-{shard}.tar.gz").write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    with StreamingDataset(
        str(directory / "train-{0..1}.tar.gz"),
        directory / "cache",
        columns_to_download=["jpg"],
        members="path",
        shuffle_seed=1,
        transforms=[with_size],
    ) as dataset:
        for batch in StreamingDataLoader(dataset, batch_size=4, collate_fn=list):
            print(len(batch), "files:", batch[0]["size"], batch[0]["name"])


if __name__ == "__main__":
    run(main)
