"""Split JSON lines of MosaicML Streaming, written here and streamed: rows of the index are counted, values read by place."""

from __future__ import annotations

from pathlib import Path

from small_data import caption, run

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.write import JsonWriter


def main(directory: Path) -> None:
    """Write shards of at most 256 bytes, and stream them."""
    with JsonWriter(directory / "texts", {"text": "str", "score": "float"}, size_limit=256) as writer:
        for number in range(12):
            writer.write({"text": caption(number), "score": number / 12})
    with StreamingDataset(directory / "texts", directory / "cache", shuffle_seed=1) as dataset:
        for batch in StreamingDataLoader(dataset, batch_size=4):
            print(len(batch["text"]), "texts:", batch["text"][0], batch["score"].tolist())


if __name__ == "__main__":
    run(main)
