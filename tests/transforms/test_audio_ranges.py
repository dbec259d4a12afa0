"""A range of a file has the samples that the whole file has there; decoders agree on lengths and on the order of channels."""

from __future__ import annotations

import io
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from sqlstream.errors import DecodeError
from sqlstream.transforms import audio_decode, optional
from sqlstream.transforms.audio_decode import decode_audio, decode_audio_between
from sqlstream.transforms.audio_process import loudness

from .clips import chirp, encoded

ORDER_OF_VORBIS = [0, 2, 1, 5, 3, 4]
"""Where the channels of FL FR FC LFE BL BR are."""


def mp3(rate: int = 48000, bit_rate: int = 32000, *, is_bare: bool = False) -> bytes:
    """A chirp of 4 s in noise as an MP3; bare: frames alone, as those have that write to a pipe."""
    noise = np.random.default_rng(0).normal(size=4 * 48000).astype(np.float32) * 0.02
    samples = (chirp(4.0) + noise)[:: 48000 // rate].copy()
    file = io.BytesIO()
    with av.open(file, "w", format="mp3", options={"write_xing": "0", "id3v2_version": "0"} if is_bare else {}) as output:
        stream = output.add_stream("libmp3lame", rate=rate, layout="mono")
        stream.bit_rate = bit_rate
        for start in range(0, len(samples), 1152):
            frame = av.AudioFrame.from_ndarray(samples[None, start : start + 1152], format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def by_av(data: bytes) -> np.ndarray[Any, Any]:
    """All samples `[c, s]` as PyAV decodes them."""
    with av.open(io.BytesIO(data), "r") as container:
        return np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)


RANGED: dict[str, Callable[[], bytes]] = {
    "MP3 of few bits": lambda: mp3(16000, 24000),
    "MP3 of fewest bits": lambda: mp3(24000, 8000),
    "Vorbis": lambda: encoded(np.stack([chirp(3.0), -chirp(3.0)], axis=1)[: 48000 * 3 - 117], "OGG"),
    "Opus": lambda: encoded(chirp(3.0), "OGG", subtype="OPUS"),
    "FLAC": lambda: encoded(chirp(1.0), "FLAC"),
}


@pytest.mark.parametrize("kind", RANGED)
def test_a_range_has_the_samples_that_the_whole_file_has_there(kind: str, tmp_path: Path) -> None:
    data = RANGED[kind]()
    (tmp_path / "a").write_bytes(data)
    whole = decode_audio(data).samples  # [c, s]
    num_samples = whole.shape[1]
    starts = {*range(0, num_samples - 400, num_samples // 23), *(num_samples - back for back in (5000, 3000, 1500, 600, 400))}
    for start in sorted(starts):
        for source in (data, str(tmp_path / "a")):
            part = decode_audio(source, lambda *_: (start, start + 400)).samples  # noqa: B023 - called at once  # [c, 400]
            assert torch.allclose(part, whole[:, start : start + 400], atol=2e-4), start


LENGTHLESS: dict[str, Callable[[], bytes]] = {
    "constant": lambda: mp3(is_bare=True),
    "changing": lambda: mp3(bit_rate=8000, is_bare=True) + mp3(bit_rate=96000, is_bare=True),
    "one that follows another": lambda: mp3() + mp3(is_bare=True),
}


@pytest.mark.parametrize("kind", LENGTHLESS)
def test_an_mp3_that_does_not_say_its_length_is_decoded_to_its_end(kind: str) -> None:
    data = LENGTHLESS[kind]()
    expected = by_av(data)
    assert expected.shape[1] >= 4 * 48000
    assert np.array_equal(decode_audio(data).samples.numpy(), expected)


@pytest.mark.parametrize("rest", [b"TAG" + bytes(125), b"APETAGEX" + b"x" * 50_000, bytes(20_000)], ids=["ID3", "APE", "zeros"])
def test_what_follows_the_last_frame_of_an_mp3_is_no_audio(rest: bytes) -> None:
    data = mp3()
    whole = decode_audio(data).samples  # [1, s]
    assert whole.shape[1] == 4 * 48000
    assert torch.equal(decode_audio(data + rest).samples, whole)
    assert torch.equal(decode_audio(b"ID3\x03\0\0\0\0\2\0" + bytes(256) + data).samples, whole)


@pytest.mark.parametrize("library", ["soundfile", "av", "torchcodec.decoders"])
@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_channels_of_ogg_come_in_the_order_of_other_formats(
    subtype: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if optional.find(library) is None:
        pytest.skip(f"{library} does not import here")
    monkeypatch.setattr(audio_decode, "find", lambda name: optional.find(name) if name == library else None)
    levels = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], dtype=np.float32)  # FL FC FR BL BR LFE
    tone = np.sin(np.arange(48000, dtype=np.float32) * (2 * np.pi * 60 / 48000))
    data = encoded(tone[:, None] * levels, "OGG", subtype=subtype)
    if library == "soundfile":
        with pytest.raises(DecodeError, match="come in another order"):
            decode_audio(data)
        return
    peaks = decode_audio(data).samples[:, 24000:].abs().amax(dim=1)  # [6]
    assert peaks.argsort().tolist() == levels[[0, 2, 1, 5, 3, 4]].argsort().tolist(), "FL FR FC LFE BL BR"


def test_loudness_leaves_low_frequencies_out_and_counts_surround_more() -> None:
    tone = torch.from_numpy(chirp(1.0))  # [s]
    alone = []
    for channel in range(6):
        samples = torch.zeros(6, len(tone))  # [6, s]
        samples[channel] = tone
        alone.append(loudness(samples, 48000))
    assert alone[3] == -np.inf
    assert alone[:3] == pytest.approx([loudness(tone[None], 48000)] * 3)
    assert alone[4:] == pytest.approx([alone[0] + 10 * np.log10(1.41)] * 2)


@pytest.mark.parametrize("start", [0.0, 0.5, 2.25])
def test_the_sound_of_a_video_keeps_its_time_behind_packets_that_lack(start: float) -> None:
    file, given = io.BytesIO(), chirp(4.0)
    given[48000:60000] = 0  # a quarter of a second lacks
    with av.open(file, "w", format="matroska") as output:
        stream = output.add_stream("pcm_f32le", rate=48000, layout="mono")
        for first in range(0, len(given), 1200):
            if not 48000 <= first < 60000:
                frame = av.AudioFrame.from_ndarray(given[None, first : first + 1200], format="flt", layout="mono")
                frame.sample_rate, frame.pts, frame.time_base = 48000, first, Fraction(1, 48000)
                output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    found = decode_audio_between(file.getvalue(), start, start + 1.5)
    assert np.array_equal(found.samples[0].numpy(), given[round(start * 48000) : round((start + 1.5) * 48000)])
