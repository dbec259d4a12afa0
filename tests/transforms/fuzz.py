"""Damaged media through the presets, in a process of its own that may die or hang: run as `python -m tests.transforms.fuzz`.

Prints one line for each file before it is decoded, so that the parent knows which one killed it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sqlstream.errors import SqlStreamError
from sqlstream.transforms import apply, optional, presets
from sqlstream.transforms.rng import begin

ROOT = Path(__file__).resolve().parents[2]


def chain_of(name: str) -> list[Any]:
    """The preset for a kind of medium."""
    if name.startswith("image"):
        return presets.create_standard_image_pipeline("x", (64, 64), normalize=True)
    if name.startswith("audio"):
        return presets.create_standard_audio_pipeline("x", 0.25, target_audio_sr=16000, mono_audio=True)
    if name.startswith("joint"):
        first = None if optional.find("torchcodec.decoders") is None else "torchcodec"  # the other videos go to PyAV first
        return presets.create_standard_joint_video_audio_pipeline("x", 6, (48, 48), {"framerate": 12.0, "decoder": first})
    return presets.create_standard_video_pipeline("x", 6, (48, 48), {"framerate": 12.0})


def corpus() -> dict[str, bytes]:
    """Whole files: every format that we name."""
    import av
    import soundfile

    from .clips import chirp, mux_sound, video
    from .media import encode, photo

    picture = photo(96, 128)
    files = {f"image {kind}": encode(picture, kind) for kind in ("JPEG", "PNG", "WEBP", "AVIF", "TIFF", "GIF", "BMP")}
    files["image big JPEG"] = encode(photo(600, 800), "JPEG", quality=80)
    files["image deflated TIFF"] = encode(picture, "TIFF", compression="tiff_deflate")
    for kind in ("WAV", "FLAC", "MP3", "OGG"):
        file = io.BytesIO()
        soundfile.write(file, chirp(0.5), 48000, format=kind)
        files[f"audio {kind}"] = file.getvalue()
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        mux_sound(output, output.add_stream("aac", rate=48000, layout="mono"), 0.5)
    files["audio M4A"] = file.getvalue()
    files["video mp4"] = video()
    files["video mkv"] = video("matroska")
    files["video webm"] = video("webm", "libvpx-vp9", 30)
    files["video ts"] = video("mpegts")
    files["video avi"] = video("avi", "mpeg4")
    files["joint mp4"] = video(sound=True)
    return files


def damage(data: bytes, rng: np.random.Generator) -> bytes:
    """Cut, flip bits, overwrite, repeat or drop a part."""
    broken = bytearray(data)
    match int(rng.integers(6)):
        case 0:
            del broken[int(rng.integers(len(broken))) :]
        case 1:
            for place in rng.integers(len(broken), size=int(rng.integers(1, 30))):
                broken[place] ^= 1 << int(rng.integers(8))
        case 2:  # the header alone, where lengths and sizes are
            for place in rng.integers(min(len(broken), 200), size=int(rng.integers(1, 6))):
                broken[place] = int(rng.integers(256))
        case 3:
            start = int(rng.integers(len(broken)))
            broken[start : start + int(rng.integers(1, 4000))] = b"\xff" * int(rng.integers(1, 4000))
        case 4:
            start = int(rng.integers(len(broken)))
            del broken[start : start + int(rng.integers(1, 400))]
        case _:
            start, length = int(rng.integers(len(broken))), int(rng.integers(1, 2000))
            broken[start:start] = broken[start : start + length]
    return bytes(broken)


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def work(files: dict[str, bytes], directory: Path, first: int, stop: int) -> None:
    """Decode the damaged files number `first` to `stop`."""
    torch.set_num_threads(1)
    names = sorted(files)
    chains = {name: chain_of(name) for name in names}
    counts = {"decoded": 0, "refused": 0}
    path = directory / f"{os.getpid()}.bin"
    for number in range(first, stop):
        rng = np.random.default_rng(number)
        name = names[number % len(names)]
        print("file", number, name, flush=True)
        path.write_bytes(damage(files[name], rng))
        sample: dict[str, Any] = {"x": str(path)}
        begin(sample, (0, 0, number))
        try:
            apply(chains[name], sample)
            counts["decoded"] += 1
        except SqlStreamError as error:
            if len(str(error)) > 4000:
                raise ValueError("the message is too long for a person") from error
            counts["refused"] += 1
    print("done", counts["decoded"], counts["refused"], flush=True)


@dataclass(slots=True)
class Outcome:
    """What a run of the fuzzer saw."""

    num_decoded: int = 0
    num_refused: int = 0
    problems: tuple[str, ...] = ()


def run(directory: Path, first: int, stop: int, *, timeout_seconds: float = 120.0, max_problems: int = 20) -> Outcome:
    """Fuzz in a child; start another one behind every file that kills or hangs it."""
    outcome = Outcome()
    while first < stop and len(outcome.problems) < max_problems:
        command = [sys.executable, "-m", "tests.transforms.fuzz", str(directory), str(first), str(stop)]
        with (directory / "stderr").open("wb") as errors:
            child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert child.stdout is not None
            os.set_blocking(child.stdout.fileno(), False)
            with child.stdout:
                last, problem = watch(child, outcome, timeout_seconds)
        if problem is None:
            break
        tail = (directory / "stderr").read_bytes()[-600:].decode(errors="replace")
        outcome.problems += (f"{last}: {problem}: {tail}",)
        first = int(last.split()[1]) + 1 if last else stop
    return outcome


def watch(child: subprocess.Popen[str], outcome: Outcome, timeout_seconds: float) -> tuple[str, str | None]:
    """Follow a child; return its last file and what went wrong."""
    last, heard = "", time.monotonic() + 300
    for line in lines_of(child):
        if line:
            heard = time.monotonic()
            if line.startswith("file "):
                last = line
            elif line.startswith("done "):
                outcome.num_decoded += int(line.split()[1])
                outcome.num_refused += int(line.split()[2])
        elif time.monotonic() - heard > timeout_seconds:
            child.kill()
            child.wait()
            return last, f"hangs for {timeout_seconds:g} s"
    return last, None if child.returncode == 0 else f"ends with {child.returncode}"


def lines_of(child: subprocess.Popen[str]) -> Iterator[str]:
    """Lines of a child as they come, '' when there is none yet, until it ends."""
    assert child.stdout is not None
    rest = ""
    while True:
        ended = child.poll() is not None
        with contextlib.suppress(BlockingIOError, TypeError):
            rest += child.stdout.read() or ""
        *whole, rest = rest.split("\n")
        yield from whole
        if ended:
            return
        yield ""
        time.sleep(0.02)


def main() -> None:
    """Run as a child."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("stop", type=int)
    given = parser.parse_args()
    work(corpus(), given.directory, given.first, given.stop)


if __name__ == "__main__":
    main()
