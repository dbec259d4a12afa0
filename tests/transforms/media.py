"""Small media made here, with known content."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image, ImageDraw


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """1/f noise: the spectrum of photographs."""
    rng = np.random.default_rng(seed)
    spectrum = np.fft.rfft2(rng.normal(size=(3, height, width)))
    distance = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    noise = np.fft.irfft2(spectrum / np.maximum(distance, 1 / max(height, width)), s=(height, width))
    levels = (noise - noise.mean()) / noise.std() * 50 + 127
    return Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8).transpose(1, 2, 0).copy())


def drawing(height: int, width: int, seed: int = 0) -> Image.Image:
    """Rectangles and text: hard edges everywhere."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for _ in range(300):
        x, y, w, h = (int(v) for v in (*rng.integers(0, [width, height]), *rng.integers(2, 90, 2)))
        draw.rectangle([x, y, x + w, y + h], fill=tuple(int(c) for c in rng.integers(0, 256, 3)))
        draw.text((int(rng.integers(0, width)), int(rng.integers(0, height))), "text", fill="black")
    return image


def quadrants(height: int, width: int) -> Image.Image:
    """Red, green / blue, white: shows where up and left are."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = (255, 0, 0)
    pixels[: height // 2, width // 2 :] = (0, 255, 0)
    pixels[height // 2 :, : width // 2] = (0, 0, 255)
    pixels[height // 2 :, width // 2 :] = (255, 255, 255)
    return Image.fromarray(pixels)


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The image as a file's bytes."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
