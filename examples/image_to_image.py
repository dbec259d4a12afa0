"""Pairs of images: two of a row's pictures are chosen before anything is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from small_data import run, write_image, write_index
from torch.utils.data import DataLoader

from sqlstream import StreamingDataset
from sqlstream.transforms import presets, rng
from sqlstream.transforms.collate import collate


class ChoosePairTransform:
    """Chooses a source and a target among the row's pictures; only these two are downloaded."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Set the two URLs."""
        source, target = rng(sample).choice(len(sample["pictures"]), size=2, replace=False)
        sample["source_url"], sample["target_url"] = sample["pictures"][source], sample["pictures"][target]
        return sample


def main(directory: Path) -> None:
    """Make 6 series of 4 pictures and stream pairs."""
    series = [[write_image(directory / f"{row}" / f"{number}.jpg", number) for number in range(4)] for row in range(6)]
    index = write_index(directory, series=[f"series-{row}" for row in range(6)], pictures=series)
    dataset = StreamingDataset(
        str(index),
        str(directory / "cache"),
        columns_to_download=["source_url", "target_url"],
        allow_missing_columns=True,
        index_col_name="series",
        shuffle_seed=1,
        predownload_transforms=[ChoosePairTransform()],
        transforms=[
            *presets.create_standard_image_pipeline("source_url", (64, 64), output_field="source"),
            *presets.create_standard_image_pipeline("target_url", (64, 64), output_field="target", normalize=True),
            presets.EnsureFieldsTransform(["source", "target", "series"], drop_others=True),
        ],
    )
    for batch in DataLoader(dataset, batch_size=3, num_workers=2, collate_fn=collate):
        print(batch["source"].shape, batch["source"].dtype, batch["target"].shape, batch["target"].dtype)


if __name__ == "__main__":
    run(main)
