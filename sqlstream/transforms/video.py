"""Transforms of videos: a clip's frames and sound, resized, as tensors `[t, c, h, w]`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError, DecodeError, TransformError
from sqlstream.transforms.audio import positive
from sqlstream.transforms.audio_decode import decode_audio_between
from sqlstream.transforms.base import Sample
from sqlstream.transforms.clip import Clip, ClipOptions, plan_clip
from sqlstream.transforms.content import source_of
from sqlstream.transforms.field import BaseTransform, dummy_reason, naming, read_field, summary
from sqlstream.transforms.frames import Frames, ReaderOptions
from sqlstream.transforms.pixels import image_to_tensor, resize_image, resize_tensor, size_of, tensor_to_image
from sqlstream.transforms.resize import (
    SDS_INTERPOLATION,
    ResizeOptions,
    ResizePlan,
    centre_crop,
    plan_resize,
    undistorted_size,
)
from sqlstream.transforms.rng import rng
from sqlstream.transforms.video_reader import VideoReader, import_decoder

FRAME_FORMATS = ("pil", "tensor")


class InitVideoDecoderTransform(BaseTransform):
    """Path, bytes, or a struct of both → an opened `VideoReader`, for several decoding transforms on one video.

    Args:
        input_field: The video.
        output_field: None: into the input field.
        transform_kwargs: `num_threads`, `is_approximate`, `is_scattered`, `decoder` (`ReaderOptions`).
    """

    options_type = ReaderOptions
    options: ReaderOptions

    def __init__(self, input_field: str, output_field: str | None = None, **transform_kwargs: Any) -> None:
        super().__init__(input_field, output_field, **transform_kwargs)
        import_decoder(self.options)

    def transform(self, value: Any, sample: Sample) -> VideoReader:  # noqa: ARG002
        """Return the reader."""
        return VideoReader(source_of(value), self.options)


class DeleteVideoDecoderTransform(BaseTransform):
    """Closes a `VideoReader` and removes its field: a reader cannot leave its process.

    Args:
        input_field: The reader.
        output_field: Gets back the path or bytes that it was opened on; None: nothing stays.
    """

    def __init__(self, input_field: str, output_field: str | None = None, **transform_kwargs: Any) -> None:
        super().__init__(input_field, output_field, **transform_kwargs)
        self.restores = output_field is not None

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample without the reader.

        Raises:
            TransformError: The field holds no reader.
        """
        reader = read_field(self, sample, self.input_field)
        with naming(self, sample, self.input_field):
            if not isinstance(reader, VideoReader):
                raise TransformError(f"expected a video reader, got {summary(reader)}")
            reader.close()
        del sample[self.input_field]
        if self.restores:
            sample[self.output_field] = reader.source
        return sample


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodedClip:
    """A clip with its frames."""

    clip: Clip
    """What was planned."""
    frames: Frames
    """What was decoded."""
    begin: float
    """Time of the video's first frame in its container, in seconds."""


class _ClipTransform(BaseTransform):
    """Plans a clip from options and fields, and decodes its frames."""

    options_type = ClipOptions
    options: ClipOptions
    values_format = 1

    def __init__(self, input_field: str, num_frames: int, output_field: str | None, decode_kwargs: dict[str, Any]) -> None:
        frame_format = decode_kwargs.pop("frame_format", "pil")
        super().__init__(input_field, output_field, **decode_kwargs)
        owner = type(self).__name__
        check_at_least(f"{owner}: num_frames", num_frames, 1)
        if frame_format not in FRAME_FORMATS:
            raise ConfigError(f"{owner}: frame_format={frame_format!r} is not one of {', '.join(FRAME_FORMATS)}")
        import_decoder(self.reader_options(self.options))  # what is wrong with them shows here
        self.num_frames = int(num_frames)
        self.frame_format = frame_format
        self.option_fields: dict[str, str | None] = {}
        self.frame_timestamps_output_field: str | None = None

    def effective_options(self, sample: Sample) -> ClipOptions:
        """Return the options with what the sample's fields say; a field that holds nothing changes nothing."""
        found: dict[str, Any] = {}
        for option, field in self.option_fields.items():
            if field is None:
                continue
            value = read_field(self, sample, field)
            if dummy_reason(sample, field) is None:
                found[option] = value if option == "frame_timestamps" else positive(value, field)
        return dataclasses.replace(self.options, **found)

    @staticmethod
    def reader_options(options: ClipOptions) -> ReaderOptions:
        """Return how the video is opened."""
        return ReaderOptions(
            num_threads=options.num_threads,
            is_approximate=options.approx_frame_seek,
            is_scattered=options.frame_timestamps is not None,
            decoder=options.decoder,
        )

    def decode(self, value: Any, sample: Sample, options: ClipOptions, num_frames: int | None = None) -> DecodedClip:
        """Return the planned clip and its frames, `num_frames` or as many as the transform was given."""
        reader_options = self.reader_options(options)
        reader = value if isinstance(value, VideoReader) else VideoReader(source_of(value), reader_options)
        try:
            facts = reader.decoder
            begin = facts.begin
            clip = plan_clip(options, num_frames or self.num_frames, facts.duration, facts.framerate, lambda: rng(sample))
            frames = reader.frames_at(clip.times, options.frame_seek_timeout_sec)
        finally:
            if reader is not value:
                reader.close()
        if self.frame_timestamps_output_field is not None:
            sample[self.frame_timestamps_output_field] = frames.times
        return DecodedClip(clip=clip, frames=frames, begin=begin)

    def formatted(self, frames: Frames) -> Any:
        """Return the frames in the asked form."""
        if self.frame_format == "tensor":
            return frames.pixels
        return [tensor_to_image(frame) for frame in frames.pixels]


class DecodeVideoTransform(_ClipTransform):
    """Path, bytes, a struct of both, or a `VideoReader` → the frames of a clip, a list of Pillow images.

    Args:
        input_field: The video.
        num_frames: Frames of the clip.
        output_field: None: into the input field.
        duration_field: Field with the video's length in seconds, if known.
        framerate_field: Field with its frames per second, if known.
        frame_timestamps_input_field: Field with the seconds of the frames to decode; wins over everything.
        frame_timestamps_output_field: Gets the seconds at which the decoded frames begin, float64 `[t]`.
        speedup_factor_field: Field with a number that divides the clip's framerate.
        crop_interval_start_field: Field with the second from which on the clip lies.
        crop_interval_end_field: Field with the second at which it must end.
        crop_interval_type: 'hard' (it must fit) or 'soft' (a short interval grows).
        decode_kwargs: `ClipOptions`; and `frame_format='tensor'` gives uint8 `[t, c, h, w]` at once.
    """

    def __init__(  # the parameters of sds
        self,
        input_field: str,
        num_frames: int,
        output_field: str | None = None,
        duration_field: str | None = None,
        framerate_field: str | None = None,
        frame_timestamps_input_field: str | None = None,
        frame_timestamps_output_field: str | None = None,
        speedup_factor_field: str | None = None,
        crop_interval_start_field: str | None = None,
        crop_interval_end_field: str | None = None,
        crop_interval_type: str | None = None,
        **decode_kwargs: Any,
    ) -> None:
        super().__init__(input_field, num_frames, output_field, {**decode_kwargs, "crop_interval_type": crop_interval_type})
        if (crop_interval_start_field is None) != (crop_interval_end_field is None):
            raise ConfigError(
                "DecodeVideoTransform: give both crop_interval_start_field and crop_interval_end_field, or neither"
            )
        self.option_fields = {
            "real_duration": duration_field,
            "real_framerate": framerate_field,
            "frame_timestamps": frame_timestamps_input_field,
            "speedup_factor": speedup_factor_field,
        }
        self.frame_timestamps_output_field = frame_timestamps_output_field
        self.crop_interval_start_field = crop_interval_start_field
        self.crop_interval_end_field = crop_interval_end_field

    def transform(self, value: Any, sample: Sample) -> Any:
        """Return the frames."""
        return self.formatted(self.decode(value, sample, self.effective_options(sample)).frames)

    def effective_options(self, sample: Sample) -> ClipOptions:
        """Return the options with what the sample's fields say."""
        options = super().effective_options(sample)
        start_field, end_field = self.crop_interval_start_field, self.crop_interval_end_field
        if start_field is None or end_field is None:
            return options
        interval = [read_field(self, sample, field) for field in (start_field, end_field)]
        if dummy_reason(sample, start_field) or dummy_reason(sample, end_field):
            return options
        try:
            return dataclasses.replace(options, crop_interval=(float(interval[0]), float(interval[1])))
        except (TypeError, ValueError) as error:
            raise TransformError(f"fields {start_field!r} and {end_field!r} hold no interval: {error}") from None


class DecodeVideoAndAudioTransform(_ClipTransform):
    """Path, bytes, or a struct of both → the frames of a clip, and its sound between the same times.

    Args:
        input_field: The video.
        video_output_field: Gets the frames, a list of Pillow images.
        audio_output_field: Gets the samples `[c, s]`.
        original_sr_output_field: Gets their rate.
        num_frames: Frames of the clip.
        duration_field: Field with the video's length in seconds, if known.
        framerate_field: Field with its frames per second, if known.
        frame_timestamps_input_field: Field with the seconds of the frames to decode; wins over everything.
        frame_timestamps_output_field: Gets the seconds at which the decoded frames begin, float64 `[t]`.
        duration_output_field: Gets the clip's length in seconds.
        silent_audio_thresh: A clip whose largest |x| lies below is an error; None: silence is fine.
        decode_kwargs: `ClipOptions`; and `frame_format='tensor'`.
    """

    def __init__(  # the parameters of sds
        self,
        input_field: str,
        video_output_field: str,
        audio_output_field: str,
        original_sr_output_field: str,
        num_frames: int,
        duration_field: str | None = None,
        framerate_field: str | None = None,
        frame_timestamps_input_field: str | None = None,
        frame_timestamps_output_field: str | None = None,
        duration_output_field: str | None = None,
        silent_audio_thresh: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        super().__init__(input_field, num_frames, video_output_field, decode_kwargs)
        self.option_fields = {
            "real_duration": duration_field,
            "real_framerate": framerate_field,
            "frame_timestamps": frame_timestamps_input_field,
        }
        self.audio_output_field = audio_output_field
        self.original_sr_output_field = original_sr_output_field
        self.frame_timestamps_output_field = frame_timestamps_output_field
        self.duration_output_field = duration_output_field
        self.silent_audio_thresh = silent_audio_thresh

    def transform(self, value: Any, sample: Sample) -> Any:
        """Return the frames; sound, rate and length go into their fields."""
        decoded = self.decode(value, sample, self.effective_options(sample))
        clip, start = decoded.clip, decoded.begin + decoded.clip.start
        source = value.source if isinstance(value, VideoReader) else source_of(value)
        audio = decode_audio_between(source, start, start + clip.duration)
        if self.silent_audio_thresh is not None and float(audio.samples.abs().max()) < self.silent_audio_thresh:
            raise DecodeError(
                f"the clip from {clip.start:.3f} s is silent: its largest |x| is {float(audio.samples.abs().max()):.2g}, below "
                f"silent_audio_thresh={self.silent_audio_thresh}"
            )
        sample[self.audio_output_field] = audio.samples
        sample[self.original_sr_output_field] = audio.sample_rate
        if self.duration_output_field is not None:
            sample[self.duration_output_field] = clip.duration
        return self.formatted(decoded.frames)


class ResizeVideoTransform(BaseTransform):
    """List of Pillow images → list, or tensor `[t, c, h, w]` → tensor, at the target's size; all frames alike.

    Args:
        input_field: Decoded frames.
        output_field: None: into the input field.
        transform_kwargs: The `resize` keywords (`ResizeOptions`); `interpolation_mode` is bilinear if not given, as in `sds`.
    """

    options_type = ResizeOptions
    options: ResizeOptions

    def __init__(self, input_field: str, output_field: str | None = None, **transform_kwargs: Any) -> None:
        super().__init__(input_field, output_field, **{"interpolation_mode": SDS_INTERPOLATION, **transform_kwargs})

    def transform(self, value: Any, sample: Sample) -> Any:
        """Return the resized frames."""
        generator = rng(sample) if self.options.random_resize else None
        return resize_frames(value, plan_resize(self.options, size_of(value), generator), self.options.interpolation_mode)


def resize_frames(value: Any, plan: ResizePlan, interpolation: str) -> Any:
    """Return frames resized as planned: a list of Pillow images stays one, a tensor `[t, c, h, w]` too.

    Raises:
        TransformError: Something else, or frames of different sizes.
    """
    if isinstance(value, torch.Tensor) and value.ndim == 4:
        return resize_tensor(value, plan, interpolation)
    if not isinstance(value, list | tuple):
        raise TransformError(f"expected a list of frames or a tensor [t, c, h, w], got {summary(value)}")
    sizes = {size_of(frame) for frame in value}
    if len(sizes) > 1:
        raise TransformError(f"the frames have different sizes: {sorted(sizes)}")
    return [resize_image(frame, plan, interpolation) for frame in value]


class UndistortFramesTransform(BaseTransform):
    """Frames that were stored squeezed → frames of the original's aspect, without losing pixels.

    Args:
        input_field: List of Pillow images, or tensor `[t, c, h, w]`.
        original_resolution_fields: Names of the fields with the original height and width, in that order.
        output_field: None: into the input field.
    """

    def __init__(self, input_field: str, original_resolution_fields: Sequence[str], output_field: str | None = None) -> None:
        super().__init__(input_field, output_field)
        if isinstance(original_resolution_fields, str) or len(original_resolution_fields) != 2:
            raise ConfigError(
                f"UndistortFramesTransform: original_resolution_fields={original_resolution_fields!r} must be two field names "
                "(height, width)"
            )
        self.original_resolution_fields = tuple(original_resolution_fields)

    def transform(self, value: Any, sample: Sample) -> Any:
        """Return the undistorted frames."""
        height, width = (positive(read_field(self, sample, name), name) for name in self.original_resolution_fields)
        size = size_of(value)
        target = undistorted_size(size, (round(height), round(width)))
        if target == size:
            return value
        return resize_frames(value, ResizePlan(crop=centre_crop(size, size), inner=target, outer=target), SDS_INTERPOLATION)


class ConvertVideoToByteTensorTransform(BaseTransform):
    """List of Pillow images or arrays `[h, w, c]` → uint8 tensor `[t, c, h, w]`."""

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:  # noqa: ARG002
        """Return the tensor; one that is such a tensor already stays."""
        if isinstance(value, torch.Tensor):
            if value.dtype != torch.uint8 or value.ndim != 4:
                raise TransformError(f"expected frames, got {summary(value)}")
            return value.contiguous()
        if not isinstance(value, list | tuple) or not value:
            raise TransformError(f"expected a list of frames, got {summary(value)}")
        if not all(hasattr(frame, "getbands") or isinstance(frame, np.ndarray) for frame in value):
            raise TransformError(f"expected a list of Pillow images, got a list of {summary(value[0])}")
        return torch.stack([image_to_tensor(frame) for frame in value])
