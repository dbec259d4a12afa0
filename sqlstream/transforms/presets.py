"""All transforms under one name, and the standard pipelines of `sds`: each returns a list of transforms.

from sqlstream.transforms import presets
transforms = presets.create_standard_image_pipeline(image_field="jpg", resolution=(256, 256))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlstream.transforms.audio import (
    AverageAudioTransform,
    ConvertAudioToFloatTensorTransform,
    DecodeAudioTransform,
    NormalizeAudioTransform,
    ResizeAudioTransform,
)
from sqlstream.transforms.base import Transform
from sqlstream.transforms.cached import CacheTransform
from sqlstream.transforms.decode_by_extension import DecodeByExtension
from sqlstream.transforms.field import BaseTransform
from sqlstream.transforms.fields import (
    AddConstantFieldTransform,
    AugmentNewFieldsTransform,
    ConvertDTypeTransform,
    EnsureFieldsTransform,
    FieldsFilteringTransform,
    FindNonDummyValueTransform,
    GatherFieldsTransform,
    IdentityTransform,
    LoadFromDiskTransform,
    RenameFieldsTransform,
)
from sqlstream.transforms.image import (
    ConvertImageToByteTensorTransform,
    DecodeImageTransform,
    DecodeResizedImageTransform,
    NormalizeFramesTransform,
    ReshapeImageAsVideoTransform,
    ResizeImageTransform,
)
from sqlstream.transforms.latents import (
    LoadLatentFromDiskTransform,
    SampleImageVAELatentTransform,
    SampleVideoVAELatentTransform,
)
from sqlstream.transforms.metadata import (
    ClassNameToIDTransform,
    ExtractMetadataSubfieldTransform,
    LoadJsonMetadataTransform,
    MergeDictFieldTransform,
    NameToIndexTransform,
    OneHotEncodeTransform,
)
from sqlstream.transforms.packs import PackTokens
from sqlstream.transforms.resize import SDS_INTERPOLATION
from sqlstream.transforms.text import (
    ChooseFieldTransform,
    LoadTextTransform,
    TextEmbLoaderTransform,
    TextEmbSamplingTransform,
    TokenizeTransform,
)
from sqlstream.transforms.to_bucket import DecodeVideoToBucket, PadToBucket, ResizeToBucket
from sqlstream.transforms.video import (
    ConvertVideoToByteTensorTransform,
    DecodeVideoAndAudioTransform,
    DecodeVideoTransform,
    DeleteVideoDecoderTransform,
    InitVideoDecoderTransform,
    ResizeVideoTransform,
    UndistortFramesTransform,
)

__all__ = [
    "AddConstantFieldTransform",
    "AugmentNewFieldsTransform",
    "AverageAudioTransform",
    "BaseTransform",
    "CacheTransform",
    "ChooseFieldTransform",
    "ClassNameToIDTransform",
    "ConvertAudioToFloatTensorTransform",
    "ConvertDTypeTransform",
    "ConvertImageToByteTensorTransform",
    "ConvertVideoToByteTensorTransform",
    "DecodeAudioTransform",
    "DecodeByExtension",
    "DecodeImageTransform",
    "DecodeResizedImageTransform",
    "DecodeVideoAndAudioTransform",
    "DecodeVideoToBucket",
    "DecodeVideoTransform",
    "DeleteVideoDecoderTransform",
    "EnsureFieldsTransform",
    "ExtractMetadataSubfieldTransform",
    "FieldsFilteringTransform",
    "FindNonDummyValueTransform",
    "GatherFieldsTransform",
    "IdentityTransform",
    "InitVideoDecoderTransform",
    "LoadFromDiskTransform",
    "LoadJsonMetadataTransform",
    "LoadLatentFromDiskTransform",
    "LoadTextTransform",
    "MergeDictFieldTransform",
    "NameToIndexTransform",
    "NormalizeAudioTransform",
    "NormalizeFramesTransform",
    "OneHotEncodeTransform",
    "PackTokens",
    "PadToBucket",
    "RenameFieldsTransform",
    "ReshapeImageAsVideoTransform",
    "ResizeAudioTransform",
    "ResizeImageTransform",
    "ResizeToBucket",
    "ResizeVideoTransform",
    "SampleImageVAELatentTransform",
    "SampleVideoVAELatentTransform",
    "TextEmbLoaderTransform",
    "TextEmbSamplingTransform",
    "TokenizeTransform",
    "UndistortFramesTransform",
    "create_standard_audio_pipeline",
    "create_standard_image_latent_pipeline",
    "create_standard_image_pipeline",
    "create_standard_joint_video_audio_pipeline",
    "create_standard_metadata_pipeline",
    "create_standard_video_latent_pipeline",
    "create_standard_video_pipeline",
]

_NOTHING: Mapping[str, Any] = {}


def create_standard_image_pipeline(
    image_field: str,
    resolution: tuple[int, int],
    return_image_as_single_frame_video: bool = False,
    normalize: bool = False,
    resize_kwargs: Mapping[str, Any] = _NOTHING,
    output_field: str = "image",
    video_output_field: str = "video",
) -> list[Transform]:
    """Return the transforms from an encoded image to a tensor of one size.

    Args:
        image_field: The image (path, bytes, or struct of both); holds its bytes afterwards.
        resolution: (height, width) of the result.
        return_image_as_single_frame_video: Give `[1, c, h, w]` and `framerate` = 960 instead of `[c, h, w]`.
        normalize: Give float32 of -1 to 1 instead of uint8.
        resize_kwargs: The `resize` keywords (`resize.ResizeOptions`); `interpolation_mode` is bilinear if not given.
        output_field: Gets the image.
        video_output_field: Gets the video, if it is to be one.
    """
    resize = {"resolution": resolution, "interpolation_mode": SDS_INTERPOLATION, **resize_kwargs}
    transforms: list[Transform] = [
        LoadFromDiskTransform([image_field]),
        DecodeResizedImageTransform(image_field, output_field, **resize),
    ]
    if normalize:
        transforms.append(NormalizeFramesTransform(output_field))
    if return_image_as_single_frame_video:
        transforms.append(ReshapeImageAsVideoTransform(output_field, video_output_field))
        if output_field != video_output_field:
            transforms.append(FieldsFilteringTransform(fields_to_remove=[output_field]))
    return transforms


def create_standard_image_latent_pipeline(
    image_latent_field: str, return_image_as_single_frame_video: bool = False
) -> list[Transform]:
    """Return the transforms from a file of a VAE's mean and log variance to a sample `[lc, lh, lw]`, in the same field.

    Args:
        image_latent_field: The file (path, bytes, or struct of both); holds the sampled latent afterwards.
        return_image_as_single_frame_video: Give `[1, lc, lh, lw]` and `framerate` = 960.
    """
    transforms: list[Transform] = [
        LoadLatentFromDiskTransform(image_latent_field),
        SampleImageVAELatentTransform(image_latent_field),
    ]
    if return_image_as_single_frame_video:
        transforms.append(ReshapeImageAsVideoTransform(image_latent_field))
    return transforms


def create_standard_video_latent_pipeline(
    video_latent_field: str, framerate: float | None = None, random_offset: bool = True
) -> list[Transform]:
    """Return the transforms from a file of a VAE's mean and log variance to a sample `[lt, lc, lh, lw]`, in the same field.

    Args:
        video_latent_field: The file (path, bytes, or struct of both); holds the sampled latent afterwards.
        framerate: Keep every k-th latent frame, k = the video's framerate / this one; None: keep all.
        random_offset: Start at a random one of the first k.
    """
    return [
        LoadLatentFromDiskTransform(video_latent_field),
        SampleVideoVAELatentTransform(video_latent_field, framerate=framerate, random_offset=random_offset),
    ]


def create_standard_metadata_pipeline(
    metadata_field: str,
    class_label_metadata_field: str | None = None,
    one_hot_encode_to_size: int | None = None,
    return_raw_metadata: bool = True,
    class_label_target_field: str = "class_label",
) -> list[Transform]:
    """Return the transforms from a JSON file to a dict in the field `meta`, and to a class label.

    Args:
        metadata_field: The file (path, bytes, or struct of both).
        class_label_metadata_field: Entry of the dict that holds the class number; None: no label.
        one_hot_encode_to_size: Make the label a float32 vector of this length.
        return_raw_metadata: Keep the dict.
        class_label_target_field: Gets the label.
    """
    transforms: list[Transform] = [LoadJsonMetadataTransform(metadata_field, "meta")]
    if class_label_metadata_field is not None:
        transforms.append(ExtractMetadataSubfieldTransform(class_label_metadata_field, class_label_target_field, "meta"))
        if one_hot_encode_to_size is not None:
            transforms.append(OneHotEncodeTransform(class_label_target_field, one_hot_encode_to_size))
    if not return_raw_metadata:
        transforms.append(FieldsFilteringTransform(fields_to_remove=["meta"]))
    return transforms


def create_standard_video_pipeline(
    video_field: str,
    num_frames: int,
    resolution: tuple[int, int],
    decode_kwargs: Mapping[str, Any] = _NOTHING,
    normalize: bool = False,
    original_resolution_fields: Sequence[str] | None = None,
    resize_kwargs: Mapping[str, Any] = _NOTHING,
    output_field: str = "video",
) -> list[Transform]:
    """Return the transforms from a video to a clip `[t, c, h, w]` of one size.

    Args:
        video_field: The video (path, bytes, or struct of both); stays.
        num_frames: Frames of the clip.
        resolution: (height, width) of the result.
        decode_kwargs: Keywords of `DecodeVideoTransform`.
        normalize: Give float32 of -1 to 1 instead of uint8.
        original_resolution_fields: Fields with the height and width before the video was squeezed; None: it was not.
        resize_kwargs: The `resize` keywords (`resize.ResizeOptions`).
        output_field: Gets the clip.
    """
    decode = {"frame_format": "tensor", **decode_kwargs}
    transforms: list[Transform] = [DecodeVideoTransform(video_field, num_frames, output_field, **decode)]
    if original_resolution_fields is not None:
        transforms.append(UndistortFramesTransform(output_field, original_resolution_fields))
    transforms.append(ResizeVideoTransform(output_field, **{"resolution": resolution, **resize_kwargs}))
    transforms.append(ConvertVideoToByteTensorTransform(output_field))
    if normalize:
        transforms.append(NormalizeFramesTransform(output_field))
    return transforms


def create_standard_audio_pipeline(
    audio_field: str,
    duration: float | None,
    mono_audio: bool = False,
    normalize_audio: bool = True,
    target_audio_sr: int = 44100,
    output_field: str = "audio",
    original_audio_sr_field: str = "original_audio_sampling_rate",
    audio_decoding_kwargs: Mapping[str, Any] = _NOTHING,
    audio_resampling_kwargs: Mapping[str, Any] = _NOTHING,
    audio_norm_kwargs: Mapping[str, Any] = _NOTHING,
) -> list[Transform]:
    """Return the transforms from an audio file to a clip `[c, s]` of one rate, length and loudness.

    Args:
        audio_field: The audio (path, bytes, or struct of both); stays.
        duration: Seconds of the clip; None: the whole audio.
        mono_audio: Average the channels.
        normalize_audio: Bring it to -24 LUFS, then limit the peaks.
        target_audio_sr: Samples per second of the result.
        output_field: Gets the samples.
        original_audio_sr_field: Gets the file's sample rate.
        audio_decoding_kwargs: Keywords of `DecodeAudioTransform`.
        audio_resampling_kwargs: Keywords of `ResizeAudioTransform`.
        audio_norm_kwargs: Keywords of `NormalizeAudioTransform`.
    """
    decode = {"duration": duration, **audio_decoding_kwargs}
    num_samples = None if duration is None else max(1, round(duration * target_audio_sr))
    resize = {"target_length": num_samples, **audio_resampling_kwargs}
    transforms: list[Transform] = [
        DecodeAudioTransform(audio_field, output_field, original_audio_sr_field, **decode),
        ConvertAudioToFloatTensorTransform(output_field),
        *([AverageAudioTransform(output_field)] if mono_audio else []),
        ResizeAudioTransform(output_field, original_audio_sr_field, target_audio_sr, **resize),
    ]
    if normalize_audio:
        transforms.append(NormalizeAudioTransform(output_field, **{"audio_sr": target_audio_sr, **audio_norm_kwargs}))
    return transforms


def create_standard_joint_video_audio_pipeline(
    video_field: str,
    num_frames: int,
    resolution: tuple[int, int],
    decode_kwargs: Mapping[str, Any] = _NOTHING,
    mono_audio: bool = True,
    normalize_audio: bool = True,
    target_audio_sr: int = 16000,
    target_audio_length: int | None = None,
    resize_kwargs: Mapping[str, Any] = _NOTHING,
    audio_resampling_kwargs: Mapping[str, Any] = _NOTHING,
    video_output_field: str = "video",
    audio_output_field: str = "audio",
    audio_norm_kwargs: Mapping[str, Any] = _NOTHING,
) -> list[Transform]:
    """Return the transforms from a video with sound to a clip `[t, c, h, w]` and its sound `[c, s]`.

    The fields `original_audio_sampling_rate` and `clip_duration` are set on the way.

    Args:
        video_field: The video (path, bytes, or struct of both); stays.
        num_frames: Frames of the clip.
        resolution: (height, width) of the result.
        decode_kwargs: Keywords of `DecodeVideoAndAudioTransform`.
        mono_audio: Average the channels.
        normalize_audio: Bring the sound to -24 LUFS, then limit the peaks.
        target_audio_sr: Samples per second of the result.
        target_audio_length: Samples of the result; None: as many as the clip lasts.
        resize_kwargs: The `resize` keywords (`resize.ResizeOptions`).
        audio_resampling_kwargs: Keywords of `ResizeAudioTransform`.
        video_output_field: Gets the clip.
        audio_output_field: Gets its sound.
        audio_norm_kwargs: Keywords of `NormalizeAudioTransform`.
    """
    rate_field, duration_field = "original_audio_sampling_rate", "clip_duration"
    decode = {"frame_format": "tensor", "duration_output_field": duration_field, **decode_kwargs}
    duration_field = str(decode["duration_output_field"])
    resize = {"target_length": target_audio_length, "clip_duration_field": duration_field, **audio_resampling_kwargs}
    transforms: list[Transform] = [
        DecodeVideoAndAudioTransform(video_field, video_output_field, audio_output_field, rate_field, num_frames, **decode),
        ResizeVideoTransform(video_output_field, **{"resolution": resolution, **resize_kwargs}),
        ConvertVideoToByteTensorTransform(video_output_field),
        ConvertAudioToFloatTensorTransform(audio_output_field),
        *([AverageAudioTransform(audio_output_field)] if mono_audio else []),
        ResizeAudioTransform(audio_output_field, rate_field, target_audio_sr, **resize),
    ]
    if normalize_audio:
        transforms.append(NormalizeAudioTransform(audio_output_field, **{"audio_sr": target_audio_sr, **audio_norm_kwargs}))
    return transforms
