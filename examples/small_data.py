"""Small data for the examples: pictures, clips with sound, captions, embeddings, latents, shards, all made here."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

WORDS = ("a red", "a green", "a blue", "a grey")
COLOURS = ((220, 60, 60), (60, 200, 60), (60, 60, 220), (128, 128, 128))


def run(main: Callable[[Path], None]) -> None:
    """Run an example in a directory that is gone afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))


def write_index(directory: Path, **columns: list[Any]) -> Path:
    """A parquet index with one row per sample."""
    path = directory / "index.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def write_image(path: Path, number: int, size: tuple[int, int] = (320, 240)) -> str:
    """A JPEG of one colour with a gradient."""
    width, height = size
    shade = np.linspace(0.5, 1.0, width)[None, :, None] * np.ones((height, 1, 1))
    pixels = (shade * COLOURS[number % len(COLOURS)]).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, quality=90)
    return str(path)


def caption(number: int) -> str:
    """Words for a picture."""
    return f"{WORDS[number % len(WORDS)]} picture, number {number}"


def tone(number: int, seconds: float, rate: int = 48000) -> np.ndarray[Any, Any]:
    """A sine whose pitch is the sample's. # [s]."""
    time = np.arange(round(seconds * rate)) / rate
    return (0.3 * np.sin(2 * np.pi * (220 + 20 * number) * time)).astype(np.float32)


def write_video(path: Path, number: int, seconds: float = 2.0, fps: int = 24, *, with_sound: bool = False) -> str:
    """An H.264 clip of a moving square, with a tone if asked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as output:
        stream: Any = output.add_stream("libx264", rate=fps)
        stream.width, stream.height, stream.pix_fmt = 320, 180, "yuv420p"
        stream.options = {"preset": "ultrafast"}
        voice: Any = output.add_stream("aac", rate=48000, layout="mono") if with_sound else None
        for index in range(round(seconds * fps)):
            pixels = np.full((180, 320, 3), 40, np.uint8)
            left = 4 * index % 280
            pixels[70:110, left : left + 40] = COLOURS[number % len(COLOURS)]
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = index, Fraction(1, fps)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
        if voice is not None:
            samples = tone(number, seconds)
            for start in range(0, len(samples), 1024):
                block = av.AudioFrame.from_ndarray(samples[None, start : start + 1024], format="fltp", layout="mono")
                block.sample_rate, block.pts, block.time_base = 48000, start, Fraction(1, 48000)
                output.mux(voice.encode(block))
            output.mux(voice.encode(None))
    return str(path)


def write_embedding(path: Path, text: str, size: int = 16) -> str:
    """A stand-in for a text encoder's output: one row for each word."""
    path.parent.mkdir(parents=True, exist_ok=True)
    words = text.split()
    rows = np.stack([np.random.default_rng(sum(map(ord, word))).normal(size=size) for word in words]).astype(np.float32)
    np.savez(path, embeddings=rows, eot_location=np.array(len(words) - 1))
    return str(path)


def write_latent(path: Path, number: int) -> str:
    """A stand-in for a VAE's output of a video of 16 frames: mean and log variance."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mean = torch.full((16, 4, 8, 8), float(number))  # [lt, lc, lh, lw]
    logvar = torch.full_like(mean, -4.0)  # [lt, lc, lh, lw]
    torch.save({"mean": mean, "logvar": logvar, "input_shape": (16, 3, 64, 64), "input_framerate": 24.0}, path)
    return str(path)


def write_tar(path: Path, numbers: Iterable[int]) -> Path:
    """A shard as WebDataset writes it: jpg and cls of each sample, and txt of every second one."""
    with tarfile.open(path, "w") as archive:
        for number in numbers:
            picture = Path(write_image(path.parent / "pictures" / f"{number}.jpg", number)).read_bytes()
            parts = {"jpg": picture, "cls": str(number % 3).encode()}
            if number % 2:
                parts["txt"] = caption(number).encode()
            for extension, content in parts.items():
                member = tarfile.TarInfo(f"{number:06}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def write_mds(directory: Path, num_shards: int, num_samples: int) -> Path:
    """Shards as MosaicML's MDSWriter writes them: a table of offsets, then the samples."""
    directory.mkdir(parents=True)
    columns = {"caption": ("str", None), "label": ("int", 8), "tokens": ("ndarray:int32:8", 32)}
    shards = []
    for shard in range(num_shards):
        samples = []
        for number in range(shard * num_samples, (shard + 1) * num_samples):
            text, tokens = caption(number).encode(), np.arange(number, number + 8, dtype=np.int32)  # [8]
            samples.append(np.uint32(len(text)).tobytes() + text + np.int64(number % 3).tobytes() + tokens.tobytes())
        offsets = 4 * (num_samples + 2) + np.cumsum([0, *map(len, samples)])  # [num_samples + 1]
        data = np.array([num_samples, *offsets], np.uint32).tobytes() + b"".join(samples)
        name = f"shard.{shard:05}.mds"
        (directory / name).write_bytes(data)
        encodings, sizes = zip(*columns.values(), strict=True)
        entry = {
            "version": 2,
            "format": "mds",
            "samples": num_samples,
            "size_limit": 1 << 26,
            "hashes": [],
            "compression": None,
        }
        entry |= {"column_names": [*columns], "column_encodings": encodings, "column_sizes": sizes}
        shards.append(entry | {"raw_data": {"basename": name, "bytes": len(data), "hashes": {}}, "zip_data": None})
    (directory / "index.json").write_text(json.dumps({"version": 2, "shards": shards}), encoding="utf-8")
    return directory
