"""Pictures of many sizes: each batch has one aspect ratio, nothing is padded, and a run goes on where it was stopped.

torchrun --standalone --nproc-per-node=2 examples/aspect_ratio.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from small_data import caption, run, write_image, write_index

from sqlstream import AspectBuckets, Buckets, StreamingDataLoader, StreamingDataset
from sqlstream.transforms import presets

BUCKETS = AspectBuckets.of([(96, 64), (80, 80), (64, 96)])  # small ones; for SDXL: AspectBuckets.sdxl()
TOKENS = 4 * 25
"""As many patches of 16 x 16 pixels as a global batch holds at most: 4 pictures of 96 x 64 or 64 x 96, or of 80 x 80."""


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
        batches=Buckets("width, height", into=BUCKETS, global_batch_tokens=TOKENS, rank_multiple=4),  # for 1, 2 or 4 ranks
        transforms=[presets.ResizeToBucket("image")],
    )
    loader = StreamingDataLoader(dataset, num_workers=0 if dataset.world.world_size > 1 else 2)
    batches = iter(loader)
    show(dataset, 0, (next(batches) for _ in range(2)))
    state = json.dumps(loader.state_dict())
    del batches
    loader.load_state_dict(json.loads(state))
    show(dataset, 2, loader)


def show(dataset: StreamingDataset, first_step: int, batches: Iterable[Any]) -> None:
    """Print what a rank is given."""
    for step, batch in enumerate(batches, first_step):
        shape, rows = tuple(batch["image"].shape), sorted(batch["__row__"].tolist())
        print(f"rank {dataset.world.rank} step {step}: {shape} rows {rows}", flush=True)


if __name__ == "__main__":
    run(main)
