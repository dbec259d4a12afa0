"""Writing samples as MDS and tar: MB/s, CPU time and memory, beside MosaicML Streaming and WebDataset where these import.

    .venv-bench/bin/python -m benchmarks.writing [--samples 100000] [--bytes N] [--rounds N] [--out DIR] [--store]

Samples are made before the clock starts: bytes that no codec shrinks, as JPEGs are, and a label. Each contender writes them
in a process of its own, in turn, `--rounds` times, in the other direction every second round; a ratio is that of two
neighbours in one round, and the median of rounds is printed. CPU time is that of the process and of what it started; MB/s are
by the clock, with what the page cache has not written yet. Memory is the peak of the process above what its imports take, and
once more for a quarter of the samples: where it is flat both are equal. `--store` writes MDS to an S3 server on this machine,
too (moto, of the extra `demo`); WebDataset has no client for S3. `streaming` needs many packages for its datasets and none for
its writers: it is imported without the two packages above them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import random
import resource
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Write = Callable[[Any, int, int], None]
"""Writes so many samples of so many bytes to a directory or a URL."""
_POOL_BYTES = 16 << 20


@functools.cache
def pool_of(size: int) -> bytes:
    return random.Random(0).randbytes(_POOL_BYTES + size)


def samples(number: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield labels and contents: windows of random bytes, so making one costs a copy."""
    pool = pool_of(size)
    for n in range(number):
        at = n * 4099 % (len(pool) - size)
        yield n, pool[at : at + size]


def ours_mds(out: Any, number: int, size: int) -> None:
    from sqlstream.write import MdsWriter

    with MdsWriter(out, {"image": "jpeg", "label": "int"}) as writer:
        for label, data in samples(number, size):
            writer.write({"image": data, "label": label})


def theirs_mds(out: Any, number: int, size: int) -> None:
    writer_of = bare_streaming()
    with writer_of(out=str(out), columns={"image": "jpeg", "label": "int"}) as writer:
        for label, data in samples(number, size):
            writer.write({"image": data, "label": label})


def ours_tar(out: Path, number: int, size: int) -> None:
    from sqlstream.write import TarWriter

    with TarWriter(out, max_samples=10_000) as writer:
        for label, data in samples(number, size):
            writer.write({"__key__": f"{label:09}", "jpg": data, "cls": label})


def theirs_tar(out: Path, number: int, size: int) -> None:
    writer_of = importlib.import_module("webdataset").ShardWriter
    out.mkdir()
    with writer_of(f"{out}/shard-%06d.tar", maxcount=10_000, verbose=0) as writer:
        for label, data in samples(number, size):
            writer.write({"__key__": f"{label:09}", "jpg": data, "cls": label})


def no_writer(out: Path, number: int, size: int) -> None:
    """Make the samples, and write nothing: what all contenders pay."""
    del out
    for _ in samples(number, size):
        pass


def bare_streaming() -> Any:
    """Return MosaicML Streaming's MDSWriter, without what its package imports beside it."""
    if "streaming" not in sys.modules:
        spec = importlib.util.find_spec("streaming")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("mosaicml-streaming is not installed")
        root = spec.submodule_search_locations[0]
        for name, path in (("streaming", root), ("streaming.base", f"{root}/base")):
            module = types.ModuleType(name)
            module.__path__ = [path]
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            sys.modules[name] = module
    return importlib.import_module("streaming.base.format").MDSWriter


WRITERS: dict[str, Write] = {
    "none": no_writer,
    "mds sqlstream": ours_mds,
    "mds MosaicML": theirs_mds,
    "tar sqlstream": ours_tar,
    "tar WebDataset": theirs_tar,
}
TO_STORE: dict[str, Write] = {"store sqlstream": ours_mds, "store MosaicML": theirs_mds}
"""The same to an object store."""
PAIRS = {
    "mds": ("mds MosaicML", "mds sqlstream"),
    "tar": ("tar WebDataset", "tar sqlstream"),
    "store": ("store MosaicML", "store sqlstream"),
}
"""A peer, and ours."""


def measured(name: str, out: Any, number: int, size: int) -> dict[str, float] | None:
    """Run a writer in a process of its own; return its figures; None: its package does not import."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(name, out, number, size, theirs))
    process.start()
    theirs.close()
    try:
        found: dict[str, float] | None = ours.recv()
    except EOFError:
        raise RuntimeError(f"{name} died: its error is above") from None
    process.join()
    return found


def run(name: str, out: Any, number: int, size: int, connection: Any) -> None:
    write = (WRITERS | TO_STORE)[name]
    place = functools.partial(os.path.join, out) if isinstance(out, str) else out.joinpath
    try:
        write(place("warm"), 1, size)  # imports
    except ImportError:
        connection.send(None)
        return
    before, cpu, started = peak_kb(), cpu_seconds(), time.perf_counter()
    write(place("all"), number, size)
    seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    memory = peak_kb()
    megabytes_a_second = number * size / 1e6 / seconds
    connection.send(
        {
            "cpu_seconds": cpu,
            "mb_per_second": megabytes_a_second,
            "memory_mb": memory / 1024,
            "before_mb": before / 1024,
        }
    )


def peak_kb() -> int:
    """Return the most memory that this process has had; `ru_maxrss` would count what its parent had as it was started."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def cpu_seconds() -> float:
    """Return the CPU time of this process, and of what it started and has ended: our helper process has."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


@contextlib.contextmanager
def store() -> Iterator[str]:
    """Yield the URL of a bucket on a server of this machine, which the environment names."""
    from sqlstream.testing.servers import LocalS3

    with LocalS3() as server:
        server.put("writing/empty", b"")
        os.environ |= {
            "S3_ENDPOINT_URL": server.endpoint_url,
            "AWS_ENDPOINT_URL": server.endpoint_url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": "us-east-1",
        }
        yield "s3://writing"


def content(folder: Path) -> str:
    """Return a digest of what was written: files of MDS, members of tars."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix == ".mds":
            digest.update(path.name.encode() + path.read_bytes())
        elif path.suffix == ".tar":
            with tarfile.open(path) as archive:
                for member in sorted(archive.getmembers(), key=lambda member: member.name):
                    file = archive.extractfile(member)
                    digest.update(member.name.encode() + (b"" if file is None else hashlib.sha256(file.read()).digest()))
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--bytes", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where to write (default: the directory for temporary files)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--store", action="store_true", help="write MDS to an S3 server (moto), too")
    options = parser.parse_args()
    with store() if options.store else contextlib.nullcontext() as bucket:
        found, equal = rounds_of(options, bucket)
    small = {name: quarter(name, options) for name in WRITERS if name in found}
    report = {
        "samples": options.samples,
        "bytes": options.bytes,
        "equal": equal,
        **{
            name: {key: statistics.median(result[key] for result in results) for key in results[0]}
            for name, results in found.items()
        },
        "memory_of_a_quarter_mb": small,
        "ratios": ratios(found),
    }
    if options.json:
        print(json.dumps(report))
        return
    print(f"{options.samples} samples of {options.bytes} bytes, {options.rounds} rounds; equal content: {equal}")
    for name, results in found.items():
        seconds, rate = (statistics.median(result[key] for result in results) for key in ("cpu_seconds", "mb_per_second"))
        memory = statistics.median(result["memory_mb"] - result["before_mb"] for result in results)
        quarters = f", {small[name]:.1f} MB for a quarter of the samples" if name in small else ""
        print(
            f"{name:16} {1e6 * seconds / options.samples:8.1f} µs of CPU a sample {rate:8.1f} MB/s "
            f"{memory:7.1f} MB more memory{quarters}"
        )
    for name, values in report["ratios"].items():
        print(f"{name}: median {statistics.median(values):.2f}, {min(values):.2f} to {max(values):.2f}")


def rounds_of(options: argparse.Namespace, bucket: str | None) -> tuple[dict[str, list[dict[str, float]]], dict[str, bool]]:
    """Return the figures of each contender in each round, and whether a format's contenders wrote the same."""
    found: dict[str, list[dict[str, float]]] = {}
    equal: dict[str, bool] = {}
    names = [*WRITERS, *(TO_STORE if bucket else ())]
    for number in range(options.rounds):
        digests: dict[str, str] = {}
        for name in names[:: -1 if number % 2 else 1]:
            folder = Path(tempfile.mkdtemp(prefix="writing-", dir=options.out))
            try:
                out = f"{bucket}/{number}/{name.replace(' ', '-')}" if name in TO_STORE else folder
                result = measured(name, out, options.samples, options.bytes)
                if result is not None:
                    found.setdefault(name, []).append(result)
                    digests[name] = content(folder / "all") if (folder / "all").exists() else ""
            finally:
                shutil.rmtree(folder)
        for kind in ("mds", "tar"):
            values = {digest for name, digest in digests.items() if name.startswith(kind)}
            equal[kind] = equal.get(kind, True) and len(values) == 1
    return found, equal


def quarter(name: str, options: argparse.Namespace) -> float:
    """Return the memory that a writer takes for a quarter of the samples, in MB above its imports."""
    folder = Path(tempfile.mkdtemp(prefix="writing-", dir=options.out))
    try:
        result = measured(name, folder, options.samples // 4, options.bytes)
    finally:
        shutil.rmtree(folder)
    assert result is not None, "it was there a moment ago"
    return result["memory_mb"] - result["before_mb"]


def ratios(found: dict[str, list[dict[str, float]]]) -> dict[str, list[float]]:
    """Return CPU of the peer over ours, round by round, less what making the samples takes; and our MB/s over the peer's."""
    made: dict[str, list[float]] = {}
    for kind, (theirs, ours) in PAIRS.items():
        if theirs not in found or ours not in found:
            continue
        rounds = list(zip(found[ours], found[theirs], found["none"], strict=True))
        made[f"{kind}: CPU of {theirs} / {ours}"] = [
            (b["cpu_seconds"] - none["cpu_seconds"]) / max(1e-9, a["cpu_seconds"] - none["cpu_seconds"])
            for a, b, none in rounds
        ]
        made[f"{kind}: MB/s of {ours} / {theirs}"] = [a["mb_per_second"] / b["mb_per_second"] for a, b, _ in rounds]
    return made


if __name__ == "__main__":
    main()
