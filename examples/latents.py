"""Latents of videos: sampled from a VAE's mean and log variance, at half the framerate."""

from __future__ import annotations

from pathlib import Path

from small_data import run, write_index, write_latent
from torch.utils.data import DataLoader

from sqlstream import StreamingDataset
from sqlstream.transforms import presets
from sqlstream.transforms.collate import collate


def main(directory: Path) -> None:
    """Make 6 files of latents and stream samples."""
    index = write_index(
        directory,
        index=[f"latent-{number}" for number in range(6)],
        latent=[write_latent(directory / "latents" / f"{number}.pt", number) for number in range(6)],
    )
    dataset = StreamingDataset(
        str(index),
        str(directory / "cache"),
        data_type="video_latent",
        columns_to_download=["latent"],
        transforms=presets.create_standard_video_latent_pipeline("latent", framerate=12.0),
    )
    for batch in DataLoader(dataset, batch_size=3, num_workers=2, collate_fn=collate):
        print(batch["latent"].shape, [round(float(latent.mean())) for latent in batch["latent"]])


if __name__ == "__main__":
    run(main)
