"""A folder of pictures, each with a caption and metadata beside it, as for training a LoRA."""

from __future__ import annotations

import json
from pathlib import Path

from small_data import caption, run, write_image
from torch.utils.data import DataLoader

from sqlstream import StreamingDataset
from sqlstream.transforms import presets
from sqlstream.transforms.collate import collate


def main(directory: Path) -> None:
    """Make a folder of 6 samples of 3 files and stream it."""
    folder = directory / "photos"
    for number in range(6):
        write_image(folder / f"{number:03d}.jpg", number)
        (folder / f"{number:03d}.txt").write_text(caption(number), encoding="utf-8")
        (folder / f"{number:03d}.meta.json").write_text(json.dumps({"class": number % 3, "author": "me"}), encoding="utf-8")
    dataset = StreamingDataset(
        str(folder),
        str(directory / "cache"),
        data_type="image",
        columns_to_download=["jpg", "txt", "meta.json"],
        shuffle_seed=1,
        transforms=[
            *presets.create_standard_image_pipeline("jpg", (64, 64), resize_kwargs={"allow_vertical": True}),
            *presets.create_standard_metadata_pipeline("meta.json", "class", one_hot_encode_to_size=3),
            presets.LoadTextTransform("txt", "caption"),
            presets.EnsureFieldsTransform(["image", "caption", "class_label", "meta"], drop_others=True),
        ],
    )
    for batch in DataLoader(dataset, batch_size=3, num_workers=2, collate_fn=collate):
        print(batch["image"].shape, batch["class_label"].tolist(), batch["caption"][0], batch["meta"]["author"])


if __name__ == "__main__":
    run(main)
