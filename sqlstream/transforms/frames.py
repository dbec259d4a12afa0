"""The interface between `video_reader` and the libraries that decode videos."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sqlstream.errors import ConfigError
from sqlstream.transforms.clip import Times
from sqlstream.transforms.content import Source

CHUNK = 64
"""Frames that a decoder gives at a time; the time limit is checked in between. Smaller pieces cost more copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """Decoded frames and when they begin."""

    pixels: torch.Tensor  # [t, c, h, w]
    """uint8 RGB."""
    times: Times
    """Seconds from the video's first frame to the beginning of each. # [t]"""


class Decoder(Protocol):
    """One opened file in one library."""

    begin: float
    """Time of the first frame in the container, in seconds; transport streams do not begin at 0."""
    duration: float
    """Seconds of the video stream."""
    framerate: float
    """Mean frames per second."""
    height: int
    """Pixels, after rotation."""
    width: int
    """Pixels, after rotation."""

    def frames_at(self, times: Times, check: Callable[[], None]) -> Frames:
        """Return the frames shown at ascending times; `check` raises when time is up."""

    def close(self) -> None:
        """Close the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOptions:
    """How a video is opened."""

    num_threads: int = 1
    """Decoding threads; 0: FFmpeg chooses."""
    is_approximate: bool = False
    """Do not scan the file for its frames (torchcodec)."""
    is_scattered: bool = False
    """Frames at scattered moments are wanted, not a clip: then another decoder is the fastest."""
    decoder: str | None = None
    """'torchcodec', 'PyAV' or 'decord': which one to try first; None: the fastest at hand."""

    def __post_init__(self) -> None:
        """Check the name."""
        if self.decoder not in (None, "torchcodec", "PyAV", "decord"):
            raise ConfigError(f"decoder={self.decoder!r} is unknown: give 'torchcodec', 'PyAV' or 'decord'")


OpenDecoder = Callable[[Any, Source, ReaderOptions], Decoder]


def file_like(source: Source) -> Any:
    """Return a path as it is, bytes as a file."""
    return io.BytesIO(source) if isinstance(source, bytes) else source


def chunks(values: Sequence[Any]) -> list[Sequence[Any]]:
    """Return `values` in pieces of at most `CHUNK`."""
    return [values[start : start + CHUNK] for start in range(0, len(values), CHUNK)]
