"""Several streams, each with batches of its own, as the loader of sds gives them; then the run goes on from its state."""

from __future__ import annotations

from pathlib import Path

from small_data import caption, run, write_image, write_index

from sqlstream import MultiStreamDataLoader, StreamingDataset, StreamOptions
from sqlstream.transforms import presets


def open_images(directory: Path, name: str, num: int) -> StreamingDataset:
    """A dataset of so many images with captions."""
    (directory / name).mkdir()
    index = write_index(
        directory / name,
        media_id=[f"{name}-{number:03d}" for number in range(num)],
        url=[write_image(directory / name / "images" / f"{number}.jpg", number) for number in range(num)],
        caption=[caption(number) for number in range(num)],
    )
    return StreamingDataset(
        str(index),
        str(directory / "cache"),
        data_type="image",
        name=name,
        columns_to_download=["url"],
        index_col_name="media_id",
        shuffle_seed=123,
        transforms=[
            *presets.create_standard_image_pipeline(image_field="url", resolution=(64, 64)),
            presets.EnsureFieldsTransform(fields_whitelist=["image", "caption"], drop_others=True),
        ],
    )


def main(directory: Path) -> None:
    """Train 10 steps on three streams, one of which is not drawn; then go on from the state, as after an interruption."""
    photos, folder = open_images(directory, "photos", 12), open_images(directory, "folder", 6)

    def open_loader() -> MultiStreamDataLoader:
        return MultiStreamDataLoader(
            datasets=[photos, folder, photos],
            stream_opts=[
                StreamOptions(name="photos", ratio=0.6, mixing_group_id=0, batch_size=4, batch_gpu=2),
                StreamOptions(name="folder", ratio=0.4, mixing_group_id=1, batch_size=3),
                StreamOptions(name="photos-unused", ratio=0.0, mixing_group_id=2, batch_size=1),
            ],
            shuffle_seed=42,
            schedule="fixed_random_order",
            num_workers=2,
        )

    loader = open_loader()
    for batch in loader:
        print(f"step {batch.step}: {batch.stream_name}, {batch['image'].shape}, rounds left: {batch.num_accum_rounds_left}")
        if batch.step == 4 and batch.num_accum_rounds_left == 0:
            break
    state = loader.state_dict()
    print(f"after 5 steps: {loader.counts(5)}; main stream: {loader.main_stream.opts.name}")
    resumed = open_loader()
    resumed.load_state_dict(state)
    for batch in resumed:
        print(f"step {batch.step}: {batch.stream_name}, {batch['image'].shape}, {batch.data_type}")
        if batch.step == 9:
            break
    resumed.close()
    loader.close()


if __name__ == "__main__":
    run(main)
