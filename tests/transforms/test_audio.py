"""Audio: formats, clips, resampling, loudness, bad files."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import torch

from sqlstream.errors import ConfigError, DecodeError, MissingDependencyError, TransformError
from sqlstream.transforms import apply, audio_decode, audio_process, optional
from sqlstream.transforms.audio import (
    AverageAudioTransform,
    ConvertAudioToFloatTensorTransform,
    DecodeAudioTransform,
    NormalizeAudioTransform,
    ResizeAudioTransform,
)
from sqlstream.transforms.audio_clip import window_means
from sqlstream.transforms.audio_process import ResampleOptions, fit_length, loudness, normalize, resample, to_float
from sqlstream.transforms.presets import create_standard_audio_pipeline
from sqlstream.transforms.rng import begin

from .clips import chirp, encoded, mux_sound, pitch

RATE = 48000
LIBRARIES = {"soundfile": "soundfile", "torchcodec": "torchcodec.decoders", "PyAV": "av"}


def sample_at(position: int = 0, **fields: Any) -> dict[str, Any]:
    begin(fields, (0, 0, position))
    return fields


def m4a(seconds: float = 2.0) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        mux_sound(output, output.add_stream("aac", rate=RATE, layout="mono"), seconds)
    return file.getvalue()


@pytest.fixture(params=[name for name, module in LIBRARIES.items() if optional.find(module) is not None])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each decoder alone."""
    keep = LIBRARIES[request.param]
    monkeypatch.setattr(audio_decode, "find", lambda module: optional.find(module) if module == keep else None)
    return str(request.param)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "MP3", "OGG", "M4A"])
def test_every_format_gives_floats_that_sound_right(library: str, kind: str) -> None:
    data = m4a() if kind == "M4A" else encoded(chirp(2.0), kind)
    if kind == "M4A" and library == "soundfile":
        with pytest.raises(DecodeError, match="soundfile: "):
            DecodeAudioTransform("x")({"x": data})
        return
    sample = DecodeAudioTransform("x", "y", "rate")({"x": data})
    assert (sample["y"].dtype, sample["y"].shape[0], sample["rate"]) == (torch.float32, 1, RATE)
    assert abs(sample["y"].shape[1] / RATE - 2.0) < 0.06
    for second in (0.5, 1.5):
        window = sample["y"][:, int((second - 0.05) * RATE) : int((second + 0.05) * RATE)]
        assert abs(pitch(window, RATE) - (200 + 400 * second)) < 45
        assert abs(float(window.abs().max()) - 0.5) < 0.1


def test_lossless_samples_come_back_exactly_from_paths_and_bytes(tmp_path: Path) -> None:
    given = np.stack([chirp(0.5), -chirp(0.5)], axis=1)
    path = tmp_path / "a.wav"
    path.write_bytes(encoded(given, subtype="FLOAT"))
    for value in (str(path), path, path.read_bytes()):
        assert np.array_equal(DecodeAudioTransform("x")({"x": value})["x"].T.numpy(), given)


def test_a_clip_of_a_long_file_decodes_only_the_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read: list[int] = []
    plain = soundfile.SoundFile.read

    def spy(file: Any, frames: int, **options: Any) -> Any:
        num_read.append(frames)
        return plain(file, frames, **options)

    monkeypatch.setattr(soundfile.SoundFile, "read", spy)
    for strategy in ("random", "start"):
        transform = DecodeAudioTransform("x", duration=0.25, clip_offset_strategy=strategy)
        assert transform(sample_at(x=encoded(chirp(4.0), "FLAC")))["x"].shape == (1, RATE // 4)
    assert num_read == [RATE // 4] * 2


def with_burst(at: float, seconds: float = 4.0, rate: int = 8000) -> np.ndarray[Any, Any]:
    """Quiet noise with 0.5 s of loud tone."""
    samples = np.random.default_rng(0).normal(size=round(seconds * rate)).astype(np.float32) * 1e-4
    start = round(at * rate)
    samples[start : start + rate // 2] += np.sin(np.arange(rate // 2) / 4).astype(np.float32) * 0.5
    return samples


def clip_start(strategy: str, samples: np.ndarray[Any, Any], position: int = 0, **options: Any) -> float:
    """Where the clip began: found by looking for it."""
    data = encoded(samples, "WAV", 8000, subtype="FLOAT")
    transform = DecodeAudioTransform("x", duration=1.0, clip_offset_strategy=strategy, **options)
    clip = transform(sample_at(position, x=data))["x"][0].numpy()
    assert len(clip) == 8000
    return next(s for s in range(len(samples) - 8000 + 1) if np.array_equal(samples[s : s + 8000], clip)) / 8000


def test_strategies_find_their_clips() -> None:
    samples = with_burst(2.25)
    assert clip_start("start", samples) == 0
    assert 1.7 <= clip_start("max_mean", samples) <= 2.3
    peak = int(np.abs(samples).argmax()) / 8000
    assert clip_start("max_center", samples) == pytest.approx(peak - 0.5, abs=1e-3)
    assert clip_start("max_center", with_burst(3.9, 4.4)) <= 3.4
    starts = {clip_start("random", samples, p) for p in range(8)}
    assert len(starts) == 8
    loud = [clip_start("random_loud", samples, p) for p in range(8)]
    assert len(set(loud)) > 4
    assert all(1.2 < start < 2.8 for start in loud)


def test_a_silent_file_has_no_loud_clip_and_the_error_says_how_loud_it_is() -> None:
    with pytest.raises(DecodeError, match=r"no window of 1.0 s reaches loudness_cutoff=-40.0 dB: the loudest has -8\d"):
        clip_start("random_loud", with_burst(2.0)[:12000])
    clip_start("random_loud", with_burst(2.0)[:12000], loudness_cutoff=-90.0)


def test_shorter_audio_is_an_error_or_given_whole() -> None:
    data = encoded(chirp(0.5))
    with pytest.raises(DecodeError, match=r"DecodeAudioTransform: field 'x': the audio lasts 0.500 s, the clip 1.0 s"):
        DecodeAudioTransform("x", duration=1.0)(sample_at(x=data))
    assert DecodeAudioTransform("x", duration=1.0, allow_shorter_audio=True)(sample_at(x=data))["x"].shape == (1, 24000)


def test_window_means_are_those_of_a_loop() -> None:
    values = torch.rand(2, 50)  # [c, s]
    expected = [float(values[:, s : s + 7].mean()) for s in range(44)]
    assert np.allclose(window_means(values, 7), expected)


@pytest.mark.parametrize("resampler", ["torchaudio.functional", "soxr"])
@pytest.mark.parametrize("rates", [(48000, 16000), (16000, 44100), (44100, 48000), (44101, 48000), (22050, 22050)])
def test_resampling_keeps_pitch_level_and_length(
    resampler: str, rates: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if optional.find(resampler) is None:
        pytest.skip(f"{resampler} does not import here")
    keep = {resampler, "soxr"}
    monkeypatch.setattr(audio_process, "find", lambda module: optional.find(module) if module in keep else None)
    old, new = rates
    tone = torch.sin(2 * np.pi * 440 * torch.arange(old) / old)[None] * 0.5
    out = resample(torch.cat([tone, -tone]), old, new)
    assert out.shape == (2, new)
    assert out.dtype == torch.float32
    assert abs(pitch(out[:1], new) - 440) < 2
    assert abs(float(out[:, new // 10 : -new // 10].abs().max()) - 0.5) < 0.01
    assert torch.allclose(out[0], -out[1], atol=1e-6)


def test_resampling_without_a_library_or_with_options_it_lacks_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio_process, "find", lambda _module: None)
    with pytest.raises(MissingDependencyError, match=r"sqlstream-data\[audio\]"):
        resample(torch.zeros(1, 100), 8000, 16000)
    with pytest.raises(MissingDependencyError, match="torchaudio"):
        resample(torch.zeros(1, 100), 8000, 16000, ResampleOptions(rolloff=0.9))


def test_lengths_are_cut_or_filled_and_come_from_a_number_or_a_field() -> None:
    assert fit_length(torch.ones(1, 3), 5).tolist() == [[1, 1, 1, 0, 0]]
    assert fit_length(torch.ones(1, 3), 2).tolist() == [[1, 1]]
    sample = {"a": torch.ones(1, 8000), "rate": 8000, "seconds": 1.5}
    assert ResizeAudioTransform("a", "rate", 8000, target_length=10)(dict(sample))["a"].shape == (1, 10)
    assert ResizeAudioTransform("a", "rate", 16000, "b", "seconds")(dict(sample))["b"].shape == (1, 24000)
    assert ResizeAudioTransform("a", "rate", 16000)(dict(sample))["a"].shape == (1, 16000)
    with pytest.raises(TransformError, match="field 'rate' holds str 'x'"):
        ResizeAudioTransform("a", "rate", 8000)({**sample, "rate": "x"})
    with pytest.raises(ConfigError, match="target_length=0"):
        ResizeAudioTransform("a", "rate", 8000, target_length=0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.array([-32768, 0, 16384], dtype=np.int16), [[-1, 0, 0.5]]),
        (np.array([[0, 128, 192]], dtype=np.uint8), [[-1, 0, 0.5]]),
        (torch.tensor([[0.25]], dtype=torch.float64), [[0.25]]),
        (np.array([-(2**31)], dtype=np.int32), [[-1]]),
    ],
)
def test_integers_are_scaled_by_their_full_range(value: Any, expected: list[list[float]]) -> None:
    result = ConvertAudioToFloatTensorTransform("x")({"x": value})["x"]
    assert (result.dtype, result.tolist()) == (torch.float32, expected)


def test_mono_is_the_mean_of_the_channels() -> None:
    assert AverageAudioTransform("x")({"x": torch.tensor([[1.0, 0.0], [0.0, 0.0]])})["x"].tolist() == [[0.5, 0.0]]
    with pytest.raises(TransformError, match="expected samples"):
        AverageAudioTransform("x")({"x": "loud"})


def tone(frequency: float, level: float, rate: int = 48000, seconds: float = 5.0) -> torch.Tensor:
    return level * torch.sin(2 * math.pi * frequency * torch.arange(round(seconds * rate)) / rate)[None]


def test_loudness_is_that_of_the_standard() -> None:
    assert loudness(tone(997, 1.0), 48000) == pytest.approx(-3.01, abs=0.02), "BS.1770: a 997 Hz sine of full scale"
    assert loudness(tone(997, 0.1), 48000) == pytest.approx(-23.01, abs=0.02)
    assert loudness(tone(997, 1.0).repeat(2, 1), 48000) == pytest.approx(0.0, abs=0.02)
    assert loudness(tone(997, 1.0, 44100), 44100) == pytest.approx(-3.01, abs=0.05)
    half_silent = torch.cat([tone(997, 0.1), torch.zeros(1, 5 * 48000)], dim=1)  # [c, s]
    assert loudness(half_silent, 48000) == pytest.approx(-23.2, abs=0.3), "silence is gated out"
    assert loudness(torch.zeros(1, 48000), 48000) == -math.inf
    assert math.isfinite(loudness(tone(997, 0.5, seconds=0.1), 48000))


def test_loudness_agrees_with_torchaudio() -> None:
    functional = optional.find("torchaudio.functional")
    if functional is None:
        pytest.skip("torchaudio does not import here")
    noise = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 96000)).astype(np.float32)) * 0.1
    assert loudness(noise, 48000) == pytest.approx(float(functional.loudness(noise, 48000)), abs=0.15)


def test_audio_is_brought_to_its_loudness_and_peaks_are_limited() -> None:
    for level in (0.01, 0.9):
        assert loudness(normalize(tone(997, level), 48000, -24.0), 48000) == pytest.approx(-24.0, abs=0.01)
    clicks = torch.zeros(1, 96000)  # [c, s]
    clicks[:, ::4800] = 1.0
    assert float(normalize(clicks, 48000, -10.0).abs().max()) == pytest.approx(1.0)
    assert torch.equal(normalize(torch.zeros(1, 1000), 48000, -24.0), torch.zeros(1, 1000))
    assert float(NormalizeAudioTransform("x", volume_norm_db=None)({"x": tone(997, 4.0)})["x"].abs().max()) == pytest.approx(
        1.0
    )
    with pytest.raises(TransformError, match="sample rate is unknown"):
        NormalizeAudioTransform("x")({"x": tone(997, 1.0)})


def test_the_standard_pipeline_gives_one_rate_length_and_loudness() -> None:
    data = encoded(np.stack([chirp(3.0), chirp(3.0)], axis=1), "FLAC")
    sample = apply(create_standard_audio_pipeline("f", 2.0, mono_audio=True, target_audio_sr=16000), sample_at(f=data))
    assert isinstance(sample, dict)
    assert (sample["audio"].shape, sample["audio"].dtype) == ((1, 32000), torch.float32)
    assert sample["original_audio_sampling_rate"] == RATE
    assert loudness(sample["audio"], 16000) == pytest.approx(-24.0, abs=0.05)


def damaged() -> dict[str, Callable[[], bytes]]:
    whole = encoded(chirp(1.0), "WAV", subtype="FLOAT")
    nan = chirp(0.1).copy()
    nan[100] = np.nan
    return {
        "empty": lambda: b"",
        "text": lambda: b"no audio at all" * 50,
        "header only": lambda: encoded(chirp(1.0), "FLAC")[:60],
        "no samples": lambda: encoded(chirp(0.0)),
        "not a number": lambda: encoded(nan, subtype="FLOAT"),
        "absurd rate": lambda: whole[:24] + (2**31 - 1).to_bytes(4, "little") + whole[28:],
    }


@pytest.mark.parametrize("kind", damaged())
def test_bad_files_give_decode_errors_that_name_the_sample(kind: str) -> None:
    with pytest.raises(DecodeError, match=r"DecodeAudioTransform: field 'x': .*sample 'k' holds"):
        DecodeAudioTransform("x")(sample_at(x=damaged()[kind](), __sample_key__="k"))


def test_wrong_options_and_values_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="clip_offset_strategy='loudest'"):
        DecodeAudioTransform("x", clip_offset_strategy="loudest")
    with pytest.raises(ConfigError, match="duration=-1"):
        DecodeAudioTransform("x", duration=-1)
    for value in (None, 3, str(tmp_path / "none.wav")):
        with pytest.raises(DecodeError, match="DecodeAudioTransform: field 'x'"):
            DecodeAudioTransform("x")({"x": value})
    assert to_float(np.zeros(3)).shape == (1, 3)


def test_many_channels_do_not_crash_a_decoder(library: str) -> None:
    samples = np.random.default_rng(0).normal(size=(4800, 33)).astype(np.float32) * 0.1
    try:
        decoded = DecodeAudioTransform("x")({"x": encoded(samples, subtype="FLOAT")})["x"]
    except DecodeError:
        assert library == "torchcodec"
    else:
        assert np.allclose(decoded.T.numpy(), samples, atol=1e-6)
