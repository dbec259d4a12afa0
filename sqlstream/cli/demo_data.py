"""The demo's dataset: real JPEGs with captions, made here, and the index beside them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image, ImageDraw

_COLORS = ("crimson", "darkorange", "gold", "seagreen", "steelblue", "indigo", "orchid", "sienna")
_SHAPES = ("circle", "square", "triangle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One sample of the demo."""

    key: str
    jpeg: bytes
    caption: str
    width: int
    height: int


def make_pictures(num_pictures: int) -> Iterator[Picture]:
    """Yield pictures of varied content and size; the same ones every time, so that a kept cache serves the next run."""
    for i in range(num_pictures):
        rng = np.random.default_rng(i)
        width, height = (int(side) for side in rng.integers(200, 700, 2))
        shape, color = _SHAPES[rng.integers(len(_SHAPES))], _COLORS[rng.integers(len(_COLORS))]
        buffer = io.BytesIO()
        _draw(rng, (width, height), shape, color).save(buffer, "JPEG", quality=int(rng.integers(70, 95)))
        caption = f"a {color} {shape} on clouds, {width} by {height}"
        yield Picture(key=f"{i:06}", jpeg=buffer.getvalue(), caption=caption, width=width, height=height)


def index_of(pictures: list[Picture], base_url: str) -> bytes:
    """Return the parquet index of pictures that lie at `<base_url>/<key>.jpg`, with the hash that each must have."""
    table = pyarrow.table(
        {
            "index": [picture.key for picture in pictures],
            "image": [f"{base_url}/{picture.key}.jpg" for picture in pictures],
            "caption": [picture.caption for picture in pictures],
            "width": [picture.width for picture in pictures],
            "height": [picture.height for picture in pictures],
            "num_bytes": [len(picture.jpeg) for picture in pictures],
            "sha256": [hashlib.sha256(picture.jpeg).hexdigest() for picture in pictures],
        }
    )
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


def _draw(rng: np.random.Generator, size: tuple[int, int], shape: str, color: str) -> Image.Image:
    """Return clouds (coarse noise, enlarged) with a shape on them, and grain, so that the JPEG is as large as a photo's."""
    coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))  # [h, w, c]
    grain = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 1), dtype=np.uint8).repeat(3, axis=2))  # [h, w, c]
    picture = Image.blend(coarse.resize(size, Image.Resampling.BICUBIC), grain, alpha=0.15)
    center, radius = (size[0] / 2, size[1] / 2), min(size) / 3
    draw = ImageDraw.Draw(picture)
    if shape == "circle":
        draw.ellipse([center[0] - radius, center[1] - radius, center[0] + radius, center[1] + radius], fill=color)
    else:
        draw.regular_polygon(
            (*center, radius), n_sides=4 if shape == "square" else 3, fill=color, rotation=int(rng.integers(90))
        )
    return picture
