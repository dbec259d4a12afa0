"""Images from a parquet index: decode, resize, flip, keep two fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small_data import caption, run, write_image, write_index
from torch.utils.data import DataLoader

from sqlstream import StreamingDataset
from sqlstream.transforms import presets, rng


class HorizontalFlipTransform:
    """A transform is any callable from sample to sample; drawn from the sample's generator, it is the same in every run."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Flip every second image."""
        if rng(sample).random() < 0.5:
            sample["image"] = torch.flip(sample["image"], dims=[2])  # [c, h, w]
        return sample


def main(directory: Path) -> None:
    """Make 12 images and stream them."""
    index = write_index(
        directory,
        media_id=[f"image-{number:03d}" for number in range(12)],
        url=[write_image(directory / "images" / f"{number}.jpg", number) for number in range(12)],
        caption=[caption(number) for number in range(12)],
    )
    dataset = StreamingDataset(
        str(index),
        str(directory / "cache"),
        columns_to_download=["url"],
        index_col_name="media_id",
        shuffle_seed=123,
        transforms=[
            *presets.create_standard_image_pipeline(image_field="url", resolution=(64, 64)),
            HorizontalFlipTransform(),
            presets.EnsureFieldsTransform(fields_whitelist=["image", "caption"], drop_others=True),
        ],
    )
    for batch in DataLoader(dataset, batch_size=4, num_workers=2, drop_last=True):
        print(batch["image"].shape, batch["image"].dtype, batch["caption"][0])


if __name__ == "__main__":
    run(main)
