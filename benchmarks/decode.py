"""Decoding against the plain libraries, in one process and one thread: `python -m benchmarks.decode [--json]`.

Images: encoded 500x375 and 1600x1200 JPEG to uint8 [3, 256, 256]; baseline: Pillow's decode, convert, crop, resize. Videos: 16
frames at a random offset of a 10 s 720p clip, of a high and a low bitrate, file opened each time; baseline: each library alone,
called as its manual says. CPU time. Rounds take turns, so that a slow moment of the machine meets all alike. Images: median
over rounds of the ratio within a round. Videos: at each offset the best of three rounds, then the mean over the offsets.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from sqlstream.transforms import image_decode, optional, video_reader
from sqlstream.transforms.image_decode import EXACT_TOLERANCE, REDUCED_TOLERANCE, decode_resized
from sqlstream.transforms.pixels import image_to_tensor, resize_image
from sqlstream.transforms.presets import DecodeVideoTransform
from sqlstream.transforms.resize import ResizeOptions, plan_resize
from sqlstream.transforms.rng import begin

Thunk = Callable[[], Any]
Clip = Callable[[str, float], Any]


def photo(height: int, width: int) -> bytes:
    """1/f noise, the spectrum of photographs, as JPEG of quality 90."""
    rng = np.random.default_rng(0)
    spectrum = np.fft.rfft2(rng.normal(size=(3, height, width)))
    distance = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    noise = np.fft.irfft2(spectrum / np.maximum(distance, 1 / width), s=(height, width))
    levels = np.clip((noise - noise.mean()) / noise.std() * 50 + 127, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(levels.transpose(1, 2, 0).copy()).save(file, "JPEG", quality=90)
    return file.getvalue()


def milliseconds(thunks: dict[str, Thunk], num_rounds: int, clock: Callable[[], float]) -> dict[str, np.ndarray[Any, Any]]:
    """The rounds of each, in turns. # [n] each."""
    rounds: dict[str, list[float]] = {name: [] for name in thunks}
    for thunk in thunks.values():
        thunk()
    turns = list(thunks.items())
    for number in range(num_rounds):
        for name, thunk in turns[number % len(turns) :] + turns[: number % len(turns)]:
            started = clock()
            thunk()
            rounds[name].append((clock() - started) * 1000)
    return {name: np.array(values) for name, values in rounds.items()}


def plain_pillow(data: bytes, options: ResizeOptions) -> torch.Tensor:
    """The baseline."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return image_to_tensor(resize_image(image, plan_resize(options, (image.height, image.width)), options.interpolation_mode))


def without_extra(data: bytes, options: ResizeOptions) -> torch.Tensor:
    """Ours, as if simplejpeg were not installed."""
    image_decode.find, found = lambda _module: None, image_decode.find
    try:
        return decode_resized(data, options)
    finally:
        image_decode.find = found


def images(num_rounds: int) -> list[dict[str, Any]]:
    """One row for each size and interpolation."""
    rows = []
    for height, width in ((375, 500), (1200, 1600)):
        data = photo(height, width)
        for mode in ("bilinear", "bicubic"):
            options = ResizeOptions(resolution=(256, 256), interpolation_mode=mode)
            thunks: dict[str, Thunk] = {
                "pillow": lambda d=data, o=options: plain_pillow(d, o),
                "ours": lambda d=data, o=options: without_extra(d, o),
            }
            if optional.find("simplejpeg") is not None:
                thunks["ours_fast"] = lambda d=data, o=options: decode_resized(d, o)
            taken = milliseconds(thunks, num_rounds, time.thread_time)
            difference = (decode_resized(data, options).int() - plain_pillow(data, options).int()).abs().float()
            tolerance = REDUCED_TOLERANCE if height > 1000 else EXACT_TOLERANCE
            rows.append(
                {
                    "image": f"{width}x{height} {mode}",
                    **{f"{name}_ms": round(float(np.median(values)), 2) for name, values in taken.items()},
                    **{
                        f"{name}_times": round(float(np.median(taken["pillow"] / taken[name])), 2)
                        for name in thunks
                        if name != "pillow"
                    },
                    "mean_difference": round(float(difference.mean()), 2),
                    "largest_difference": int(difference.max()),
                    "is_in_tolerance": bool(difference.mean() <= tolerance.mean and difference.max() <= tolerance.most),
                }
            )
    return rows


def make_clip(path: Path, seconds: float = 10.0, *, is_noisy: bool = True) -> None:
    """A 720p H.264 clip at 24 frames per second, a key frame every 2 s: a photograph that moves; without noise 0.5 Mbit/s."""
    import av

    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (45, 80, 3), dtype=np.uint8)
    base = np.asarray(Image.fromarray(picture).resize((1600, 900), Image.Resampling.BICUBIC))
    with av.open(str(path), "w") as output:
        stream: Any = output.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        stream.codec_context.gop_size, stream.codec_context.max_b_frames = 48, 2
        stream.options = {"preset": "medium", "crf": "20"}
        for number in range(round(seconds * 24)):
            y, x = 90 + int(80 * np.sin(number / 17)), 160 + int(150 * np.cos(number / 23))
            noise = rng.integers(-6, 7, (720, 1280, 1)) if is_noisy else 0
            pixels = np.clip(base[y : y + 720, x : x + 1280] + noise, 0, 255).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 24)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


def by_torchcodec(path: str, start: float) -> Any:
    """torchcodec alone."""
    from torchcodec.decoders import VideoDecoder

    times = (start + np.arange(16) / 24 + 0.002).tolist()
    return VideoDecoder(path, num_ffmpeg_threads=1).get_frames_played_at(times).data


def by_decord(path: str, start: float) -> Any:
    """decord alone."""
    import decord

    first = round(start * 24)
    return decord.VideoReader(path, num_threads=1).get_batch(range(first, first + 16)).asnumpy()


def by_av(path: str, start: float) -> Any:
    """PyAV alone: seek, decode on."""
    import av

    frames = []
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        container.seek(int(start / stream.time_base), stream=stream)
        for frame in container.decode(stream):
            if float(frame.pts * stream.time_base) >= start - 0.02:
                frames.append(frame.to_ndarray(format="rgb24"))
                if len(frames) == 16:
                    return np.stack(frames)
    raise AssertionError("the clip is too short")


def ours(path: str, start: float, decoder: str | None = None) -> Any:
    """Our transform, with its own random offset: the crop interval fixes where it falls."""
    transform = DecodeVideoTransform(
        *("v", 16),
        crop_interval_start_field="a",
        crop_interval_end_field="b",
        frame_format="tensor",
        framerate=24.0,
        decoder=decoder,
    )
    sample: dict[str, Any] = {"v": path, "a": start, "b": start + 16 / 24}
    begin(sample, (0, 0, 0))
    return transform(sample)["v"]


def videos(num_offsets: int) -> list[dict[str, Any]]:
    """A row for each bitrate: ours, as chosen and with each decoder, beside each library alone, at the same random offsets."""
    alone = {"torchcodec": ("torchcodec", by_torchcodec), "decord": ("decord", by_decord), "pyav": ("av", by_av)}
    found: dict[str, Clip] = {name: function for name, (module, function) in alone.items() if optional.find(module) is not None}
    own: dict[str, Clip] = {"ours": ours}
    for name, (module, _) in video_reader.DECODERS.items():
        if optional.find(module) is not None:
            own[f"ours_{name.lower()}"] = functools.partial(ours, decoder=name)
    return [_video_row(is_noisy, num_offsets, own, found) for is_noisy in (True, False)]


def _video_row(
    is_noisy: bool,
    num_offsets: int,
    own: Mapping[str, Callable[[str, float], Any]],
    alone: Mapping[str, Callable[[str, float], Any]],
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "clip.mp4")
        make_clip(Path(path), is_noisy=is_noisy)
        best: dict[str, list[float]] = {name: [] for name in (*own, *alone)}
        for start in (np.random.default_rng(1).integers(0, 24 * 9, num_offsets) / 24).tolist():
            thunks = {name: functools.partial(function, path, start) for name, function in (*own.items(), *alone.items())}
            for name, values in milliseconds(thunks, 3, time.process_time).items():
                best[name].append(float(values.min()))
        used, size_bytes = video_reader.VideoReader(path).name, Path(path).stat().st_size
    mean = {name: float(np.mean(values)) for name, values in best.items()}
    fastest = min(mean[name] for name in alone)
    return {
        "video": f"16 frames of 720p, {8e-7 * size_bytes:.1f} Mbit/s",
        "decoder": used,
        **{f"{name}_ms": round(value, 1) for name, value in mean.items()},
        **{f"{name}_to_best": round(mean[name] / fastest, 3) for name in own},
    }


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each image; a quarter as many offsets in a clip")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [*images(given.rounds), *videos(max(2, given.rounds // 4))]
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
