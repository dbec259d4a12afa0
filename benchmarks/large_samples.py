"""MDS samples of more than 128 KiB, whose values are used up as they come: `dataset[i]`, and an epoch without workers.

    .venv/bin/python -m benchmarks.large_samples [--sizes 44000 200000 1000000] [--rounds 7]

Prints the least microseconds and the page faults of a sample. To compare two trees, run it in each in turns (PYTHONPATH).
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
from collections.abc import Callable
from time import perf_counter
from typing import Any

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.write import MdsWriter

TOTAL_BYTES = 200_000_000


def length_of(sample: dict[str, Any]) -> dict[str, Any]:
    """Use a picture up."""
    return {"length": len(sample["image"])}


def measured(run: Callable[[], object], num_samples: int, rounds: int) -> str:
    """Return the best of some rounds."""
    found = []
    for _ in range(rounds):
        faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, perf_counter()
        run()
        seconds = perf_counter() - start
        found.append((seconds / num_samples, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / num_samples))
    seconds, num_faults = min(found)
    return f"{1e6 * seconds:.0f} us, {num_faults:.0f} page faults"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[44_000, 200_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            with MdsWriter(f"{folder}/mds", columns={"image": "bytes", "label": "int", "name": "str"}) as writer:
                for number in range(min(2000, TOTAL_BYTES // size)):
                    writer.write({"image": os.urandom(size), "label": number, "name": f"n{number}"})
            with StreamingDataset(f"{folder}/mds", f"{folder}/cache", transforms=[length_of], show_progress=False) as dataset:
                num_samples = len(dataset)
                loader = StreamingDataLoader(dataset, batch_size=16, num_workers=0)
                by_row = measured(lambda: [dataset[i] for i in range(num_samples)], num_samples, options.rounds)  # noqa: B023
                epoch = measured(lambda: [None for _ in loader], num_samples, options.rounds)  # noqa: B023
                print(f"{size} bytes: dataset[i] {by_row}; an epoch {epoch}", flush=True)


if __name__ == "__main__":
    main()
