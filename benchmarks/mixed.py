"""CPU and memory of a worker that reads a mixture of cached streams, beside a single dataset of the same rows.

    python benchmarks/mixed.py [--rounds 5] [--samples 6000] [--json FILE]

As a user writes it: a transform of one's own that reads the file, a collate function of one's own, whole epochs of a
StreamingDataLoader with one worker. CPU is that of the worker and of its helper in the second epoch, from its first batch to
its last, medians of interleaved rounds in processes of their own. Memory is the worker's private memory after an epoch in
which every stream was drawn, less that with a single dataset (0 streams: a StreamingDataset that is not mixed).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream import MixedDataset, Stream, StreamingDataLoader
from sqlstream.testing.servers import FaultyHttpServer

FILE_BYTES = 44_000
NUM_STREAMS = (0, 1, 3, 20, 100)


class ReadFile:
    """A transform as a user writes it."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        with open(sample["file"], "rb") as file:
            sample["file"] = file.read()
        return sample


class Watch:
    """A collate function that also says what this process has used so far."""

    def __call__(self, samples: list[dict[str, Any]]) -> tuple[list[bytes], float, int]:
        own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
        return [sample["file"] for sample in samples], cpu, os.getpid()


def private_bytes(pid: int) -> int:
    """Private memory of a process."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))


def epoch(folder: str, num_streams: int) -> dict[str, float]:
    """CPU of a sample in microseconds, and private bytes, of the second epoch."""
    streams = {
        f"s{number}": Stream(
            f"{folder}/{num_streams}/{number}.parquet",
            f"{folder}/cache",
            columns_to_download=["file"],
            transforms=[ReadFile()],
            shuffle_seed=number,
            show_progress=False,
        )
        for number in range(max(1, num_streams))
    }
    with MixedDataset(streams) as mixed:
        loader = StreamingDataLoader(
            mixed if num_streams else mixed.streams["s0"],
            32,
            1,
            collate_fn=Watch(),
            persistent_workers=True,
            multiprocessing_context="fork",
        )
        num_samples, first, last, pid = 0, 0.0, 0.0, 0
        for _ in range(2):
            num_samples, first = 0, 0.0
            for files, cpu, worker in loader:
                pid = worker
                num_samples += len(files)
                first, last = first or cpu, cpu
        return {"cpu_us": 1e6 * (last - first) / (num_samples - 32), "bytes": private_bytes(pid)}


def measure(num_rounds: int, num_samples: int) -> dict[str, Any]:
    """Ratios to a single stream."""
    with tempfile.TemporaryDirectory() as folder, FaultyHttpServer() as server:
        urls = []
        for number in range(num_samples):
            server.objects[f"/{number}.jpg"] = os.urandom(FILE_BYTES)
            urls.append(f"{server.url}/{number}.jpg")
        found: dict[int, list[dict[str, float]]] = {num: [] for num in NUM_STREAMS}
        for num in NUM_STREAMS:
            (Path(folder) / str(num)).mkdir()
            for number in range(max(1, num)):
                pq.write_table(pa.table({"file": urls[number :: max(1, num)]}), f"{folder}/{num}/{number}.parquet")
        for number in range(-1, num_rounds):  # the first round fills the cache
            for num in NUM_STREAMS:
                command = [sys.executable, __file__, "--epoch", folder, str(num)]
                made = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                if number >= 0:
                    found[num].append(made)
    cpu = {num: statistics.median(one["cpu_us"] for one in rounds) for num, rounds in found.items()}
    ratios = {
        num: statistics.median(a["cpu_us"] / b["cpu_us"] for a, b in zip(found[num], found[0], strict=True)) for num in cpu
    }
    memory = {num: statistics.median(one["bytes"] for one in rounds) for num, rounds in found.items()}
    each = {num: (memory[num] - memory[0]) / num / (1 << 20) for num in memory if num}
    return {"cpu_us": cpu, "cpu_ratio": ratios, "mib_a_stream": each, "rounds": num_rounds, "samples": num_samples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--epoch", nargs=2)
    arguments = parser.parse_args()
    if arguments.epoch:
        print(json.dumps(epoch(arguments.epoch[0], int(arguments.epoch[1]))))
        return
    found = measure(arguments.rounds, arguments.samples)
    print(json.dumps(found, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
