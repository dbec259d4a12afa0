"""How fast the order is, what it holds in memory, and how well blocks are shuffled; beside MosaicML Streaming.

    python benchmarks/order.py [--peer-python /path/to/venv/bin/python] [--json FILE]

The peer's interpreter needs mosaicml-streaming and numpy. Only its order is timed: the two functions with which its
StreamingDataset works out an epoch (`get_partitions_orig`, `get_shuffle_py1e`), without its shared memory and barriers.
Figures of one machine are comparable with each other only: quote ratios.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sqlstream.order import BlockLayout, Int64Array, Plan
from sqlstream.world import World

LARGE, PEER_SIZE = 10**9, 10**7
BATCH, RANKS, WORKERS = 64, 8, 4

PEER_PROGRAM = """
import importlib.util, json, pathlib, resource, sys, time, types
root = pathlib.Path(importlib.util.find_spec("streaming").submodule_search_locations[0])
for name in ("streaming", "streaming.base", "streaming.base.partition", "streaming.base.shuffle"):
    package = types.ModuleType(name)  # its __init__ files import half of the field; the order needs numpy alone
    package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    sys.modules[name] = package
from streaming.base.partition.orig import get_partitions_orig
from streaming.base.shuffle.py1e import get_shuffle_py1e
import numpy as np
size, batch, ranks, workers = map(int, sys.argv[1:])
result = {}
for what, consumed in (("start", 0), ("resume", size // 2 // (batch * ranks) * batch * ranks)):
    started = time.perf_counter()
    ids = get_partitions_orig(size, 1, 1, ranks, workers, batch, consumed)
    shuffle = get_shuffle_py1e(np.full(size // 1000, 1000, np.int64), 1, 7, 0, 1 << 18)
    ids = np.where(ids != -1, shuffle[ids], -1)
    result[f"{what}_seconds"] = time.perf_counter() - started
result["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps(result))
"""


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    """The fastest of `repeats` calls: what it costs when nobody disturbs."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def first_samples(plan: Plan, consumed: int) -> Int64Array:
    """What a worker does before its first sample of an epoch: its share, the first block of positions, their rows."""
    world = World(rank=3, world_size=RANKS, worker=1, num_workers=WORKERS)
    return plan.order.rows_at(4, next(plan.partition(world, consumed).blocks())).row


def measure_order(size: int) -> dict[str, float]:
    plan = Plan(num_samples=size, seed=7, batch_size=BATCH)
    nodes = Plan(num_samples=size, seed=7, batch_size=BATCH, num_canonical_nodes=8)
    middle = size // 2 // (BATCH * RANKS) * BATCH * RANKS
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = {
        "rows_64_us": 1e6 * best_seconds(lambda: plan.rows(4, middle, middle + 64), 2000),
        "rows_64_canonical_nodes_us": 1e6 * best_seconds(lambda: nodes.rows(4, middle, middle + 64), 2000),
        "rows_4096_us": 1e6 * best_seconds(lambda: plan.rows(4, middle, middle + 4096), 500),
        "start_ms": 1e3 * best_seconds(lambda: first_samples(plan, 0), 200),
        "resume_ms": 1e3 * best_seconds(lambda: first_samples(plan, middle), 200),
    }
    tracemalloc.start()
    for start in range(0, size, size // 1000):
        plan.rows(0, start, start + 64)
    first_samples(plan, middle)
    result["peak_bytes"] = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    result["rss_growth_bytes"] = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return result


def measure_peer(python: str) -> dict[str, float]:
    arguments = [str(number) for number in (PEER_SIZE, BATCH, RANKS, WORKERS)]
    answer = subprocess.run([python, "-c", PEER_PROGRAM, *arguments], check=True, capture_output=True, text=True)
    measured: dict[str, float] = json.loads(answer.stdout)
    return measured


def shuffle_quality(block_size: int, window: int, size: int = 100_000) -> dict[str, float]:
    """How near a block shuffle is to a whole one.

    mixing: distinct blocks among 64 consecutive samples, of as many as chance gives (1: a whole shuffle). noise: where the rows
    of a block are alike, the variance of the means of batches of 64, of that in a whole shuffle (1; at worst 64).
    """
    layout = BlockLayout.of_size(block_size, num_rows=size, window=window)
    blocks = Plan(num_samples=size, seed=7, batch_size=BATCH, blocks=layout).rows(0, 0, size // 64 * 64) // block_size
    batches = blocks.reshape(-1, 64)
    num_blocks = size // block_size
    distinct = np.mean([len(np.unique(batch)) for batch in batches])
    chance = num_blocks * (1 - (1 - 1 / num_blocks) ** 64)
    values = np.random.default_rng(0).standard_normal((num_blocks + 1, 32))
    variance = values[batches].mean(axis=1).var(axis=0).mean()
    return {"mixing": float(distinct / chance), "noise": float(64 * variance / values.var(axis=0).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="an interpreter that has mosaicml-streaming")
    parser.add_argument("--json", type=Path, help="write all figures here, too")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for size in (PEER_SIZE, LARGE):
        ours = figures[f"sqlstream_{size:.0e}"] = measure_order(size)
        print(f"sqlstream, {size:.0e} rows:", ", ".join(f"{name} {value:,.2f}" for name, value in ours.items()))
        if size == PEER_SIZE and options.peer_python:
            peer = figures["mosaicml_1e+07"] = measure_peer(options.peer_python)
            start, resume = (1e3 * peer[name] for name in ("start_seconds", "resume_seconds"))
            print(
                f"MosaicML, {size:.0e} rows: start {start:,.0f} ms ({start / ours['start_ms']:,.0f} times ours), "
                f"resume {resume:,.0f} ms ({resume / ours['resume_ms']:,.0f} times), peak {peer['peak_bytes'] / 2**20:.0f} MiB"
            )
    print("\nblock shuffle of 100 000 rows (1: as good as a whole shuffle)\nblock  window  mixing  noise")
    quality = figures["block_shuffle"] = []
    for block_size in (10, 100, 1000):
        for window in (1, 4, 16, 64):
            measured = shuffle_quality(block_size, window)
            quality.append({"block_size": block_size, "window": window, **measured})
            print(f"{block_size:5}  {window:6}  {measured['mixing']:6.2f}  {measured['noise']:5.1f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
