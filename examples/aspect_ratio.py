"""Pictures of many sizes: each batch has one aspect ratio, nothing is padded, and a run goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

from small_data import caption, run, write_image, write_index

from sqlstream import AspectBuckets, Buckets, StreamingDataLoader, StreamingDataset
from sqlstream.transforms import presets

BUCKETS = AspectBuckets.of([(96, 64), (80, 80), (64, 96)])  # small ones; for SDXL: AspectBuckets.sdxl()


def main(directory: Path) -> None:
    """Make 24 pictures of three shapes, stream them, stop after two batches and go on."""
    shapes = [((320, 240), (240, 320), (300, 300))[number % 3] for number in range(24)]
    index = write_index(
        directory,
        image=[write_image(directory / "images" / f"{number}.jpg", number, shape) for number, shape in enumerate(shapes)],
        caption=[caption(number) for number in range(24)],
        width=[width for width, _ in shapes],
        height=[height for _, height in shapes],
    )
    dataset = StreamingDataset(
        str(index),
        str(directory / "cache"),
        columns_to_download=["image"],
        shuffle_seed=123,
        batches=Buckets("width, height", into=BUCKETS, global_batch_size=4),
        transforms=[presets.ResizeToBucket("image")],
    )
    loader = StreamingDataLoader(dataset, num_workers=2)  # 4 samples of a batch, divided by the number of ranks
    batches = iter(loader)
    for _ in range(2):
        batch = next(batches)
        print(batch["image"].shape, "at", batch["crop_top_left"])
    state = json.dumps(loader.state_dict())
    del batches
    loader.load_state_dict(json.loads(state))
    for batch in loader:
        print(batch["image"].shape, "of", batch["original_size"])


if __name__ == "__main__":
    run(main)
