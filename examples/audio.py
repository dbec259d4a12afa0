"""Clips of audio: the loudest second of each file, mono, 16 kHz, one loudness."""

from __future__ import annotations

from pathlib import Path

import soundfile
from small_data import run, tone, write_index
from torch.utils.data import DataLoader

from sqlstream import StreamingDataset
from sqlstream.transforms import presets
from sqlstream.transforms.collate import collate


def main(directory: Path) -> None:
    """Make 8 FLAC files and stream clips."""
    (directory / "sounds").mkdir()
    paths = [directory / "sounds" / f"{number}.flac" for number in range(8)]
    for number, path in enumerate(paths):
        soundfile.write(path, tone(number, 2.0), 48000)
    index = write_index(directory, data_id=[f"sound-{number}" for number in range(8)], url=[str(path) for path in paths])
    dataset = StreamingDataset(
        str(index),
        str(directory / "cache"),
        data_type="audio",
        columns_to_download=["url"],
        index_col_name="data_id",
        shuffle_seed=42,
        transforms=presets.create_standard_audio_pipeline(
            audio_field="url",
            duration=1.0,
            mono_audio=True,
            target_audio_sr=16000,
            audio_decoding_kwargs={"clip_offset_strategy": "random_loud", "allow_shorter_audio": False},
        ),
    )
    for batch in DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=collate):
        print(batch["audio"].shape, "largest", round(float(batch["audio"].abs().max()), 3), batch["data_id"])


if __name__ == "__main__":
    run(main)
