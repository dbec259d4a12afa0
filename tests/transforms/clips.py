"""Small videos made here, by PyAV's own encoders: every frame carries its number, the sound its time."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import soundfile
import torch
from av.stream import Disposition

WIDTH, HEIGHT, FPS = 160, 96, 24
BITS = 10
"""Blocks of 16 x 16 pixels in the upper row, white for 1; the lower half shows whether colours come through."""


def numbered(number: int) -> npt.NDArray[np.uint8]:
    """The picture of a frame."""
    picture = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    for bit in range(BITS):
        picture[:32, 16 * bit : 16 * (bit + 1)] = 235 if number >> bit & 1 else 20
    picture[48:, :80] = (200, 40, 40)
    picture[48:, 80:] = (40, 40, 200)
    return picture


def numbers(frames: torch.Tensor) -> list[int]:  # [t, c, h, w]
    """The numbers that frames carry."""
    centres = frames.float().mean(dim=1)[:, 12, 8 : 16 * BITS : 16]  # [t, bits]
    return [sum(1 << bit for bit, level in enumerate(row.tolist()) if level > 128) for row in centres]


@contextlib.contextmanager
def scheduled_as_before() -> Iterator[None]:
    """Take back what SVT-AV1 does to its caller where that is root: SCHED_FIFO at priority 99, which children inherit.

    Two of those that spin on two cores let nobody else run, not even their siblings.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


@functools.cache
def video(
    container: str = "mp4",
    codec: str = "libx264",
    num_frames: int = 60,
    *,
    gop: int = 12,
    sound: bool = False,
    is_variable: bool = False,
    rotation: int = 0,
    options: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """A video's bytes; with `is_variable`, frame k lasts 1 or 3 frame times in turn."""
    file = io.BytesIO()
    with scheduled_as_before(), av.open(file, "w", format=container, options=dict(options)) as output:
        stream: Any = output.add_stream(codec, rate=FPS)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.codec_context.gop_size = gop
        stream.codec_context.time_base = Fraction(1, FPS)
        stream.options = {"preset": "ultrafast", "crf": "18"} if codec == "libx264" else {}
        if codec in ("libx264", "mpeg4"):
            stream.codec_context.max_b_frames = 2
        if codec == "libsvtav1":
            stream.options = {"preset": "12", "crf": "12"}
        voice: Any = output.add_stream("aac", rate=48000, layout="mono") if sound else None
        for number, pts in enumerate(times_of(num_frames, is_variable)):
            frame = av.VideoFrame.from_ndarray(numbered(number), format="rgb24")
            frame.pts, frame.time_base = pts, Fraction(1, FPS)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
        if voice is not None:
            mux_sound(output, voice, num_frames / FPS)
    return file.getvalue()


@functools.cache
def cut(num_frames: int, container: str = "mp4") -> bytes:
    """The video from a frame on, cut as `ffmpeg -ss -c copy` does: what it keeps before it, from a key frame, is not shown."""
    file, start = io.BytesIO(), Fraction(num_frames, FPS)
    source: Any
    with av.open(io.BytesIO(video(sound=True))) as source, av.open(file, "w", format=container) as output:
        streams = {stream: output.add_stream_from_template(stream) for stream in source.streams}
        source.seek(int(start * av.time_base))
        for packet in source.demux():
            if packet.dts is None or packet.pts is None or packet.time_base is None:
                continue  # the end
            late = round(start / packet.time_base)
            if packet.stream.type == "video" or packet.pts >= late:
                packet.pts, packet.dts = packet.pts - late, packet.dts - late
                packet.stream = streams[packet.stream]
                output.mux(packet)
    return file.getvalue()


@functools.cache
def beside_another() -> bytes:
    """The video as the second, default stream of a Matroska file, whose first one shows nothing."""
    file = io.BytesIO()
    source: Any
    with av.open(io.BytesIO(video())) as source, av.open(file, "w", format="matroska") as output:
        other: Any = output.add_stream("libx264", rate=FPS)
        other.width, other.height, other.pix_fmt, other.disposition = WIDTH, HEIGHT, "yuv420p", Disposition(0)
        stream = output.add_stream_from_template(source.streams.video[0])
        stream.disposition = Disposition.default
        for number in range(24):
            frame = av.VideoFrame.from_ndarray(np.zeros((HEIGHT, WIDTH, 3), np.uint8), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            output.mux(other.encode(frame))
        output.mux(other.encode(None))
        for packet in source.demux():
            if packet.dts is not None:
                packet.stream = stream
                output.mux(packet)
    return file.getvalue()


@functools.cache
def delayed(seconds: int, container: str) -> bytes:
    """The video with its first frame at a time above 0, as `ffmpeg -f segment -c copy` leaves its pieces."""
    file = io.BytesIO()
    source: Any
    with av.open(io.BytesIO(video())) as source, av.open(file, "w", format=container) as output:
        stream = output.add_stream_from_template(source.streams.video[0])
        for packet in source.demux():
            if packet.dts is not None and packet.pts is not None and packet.time_base is not None:
                late = round(seconds / packet.time_base)
                packet.pts, packet.dts, packet.stream = packet.pts + late, packet.dts + late, stream
                output.mux(packet)
    return file.getvalue()


def times_of(num_frames: int, is_variable: bool) -> list[int]:
    """When frames begin, in frame times."""
    return [2 * k + k % 2 for k in range(num_frames)] if is_variable else list(range(num_frames))


def chirp(seconds: float, rate: int = 48000) -> npt.NDArray[np.float32]:
    """A tone that climbs 400 Hz each second from 200 Hz: its pitch tells the time."""
    t = np.arange(round(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * (200 * t + 200 * t * t))).astype(np.float32)


def pitch(samples: torch.Tensor, rate: int) -> float:  # [c, s]
    """Main frequency of samples."""
    window = samples[0] * torch.hann_window(samples.shape[1])
    return float(torch.fft.rfft(window).abs().argmax()) * rate / samples.shape[1]


def encoded(samples: npt.NDArray[Any], kind: str = "WAV", rate: int = 48000, **options: Any) -> bytes:
    """Samples [s] or [s, c] as a file's bytes."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, **options)
    return file.getvalue()


def mux_sound(output: Any, stream: Any, seconds: float) -> None:
    """Encode the chirp."""
    samples = chirp(seconds)
    for start in range(0, len(samples), 1024):
        block = samples[None, start : start + 1024]
        frame = av.AudioFrame.from_ndarray(block, format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 48000, start, Fraction(1, 48000)
        output.mux(stream.encode(frame))
    output.mux(stream.encode(None))
