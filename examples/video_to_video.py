"""Pairs of videos at the same moments: the target is decoded at the timestamps of the source's frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small_data import run, write_index, write_video
from torch.utils.data import DataLoader

from sqlstream import StreamingDataset
from sqlstream.transforms import presets
from sqlstream.transforms.collate import collate


def clip(field: str, output_field: str, **timestamps: str) -> list[Any]:
    """A clip of 4 frames at 12 frames per second."""
    decode_kwargs = {"framerate": 12.0, **timestamps}
    return presets.create_standard_video_pipeline(field, 4, (64, 64), decode_kwargs, output_field=output_field)


def main(directory: Path) -> None:
    """Make 4 pairs of equal videos and stream the same clip of both."""
    urls = {side: [write_video(directory / side / f"{number}.mp4", number) for number in range(4)] for side in ("a", "b")}
    index = write_index(directory, index=[f"pair-{number}" for number in range(4)], source_url=urls["a"], target_url=urls["b"])
    dataset = StreamingDataset(
        str(index),
        str(directory / "cache"),
        columns_to_download=["source_url", "target_url"],
        shuffle_seed=1,
        transforms=[
            *clip("source_url", "source", frame_timestamps_output_field="frame_timestamps"),
            *clip("target_url", "target", frame_timestamps_input_field="frame_timestamps"),
            presets.FieldsFilteringTransform(fields_to_keep=["source", "target", "frame_timestamps"]),
        ],
    )
    for batch in DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=collate):
        assert torch.equal(batch["source"], batch["target"])
        print(batch["source"].shape, "from", batch["frame_timestamps"][:, 0].tolist(), "s")


if __name__ == "__main__":
    run(main)
