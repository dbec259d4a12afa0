"""A table of captions, whose pictures are members of a ZIP on a web server: their URLs are computed in SQL."""

from __future__ import annotations

import zipfile
from pathlib import Path

from small_data import caption, run, write_image, write_index

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.transforms import presets


def main(directory: Path) -> None:
    """Pack 12 pictures, and stream those of the table, each with one request."""
    with zipfile.ZipFile(directory / "pictures.zip", "w") as archive:
        for number in range(12):
            archive.write(write_image(directory / f"{number}.jpg", number), f"train/{number:03}.jpg")
    table = write_index(directory, name=[f"{number:03}" for number in range(12)], caption=list(map(caption, range(12))))
    with FaultyHttpServer({"/pictures.zip": (directory / "pictures.zip").read_bytes()}) as server:
        dataset = StreamingDataset(
            table,
            directory / "cache",
            sql_query=f"SELECT *, 'zip://train/' || name || '.jpg::{server.url}/pictures.zip' AS image FROM dataframe",
            columns_to_download=["image"],
            shuffle_seed=1,
            transforms=presets.create_standard_image_pipeline("image", (64, 64)),
        )
        for batch in StreamingDataLoader(dataset, batch_size=3, num_workers=2):
            print(batch["image"].shape, batch["name"], batch["caption"])
        dataset.close()


if __name__ == "__main__":
    run(main)
