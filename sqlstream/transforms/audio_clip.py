"""The range of a clip in an audio file: pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch

from sqlstream.errors import ConfigError, DecodeError
from sqlstream.transforms.audio_decode import ChooseRange, DecodeAll


class ClipOffset(StrEnum):
    """Ways to choose a clip, as `sds` names them."""

    RANDOM = "random"
    """Uniform."""
    START = "start"
    """The beginning."""
    MAX_MEAN = "max_mean"
    """The window with the largest mean of |x|."""
    MAX_CENTER = "max_center"
    """The window around the largest |x|, shifted into the audio."""
    RANDOM_LOUD = "random_loud"
    """Uniform among windows whose level is at least `loudness_cutoff`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioClipOptions:
    """The decode keywords of `sds`."""

    duration: float | None = None
    """Seconds of the clip; None: the whole audio."""
    clip_offset_strategy: ClipOffset | str = ClipOffset.RANDOM
    """Which part."""
    allow_shorter_audio: bool = False
    """Audio shorter than the clip is given whole; False: an error."""
    loudness_cutoff: float = -40.0
    """Least root mean square of a `random_loud` window, in dB of full scale."""

    def __post_init__(self) -> None:
        """Check values."""
        if self.clip_offset_strategy not in list(ClipOffset):
            raise ConfigError(f"clip_offset_strategy={self.clip_offset_strategy!r} is not one of {', '.join(ClipOffset)}")
        if self.duration is not None and not 0 < self.duration < math.inf:
            raise ConfigError(f"duration={self.duration!r} is out of range: give seconds, more than 0, or None")


def chooser(options: AudioClipOptions, rng: Callable[[], np.random.Generator]) -> ChooseRange:
    """Return the function that `decode_audio` asks for the range to decode.

    Args:
        options: What the user asked for.
        rng: Gives the sample's generator; called only if something is random.
    """

    def choose(num_samples: int, sample_rate: int, decode_all: DecodeAll) -> tuple[int, int]:
        if options.duration is None:
            return 0, num_samples
        length = max(1, round(options.duration * sample_rate))
        if length > num_samples:
            if not options.allow_shorter_audio:
                raise DecodeError(
                    f"the audio lasts {num_samples / sample_rate:.3f} s, the clip {options.duration} s "
                    "(allow_shorter_audio=True gives it whole)"
                )
            return 0, num_samples
        start = _start(options, num_samples, length, decode_all, rng)
        return start, start + length

    return choose


def _start(
    options: AudioClipOptions,
    num_samples: int,
    length: int,
    decode_all: DecodeAll,
    rng: Callable[[], np.random.Generator],
) -> int:
    match ClipOffset(options.clip_offset_strategy):
        case ClipOffset.START:
            return 0
        case ClipOffset.RANDOM:
            return int(rng().integers(num_samples - length + 1))
        case ClipOffset.MAX_MEAN:
            return int(window_means(decode_all().abs(), length).argmax())
        case ClipOffset.MAX_CENTER:
            peak = int(decode_all().abs().amax(dim=0).argmax())
            return min(max(0, peak - length // 2), num_samples - length)
        case ClipOffset.RANDOM_LOUD:
            levels = window_means(decode_all().square(), length)  # [s - length + 1]
            loud = torch.nonzero(levels >= 10 ** (options.loudness_cutoff / 10)).flatten()  # [n]
            if not len(loud):
                loudest = 10 * math.log10(max(float(levels.max()), 1e-20))
                raise DecodeError(
                    f"no window of {options.duration} s reaches loudness_cutoff={options.loudness_cutoff} dB: "
                    f"the loudest has {loudest:.1f} dB"
                )
            return int(loud[int(rng().integers(len(loud)))])


def window_means(values: torch.Tensor, length: int) -> torch.Tensor:  # [c, s]
    """Return the mean over channels and time of every window of `length`, by its start. # [s - length + 1]."""
    sums = torch.nn.functional.pad(values.to(torch.float64).mean(dim=0).cumsum(0), (1, 0))  # [s + 1]
    return (sums[length:] - sums[:-length]) / length
