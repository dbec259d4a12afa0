"""Work on samples `[c, s]`: resampling, length, loudness."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sqlstream.errors import ConfigError, MissingDependencyError, TransformError
from sqlstream.transforms.field import summary
from sqlstream.transforms.optional import find

_MAX_KERNEL = 1 << 24
"""torchaudio makes a filter for each phase, target / gcd of them: at 44101 → 48000 Hz its kernel would fill 9 GiB."""
_METHODS = ("sinc_interp_hann", "sinc_interp_kaiser")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResampleOptions:
    """torchaudio's keywords; soxr, used where torchaudio does not import, takes none of them."""

    lowpass_filter_width: int = 6
    """Zero crossings of the filter: more is sharper and slower; 6 as in torchaudio."""
    rolloff: float = 0.99
    """Cut-off as a share of the Nyquist frequency."""
    resampling_method: str = "sinc_interp_hann"
    """`sinc_interp_hann` or `sinc_interp_kaiser`."""
    beta: float | None = None
    """Shape of the Kaiser window."""

    def __post_init__(self) -> None:
        """Check values."""
        if self.resampling_method not in _METHODS:
            raise ConfigError(f"resampling_method={self.resampling_method!r} is not one of {', '.join(_METHODS)}")
        if self.lowpass_filter_width < 1:
            raise ConfigError(f"lowpass_filter_width={self.lowpass_filter_width!r} is out of range: give 1 or more")
        if not 0 < self.rolloff <= 1:
            raise ConfigError(f"rolloff={self.rolloff!r} is out of range: give more than 0, at most 1")


DEFAULT_RESAMPLING = ResampleOptions()


def resample(
    samples: torch.Tensor,  # [c, s]
    original_rate: int,
    target_rate: int,
    options: ResampleOptions = DEFAULT_RESAMPLING,
) -> torch.Tensor:
    """Return samples at another rate, ceil(s · target / original) of them. # [c, s].

    torchaudio does it where it imports and its filter is not too large, else soxr.

    Raises:
        MissingDependencyError: Neither is installed, or options need torchaudio.
    """
    if original_rate == target_rate:
        return samples
    divisor = math.gcd(original_rate, target_rate)
    old, new = original_rate // divisor, target_rate // divisor
    num_samples = -(-samples.shape[1] * new // old)
    is_small = new * (2 * options.lowpass_filter_width * max(old, new) / min(old, new) + old) <= _MAX_KERNEL
    torchaudio = find("torchaudio.functional") if is_small or options != DEFAULT_RESAMPLING else None
    if torchaudio is not None:
        keywords: dict[str, Any] = {name: getattr(options, name) for name in ResampleOptions.__slots__}
        resampled: torch.Tensor = torchaudio.resample(samples, original_rate, target_rate, **keywords)  # [c, s]
        return resampled[:, :num_samples]
    if options != DEFAULT_RESAMPLING:
        raise MissingDependencyError("torchaudio is needed for these resampling options, and does not import: leave them out")
    soxr = find("soxr")
    if soxr is None:
        raise MissingDependencyError("torchaudio or soxr is needed to resample audio: pip install 'sqlstream-data[audio]'")
    array = soxr.resample(np.ascontiguousarray(samples.T.numpy()), original_rate, target_rate)  # [s, c]
    return fit_length(torch.from_numpy(np.ascontiguousarray(array.T)), num_samples)


def fit_length(samples: torch.Tensor, num_samples: int) -> torch.Tensor:  # [c, s]
    """Return samples cut, or filled up with silence at the end, to `num_samples`. # [c, num_samples]."""
    if samples.shape[1] >= num_samples:
        return samples[:, :num_samples].contiguous()
    return torch.nn.functional.pad(samples, (0, num_samples - samples.shape[1]))


def to_float(value: Any) -> torch.Tensor:  # [c, s]
    """Return samples as float32 `[c, s]`; integers are scaled by their full range.

    Raises:
        TransformError: Not samples of one or two axes.
    """
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))  # [...]
    if not isinstance(value, torch.Tensor) or value.ndim not in (1, 2) or value.dtype == torch.bool or value.is_complex():
        raise TransformError(f"expected samples [c, s] or [s], got {summary(value)}")
    samples = value if value.ndim == 2 else value[None]  # [c, s]
    if samples.is_floating_point():
        return samples.to(torch.float32)
    is_signed, top = torch.iinfo(samples.dtype).min < 0, torch.iinfo(samples.dtype).max + 1
    middle = 0 if is_signed else top // 2
    return ((samples.to(torch.float64) - middle) / (top - middle)).to(torch.float32)


# -- loudness ---------------------------------------------------------------------------------------------------------

_BLOCK_SECONDS = 0.4
_ABSOLUTE_GATE = -70.0  # LUFS
_RELATIVE_GATE = -10.0  # LU
_OFFSET = -0.691  # dB, makes a 1 kHz sine of full scale on one channel -3.01
_FRONT, _SURROUND = (1.0, 1.0, 1.0), 1.41


def loudness(samples: torch.Tensor, sample_rate: int) -> float:  # [c, s]
    """Return the integrated loudness in LUFS, by ITU-R BS.1770; minus infinity for silence.

    The K filter works on the spectrum: no recursion over samples, no dependency. Audio shorter than a block of 0.4 s is one
    block.
    """
    num_samples = samples.shape[1]
    if num_samples == 0:
        return -math.inf
    padded = 1 << (2 * num_samples - 1).bit_length()  # the filter's tail must not come round to the start
    response = torch.from_numpy(_k_weighting(np.fft.rfftfreq(padded, 1 / sample_rate), sample_rate))  # [f]
    filtered = torch.fft.irfft(torch.fft.rfft(samples.to(torch.float64), padded) * response, padded)[:, :num_samples]  # [c, s]
    block = min(num_samples, round(_BLOCK_SECONDS * sample_rate))
    sums = torch.nn.functional.pad(filtered.square().cumsum(1), (1, 0))  # [c, s + 1]
    starts = torch.arange(0, num_samples - block + 1, max(1, block // 4))  # [n]
    powers = (sums[:, starts + block] - sums[:, starts]) / block  # [c, n]
    weights = torch.tensor([_channel_weights(samples.shape[0])], dtype=torch.float64)  # [1, c]
    power = (weights @ powers)[0].clamp_min(1e-30)  # [n]
    for gate in (_ABSOLUTE_GATE, None):
        threshold = gate if gate is not None else _decibel(float(power.mean())) + _RELATIVE_GATE
        power = power[_OFFSET + 10 * torch.log10(power) > threshold]  # [n]
        if not len(power):
            return -math.inf
    return _decibel(float(power.mean()))


def _channel_weights(num_channels: int) -> tuple[float, ...]:
    """Return what channels count, in the order of WAV; of more than five the fourth has low frequencies, and counts nothing."""
    rest = num_channels - len(_FRONT)
    return (*_FRONT, 0.0, *(_SURROUND,) * (rest - 1)) if rest > 2 else (*_FRONT, *(_SURROUND,) * rest)[:num_channels]


def _decibel(power: float) -> float:
    return _OFFSET + 10 * math.log10(power)


def _k_weighting(frequencies: np.ndarray[Any, Any], sample_rate: int) -> np.ndarray[Any, Any]:
    """Return the complex response of the K filter: a high shelf for the head, then a high pass. # [f].

    Source: coefficients of BS.1770-4 for 48 kHz, as analogue prototypes (De Man, "Evaluation of Implementations of the EBU R128
    Loudness Measurement", 2014), so that they hold at any rate.
    """
    z = np.exp(-2j * np.pi * frequencies / sample_rate)  # [f]
    k, q = math.tan(math.pi * 1681.974450955533 / sample_rate), 0.7071752369554196
    high = 10 ** (3.999843853973347 / 20)
    band = high**0.4996667741545416
    top = (high + band * k / q + k * k) + 2 * (k * k - high) * z + (high - band * k / q + k * k) * z**2
    shelf = top / ((1 + k / q + k * k) + 2 * (k * k - 1) * z + (1 - k / q + k * k) * z**2)
    k, q = math.tan(math.pi * 38.13547087602444 / sample_rate), 0.5003270373238773
    normal = 1 + k / q + k * k
    high_pass = (1 - 2 * z + z**2) / (1 + 2 * (k * k - 1) / normal * z + (1 - k / q + k * k) / normal * z**2)
    response: np.ndarray[Any, Any] = shelf * high_pass  # [f]
    return response


def normalize(samples: torch.Tensor, sample_rate: int, target_db: float | None) -> torch.Tensor:  # [c, s]
    """Return samples scaled to a loudness, then scaled down if a peak passes 1; silence stays silence. # [c, s].

    Args:
        samples: float.
        sample_rate: Samples per second.
        target_db: LUFS; None: only the peaks are limited.
    """
    if target_db is not None:
        current = loudness(samples, sample_rate)
        if math.isfinite(current):
            samples = samples * 10 ** ((target_db - current) / 20)  # [c, s]
    peak = float(samples.abs().max()) if samples.numel() else 0.0
    return samples / peak if peak > 1 else samples
