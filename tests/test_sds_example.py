"""The scripts that `sds` users have: their calls run after the imports were changed, and nothing else."""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from sqlstream import StreamingDataset
from sqlstream.testing.servers import LocalS3
from sqlstream.transforms import presets

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),  # there may be no accelerator here
]
NUM_MEDIA = 40


@pytest.fixture(scope="module")
def s3() -> Iterator[LocalS3]:
    with LocalS3() as server:
        yield server


@pytest.fixture
def index_url(s3: LocalS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A parquet index of images and captions in a bucket; credentials and endpoint are in the environment, as on a cluster."""
    for name, value in {
        "AWS_REGION": "us-west-2",
        "SDS_LOG_LEVEL": "DEBUG",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_ENDPOINT_URL": s3.endpoint_url,
    }.items():
        monkeypatch.setenv(name, value)
    images, captions = [], []
    for number in range(NUM_MEDIA):
        jpeg = io.BytesIO()
        Image.new("RGB", (400 + number, 300), (5 * number, 100, 200)).save(jpeg, "JPEG")
        images.append(s3.put(f"media/images/{number:03d}.jpg", jpeg.getvalue()))
        captions.append(s3.put(f"media/captions/{number:03d}.txt", f"a picture, the {number}th".encode()))
    table = {
        "media_id": [f"media-{number:03d}" for number in range(NUM_MEDIA)],
        "personalization_image_path": images,
        "personalization_caption_path": captions,
        "num_related_images": [number % 4 for number in range(NUM_MEDIA)],
        "unused": [None] * NUM_MEDIA,
    }
    path = tmp_path / "media.parquet"
    pq.write_table(pa.table(table), path)
    return s3.put("media/index/media.parquet", path.read_bytes())


class HorizontalFlipTransform:
    """A transform as users write them."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(sample["image"], torch.Tensor)
        assert sample["image"].ndim == 3
        assert sample["image"].shape[0] in [1, 3]
        sample["image"] = torch.flip(sample["image"], dims=[2]) if torch.rand(1) < 0.5 else sample["image"]  # [c, h, w]
        return sample


def build_transforms() -> list[Callable[..., Any]]:
    image_transforms = presets.create_standard_image_pipeline(
        image_field="personalization_image_path",
        resolution=(256, 256),
    )
    sample_cleaning_transform = presets.EnsureFieldsTransform(fields_whitelist=["image", "media_id"], drop_others=True)
    name = lambda sample: {**sample, "media_id": sample["media_id"].upper()}  # noqa: E731 - as users write it
    return image_transforms + [HorizontalFlipTransform(), sample_cleaning_transform, name]  # noqa: RUF005 - as users write it


def test_the_script_with_a_parquet_index_on_s3_runs(index_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        dataset = StreamingDataset(
            index_url,
            str(tmp_path / "downloads"),
            transforms=build_transforms(),
            columns_to_download=["personalization_image_path", "personalization_caption_path"],
            index_col_name="media_id",
            num_downloading_workers=5,
            prefetch=100,
            cache_limit="10gb",
            allow_missing_columns=False,
            lazy_index_chunk_size=1000,
            lazy_index_num_threads=2,
            lazy_index_prefetch_factor=3,
            min_num_pending_tasks_thresh=200,
            shuffle_seed=123,
            sql_query="SELECT * FROM dataframe WHERE num_related_images > 0",
            max_size=50_000,
            print_exceptions=True,
            print_traceback=True,
        )
    sample = dataset[12]  # the 13th row with related images: 16 rows lie before it, 4 of them without
    assert sample.keys() == {"image", "media_id"}
    assert sample["media_id"] == "MEDIA-017"
    Image.fromarray(sample["image"].permute(1, 2, 0).cpu().numpy().astype("uint8")).save(tmp_path / "debug.png")

    random.seed(7)
    before = random.getstate()
    dataloader = torch.utils.data.DataLoader(dataset, batch_size=3, num_workers=2, pin_memory=True, drop_last=True)
    data_iterator = iter(dataloader)
    seen = []
    for _ in range(7):
        batch = next(data_iterator)
        assert len(batch["media_id"]) == 3
        assert batch["image"].shape == (3, 3, 256, 256)
        assert batch["image"].dtype == torch.uint8
        for media_id, image in zip(batch["media_id"], batch["image"], strict=True):
            number = int(media_id.removeprefix("MEDIA-"))
            assert number % 4 > 0
            assert abs(float(image[0].float().mean()) - 5 * number) < 4, "another sample's image"
            seen.append(number)
    assert len(set(seen)) == 21
    assert seen != sorted(seen)
    assert random.getstate() == before
    del data_iterator
    assert sum(1 for _ in dataset) == len(dataset) == NUM_MEDIA * 3 // 4  # known after one pass
    dataset.close()


def test_the_script_with_a_folder_of_texts_runs(tmp_path: Path) -> None:
    src, extension = tmp_path / "data", "txt"
    src.mkdir()
    for number in range(10):
        (src / f"{number:05d}.{extension}").write_text(f"This is text {number}.\n" * 10)

    class LoadTransform:
        def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
            with open(sample[extension]) as file:
                sample[extension] = file.read()
            return sample

    dataset = StreamingDataset(
        str(src), str(tmp_path / "out"), columns_to_download=[extension], data_type="text", transforms=[LoadTransform()]
    )
    dataloader = torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=0)
    batches = list(dataloader)
    assert [text for batch in batches for text in batch[extension]] == [f"This is text {n}.\n" * 10 for n in range(10)]
    assert [key for batch in batches for key in batch["index"]] == [f"{number:05d}" for number in range(10)]
    dataset.close()
