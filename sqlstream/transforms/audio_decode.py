"""From encoded audio to float samples `[c, s]`: soundfile where it reads the format exactly, then PyAV, then torchcodec.

soundfile is the fastest and needs no system packages; it reads wav, flac, mp3, ogg and seeks in them (`seeking.py`). m4a and
the rest need FFmpeg, which PyAV has with it and torchcodec finds on the system.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sqlstream.errors import DecodeError, MissingDependencyError
from sqlstream.transforms.content import Source
from sqlstream.transforms.optional import find
from sqlstream.transforms.seeking import check_exact, seekable

MAX_VALUES = 1 << 30
"""Most samples times channels that are decoded at once: 4 GiB. A damaged header may ask for any number."""
_BLOCK = 1 << 20  # values read at a time: what a damaged header can make us allocate in vain
_RATES = range(1_000, 1_000_001)
_LEAST_GAP_SECONDS = 0.01
_MOST_PLANES = 8  # PyAV crashes on the planar form of more channels


@dataclass(frozen=True, slots=True, kw_only=True)
class Audio:
    """Decoded samples."""

    samples: torch.Tensor  # [c, s]
    """float32, full scale is -1 to 1."""
    sample_rate: int
    """Samples per second."""


DecodeAll = Callable[[], torch.Tensor]  # [c, s]
"""Decodes everything, at most once."""
ChooseRange = Callable[[int, int, DecodeAll], tuple[int, int]]
"""From (number of samples, sample rate, a function that decodes all) to the range [start, stop) to return."""


def whole(num_samples: int, sample_rate: int, decode_all: DecodeAll) -> tuple[int, int]:  # noqa: ARG001
    """Choose everything."""
    return 0, num_samples


def decode_audio(source: Source, choose: ChooseRange = whole) -> Audio:
    """Return the chosen range of a file's audio.

    Args:
        source: Path or bytes.
        choose: Called with what the file has; where the format allows it, only the range is decoded.

    Raises:
        DecodeError: No decoder at hand reads it, or it holds no audio; the message has every decoder's reason.
        MissingDependencyError: No decoder is installed at all.
    """
    reasons = []
    for module, decode in (("soundfile", _by_soundfile), ("av", _by_av), ("torchcodec.decoders", _by_torchcodec)):
        library = find(module)
        if library is None:
            continue
        try:
            audio = decode(library, source, choose)
        except DecodeError:
            raise
        except Exception as error:
            reasons.append(f"{module.partition('.')[0]}: {type(error).__name__}: {str(error).strip()[:200]}")
            continue
        if not bool(torch.isfinite(audio.samples).all()):
            raise DecodeError("the audio has samples that are no numbers")
        return audio
    if not reasons:
        raise MissingDependencyError(
            "soundfile, torchcodec or PyAV is needed to decode audio: pip install 'sqlstream-data[audio]'"
        )
    raise DecodeError(f"no decoder reads this audio ({'; '.join(reasons)})")


def _check(num_samples: int, num_channels: int, sample_rate: int) -> None:
    if num_samples < 1 or num_channels < 1:
        raise DecodeError(f"the file has {num_samples} samples of {num_channels} channels")
    if sample_rate not in _RATES:
        raise DecodeError(f"the file has {sample_rate} samples per second: expected {_RATES.start} to {_RATES.stop - 1}")


def _limit(num_values: int) -> None:
    if num_values > MAX_VALUES:
        raise DecodeError(f"the audio has more than {MAX_VALUES} values: cut it into shorter files")


# -- soundfile --------------------------------------------------------------------------------------------------------


def _by_soundfile(soundfile: Any, source: Source, choose: ChooseRange) -> Audio:
    with soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else source) as file:
        check_exact(file, source)
        _check(file.frames, file.channels, file.samplerate)
        decoded: list[torch.Tensor] = []  # [c, s] each

        def decode_all() -> torch.Tensor:  # [c, s]
            if not decoded:
                file.seek(0)
                decoded.append(_read_blocks(file, file.frames))
            return decoded[0]

        start, stop = choose(file.frames, file.samplerate, decode_all)
        if decoded:
            samples = decoded[0][:, start:stop].contiguous()  # [c, s]
        else:
            begin = seekable(file, source, start)
            file.seek(begin)
            samples = _read_blocks(file, stop - begin)[:, start - begin :].contiguous()  # [c, s]
        if samples.shape[1] < stop - start:
            raise DecodeError(f"the file ends after {start + samples.shape[1]} samples, its header says {file.frames}")
        return Audio(samples=samples, sample_rate=file.samplerate)


def _read_blocks(file: Any, num_samples: int) -> torch.Tensor:  # [c, s]
    blocks = []
    missing = num_samples
    while missing > 0:
        block = file.read(min(missing, max(1, _BLOCK // file.channels)), dtype="float32", always_2d=True)  # [s, c]
        if not len(block):
            break
        blocks.append(block)
        missing -= len(block)
        _limit((num_samples - missing) * file.channels)
    if not blocks:
        return torch.zeros((file.channels, 0), dtype=torch.float32)
    return torch.from_numpy(np.concatenate(blocks)).T.contiguous()


# -- torchcodec and PyAV ----------------------------------------------------------------------------------------------


def _by_torchcodec(decoders: Any, source: Source, choose: ChooseRange) -> Audio:
    decoder = decoders.AudioDecoder(source)
    decoded = decoder.get_all_samples()
    return _chosen(decoded.data, int(decoded.sample_rate), choose)


def _by_av(av: Any, source: Source, choose: ChooseRange) -> Audio:
    with opened(av, source) as container:
        samples, rate, _ = _decode_stream(av, container, None, math.inf)
    return _chosen(samples, rate, choose)


def _chosen(samples: torch.Tensor, rate: int, choose: ChooseRange) -> Audio:  # [c, s]
    _check(samples.shape[1], samples.shape[0], rate)
    start, stop = choose(samples.shape[1], rate, lambda: samples)
    return Audio(samples=samples[:, start:stop].to(torch.float32).contiguous(), sample_rate=rate)


@contextlib.contextmanager
def opened(av: Any, source: Source) -> Iterator[Any]:
    """Give a PyAV container."""
    container = av.open(io.BytesIO(source) if isinstance(source, bytes) else source, metadata_errors="ignore")
    try:
        yield container
    finally:
        container.close()


def _decode_stream(av: Any, container: Any, start: float | None, stop: float) -> tuple[torch.Tensor, int, float]:  # [c, s]
    """Return samples that cover [start, stop) in the container's time, their rate, and the time of the first.

    Without a start they are all samples, one behind the other, else silence stands for what lacks between them.
    """
    if not container.streams.audio:
        raise DecodeError("the file has no audio stream")
    stream = container.streams.audio[0]
    origin = float((stream.start_time or 0) * stream.time_base)
    if start is not None and start > origin + 1:
        container.seek(int((start - 1) / stream.time_base), stream=stream)  # a second earlier: codecs need run-up
    resampler = av.AudioResampler(format="flt")
    blocks: list[Any] = []
    begin: float | None = None
    num_samples = num_channels = rate = 0
    for frame in container.decode(stream):
        if begin is None:
            begin = float(frame.pts * frame.time_base) if frame.pts is not None else origin
            rate, num_channels = frame.sample_rate, len(frame.layout.channels)
        elif start is not None and frame.pts is not None:
            ended = begin + num_samples / rate
            gap = min(float(frame.pts * frame.time_base), stop) - ended  # where packets are lacking; times may be in whole ms
            if gap > _LEAST_GAP_SECONDS:
                blocks.append(np.zeros((num_channels, round(gap * rate)), dtype=np.float32))  # [c, s]
                num_samples += blocks[-1].shape[1]
        is_ready = frame.format.name == "fltp" and num_channels <= _MOST_PLANES
        for converted in (frame,) if is_ready else resampler.resample(frame):
            values = converted.to_ndarray()
            blocks.append(values if is_ready else values.reshape(-1, num_channels).T)  # [c, s]
            num_samples += blocks[-1].shape[1]
            _limit(num_samples * num_channels)
        if begin + num_samples / rate >= stop:
            break
    if begin is None or not blocks:
        raise DecodeError("the audio stream has no samples")
    return torch.from_numpy(np.concatenate(blocks, axis=1)), rate, begin


def decode_audio_between(source: Source, start: float, stop: float) -> Audio:
    """Return a video's sound between two times of its container.

    Args:
        source: Path or bytes.
        start: Seconds; silence stands for what lies before the audio stream begins.
        stop: Seconds; a stream that ends before it gives fewer samples.

    Raises:
        DecodeError: There is no audio, or none at that time.
        MissingDependencyError: No decoder is installed.
    """
    reasons = []
    for module, decode in (("av", _between_by_av), ("torchcodec.decoders", _between_by_torchcodec)):
        library = find(module)
        if library is None:
            continue
        try:
            samples, rate, begin = decode(library, source, start, stop)
            samples = _aligned(samples, round((begin - start) * rate), round((stop - start) * rate))  # [c, s]
            _check(samples.shape[1], samples.shape[0], rate)
        except Exception as error:
            reasons.append(f"{module.partition('.')[0]}: {type(error).__name__}: {str(error).strip()[:200]}")
            continue
        return Audio(samples=samples, sample_rate=rate)
    if not reasons:
        raise MissingDependencyError(
            "torchcodec or PyAV is needed to decode a video's audio: pip install 'sqlstream-data[video]'"
        )
    raise DecodeError(f"no audio between {start:.3f} and {stop:.3f} s ({'; '.join(reasons)})")


def _aligned(samples: torch.Tensor, late: int, num_samples: int) -> torch.Tensor:  # [c, s]
    """Return at most `num_samples` from the wanted start on, when `samples` begin `late` (or, negative, early)."""
    if late >= num_samples:
        return samples[:, :0]
    shifted = torch.nn.functional.pad(samples, (late, 0)) if late > 0 else samples[:, -late:]
    return shifted[:, :num_samples].to(torch.float32).contiguous()


def _between_by_torchcodec(
    decoders: Any, source: Source, start: float, stop: float
) -> tuple[torch.Tensor, int, float]:  # [c, s]
    decoder = decoders.AudioDecoder(source)
    origin = float(decoder.metadata.begin_stream_seconds or 0.0)
    if stop <= origin:
        raise DecodeError(f"the audio begins at {origin:.3f} s")
    samples = decoder.get_samples_played_in_range(max(start, origin), stop)
    return samples.data, int(samples.sample_rate), float(samples.pts_seconds)


def _between_by_av(av: Any, source: Source, start: float, stop: float) -> tuple[torch.Tensor, int, float]:  # [c, s]
    with opened(av, source) as container:
        return _decode_stream(av, container, start, stop)
