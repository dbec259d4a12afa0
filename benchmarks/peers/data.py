"""The data: photo-like JPEGs, the table that names them, and large tables of rows without objects; made once, then kept."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.peers.job import names

NUM_DISTINCT = 16
"""Pictures that are encoded; the photos are these with a comment of their own, so that no two files are equal."""
WIDTH, HEIGHT = 500, 375
QUALITY = 75
"""With the noise below: about 44 KB a photo, what ImageNet-like sets have at this size."""
ROWS_A_GROUP = 1 << 18
SMALL_BYTES = 1024
"""Of each file where the number of files is what counts."""
LINKS_A_FILE = 50_000
"""ext4 allows 65 000 names of a file."""


def once(marker: Path, make: Callable[[], None]) -> None:
    """Make something that is not there yet; the marker stands for all of it."""
    if not marker.exists():
        make()
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text("made\n")


def picture(generator: np.random.Generator) -> bytes:
    """Return a JPEG of 1/f noise: smooth areas, edges and grain, as photos have them."""
    scale = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.fftfreq(WIDTH)[None, :])  # [h, w]
    scale[0, 0] = 1.0
    spectrum = np.fft.fft2(generator.standard_normal((3, HEIGHT, WIDTH))) / scale**1.2  # [c, h, w]
    pixels = np.fft.ifft2(spectrum).real.transpose(1, 2, 0)  # [h, w, c]
    pixels = 128 + 48 * (pixels - pixels.mean()) / pixels.std()
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def with_comment(jpeg: bytes, text: str) -> bytes:
    """Return a JPEG with a comment after its first marker."""
    comment = text.encode()
    return jpeg[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + jpeg[2:]


def make_photos(directory: Path, num_samples: int) -> None:
    """Write the photos and, beside them, the table that names them by relative paths."""
    photos = directory / "photos"
    photos.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    pictures = [picture(generator) for _ in range(min(NUM_DISTINCT, num_samples))]
    for number, name in enumerate(names(num_samples)):
        (photos / name).write_bytes(with_comment(pictures[number % len(pictures)], name))
    table = pa.table(
        {
            "index": names(num_samples),
            "image": [f"photos/{name}" for name in names(num_samples)],
            "label": pa.array(np.arange(num_samples) % 1000),
        }
    )
    pq.write_table(table, directory / "photos.parquet")


def rows_path(place: Path, num_rows: int) -> Path:
    """Return where the table of so many rows is."""
    return place / f"rows-{num_rows}.parquet"


def make_rows(path: Path, num_rows: int) -> None:
    """Write a table of so many rows: a name, a URL, a caption, a score."""
    schema = pa.schema({"index": pa.string(), "url": pa.string(), "caption": pa.string(), "score": pa.float64()})
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, ROWS_A_GROUP):
            numbers = range(start, min(start + ROWS_A_GROUP, num_rows))
            columns = [
                pa.array([f"{number:09}" for number in numbers]),
                pa.array([f"s3://bench/rows/{number:09}.jpg" for number in numbers]),
                pa.array([f"a photo of thing {number % 1000} beside thing {number % 777}" for number in numbers]),
                pa.array(generator.random(len(numbers))),
            ]
            writer.write_table(pa.table(columns, schema=schema))


def write_small_files(paths: Sequence[str]) -> None:
    """Write small files, which share the bytes of a few: that takes seconds, not minutes, for a million of them."""
    for directory in {os.path.dirname(path) for path in paths}:
        os.makedirs(directory, exist_ok=True)
    for start in range(0, len(paths), LINKS_A_FILE):
        first, *others = paths[start : start + LINKS_A_FILE]
        Path(first).write_bytes(bytes(SMALL_BYTES))
        for path in others:
            os.link(first, path)


def prepare(place: Path, num_samples: int) -> None:
    """Make so many photos below `place`, if they are not there."""
    once(place / "photos.made", lambda: make_photos(place / "bench", num_samples))


def prepare_rows(place: Path, num_rows: int) -> None:
    """Make the table of so many rows, if it is not there."""
    path = rows_path(place, num_rows)
    once(path.with_suffix(".made"), lambda: make_rows(path, num_rows))


def total_bytes(place: Path) -> int:
    """Return the bytes of all photos."""
    return sum(path.stat().st_size for path in (place / "bench" / "photos").glob("*.jpg"))


def describe(place: Path) -> str:
    """Return what the photos are, for the report."""
    sizes = [path.stat().st_size for path in (place / "bench" / "photos").glob("*.jpg")]
    return json.dumps({"photos": len(sizes), "mean_bytes": sum(sizes) // len(sizes), "total_bytes": sum(sizes)})
