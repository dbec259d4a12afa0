"""CPU of a sample through the drop-in of MosaicML Streaming, beside our own API, and beside that package where it is there.

    .venv/bin/python benchmarks/drop_ins.py [--samples 4000] [--rounds 100] [--kinds small 20kB]

Two datasets of the same shards are iterated in turn, some samples at a time, in one process, so that both see the same machine.
Prints the ratio of the sums of CPU time and that of the medians. Bar: at most 1.05 of our own API.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np

from sqlstream import StreamingDataset as OurDataset
from sqlstream.compat.streaming import MDSWriter, StreamingDataset

CHUNK = 200
"""Samples that one of two takes before the other: some milliseconds."""
KINDS: dict[str, tuple[dict[str, str], Callable[[int], dict[str, Any]]]] = {
    "small": ({"n": "int", "text": "str"}, lambda number: {"n": number, "text": f"text {number}"}),
    "20kB": ({"n": "int", "data": "bytes"}, lambda number: {"n": number, "data": bytes(20_000)}),
}
"""Columns, and what makes a sample."""


class Numbers(StreamingDataset):
    """Makes an item of a sample, as users' classes do."""

    def __getitem__(self, at: Any) -> Any:
        return super().__getitem__(at)["n"]


def number_of(sample: dict[str, Any]) -> dict[str, Any]:
    """The same as a transform."""
    return {"n": sample["n"]}


def endless(dataset: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from dataset


def compare(name: str, one: Iterable[Any], other: Iterable[Any], rounds: int, num_together: int = CHUNK) -> None:
    """Print the ratios of two datasets.

    Args:
        name: What is compared.
        one: The first one.
        other: What it is divided by.
        rounds: How often each of them is asked.
        num_together: Samples that it then gives.
    """
    streams = [endless(one), endless(other)]
    seconds: list[list[float]] = [[], []]
    for number in range(-2, rounds):  # the first two are not counted
        for which in (0, 1) if number % 2 else (1, 0):
            start = process_time()
            for _ in itertools.islice(streams[which], num_together):
                pass
            if number >= 0:
                seconds[which].append(process_time() - start)
    sums, medians = (measure(seconds[0]) / measure(seconds[1]) for measure in (sum, median))
    print(
        f"{name}: sums {sums:.3f}, medians {medians:.3f}, {1e6 * sum(seconds[1]) / rounds / num_together:.1f} us of the other"
    )


def main(num_samples: int, rounds: int, kinds: list[str], place: Path) -> None:
    """Compare all kinds of samples."""
    np.random.seed(0)
    for kind in kinds:
        columns, make = KINDS[kind]
        local = str(place / kind)
        with MDSWriter(out=local, columns=columns) as writer:
            for number in range(num_samples):
                writer.write(make(number))
        theirs: dict[str, Any] = {"local": local, "shuffle": True, "batch_size": 16}
        ours = {"dst": place / "cache", "cache_limit": None, "shuffle_seed": 9176, "batch_size": 16, "on_error": "raise"}
        compare(f"{kind}, drop-in to our API", StreamingDataset(**theirs), OurDataset(local, **ours), rounds)
        with_items = OurDataset(local, transforms=[number_of], **ours)
        compare(f"{kind}, __getitem__ to a transform", Numbers(**theirs), with_items, rounds)
        if importlib.util.find_spec("streaming") is not None:
            import streaming

            shutil.copytree(local, f"{local}-peer", ignore=shutil.ignore_patterns(".sqlstream"))
            peer = streaming.StreamingDataset(**theirs | {"local": f"{local}-peer"})
            rounds_of_all = max(4, rounds * CHUNK // num_samples)  # its threads work within an epoch, also for what comes later
            compare(f"{kind}, MosaicML Streaming to the drop-in", peer, StreamingDataset(**theirs), rounds_of_all, num_samples)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        main(given.samples, given.rounds, given.kinds, Path(directory))
