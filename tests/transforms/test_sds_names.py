"""The contract with users' scripts: every class and function of `sds`, its parameters in order, its defaults."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from sqlstream.transforms import presets

REQUIRED = inspect.Parameter.empty
# Written down from ../shared/reference/sds-transforms.md: name(parameters in order); "**" ends with any keywords.
SIGNATURES = """
BaseTransform(input_field, output_field=None, **)
DecodeImageTransform(input_field, output_field=None, **)
ResizeImageTransform(input_field, output_field=None, **)
ReshapeImageAsVideoTransform(input_field, output_field=None, **)
ConvertImageToByteTensorTransform(input_field, output_field=None, **)
DecodeVideoTransform(input_field, num_frames, output_field=None, duration_field=None, framerate_field=None, \
frame_timestamps_input_field=None, frame_timestamps_output_field=None, speedup_factor_field=None, \
crop_interval_start_field=None, crop_interval_end_field=None, crop_interval_type=None, **)
ResizeVideoTransform(input_field, output_field=None, **)
ConvertVideoToByteTensorTransform(input_field, output_field=None, **)
InitVideoDecoderTransform(input_field, output_field=None, **)
DeleteVideoDecoderTransform(input_field, output_field=None, **)
NormalizeFramesTransform(input_field, output_field=None, **)
UndistortFramesTransform(input_field, original_resolution_fields, output_field=None)
ConvertAudioToFloatTensorTransform(input_field, output_field=None, **)
AverageAudioTransform(input_field, output_field=None, **)
ResizeAudioTransform(audio_input_field, original_sr_input_field, target_audio_sr, output_field=None, \
clip_duration_field=None, target_length=None, **)
NormalizeAudioTransform(audio_input_field, sample_rate_field=None, audio_sr=None, volume_norm_db=-24.0)
DecodeAudioTransform(input_field, output_field=None, original_sr_output_field=None, **)
LoadLatentFromDiskTransform(input_field, output_field=None, **)
SampleImageVAELatentTransform(input_field, output_field=None, mean_field='mean', logvar_field='logvar')
SampleVideoVAELatentTransform(input_field, output_field=None, mean_field='mean', logvar_field='logvar', framerate=None, \
random_offset=False)
DecodeVideoAndAudioTransform(input_field, video_output_field, audio_output_field, original_sr_output_field, num_frames, \
duration_field=None, framerate_field=None, frame_timestamps_input_field=None, frame_timestamps_output_field=None, \
duration_output_field=None, silent_audio_thresh=None, **)
TextEmbLoaderTransform(input_field, num_tokens, output_field=None, allow_missing=False)
TextEmbSamplingTransform(input_text_fields, input_text_emb_fields, probabilities, output_text_field, \
output_text_emb_field, cleanup=True, allow_missing=False)
LoadJsonMetadataTransform(input_field, output_field=None, **)
MergeDictFieldTransform(input_field, skip_if_exists=False, overwrite=False, cleanup=False)
ExtractMetadataSubfieldTransform(metadata_subfield, output_field, metadata_field='meta')
OneHotEncodeTransform(input_field, num_classes, output_field=None)
AddConstantFieldTransform(output_field, value)
ClassNameToIDTransform(input_field, class_name_to_id_mapping, output_field=None)
GatherFieldsTransform(input_fields, output_field, output_type=dict)
NameToIndexTransform(field, name_to_index_mapping)
RenameFieldsTransform(old_to_new_mapping, strict=True)
LoadFromDiskTransform(fields_to_load, mode='rb')
FieldsFilteringTransform(fields_to_keep=None, fields_to_remove=None)
AugmentNewFieldsTransform(new_fields)
ConvertDTypeTransform(input_field, output_field=None, output_dtype=torch.float32)
EnsureFieldsTransform(fields_whitelist, check_dummy_values=False, drop_others=False)
FindNonDummyValueTransform(input_fields, output_field)
IdentityTransform(input_field, output_field=None, **)
create_standard_image_pipeline(image_field, resolution, return_image_as_single_frame_video=False, normalize=False, \
resize_kwargs={}, output_field='image', video_output_field='video')
create_standard_image_latent_pipeline(image_latent_field, return_image_as_single_frame_video=False)
create_standard_video_pipeline(video_field, num_frames, resolution, decode_kwargs={}, normalize=False, \
original_resolution_fields=None, resize_kwargs={}, output_field='video')
create_standard_video_latent_pipeline(video_latent_field, framerate=None, random_offset=True)
create_standard_audio_pipeline(audio_field, duration, mono_audio=False, normalize_audio=True, target_audio_sr=44100, \
output_field='audio', original_audio_sr_field='original_audio_sampling_rate', audio_decoding_kwargs={}, \
audio_resampling_kwargs={}, audio_norm_kwargs={})
create_standard_joint_video_audio_pipeline(video_field, num_frames, resolution, decode_kwargs={}, mono_audio=True, \
normalize_audio=True, target_audio_sr=16000, target_audio_length=None, resize_kwargs={}, audio_resampling_kwargs={}, \
video_output_field='video', audio_output_field='audio', audio_norm_kwargs={})
create_standard_metadata_pipeline(metadata_field, class_label_metadata_field=None, one_hot_encode_to_size=None, \
return_raw_metadata=True, class_label_target_field='class_label')
""".strip().splitlines()

VALUES: dict[str, Any] = {
    "resolution": (8, 8),
    "num_frames": 4,
    "num_tokens": 4,
    "num_classes": 4,
    "target_audio_sr": 16000,
    "duration": 1.0,
    "original_resolution_fields": ["height", "width"],
    "input_text_fields": ["a"],
    "input_text_emb_fields": ["b"],
    "probabilities": [1.0],
    "class_name_to_id_mapping": {"a": 1},
    "name_to_index_mapping": {"a": 1},
    "old_to_new_mapping": {"a": "b"},
    "fields_to_load": ["a"],
    "fields_to_keep": ["a"],
    "new_fields": {"a": 1},
    "fields_whitelist": ["a"],
    "input_fields": ["a"],
    "value": 1,
}


def parse(line: str) -> tuple[str, list[tuple[str, Any]], bool]:
    """Name, (parameter, default) in order, whether any keywords may follow."""
    name, _, rest = line.partition("(")
    takes_any = rest.endswith("**)")
    plain = rest.removesuffix(")").removesuffix("**").rstrip(", ")
    scope: dict[str, Any] = {"torch": torch, "REQUIRED": REQUIRED}
    signature = inspect.signature(eval(f"lambda {plain}: None", scope))
    return name, [(p.name, p.default) for p in signature.parameters.values()], takes_any


@pytest.mark.parametrize("line", SIGNATURES, ids=lambda line: line.partition("(")[0])
def test_every_name_takes_the_parameters_of_sds_in_their_order_with_their_defaults(line: str) -> None:
    name, expected, takes_any = parse(line)
    ours = [p for p in inspect.signature(getattr(presets, name)).parameters.values() if p.name != "self"]
    positional = [(p.name, p.default) for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    got = [(n, dict(d) if isinstance(d, Mapping) else d) for n, d in positional]
    assert got[: len(expected)] == expected
    assert all(default is not REQUIRED for _, default in got[len(expected) :]), "what we add must be optional"
    assert any(p.kind is p.VAR_KEYWORD for p in ours) == takes_any
    assert name in presets.__all__


@pytest.mark.parametrize("line", SIGNATURES, ids=lambda line: line.partition("(")[0])
def test_everything_is_made_of_its_required_parameters_alone_and_pickles(line: str) -> None:
    name, parameters, _ = parse(line)
    given = {p: VALUES.get(p, p) for p, default in parameters if default is REQUIRED}
    if name == "ResizeImageTransform" or name == "ResizeVideoTransform":
        given["resolution"] = (8, 8)
    if name == "FieldsFilteringTransform":
        given["fields_to_keep"] = ["a"]
    made = getattr(presets, name)(**given)
    for transform in made if name.startswith("create_") else [made]:
        again = pickle.loads(pickle.dumps(transform))
        assert vars(again).keys() == vars(transform).keys()
    assert isinstance(made, list) == name.startswith("create_"), "scripts concatenate pipelines with +"


def test_the_list_is_whole_and_every_public_name_has_a_docstring() -> None:
    assert len(SIGNATURES) == 46
    for name in presets.__all__:
        assert inspect.getdoc(getattr(presets, name)), name
