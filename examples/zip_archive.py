"""A ZIP of Hugging Face's imagefolder: pictures, and a metadata.jsonl that describes them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from small_data import caption, run, write_image

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.transforms import presets


def main(directory: Path) -> None:
    """Pack 12 pictures, and stream those whose caption is of a red or a blue one."""
    rows = [{"file_name": f"train/{number:03}.jpg", "caption": caption(number)} for number in range(12)]
    with zipfile.ZipFile(directory / "pictures.zip", "w") as archive:
        for number, row in enumerate(rows):
            archive.write(write_image(directory / f"{number}.jpg", number), row["file_name"])
        archive.writestr("metadata.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    dataset = StreamingDataset(
        directory / "pictures.zip",
        directory / "cache",
        where="caption LIKE '%red%' OR caption LIKE '%blue%'",
        shuffle_seed=1,
        transforms=presets.create_standard_image_pipeline("image", (64, 64)),
    )
    for batch in StreamingDataLoader(dataset, batch_size=3, num_workers=2):
        print(batch["image"].shape, batch["file_name"][0], batch["caption"])


if __name__ == "__main__":
    run(main)
