"""Video decoding: the right frames in every container, clips, bad files, forks."""

from __future__ import annotations

import gc
import io
import multiprocessing
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sqlstream.errors import ConfigError, DecodeError, MissingDependencyError, TransformError
from sqlstream.transforms import Transform, apply, audio_decode, optional, video_reader
from sqlstream.transforms.frames import OpenDecoder, ReaderOptions
from sqlstream.transforms.presets import create_standard_joint_video_audio_pipeline, create_standard_video_pipeline
from sqlstream.transforms.rng import begin
from sqlstream.transforms.video import (
    ConvertVideoToByteTensorTransform,
    DecodeVideoAndAudioTransform,
    DecodeVideoTransform,
    DeleteVideoDecoderTransform,
    InitVideoDecoderTransform,
    ResizeVideoTransform,
    UndistortFramesTransform,
)
from sqlstream.transforms.video_decoders import AvDecoder
from sqlstream.transforms.video_reader import DECODERS, VideoReader

from .clips import FPS, HEIGHT, WIDTH, beside_another, cut, delayed, mux_sound, numbers, pitch, times_of, video

LIBRARIES = {name: module for name, (module, _) in DECODERS.items()}
KINDS: dict[str, dict[str, Any]] = {
    "mp4": {},
    "one group of pictures": {"gop": 250},
    "mkv": {"container": "matroska"},
    "webm vp9": {"container": "webm", "codec": "libvpx-vp9"},
    "transport stream": {"container": "mpegts"},
    "variable frame rate": {"is_variable": True},
    "fragmented mp4": {"options": (("movflags", "frag_keyframe+empty_moov"),)},
    "av1": {"codec": "libsvtav1"},
    "avi mpeg4": {"container": "avi", "codec": "mpeg4"},
    "hevc": {"codec": "libx265"},
    "flv": {"container": "flv", "codec": "flv"},
    "wmv": {"container": "asf", "codec": "wmv2"},
}


@pytest.fixture(params=[name for name, module in LIBRARIES.items() if optional.find(module) is not None])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each decoder in turn preferred, PyAV always there as in the video extra."""
    only(monkeypatch, request.param)
    return str(request.param)


def only(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for order in ("ORDER_FOR_CLIPS", "ORDER_FOR_SCATTERED"):
        monkeypatch.setattr(video_reader, order, tuple(dict.fromkeys((name, "PyAV"))))


def sample_at(position: int = 0, **fields: Any) -> dict[str, Any]:
    begin(fields, (0, 0, position))
    return fields


@pytest.mark.parametrize("kind", KINDS)
def test_every_decoder_gives_exactly_the_frames_of_a_sequential_decode(library: str, kind: str) -> None:
    reader = VideoReader(video(**KINDS[kind]))
    begins = np.array(times_of(60, kind == "variable frame rate")) / 24
    frames = reader.frames_at(begins)
    assert numbers(frames.pixels) == list(range(60)), f"{reader.name} in order"
    assert np.abs(frames.times - begins).max() < 2e-3
    assert frames.pixels.shape == (60, 3, HEIGHT, WIDTH)
    assert frames.pixels.dtype == torch.uint8
    moments = np.random.default_rng(0).uniform(0, begins[-1], 60)
    moments = moments[np.abs(moments * 24 - np.round(moments * 24)) > 0.15]  # clear of borders, which containers round
    expected = (np.searchsorted(begins, moments, side="right") - 1).tolist()
    assert numbers(reader.frames_at(moments).pixels) == expected, f"{reader.name} at random"
    red, blue = frames.pixels[7, :, 80, 20].tolist(), frames.pixels[7, :, 80, 140].tolist()
    assert np.abs(np.array([red, blue]) - [[200, 40, 40], [40, 40, 200]]).max() < 30
    reader.close()


@pytest.mark.parametrize("container", ["mp4", "mov"])
def test_a_video_that_was_cut_without_encoding_begins_at_its_first_shown_frame(library: str, container: str) -> None:
    frames = VideoReader(cut(17, container)).frames_at(np.arange(43) / FPS)
    assert numbers(frames.pixels) == list(range(17, 60)), library
    assert np.abs(frames.times - np.arange(43) / FPS).max() < 2e-3


@pytest.mark.parametrize("container", ["matroska", "flv", "mpegts", "mp4"])
def test_a_video_that_begins_late_lasts_as_long_as_its_frames(library: str, container: str) -> None:
    file = delayed(20, container)
    assert VideoReader(file).decoder.duration == pytest.approx(60 / FPS, abs=0.1)
    for position in range(8):
        assert len(set(decoded(sample_at(position, v=file), num_frames=12, framerate=12.0)[0])) == 12, library


def test_of_several_video_streams_every_request_reads_the_default_one() -> None:
    times = [0.0, 0.5, 1.0]
    for fields in ({"frame_timestamps": times}, {"framerate": 2.0, "random_offset": False}):
        assert decoded({"v": beside_another()}, num_frames=3, **fields)[0] == [0, 12, 24], fields


def test_the_sound_of_a_cut_video_goes_with_its_frames() -> None:
    decode = DecodeVideoAndAudioTransform("v", "frames", "sound", "rate", 12, random_offset=False, frame_format="tensor")
    sample = decode({"v": cut(17), **sample_at()})
    assert numbers(sample["frames"]) == list(range(17, 29))
    assert pitch(sample["sound"], sample["rate"]) == pytest.approx(200 + 400 * 23 / FPS, abs=20)


def test_files_that_a_decoder_reads_wrongly_go_to_another_one(library: str) -> None:
    assert VideoReader(video(container="mpegts")).name == "PyAV"
    assert VideoReader(video(container="mpegts", codec="libx264", gop=250)).name == "PyAV"
    assert VideoReader(video(container="avi", codec="mpeg4")).name == "PyAV"
    assert VideoReader(video(container="flv", codec="flv")).name == "PyAV"
    assert VideoReader(video(container="asf", codec="wmv2")).name == "PyAV"
    if library == "decord":
        assert VideoReader(cut(17)).name == "PyAV"
        assert VideoReader(video(codec="libsvtav1")).name == "PyAV"
        assert VideoReader(video(codec="libx265")).name == "PyAV"
    assert VideoReader(video()).name == library


def test_paths_and_bytes_give_the_same(library: str, tmp_path: Path) -> None:
    path = tmp_path / "v.mp4"
    path.write_bytes(video())
    times = np.array([0.5, 1.0])
    assert torch.equal(VideoReader(str(path)).frames_at(times).pixels, VideoReader(video()).frames_at(times).pixels)


def decoded(sample: dict[str, Any] | None = None, num_frames: int = 4, **options: Any) -> tuple[list[int], Any]:
    """Numbers of the decoded frames, and their times."""
    transform = DecodeVideoTransform(
        "v", num_frames, "frames", frame_timestamps_output_field="times", frame_format="tensor", **options
    )
    result = transform({"v": video(), **sample_at(), **(sample or {})})
    return numbers(result["frames"]), result["times"]


def through(transforms: list[Transform], sample: dict[str, Any]) -> dict[str, Any]:
    """The sample after all transforms."""
    result = apply(transforms, sample)
    assert isinstance(result, dict)
    return result


def test_clips_start_where_asked_and_step_by_the_framerate(library: str) -> None:
    assert decoded(random_offset=False)[0] == [0, 1, 2, 3]
    assert decoded(random_offset=False, framerate=12.0)[0] == [0, 2, 4, 6]
    assert decoded(random_offset=False, framerate=48.0)[0] == [0, 0, 1, 1]
    assert decoded(random_offset=False, framerate=12.0, speedup_factor=2.0)[0] == [0, 4, 8, 12]
    assert decoded({"s": 3}, random_offset=False, speedup_factor_field="s")[0] == [0, 3, 6, 9]
    assert decoded(random_offset=False, num_frames=60)[0] == list(range(60)), "the whole video is a clip"


def test_random_clips_are_uniform_reproducible_and_inside(library: str) -> None:
    starts = []
    for position in range(30):
        frames, times = decoded(sample_at(position), num_frames=12, framerate=12.0)
        assert frames == [frames[0] + 2 * k for k in range(12)]
        assert abs(times[0] - frames[0] / 24) < 2e-3
        starts.append(frames[0])
    assert max(starts) <= 60 - 24
    assert len(set(starts)) > 12
    assert decoded(sample_at(5))[0] == decoded(sample_at(5))[0]


def test_given_timestamps_win_and_read_back_the_same_frames(library: str) -> None:
    frames, times = decoded(sample_at(3), num_frames=6, framerate=10.0)
    again, _ = decoded({"t": times}, num_frames=6, framerate=10.0, frame_timestamps_input_field="t")
    assert again == frames
    assert decoded({"t": [2.0, 0.5, 0.5]}, frame_timestamps_input_field="t")[0] == [48, 12, 12], "any order, repeats"
    with pytest.raises(DecodeError, match=r"no frame at 99.000 s: the video lasts 2.5"):
        decoded({"t": [99.0]}, frame_timestamps_input_field="t")


def test_crop_intervals_bound_the_clip_hard_or_soft() -> None:
    interval = {"a": 1.0, "b": 1.5}
    fields: dict[str, Any] = {"crop_interval_start_field": "a", "crop_interval_end_field": "b"}
    for position in range(10):
        frames, _ = decoded(sample_at(position, **interval), num_frames=6, **fields)
        assert frames[0] >= 24
        assert frames[-1] <= 36
    with pytest.raises(DecodeError, match=r"0.500 s between 1.000 and 1.500"):
        decoded(interval, num_frames=24, **fields)
    soft, _ = decoded(interval, num_frames=24, crop_interval_type="soft", random_offset=False, **fields)
    assert soft == list(range(18, 42)), "0.5 s grows to 1 s, evenly"
    at_the_end, _ = decoded({"a": 2.4, "b": 2.5}, num_frames=24, crop_interval_type="soft", **fields)
    assert at_the_end == list(range(36, 60)), "shifted into the video"
    with pytest.raises(ConfigError, match="crop_interval_type='firm'"):
        DecodeVideoTransform("v", 4, crop_interval_type="firm")
    with pytest.raises(ConfigError, match="both"):
        DecodeVideoTransform("v", 4, crop_interval_start_field="a")


def test_shorter_videos_give_fewer_frames_only_when_allowed() -> None:
    with pytest.raises(DecodeError, match=r"DecodeVideoTransform: field 'v': a clip of 62 frames .*allow_shorter_videos"):
        decoded(num_frames=62)
    assert decoded(num_frames=100, allow_shorter_videos=True)[0] == list(range(60))


def test_facts_from_fields_are_used_and_nothing_in_a_field_changes_nothing(library: str) -> None:
    fields: dict[str, Any] = {"duration_field": "d", "framerate_field": "f"}
    for position in range(6):
        assert max(decoded(sample_at(position, d=1.0, f=24.0), **fields)[0]) < 24
    assert decoded({"d": None, "f": ""}, random_offset=False, **fields)[0] == [0, 1, 2, 3]
    with pytest.raises(TransformError, match=r"field 'd' holds str 'x': expected a number above 0"):
        decoded({"d": "x", "f": 24.0}, **fields)


def test_rotation_is_applied_by_every_decoder(library: str, tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    source, turned = tmp_path / "a.mp4", tmp_path / "b.mp4"
    source.write_bytes(video())
    with av.open(str(source)) as given, av.open(str(turned), "w") as output:
        stream = output.add_stream_from_template(given.streams.video[0])
        if not hasattr(stream, "set_display_rotation"):
            pytest.skip("this PyAV cannot write a rotation")
        stream.set_display_rotation(90)
        for packet in given.demux(given.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                output.mux(packet)
    assert VideoReader(str(turned)).frames_at(np.array([0.5])).pixels.shape == (1, 3, WIDTH, HEIGHT)


@pytest.mark.parametrize(
    ("matrix", "axes", "flipped"),
    [((-1, 0, 0, 1), (0, 1, 2, 3), (3,)), ((1, 0, 0, -1), (0, 1, 2, 3), (2,)), ((0, 1, 1, 0), (0, 1, 3, 2), ())],
)
def test_a_mirrored_video_is_shown_mirrored(
    library: str, matrix: tuple[int, ...], axes: tuple[int, ...], flipped: tuple[int, ...]
) -> None:
    file, (a, b, c, d) = bytearray(video()), (part << 16 for part in matrix)
    at = file.index(b"tkhd") + 44
    assert file[at : at + 4] == b"\0\1\0\0", "the matrix of a track that is shown as it is"
    file[at : at + 20] = struct.pack(">5i", a, b, 0, c, d)
    times = np.array([0.5, 1.0])
    plain = VideoReader(video(), ReaderOptions(decoder="PyAV")).frames_at(times).pixels
    assert torch.equal(VideoReader(bytes(file)).frames_at(times).pixels, plain.permute(axes).flip(flipped)), library


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts"])
def test_the_sound_of_a_clip_lies_between_its_times(library: str, monkeypatch: pytest.MonkeyPatch, container: str) -> None:
    keep = {LIBRARIES[library], "av"}
    monkeypatch.setattr(audio_decode, "find", lambda module: optional.find(module) if module in keep else None)
    for position in range(4):
        sample = sample_at(position, v=video(container, num_frames=96, sound=True))
        transform = DecodeVideoAndAudioTransform(
            "v", "frames", "sound", "rate", 24, frame_timestamps_output_field="times", duration_output_field="seconds"
        )
        sample = transform(sample)
        assert isinstance(sample["frames"][0], Image.Image)
        assert (sample["rate"], sample["seconds"]) == (48000, pytest.approx(1.0))
        assert sample["sound"].dtype == torch.float32
        assert abs(sample["sound"].shape[1] - 48000) <= 2500, "the sound of a stream may end a little before its picture"
        middle = sample["times"][0] + 0.5
        window = sample["sound"][:, 21600:26400]
        assert abs(pitch(window, 48000) - (200 + 400 * middle)) < 25, "a tenth of a second would be 40 Hz"


def test_silence_and_missing_sound_are_errors_that_say_so() -> None:
    transform = DecodeVideoAndAudioTransform("v", "frames", "sound", "rate", 4, silent_audio_thresh=2.0)
    with pytest.raises(DecodeError, match=r"is silent: its largest \|x\| is 0\.\d+, below silent_audio_thresh=2.0"):
        transform(sample_at(v=video(sound=True)))
    with pytest.raises(DecodeError, match="no audio between"):
        transform(sample_at(v=video()))


def test_the_standard_pipelines_give_tensors_of_the_asked_shape() -> None:
    sample = sample_at(v=video(num_frames=96, sound=True))
    chain = create_standard_video_pipeline("v", 8, (32, 48), {"framerate": 12.0}, normalize=True, output_field="clip")
    sample = through(chain, sample)
    assert (sample["clip"].shape, sample["clip"].dtype) == ((8, 3, 32, 48), torch.float32)
    assert sample["clip"].is_contiguous()
    sample = through(create_standard_joint_video_audio_pipeline("v", 12, (32, 48), {"framerate": 12.0}), sample)
    assert sample["video"].shape == (12, 3, 32, 48)
    assert sample["audio"].shape == (1, 16000)


def test_pillow_frames_and_tensors_give_the_same_pixels() -> None:
    steps: list[Transform] = [
        DecodeVideoTransform("v", 4, "x", random_offset=False),
        ResizeVideoTransform("x", resolution=(32, 32)),
        ConvertVideoToByteTensorTransform("x"),
    ]
    sample = through(steps, sample_at(v=video()))
    fused = through(create_standard_video_pipeline("v", 4, (32, 32), {"random_offset": False}), sample_at(v=video()))
    assert (sample["x"].int() - fused["video"].int()).abs().max() <= 2


def test_squeezed_frames_get_their_aspect_back() -> None:
    frames = torch.zeros(2, 3, 40, 40, dtype=torch.uint8)  # [t, c, h, w]
    sample = {"x": frames, "h": 1080, "w": 1920}
    assert UndistortFramesTransform("x", ["h", "w"], "y")(sample)["y"].shape == (2, 3, 40, 71)
    with pytest.raises(ConfigError, match="two field names"):
        UndistortFramesTransform("x", ["h"])
    with pytest.raises(TransformError, match="'w' holds int 0"):
        UndistortFramesTransform("x", ["h", "w"])({"x": frames, "h": 1, "w": 0})


def test_an_opened_reader_serves_several_transforms_and_does_not_leave_its_process() -> None:
    sample = InitVideoDecoderTransform("v", "reader")(sample_at(v=video()))
    first = DecodeVideoTransform("reader", 2, "a", random_offset=False, frame_format="tensor")(sample)
    second = DecodeVideoTransform("reader", 2, "b", frame_timestamps=[1.0, 1.5], frame_format="tensor")(first)
    assert (numbers(second["a"]), numbers(second["b"])) == ([0, 1], [24, 36])
    reader = second["reader"]
    with pytest.raises(TypeError, match="DeleteVideoDecoderTransform"):
        pickle.dumps(reader)
    sample = DeleteVideoDecoderTransform("reader")(second)
    assert "reader" not in sample
    with pytest.raises(DecodeError, match="closed"):
        reader.frames_at(np.array([0.0]))
    with pytest.raises(TransformError, match="expected a video reader"):
        DeleteVideoDecoderTransform("v")(sample)


def _use(reader: VideoReader, answers: Any) -> None:
    try:
        reader.frames_at(np.array([0.0]))
        answers.put("worked")
    except DecodeError as error:
        answers.put(str(error))


def _decode_in_child(answers: Any) -> None:
    torch.set_num_threads(1)  # as a DataLoader's workers do: OpenMP's threads do not survive a fork
    answers.put(decoded(random_offset=False)[0])


def test_no_frame_of_pyav_is_left_to_the_collector_which_may_run_in_a_forked_child() -> None:
    av = pytest.importorskip("av")
    gc.collect()
    gc.disable()
    try:
        reader = VideoReader(video(), ReaderOptions(decoder="PyAV"))
        assert numbers(reader.frames_at(np.array([0.5, 1.0])).pixels) == [12, 24]
        left = [found for found in gc.get_objects() if type(found) is av.VideoFrame and found.width]
        assert not left, "a decoder has one without a picture"
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_refuses_its_parents_reader_and_opens_its_own(library: str) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    reader = VideoReader(video())
    reader.frames_at(np.array([0.5]))
    for target, arguments in ((_use, (reader, answers)), (_decode_in_child, (answers,))):
        child = context.Process(target=target, args=arguments)
        child.start()
        answer = answers.get(timeout=300)
        child.join(300)
        assert child.exitcode == 0
        assert answer == [0, 1, 2, 3] or "another process" in answer
    assert numbers(reader.frames_at(np.array([0.5])).pixels) == [12], "the parent's reader still works"


def bad_files() -> dict[str, bytes]:
    """Files that must give a DecodeError."""
    av = pytest.importorskip("av")
    whole = video(sound=True)
    sound_only = io.BytesIO()
    with av.open(sound_only, "w", format="mp4") as output:
        mux_sound(output, output.add_stream("aac", rate=48000, layout="mono"), 0.5)
    return {
        "empty": b"",
        "text": b"this is no video" * 100,
        "truncated before the index": whole[: len(whole) // 2],
        "first bytes": whole[:100],
        "audio only": sound_only.getvalue(),
    }


@pytest.mark.parametrize("kind", ["empty", "text", "truncated before the index", "first bytes", "audio only"])
def test_bad_files_give_a_decode_error_soon(library: str, kind: str) -> None:
    started = time.process_time()  # our own work: other processes may keep us waiting for long
    with pytest.raises(DecodeError, match=r"DecodeVideoTransform: field 'v': .*sample 'k' holds") as caught:
        decoded({"v": bad_files()[kind], "__sample_key__": "k"}, num_frames=24)
    assert time.process_time() - started < 10
    assert caught.value.context["transform"] == "DecodeVideoTransform"


def test_missing_files_and_wrong_types_are_decode_errors(tmp_path: Path) -> None:
    for value in (str(tmp_path / "none.mp4"), "", None, 3):
        with pytest.raises(DecodeError, match=r"DecodeVideoTransform: field 'v'"):
            decoded({"v": value})


def test_the_time_limit_on_frames_holds(library: str) -> None:
    with pytest.raises(DecodeError, match="longer than frame_seek_timeout_sec=1e-09"):
        decoded(frame_seek_timeout_sec=1e-9)


def test_pyav_skips_what_no_other_frame_needs_on_its_way_to_a_clip_and_still_gives_the_right_frames() -> None:
    reader = VideoReader(video(codec="libx264", gop=250), ReaderOptions(decoder="PyAV"))
    decoder = reader.decoder
    assert isinstance(decoder, AvDecoder)
    num_decoded = 0
    all_frames = decoder._frames

    def counted(check: Callable[[], None], skip_before: float) -> Iterator[tuple[float, Any]]:
        nonlocal num_decoded
        for item in all_frames(check, skip_before):
            num_decoded += 1
            yield item

    decoder._frames = counted  # type: ignore[method-assign]
    assert numbers(reader.frames_at(np.arange(50, 54) / 24).pixels) == [50, 51, 52, 53]
    assert num_decoded < 50, "the way there was decoded whole"


def test_a_frame_that_lasts_so_long_that_it_was_skipped_is_found() -> None:
    begins = np.array(times_of(60, True)) / 24
    reader = VideoReader(video(codec="libx264", gop=250, is_variable=True), ReaderOptions(decoder="PyAV"))
    reader.decoder.framerate *= 100  # the margin before a clip is nothing now
    moments = begins[1:] - 1e-3  # just before each frame the one before it is shown
    for number, moment in enumerate(moments.tolist()):
        assert numbers(reader.decoder.frames_at(np.array([moment]), lambda: None).pixels) == [number]


@pytest.mark.parametrize(
    ("options", "fields", "order"),
    [
        ({}, {}, video_reader.ORDER_FOR_CLIPS),
        ({"framerate": 12.0, "random_offset": False}, {}, video_reader.ORDER_FOR_CLIPS),
        ({"frame_timestamps": [2.0, 0.5]}, {}, video_reader.ORDER_FOR_SCATTERED),
        ({"frame_timestamps_input_field": "t"}, {"t": [2.0, 0.5]}, video_reader.ORDER_FOR_SCATTERED),
        ({"frame_timestamps_input_field": "t"}, {"t": None}, video_reader.ORDER_FOR_CLIPS),
    ],
    ids=["clip", "spaced clip", "given moments", "moments in a field", "nothing in the field"],
)
def test_pyav_is_tried_first_for_a_clip_torchcodec_for_given_moments(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], fields: dict[str, Any], order: tuple[str, ...]
) -> None:
    tried: list[str] = []

    def refusing(name: str) -> OpenDecoder:
        def open_decoder(_library: Any, _source: Any, _options: ReaderOptions) -> Any:
            tried.append(name)
            raise DecodeError(f"{name} will not")

        return open_decoder

    monkeypatch.setattr(video_reader, "DECODERS", {name: (module, refusing(name)) for name, module in LIBRARIES.items()})
    expected = [name for name in order if optional.find(LIBRARIES[name]) is not None and name != "decord"]
    with pytest.raises(DecodeError, match=r"no decoder reads this video \(") as caught:
        DecodeVideoTransform("v", 2, **options)(sample_at(v=video(), **fields))
    assert tried == expected
    assert [name for name in expected if f"{name}: DecodeError: {name} will not" in str(caught.value)] == expected
    tried.clear()
    with pytest.raises(DecodeError):
        DecodeVideoTransform("v", 2, decoder=expected[-1], **options)(sample_at(v=video(), **fields))
    assert tried == [expected[-1], *expected[:-1]], "one that is asked for comes first, the others follow"


def test_orders_hold_every_decoder_and_what_is_missing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert video_reader.ORDER_FOR_CLIPS == ("PyAV", "torchcodec", "decord")
    assert video_reader.ORDER_FOR_SCATTERED == ("torchcodec", "PyAV", "decord")
    missing: set[str] = set()
    monkeypatch.setattr(video_reader, "find", lambda module: None if module in missing else optional.find(module))
    for name in video_reader.ORDER_FOR_SCATTERED:
        if optional.find(LIBRARIES[name]) is not None:
            assert VideoReader(video(), ReaderOptions(is_scattered=True)).name == name
        missing.add(LIBRARIES[name])
    with pytest.raises(MissingDependencyError, match="PyAV, torchcodec or decord is needed"):
        VideoReader(video())


def test_a_decoder_may_be_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (module, _) in DECODERS.items():
        if optional.find(module) is not None:
            assert VideoReader(video(), ReaderOptions(decoder=name)).name == name
            assert DecodeVideoTransform("v", 2, "frames", decoder=name)({"v": video()})["frames"]
    with pytest.raises(ConfigError, match="decoder='ffmpeg' is unknown"):
        DecodeVideoTransform("v", 2, decoder="ffmpeg")
    monkeypatch.setattr(video_reader, "find", lambda module: None if module == "decord" else optional.find(module))
    with pytest.raises(MissingDependencyError, match="decoder='decord' does not import"):
        VideoReader(video(), ReaderOptions(decoder="decord"))


def test_a_file_whose_first_packet_is_no_key_frame_is_opened_again_and_read() -> None:
    """A transport stream cut before its first key frame ends; the stream object of the first opening must not be used again."""
    whole = video("mpegts", gop=12)
    times = []
    for packets in range(20, 200, 20):
        try:
            reader = VideoReader(whole[188 * packets :])
        except DecodeError:
            continue
        times.append(reader.decoder.duration)
        reader.close()
    assert times, "none of them was read"


def test_a_decoder_is_imported_when_it_is_its_turn() -> None:
    program = (
        "import sys; from sqlstream.transforms.frames import ReaderOptions; "
        "from sqlstream.transforms.video_reader import decoders_for; "
        "print(next(decoders_for(bytes(400), ReaderOptions()))[0], 'torchcodec' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "PyAV False\n"
