"""The image example of the README of `sds`, its imports changed (and its bucket): transforms and loop as users have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from sqlstream import StreamingDataset
from sqlstream.transforms import presets

NUM_MEDIA = 24
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),  # there may be no accelerator here
]


class HorizontalFlipTransform:
    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(sample["image"], torch.Tensor)
        assert sample["image"].ndim == 3
        assert sample["image"].shape[0] in [1, 3]
        sample["image"] = torch.flip(sample["image"], dims=[2]) if torch.rand(1) < 0.5 else sample["image"]
        return sample


def build_transforms() -> list[Callable[..., Any]]:
    image_transforms = presets.create_standard_image_pipeline(
        image_field="personalization_image_path",
        resolution=(256, 256),
    )
    sample_cleaning_transform = presets.EnsureFieldsTransform(fields_whitelist=["image", "media_id"], drop_others=True)
    return image_transforms + [HorizontalFlipTransform(), sample_cleaning_transform]  # noqa: RUF005 - as users write it


@pytest.fixture
def index_path(tmp_path: Path) -> Path:
    for number in range(NUM_MEDIA):
        Image.new("RGB", (400 + number, 300), (10 * number, 100, 200)).save(tmp_path / f"{number}.jpg")
        (tmp_path / f"{number}.txt").write_text("a caption")
    table = {
        "media_id": [f"media-{number:02d}" for number in range(NUM_MEDIA)],
        "personalization_image_path": [str(tmp_path / f"{number}.jpg") for number in range(NUM_MEDIA)],
        "personalization_caption_path": [str(tmp_path / f"{number}.txt") for number in range(NUM_MEDIA)],
        "num_related_images": [1] * NUM_MEDIA,
        "unused": [None] * NUM_MEDIA,
    }
    pq.write_table(pa.table(table), tmp_path / "index.parquet")
    return tmp_path / "index.parquet"


def test_the_image_example_runs_with_its_imports_changed(index_path: Path, tmp_path: Path) -> None:
    dataset = StreamingDataset(
        src=str(index_path),
        dst=str(tmp_path / "downloads"),
        transforms=build_transforms(),
        columns_to_download=["personalization_image_path", "personalization_caption_path"],
        index_col_name="media_id",
        num_downloading_workers=5,
        prefetch=100,
        cache_limit="10gb",
        allow_missing_columns=False,
        shuffle_seed=123,
        sql_query="SELECT * FROM dataframe WHERE num_related_images > 0",
        max_size=50_000,
        print_exceptions=True,
        print_traceback=True,
    )
    sample = dataset[12]
    assert sample.keys() == {"image", "media_id"}
    Image.fromarray(sample["image"].permute(1, 2, 0).cpu().numpy().astype("uint8")).save(tmp_path / "debug-sample.png")
    dataloader = torch.utils.data.DataLoader(dataset, batch_size=3, num_workers=2, pin_memory=True, drop_last=True)
    data_iterator = iter(dataloader)
    for _ in range(7):
        batch = next(data_iterator)
        assert len(batch["media_id"]) == 3
        for media_id, image in zip(batch["media_id"], batch["image"], strict=True):
            assert image.dtype == torch.uint8
            pixels = image.permute(1, 2, 0).cpu().numpy().astype("uint8")  # [h, w, c]
            assert pixels.shape == (256, 256, 3)
            assert np.abs(pixels[..., 0].mean() - 10 * int(media_id.removeprefix("media-"))) < 4
    del data_iterator
    dataset.close()
