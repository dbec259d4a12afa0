"""Transforms of audio: decode a clip, to mono, to another rate and length, to one loudness. Samples are float32 `[c, s]`."""

from __future__ import annotations

from typing import Any

import torch

from sqlstream.config import check_at_least
from sqlstream.errors import TransformError
from sqlstream.transforms.audio_clip import AudioClipOptions, chooser
from sqlstream.transforms.audio_decode import decode_audio
from sqlstream.transforms.audio_process import ResampleOptions, fit_length, normalize, resample, to_float
from sqlstream.transforms.base import Sample
from sqlstream.transforms.content import source_of
from sqlstream.transforms.field import BaseTransform, read_field, summary
from sqlstream.transforms.rng import rng


class DecodeAudioTransform(BaseTransform):
    """Path, bytes, or a struct of both → samples of the whole audio or of a clip `[c, s]`.

    Args:
        input_field: Encoded audio.
        output_field: None: into the input field.
        original_sr_output_field: Gets the sample rate; None: no field gets it.
        decode_kwargs: `duration`, `clip_offset_strategy`, `allow_shorter_audio`, `loudness_cutoff` (`AudioClipOptions`).
    """

    options_type = AudioClipOptions
    options: AudioClipOptions
    optional_modules = ("soundfile",)
    values_format = 1

    def __init__(
        self,
        input_field: str,
        output_field: str | None = None,
        original_sr_output_field: str | None = None,
        **decode_kwargs: Any,
    ) -> None:
        super().__init__(input_field, output_field, **decode_kwargs)
        self.original_sr_output_field = original_sr_output_field

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:
        """Return the samples."""
        audio = decode_audio(source_of(value), chooser(self.options, lambda: rng(sample)))
        if self.original_sr_output_field is not None:
            sample[self.original_sr_output_field] = audio.sample_rate
        return audio.samples


class ConvertAudioToFloatTensorTransform(BaseTransform):
    """Tensor or array of samples → float32 tensor `[c, s]`; integers are scaled by their full range."""

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:  # noqa: ARG002
        """Return the tensor."""
        return to_float(value)


class AverageAudioTransform(BaseTransform):
    """Samples of any number of channels → mono `[1, s]`, their mean."""

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:  # noqa: ARG002
        """Return the mean of the channels."""
        return to_float(value).mean(dim=0, keepdim=True)


class ResizeAudioTransform(BaseTransform):
    """Samples → samples at another rate, cut or filled up with silence to a length.

    Args:
        audio_input_field: Samples `[c, s]`.
        original_sr_input_field: Field with their rate.
        target_audio_sr: Rate of the result.
        output_field: None: into the input field.
        clip_duration_field: Field with the length in seconds; None: see `target_length`.
        target_length: Length in samples of the result; None: as resampling leaves it.
        resampling_kwargs: `audio_process.ResampleOptions`.
    """

    options_type = ResampleOptions
    options: ResampleOptions
    optional_modules = ("torchaudio.functional", "soxr")

    def __init__(
        self,
        audio_input_field: str,
        original_sr_input_field: str,
        target_audio_sr: int,
        output_field: str | None = None,
        clip_duration_field: str | None = None,
        target_length: int | None = None,
        **resampling_kwargs: Any,
    ) -> None:
        super().__init__(audio_input_field, output_field, **resampling_kwargs)
        check_at_least("ResizeAudioTransform: target_audio_sr", target_audio_sr, 1)
        if target_length is not None:
            check_at_least("ResizeAudioTransform: target_length", target_length, 1)
        self.original_sr_input_field = original_sr_input_field
        self.target_audio_sr = int(target_audio_sr)
        self.clip_duration_field = clip_duration_field
        self.target_length = target_length

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:
        """Return the samples. # [c, s]."""
        rate = positive(read_field(self, sample, self.original_sr_input_field), self.original_sr_input_field)
        resampled = resample(to_float(value), round(rate), self.target_audio_sr, self.options)  # [c, s]
        num_samples = self.target_length
        if num_samples is None and self.clip_duration_field is not None:
            duration = positive(read_field(self, sample, self.clip_duration_field), self.clip_duration_field)
            num_samples = round(duration * self.target_audio_sr)
        return resampled if num_samples is None else fit_length(resampled, num_samples)


class NormalizeAudioTransform(BaseTransform):
    """Samples → samples of one loudness (ITU-R BS.1770), then scaled down so that no channel passes 1; in place.

    Args:
        audio_input_field: Samples `[c, s]`.
        sample_rate_field: Field with their rate; wins over `audio_sr`.
        audio_sr: Their rate.
        volume_norm_db: Loudness in LUFS; None: only the peaks are limited.
    """

    values_format = 1

    def __init__(
        self,
        audio_input_field: str,
        sample_rate_field: str | None = None,
        audio_sr: int | None = None,
        volume_norm_db: float | None = -24.0,
    ) -> None:
        super().__init__(audio_input_field)
        self.sample_rate_field = sample_rate_field
        self.audio_sr = audio_sr
        self.volume_norm_db = volume_norm_db

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:
        """Return the samples. # [c, s]."""
        if self.sample_rate_field is not None:
            rate = positive(read_field(self, sample, self.sample_rate_field), self.sample_rate_field)
        elif self.audio_sr is not None:
            rate = float(self.audio_sr)
        elif self.volume_norm_db is None:
            rate = 1.0  # limiting peaks needs none
        else:
            raise TransformError("the sample rate is unknown: give sample_rate_field or audio_sr, or volume_norm_db=None")
        return normalize(to_float(value), round(rate), self.volume_norm_db)


def positive(value: Any, field: str) -> float:
    """Return a number above 0.

    Raises:
        TransformError: It is something else.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise TransformError(f"field {field!r} holds {summary(value)}: expected a number above 0")
    return number
