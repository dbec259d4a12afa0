"""The moments of a video that make a clip: pure functions. Times are seconds from the first frame."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from sqlstream.errors import ConfigError, DecodeError

Times = npt.NDArray[np.float64]


class CropInterval(StrEnum):
    """How a clip lies in its interval."""

    HARD = "hard"
    """The clip lies inside."""
    SOFT = "soft"
    """An interval shorter than the clip grows evenly to its length, then shifts into the video."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipOptions:
    """The decode keywords of `sds`, apart from the field names."""

    random_offset: bool = True
    """Start at random; False: at the beginning of the video or interval."""
    frame_seek_timeout_sec: float | None = 5.0
    """Most seconds that the frames of one clip may take; looked at between frames. None: no limit."""
    allow_shorter_videos: bool = False
    """A video shorter than the clip gives fewer frames; False: an error."""
    framerate: float | None = None
    """Frames per second of the clip; None: the video's own."""
    thread_type: str | None = "NONE"
    """'NONE': one decoding thread (a DataLoader has a worker per core); 'FRAME', 'SLICE', 'AUTO': FFmpeg's choice."""
    approx_frame_seek: bool = False
    """Trust the header instead of scanning the file: faster to open, and wrong where frames are unevenly spaced."""
    decoder: str | None = None
    """'torchcodec', 'PyAV' or 'decord': which one to try first; None: the fastest at hand."""
    frame_timestamps: Sequence[float] | None = None
    """Seconds of the frames to decode; wins over everything else."""
    real_duration: float | None = None
    """Seconds, if known better than the file says."""
    real_framerate: float | None = None
    """Frames per second, if known better than the file says."""
    speedup_factor: float | None = None
    """Divides the clip's framerate: 2 shows twice the time."""
    crop_interval: tuple[float, float] | None = None
    """Seconds (start, end) that the clip is taken from."""
    crop_interval_type: CropInterval | str | None = None
    """'hard' or 'soft'; None: hard."""

    def __post_init__(self) -> None:
        """Check values."""
        for name in ("framerate", "real_duration", "real_framerate", "speedup_factor", "frame_seek_timeout_sec"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value!r} is out of range: give more than 0, or None")
        if self.crop_interval_type is not None and self.crop_interval_type not in list(CropInterval):
            raise ConfigError(f"crop_interval_type={self.crop_interval_type!r} is not one of {', '.join(CropInterval)}")
        if str(self.thread_type).upper() not in ("NONE", "FRAME", "SLICE", "AUTO"):
            raise ConfigError(f"thread_type={self.thread_type!r} is not one of NONE, FRAME, SLICE, AUTO")
        if self.crop_interval is not None:
            start, end = self.crop_interval
            if not (0 <= start < end):
                raise ConfigError(f"crop_interval={self.crop_interval!r} must be (start, end) with 0 <= start < end")

    @property
    def num_threads(self) -> int:
        """Decoding threads; 0: FFmpeg chooses."""
        return 1 if str(self.thread_type).upper() == "NONE" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """A planned clip."""

    times: Times
    """When each frame is shown. # [t]"""
    framerate: float
    """Frames per second between them."""

    @property
    def start(self) -> float:
        """Seconds of the first frame."""
        return float(self.times[0])

    @property
    def duration(self) -> float:
        """Seconds from the first frame to the end of the last."""
        return float(self.times[-1] - self.times[0]) + 1 / self.framerate


def plan_clip(
    options: ClipOptions,
    num_frames: int,
    duration: float,
    framerate: float,
    rng: Callable[[], np.random.Generator],
) -> Clip:
    """Return the moments of a clip.

    Args:
        options: What the user asked for.
        num_frames: Frames of the clip.
        duration: Length of the video, in seconds.
        framerate: Frames per second of the video.
        rng: Gives the sample's generator; called only if something is random.

    Raises:
        DecodeError: The video, or the interval, is too short, or the facts are no numbers.
    """
    duration = options.real_duration or duration
    framerate = options.real_framerate or framerate
    target = options.framerate or framerate
    if not (0 < duration < math.inf and 0 < framerate < math.inf):
        raise DecodeError(f"the video lasts {duration} s at {framerate} frames per second: no clip can be planned")
    target /= options.speedup_factor or 1.0
    if options.frame_timestamps is not None:
        return Clip(times=_checked_times(options.frame_timestamps), framerate=target)
    length = num_frames / target
    slack = min(0.5 / framerate, 0.02 * length)  # headers round durations, some to milliseconds
    low, high = _interval(options, length, duration)
    if high - low + slack < length:
        if not options.allow_shorter_videos:
            raise DecodeError(
                f"a clip of {num_frames} frames at {target:g} per second lasts {length:.3f} s, there are {high - low:.3f} s "
                f"between {low:.3f} and {high:.3f} (allow_shorter_videos=True gives fewer frames)"
            )
        num_frames = max(1, int((high - low) * target + 1e-6))
        length = num_frames / target
    room = max(0.0, high - low - length)
    start = low + (float(rng().random()) * room if options.random_offset and room > 0 else 0.0)
    return Clip(times=start + np.arange(num_frames) / target, framerate=target)


def _interval(options: ClipOptions, length: float, duration: float) -> tuple[float, float]:
    """Return the part of the video that the clip is taken from."""
    if options.crop_interval is None:
        return 0.0, duration
    low, high = options.crop_interval
    if low >= duration:
        raise DecodeError(f"crop_interval {options.crop_interval} begins after the video, which lasts {duration:.3f} s")
    high = min(high, duration)
    if options.crop_interval_type == CropInterval.SOFT and high - low < length:
        low = (low + high - length) / 2
        low = max(0.0, min(low, duration - length))
        high = min(duration, low + length)
    return low, high


def _checked_times(given: Sequence[float]) -> Times:
    try:
        times = np.array([float(time) for time in given], dtype=np.float64)  # [t]
    except (TypeError, ValueError) as error:
        raise DecodeError(f"frame timestamps must be numbers: {error}") from None
    if not len(times) or not bool(np.isfinite(times).all()) or bool((times < 0).any()):
        raise DecodeError(f"frame timestamps must be one or more numbers of at least 0, got {given!r}")
    return times


def tolerance(framerate: float) -> float:
    """Return how late a frame may begin and still count as shown at a moment.

    Moments are k / framerate, frames begin there up to rounding: Matroska and WebM round to milliseconds.
    """
    return min(0.5 / framerate, max(6e-4, 0.05 / framerate))


def shown_at(starts: npt.NDArray[Any], times: Times, framerate: float) -> npt.NDArray[np.int64]:
    """Return the index of the frame that is shown at each time: the last one that begins before it. # [t].

    Args:
        starts: When each frame begins, ascending. # [n]
        times: Moments. # [t]
        framerate: Frames per second of the video, for the tolerance.
    """
    indices = np.searchsorted(starts, times + tolerance(framerate), side="right") - 1  # [t]
    return np.clip(indices, 0, len(starts) - 1).astype(np.int64)
