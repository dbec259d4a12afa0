"""Pages of the documentation as programs, and the bucket that they read."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from sqlstream.testing.servers import LocalS3
from tests.goldens import FIXTURES
from tests.processes import ROOT
from tests.stream.shards import tar_of

NUM_PHOTOS = 64
NUM_SHARDS = 4


def examples(page: Path) -> str:
    """All Python blocks of a page, as one script."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE))


@contextlib.contextmanager
def photo_bucket() -> Iterator[LocalS3]:
    """`s3://my-bucket/photos`: an index with image, caption and score, and the images; the same as shards, and other shards."""
    rng = np.random.default_rng(0)
    images: list[bytes] = []
    with LocalS3() as s3:
        for number in range(NUM_PHOTOS):
            image = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (48, 64, 3), dtype=np.uint8)).save(image, "JPEG")
            images.append(image.getvalue())
            s3.put(f"my-bucket/photos/images/{number:04d}.jpg", image.getvalue())
        table = pa.table(
            {
                "index": [f"photo-{number}" for number in range(NUM_PHOTOS)],
                "image": [f"images/{number:04d}.jpg" for number in range(NUM_PHOTOS)],
                "caption": [f"photo number {number}" for number in range(NUM_PHOTOS)],
                "score": [number / NUM_PHOTOS for number in range(NUM_PHOTOS)],
            }
        )
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        s3.put("my-bucket/photos/index.parquet", buffer.getvalue())
        _put_shards(s3, images)
        yield s3


def _put_shards(s3: LocalS3, images: Sequence[bytes]) -> None:
    """Put the images into TAR shards, with a table of scores; and a ZIP of Hugging Face, and MDS, that others wrote."""
    for shard in range(NUM_SHARDS):
        numbers = range(shard * NUM_PHOTOS // NUM_SHARDS, (shard + 1) * NUM_PHOTOS // NUM_SHARDS)
        made = [
            (
                f"{number:04d}",
                {"jpg": images[number], "cls": b"%d" % (number % 10)} | ({"txt": b"a photo"} if number % 2 else {}),
            )
            for number in numbers
        ]
        s3.put(f"my-bucket/shards/train-{shard:06d}.tar", tar_of(made))
    keys = [f"{number:04d}" for number in range(NUM_PHOTOS)]
    buffer = io.BytesIO()
    pq.write_table(pa.table({"__key__": keys, "score": [number / NUM_PHOTOS for number in range(NUM_PHOTOS)]}), buffer)
    s3.put("my-bucket/shards/scores.parquet", buffer.getvalue())
    s3.put("my-bucket/animals.zip", (FIXTURES / "hf/folder.zip").read_bytes())
    for path in (FIXTURES / "mds/zstd").iterdir():
        s3.put(f"my-bucket/mds/train/{path.name}", path.read_bytes())


def indented(text: str) -> str:
    """Code for the body of a block."""
    return "".join(f"    {line}\n" if line.strip() else "\n" for line in text.splitlines())
