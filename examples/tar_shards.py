"""TAR shards of WebDataset, over HTTP: filtered by the size of a part, parts chosen, decoded by their extensions."""

from __future__ import annotations

from pathlib import Path

from small_data import run, write_tar

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.transforms.presets import DecodeByExtension


def main(directory: Path) -> None:
    """Serve 3 shards of 6 samples, of which every second one has a caption, and stream these."""
    with FaultyHttpServer() as server:
        for shard in range(3):
            path = write_tar(directory / f"train-{shard:03}.tar", range(6 * shard, 6 * shard + 6))
            server.objects[f"/train-{shard:03}.tar"] = path.read_bytes()
        with StreamingDataset(
            f"{server.url}/train-{{000..002}}.tar",
            directory / "cache",
            where="jpg > 1000 AND txt IS NOT NULL",
            columns_to_download=["jpg", "cls", "txt"],
            shuffle_seed=1,
            transforms=[DecodeByExtension("torchrgb8")],
        ) as dataset:
            for batch in StreamingDataLoader(dataset, batch_size=3):
                print(batch["jpg"].shape, batch["cls"].tolist(), batch["txt"][0], batch["__key__"])


if __name__ == "__main__":
    run(main)
