"""Random clips of videos, 8 frames at 12 frames per second."""

from __future__ import annotations

from pathlib import Path

from small_data import caption, run, write_index, write_video
from torch.utils.data import DataLoader

from sqlstream import StreamingDataset
from sqlstream.transforms import presets
from sqlstream.transforms.collate import collate


def main(directory: Path) -> None:
    """Make 6 videos and stream clips."""
    index = write_index(
        directory,
        index=[f"video-{number}" for number in range(6)],
        url=[write_video(directory / "videos" / f"{number}.mp4", number) for number in range(6)],
        caption=[caption(number) for number in range(6)],
    )
    dataset = StreamingDataset(
        str(index),
        str(directory / "cache"),
        data_type="video",
        columns_to_download=["url"],
        shuffle_seed=1,
        transforms=[
            *presets.create_standard_video_pipeline(
                video_field="url",
                num_frames=8,
                resolution=(64, 64),
                decode_kwargs={"framerate": 12.0, "random_offset": True, "frame_seek_timeout_sec": 20.0},
            ),
            presets.FieldsFilteringTransform(fields_to_keep=["video", "caption"]),
        ],
    )
    for batch in DataLoader(dataset, batch_size=3, num_workers=2, collate_fn=collate):
        print(batch["video"].shape, batch["video"].dtype, batch["caption"])


if __name__ == "__main__":
    run(main)
