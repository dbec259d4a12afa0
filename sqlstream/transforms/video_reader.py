"""Frames of a video at given times, by the fastest decoder that is installed and reads the file.

For frames at scattered moments torchcodec is tried first, for the frames of a clip PyAV; then the other one. decord is used
where neither is installed, or where it is asked for. PyAV alone reads MPEG-TS, AVI, FLV, WMV and mirrored MP4 (the other two
give wrong frames there). A file that one decoder cannot read goes to the next.

A reader belongs to the process that opened it: decord's hangs after a fork, torchcodec's shares a file position with the
parent. So it cannot be pickled, and refuses to work in another process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch

from sqlstream.errors import DecodeError, MissingDependencyError
from sqlstream.transforms.clip import Times
from sqlstream.transforms.content import Source, opened
from sqlstream.transforms.frames import Decoder, Frames, OpenDecoder, ReaderOptions, file_like
from sqlstream.transforms.mirrored import is_mirrored
from sqlstream.transforms.optional import find, import_ahead
from sqlstream.transforms.video_decoders import AvDecoder, DecordDecoder, TorchcodecDecoder

DECODERS: dict[str, tuple[str, OpenDecoder]] = {
    "torchcodec": ("torchcodec.decoders", TorchcodecDecoder),
    "PyAV": ("av", AvDecoder),
    "decord": ("decord", DecordDecoder),
}
"""Modules and what opens a file with them."""
ORDER_FOR_CLIPS = ("PyAV", "torchcodec", "decord")
"""Fastest first (`benchmarks/decode.py`): PyAV skips frames that no other frame needs, and fills one array."""
ORDER_FOR_SCATTERED = ("torchcodec", "PyAV", "decord")
"""Fastest first (`benchmarks/decode.py`)."""
_DECORD_FORMATS = frozenset(("mp4", "mov", "matroska", "webm"))
_NOT_FOR_DECORD = frozenset(("hevc", "av1", "libdav1d", "libaom-av1"))
_WITHOUT_LENGTHS = (b"FLV\x01", bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c"))
"""FLV, and ASF (WMV)."""
_MAX_PIXELS = 1 << 27  # 16384 x 8192: more than any video has
MAX_BYTES = 1 << 33
"""Most bytes of the frames of one clip: 8 GiB. A damaged header may claim any size."""


class VideoReader:
    """Reads frames of one video at given times.

    Args:
        source: Path or bytes.
        options: How to open it.

    Raises:
        DecodeError: No decoder at hand reads it; the message has every decoder's reason.
        MissingDependencyError: None is installed.
    """

    def __init__(self, source: Source, options: ReaderOptions | None = None) -> None:
        self.source = source
        self._options = options or ReaderOptions()
        self._pid = os.getpid()
        self._reasons: list[str] = []
        self._candidates = decoders_for(source, self._options)
        self._decoder: Decoder | None = None
        self._open_next()

    def _open_next(self) -> None:
        """Open with the next decoder that can."""
        self.close()
        for name, library, open_decoder in self._candidates:
            try:
                decoder = open_decoder(library, self.source, self._options)
                if not (decoder.duration > 0 and decoder.framerate > 0):
                    raise DecodeError(f"it lasts {decoder.duration} s at {decoder.framerate} frames per second")
            except Exception as error:
                self._note(name, error)
                continue
            self._name, self._decoder = name, decoder
            return
        raise DecodeError(f"no decoder reads this video ({'; '.join(self._reasons)})")

    def _note(self, name: str, error: Exception) -> None:
        self._reasons.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")

    @property
    def name(self) -> str:
        """The library that reads."""
        return self._name

    @property
    def decoder(self) -> Decoder:
        """The opened decoder.

        Raises:
            DecodeError: The reader is closed, or belongs to another process.
        """
        if os.getpid() != self._pid:
            raise DecodeError(
                "the video reader was opened in another process: open it where it is used (InitVideoDecoderTransform)"
            )
        if self._decoder is None:
            raise DecodeError("the video reader is closed")
        return self._decoder

    def frames_at(self, times: Times, timeout_seconds: float | None = None) -> Frames:
        """Return the frames shown at `times`, in their order.

        Args:
            times: Seconds from the first frame. # [t]
            timeout_seconds: Longest time, checked between frames.

        Raises:
            DecodeError: They cannot be decoded, lie after the end, or take too long.
        """
        check = _deadline(timeout_seconds)
        order = np.argsort(times, kind="stable")  # [t]
        while True:
            decoder = self.decoder
            try:
                _check_request(decoder, times)
                frames = decoder.frames_at(times[order], check)
            except (_LateError, _RequestError) as error:
                raise DecodeError(f"{self._name}: {error}") from None
            except Exception as error:
                self._note(self._name, error)
                self._open_next()
                continue
            if bool((order[:-1] <= order[1:]).all()):
                return frames
            back = np.argsort(order, kind="stable")  # [t]
            return Frames(pixels=frames.pixels[torch.from_numpy(back)], times=frames.times[back])

    def close(self) -> None:
        """Give the file back; a forked child leaves it to its parent."""
        if self._decoder is not None and os.getpid() == self._pid:
            self._decoder.close()
        self._decoder = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a video reader belongs to its process: remove it from the sample (DeleteVideoDecoderTransform)")


class _LateError(Exception):
    """The time is up."""


class _RequestError(Exception):
    """What is asked for is not in the video; no other decoder would find it."""


def _deadline(timeout_seconds: float | None) -> Callable[[], None]:
    started = time.monotonic()

    def check() -> None:
        if timeout_seconds is not None and time.monotonic() - started > timeout_seconds:
            raise _LateError(f"the frames took longer than frame_seek_timeout_sec={timeout_seconds:g}")

    return check


def _check_request(decoder: Decoder, times: Times) -> None:
    latest = float(times.max())
    if latest > decoder.duration + 1.5 / decoder.framerate:
        raise _RequestError(f"there is no frame at {latest:.3f} s: the video lasts {decoder.duration:.3f} s")
    num_bytes = 3 * decoder.height * decoder.width * len(times)
    if num_bytes > MAX_BYTES:
        raise _RequestError(f"{len(times)} frames of {decoder.width}x{decoder.height} pixels would fill {num_bytes} bytes")


def import_decoder(options: ReaderOptions) -> None:
    """Import what is tried first, but for decord, where a transform is made: forked workers would, each in each epoch."""
    if (name := _names(options)[0]) != "decord":  # which has threads
        import_ahead(DECODERS[name][0])


def _names(options: ReaderOptions) -> list[str]:
    """Return all decoders' names, best first."""
    order = ORDER_FOR_SCATTERED if options.is_scattered else ORDER_FOR_CLIPS
    return sorted(order, key=lambda name: name != options.decoder)


def decoders_for(source: Source, options: ReaderOptions) -> Iterator[tuple[str, Any, OpenDecoder]]:
    """Yield the decoders to try on a file, best first: (name, library, function that opens).

    One is imported when it is its turn: torchcodec takes 2 s.

    Args:
        source: Path or bytes.
        options: Which comes first if it suits the file, or what is asked for.

    Raises:
        MissingDependencyError: None is installed, or the preferred one is not.
        DecodeError: The file cannot be read.
    """
    preferred = options.decoder
    if preferred is not None and find(DECODERS[preferred][0]) is None:
        raise MissingDependencyError(f"decoder={preferred!r} does not import here: install it, or leave the option out")
    is_for_pyav = _is_for_pyav(source)
    is_any = False
    for name in _names(options):
        module, open_decoder = DECODERS[name]
        if (is_for_pyav and name != "PyAV") or (library := find(module)) is None:
            continue
        if name == "decord" and (is_any or not _suits_decord(find("av"), source)):
            continue  # a file that failed in another decoder may end the process in decord
        is_any = True
        yield name, library, open_decoder
    if not is_any:
        raise MissingDependencyError(
            "PyAV, torchcodec or decord is needed to decode videos: pip install 'sqlstream-data[video]'"
        )


def _suits_decord(av: Any | None, source: Source) -> bool:
    """Return whether decord reads this file, and rightly: MP4 or Matroska, neither HEVC nor AV1, of a sane size.

    Without PyAV it is not known: then decord is tried.

    decord gives wrong frames of HEVC's open groups of pictures, and counts those that an edit list hides; damaged AVI files
    made it end the process (3 of some 700 in a fuzzing run).
    """
    if av is None:
        return True
    try:
        with av.open(file_like(source), metadata_errors="ignore") as container:
            stream = container.streams.video[0]
            is_known = not _DECORD_FORMATS.isdisjoint(container.format.name.split(","))
            codec = stream.codec_context
            if not is_known or codec.name in _NOT_FOR_DECORD or codec.width * codec.height > _MAX_PIXELS:
                return False
            return not next(container.demux(stream)).is_discard
    except Exception:  # a file that PyAV cannot open may end the process in decord
        return False


def _is_for_pyav(source: Source) -> bool:
    """Return whether the file is MPEG-TS, AVI, FLV, WMV or a mirrored MP4, of which torchcodec and decord give wrong frames.

    Packets of MPEG-TS, of 188 bytes (192 with times), begin with 0x47. AVI has no times: with B frames, torchcodec's are late.
    FLV and WMV do not say how long a frame lasts: torchcodec never shows the last one.

    Raises:
        DecodeError: The file cannot be read.
    """
    try:
        with opened(source) as file:
            head = file.read(600)
        is_turned = is_mirrored(source)
    except OSError as error:
        raise DecodeError(f"{source!r} cannot be read: {error}") from error
    is_avi = head.startswith(b"RIFF") and head[8:12] in (b"AVI ", b"AVIX")
    return (
        is_turned
        or is_avi
        or head.startswith(_WITHOUT_LENGTHS)
        or any(
            len(head) > first + 2 * step and all(head[first + k * step] == 0x47 for k in range(3))
            for first, step in ((0, 188), (4, 192))
        )
    )
