"""torchcodec, decord and PyAV behind one interface, `video_reader.Decoder`.

Times are from the first frame; rotation is applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from sqlstream.errors import DecodeError
from sqlstream.transforms.clip import Times, shown_at, tolerance
from sqlstream.transforms.content import Source
from sqlstream.transforms.frames import Frames, ReaderOptions, chunks, file_like
from sqlstream.transforms.mirrored import is_mirrored

_LONG_GAP_SECONDS = 3.0
"""PyAV seeks over gaps longer than this; shorter ones are decoded through (a group of pictures lasts 1 to 10 s)."""
_MARGIN_FRAMES = 3
"""Frames before a clip that are all decoded: so the frame shown is found in most videos of uneven frames, too."""


class TorchcodecDecoder:
    """By torchcodec: exact by a scan when it opens, or approximate."""

    def __init__(self, torchcodec: Any, source: Source, options: ReaderOptions) -> None:
        mode = "approximate" if options.is_approximate else "exact"
        self._decoder = torchcodec.VideoDecoder(source, num_ffmpeg_threads=options.num_threads, seek_mode=mode)
        metadata = self._decoder.metadata
        self.begin = float(metadata.begin_stream_seconds or 0.0)
        self._end = float(metadata.end_stream_seconds)
        self.duration = self._end - self.begin
        self.framerate = _nominal(metadata.average_fps_from_header, float(metadata.average_fps))
        self.height, self.width = int(metadata.height), int(metadata.width)

    def frames_at(self, times: Times, check: Callable[[], None]) -> Frames:
        """Return the frames shown at ascending times."""
        latest = np.nextafter(self._end - tolerance(self.framerate) / 2, 0)
        asked = np.minimum(self.begin + times + tolerance(self.framerate), latest)  # [t]
        pixels, starts = [], []
        for chunk in chunks(np.maximum(asked, self.begin).tolist()):
            check()
            batch = self._decoder.get_frames_played_at(chunk)
            pixels.append(batch.data)
            starts.append(batch.pts_seconds.numpy())
        return Frames(pixels=joined(pixels), times=np.concatenate(starts).astype(np.float64) - self.begin)

    def close(self) -> None:
        """Close the file."""
        del self._decoder


class DecordDecoder:
    """By decord, which knows the time of every frame from its index."""

    def __init__(self, decord: Any, source: Source, options: ReaderOptions) -> None:
        decord.logging.set_level(decord.logging.QUIET)
        self._reader = decord.VideoReader(file_like(source), ctx=decord.cpu(0), num_threads=options.num_threads)
        if len(self._reader) < 1:
            raise DecodeError("the video has no frames")
        spans = np.asarray(self._reader.get_frame_timestamp(range(len(self._reader))))  # [n, 2]
        self._starts = spans[:, 0].astype(np.float64) - float(spans[0, 0])  # [n]
        self.begin = 0.0  # decord does not tell; MP4 and Matroska begin there
        self.framerate = float(self._reader.get_avg_fps())
        self.duration = float(self._starts[-1]) + 1 / self.framerate
        self.height, self.width = (int(side) for side in self._reader[0].shape[:2])

    def frames_at(self, times: Times, check: Callable[[], None]) -> Frames:
        """Return the frames shown at ascending times."""
        indices = shown_at(self._starts, times, self.framerate)  # [t]
        pixels = []
        for chunk in chunks(indices.tolist()):
            check()
            pixels.append(torch.from_numpy(self._reader.get_batch(chunk).asnumpy()).permute(0, 3, 1, 2))
        return Frames(pixels=joined(pixels), times=self._starts[indices])

    def close(self) -> None:
        """Close the file."""
        del self._reader


class AvDecoder:
    """By PyAV: seek to a key frame before the time, decode on; steps back where a seek lands late (MPEG-TS)."""

    def __init__(self, av: Any, source: Source, options: ReaderOptions) -> None:
        self._av, self._source, self._options = av, source, options
        self._skipped_until = -math.inf
        self._is_mirrored = is_mirrored(source)
        self._open()
        try:
            self._read_facts(av)
        except BaseException:
            self._container.close()
            raise

    def _open(self) -> None:
        self._container = self._av.open(file_like(self._source), metadata_errors="ignore")
        self._stream = self._container.streams.best("video")  # as torchcodec, and no cover
        if self._stream is None:
            self._container.close()
            raise DecodeError("the file has no video stream")
        self._stream.thread_type = "NONE" if self._options.num_threads == 1 else "AUTO"

    def _read_facts(self, av: Any) -> None:
        first_pts = self._first_pts()  # it may open the file again: a stream of a closed one ends the process
        stream = self._stream
        self._time_base = float(stream.time_base or 1 / 90_000)
        self.begin = float(first_pts) * self._time_base
        rate = stream.average_rate or stream.guessed_rate or stream.base_rate
        self.framerate = float(rate) if rate else 0.0
        if stream.duration:
            self.duration = float(stream.duration) * self._time_base
        elif self._container.duration:
            end = float((self._container.duration + (self._container.start_time or 0)) / av.time_base)
            if self.framerate and self.begin > 1 / self.framerate:  # some containers count from 0, some from there
                end = self._end_of_packets(end)
            self.duration = end - self.begin
        else:
            self.duration = float(stream.frames) / self.framerate if self.framerate else 0.0
        context = stream.codec_context
        self.height, self.width = context.height, context.width  # those of the frames, or turned: their rotation tells

    def _first_pts(self) -> int:
        """Return when the first frame is shown, in units of the time base.

        A key frame's packet has the time, so the frame need not be decoded; unless an edit list hides it, as where a video was
        cut without encoding it anew.
        """
        packet = next(self._container.demux(self._stream), None)
        if packet is not None and packet.is_keyframe and not packet.is_discard and packet.pts is not None:
            return int(packet.pts)
        self._container.close()
        self._open()
        first = next(self._container.decode(self._stream), None)
        if first is None:
            raise DecodeError("the video has no frames")
        return int(first.pts if first.pts is not None else self._stream.start_time or 0)

    def _end_of_packets(self, latest: float) -> float:
        """Return when the last frame ends, in seconds of the container; `latest` where no key frame is found before that."""
        try:
            self._container.seek(math.ceil(latest / self._time_base), stream=self._stream, backward=True)
        except self._av.FFmpegError:  # FLV
            return latest
        starts = [packet.pts for packet in self._container.demux(self._stream) if packet.pts is not None]
        return max(starts) * self._time_base + 1 / self.framerate if starts else latest

    def frames_at(self, times: Times, check: Callable[[], None]) -> Frames:
        """Return the frames shown at ascending times."""
        pixels: np.ndarray[Any, Any] | None = None  # [t, h, w, c]
        starts: list[float] = []
        for number, (start, frame) in enumerate(self._shown(times, check)):
            if starts and start == starts[-1]:
                assert pixels is not None
                pixels[number] = pixels[number - 1]
            else:
                array = _upright(frame, self._is_mirrored)  # [h, w, c]
                if pixels is None:
                    pixels = np.empty((len(times), *array.shape), dtype=np.uint8)  # [t, h, w, c]
                pixels[number] = array
                del array  # so that the next frame gets its memory, not new pages
            starts.append(start)
        assert pixels is not None
        return Frames(pixels=torch.from_numpy(pixels).permute(0, 3, 1, 2), times=np.array(starts, dtype=np.float64))

    def _shown(self, times: Times, check: Callable[[], None]) -> Iterator[tuple[float, Any]]:
        """Yield (time, frame) of what is shown at each of the ascending times."""
        late = tolerance(self.framerate)
        shown: tuple[float, Any] | None = None
        ahead = self._from(float(times[0]), check)
        upcoming = next(ahead, None)
        for moment in times.tolist():
            if shown is not None and upcoming is not None and moment - upcoming[0] > _LONG_GAP_SECONDS:
                ahead = self._from(moment, check)
                shown, upcoming = None, next(ahead, None)
            while upcoming is not None and (shown is None or upcoming[0] <= moment + late):
                shown, upcoming = upcoming, next(ahead, None)
            if shown is None:
                raise DecodeError(f"there is no frame at {moment:.3f} s")
            if upcoming is None and moment > shown[0] + max(1.0, 5 / self.framerate):
                raise DecodeError(f"the frames end at {shown[0]:.3f} s, before {moment:.3f} s")
            yield shown

    def _from(self, moment: float, check: Callable[[], None]) -> Iterator[tuple[float, Any]]:
        """Yield (time, frame) from the one shown at `moment` on.

        Before `moment`, frames that no other frame needs (most B frames) are not decoded. If one of them is shown at `moment`,
        as in a video of uneven frames, decoding starts again with all of them.
        """
        for skip_before in (moment - _MARGIN_FRAMES / self.framerate, -math.inf):
            frames = self._sought(moment, check, skip_before)
            shown, upcoming = next(frames, None), next(frames, None)
            while upcoming is not None and upcoming[0] <= moment + tolerance(self.framerate):
                shown, upcoming = upcoming, next(frames, None)
            if shown is not None and shown[0] >= self._skipped_until:
                break
        yield from (frame for frame in (shown, upcoming) if frame is not None)
        yield from frames

    def _sought(self, moment: float, check: Callable[[], None], skip_before: float) -> Iterator[tuple[float, Any]]:
        """Yield (time, frame) from a frame shown at or before `moment` on."""
        back = 0.0
        while True:
            target = max(0.0, moment - back)
            check()
            self._container.seek(math.floor((self.begin + target) / self._time_base), stream=self._stream, backward=True)
            frames = self._frames(check, skip_before)
            first = next(frames, None)
            if first is not None and first[0] <= moment + tolerance(self.framerate):
                yield first
                yield from frames
                return
            if target == 0.0:  # a seek to the very start may land late too (MPEG-TS)
                self._container.close()
                self._open()
                yield from self._frames(check, skip_before)
                return
            back = max(1.0, 2 * back)

    def _frames(self, check: Callable[[], None], skip_before: float) -> Iterator[tuple[float, Any]]:
        """Yield (time, frame) from here on; of the frames before `skip_before` perhaps only those that others need."""
        self._skipped_until = -math.inf
        previous = None
        for packet in self._container.demux(self._stream):
            start = math.inf if packet.pts is None else float(packet.pts) * self._time_base - self.begin
            is_skipped = start < skip_before
            self._stream.codec_context.skip_frame = "NONREF" if is_skipped else "DEFAULT"
            if is_skipped:
                self._skipped_until = max(self._skipped_until, start)
            for frame in packet.decode():
                check()
                if frame.pts is not None:
                    start = float(frame.pts) * self._time_base - self.begin
                else:
                    start = 0.0 if previous is None else previous + 1 / self.framerate
                previous = start
                yield start, frame

    def close(self) -> None:
        """Close the file."""
        self._container.close()


def _nominal(from_header: float | None, from_content: float) -> float:
    """Return the header's framerate, unless the frames say another one: Matroska's rounded times make 24.006 of 24."""
    is_near = from_header is not None and abs(from_header - from_content) < 0.01 * from_content
    return float(from_header) if from_header is not None and is_near else from_content


def _upright(frame: Any, is_mirrored: bool) -> np.ndarray[Any, Any]:
    """Return a frame's pixels, its rotation and mirroring applied. # [h, w, c]."""
    array: np.ndarray[Any, Any] = frame.to_ndarray(format="rgb24")  # [h, w, c]
    turns = round(frame.rotation / 90) % 4
    return np.rot90(array[::-1] if is_mirrored else array, turns) if is_mirrored or turns else array


def joined(pixels: list[torch.Tensor]) -> torch.Tensor:  # [t, c, h, w]
    """Return chunks of frames as one tensor; a single one without a copy."""
    return pixels[0] if len(pixels) == 1 else torch.cat(pixels)
