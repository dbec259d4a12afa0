"""TAR shards that a wids index names: written here, then streamed by the samples that the index counts."""

from __future__ import annotations

from pathlib import Path

from small_data import caption, run

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.write import TarWriter


def main(directory: Path) -> None:
    """Write 3 shards of 4 captions with a class each, and stream those of two classes."""
    with TarWriter(directory / "texts", max_samples=4) as writer:  # with an index.json, which `wids` reads
        for number in range(12):
            writer.write({"__key__": f"{number:04}", "txt": caption(number), "cls": number % 4})
    with StreamingDataset(
        directory / "texts/index.json",
        directory / "cache",
        where="cls < 2",
        source_options={"index_members": ["cls"]},
        columns_to_download=["txt"],
        shuffle_seed=1,
    ) as dataset:
        for batch in StreamingDataLoader(dataset, batch_size=3):
            print(len(batch["txt"]), "captions:", batch["txt"][0], batch["cls"].tolist())


if __name__ == "__main__":
    run(main)
