"""Pages of the documentation as programs, and the bucket that they read."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from sqlstream.testing.servers import LocalS3
from tests.processes import ROOT

NUM_PHOTOS = 64


def examples(page: Path) -> str:
    """All Python blocks of a page, as one script."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE))


@contextlib.contextmanager
def photo_bucket() -> Iterator[LocalS3]:
    """`s3://my-bucket/photos`: an index with image, caption and score, and the images."""
    rng = np.random.default_rng(0)
    with LocalS3() as s3:
        for number in range(NUM_PHOTOS):
            image = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (48, 64, 3), dtype=np.uint8)).save(image, "JPEG")
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
        yield s3


def indented(text: str) -> str:
    """Code for the body of a block."""
    return "".join(f"    {line}\n" if line.strip() else "\n" for line in text.splitlines())
