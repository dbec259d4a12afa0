"""How full packs are, and what a plan costs; beside the code of TRL, axolotl and grain.

    python benchmarks/packing.py [--rows 1000000] [--peer-rows 100000] [--trl FILE] [--axolotl FILE] [--grain] [--json FILE]

Log-normal and uniform lengths, all at most the capacity. Rows whose lengths the index does not have are packed by windows.
TRL packs by `map` of 1000 rows, axolotl in groups of 100 000 rows, in the order of its sampler; both are functions cut out of
files of theirs that are named on the command line (TRL's needs pyarrow, axolotl's numba). grain is installed; it packs what
comes into so many open bins. How full the packs of these are does not depend on the number of rows beyond their window, so they
get fewer rows.

Seconds are of CPU time, one process, best of three for ours: quote ratios.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sqlstream.config import OnLong
from sqlstream.order import pack_window, plan_packs

Lengths = NDArray[np.int64]
TRL_BATCH, AXOLOTL_GROUP, AXOLOTL_ROWS = 1000, 100_000, 200
"""Rows that `datasets.map` hands over, axolotl's `sample_packing_group_size`, and its `sample_packing_bin_size`."""
GRAIN_BINS = (64, 1024)
WINDOWS = (256, 1024)
"""`lookahead` of packs whose lengths show when their rows are made."""


def log_normal(rows: int) -> tuple[Lengths, int]:
    """The lengths of reference/mixing.md, section 3.6, and their capacity."""
    return np.clip(np.exp(np.random.RandomState(2).randn(rows) * 1.2 + 6.0).astype(np.int64), 1, 4096), 4096


def uniform(rows: int) -> tuple[Lengths, int]:
    """Lengths from 1 to the capacity, and the capacity."""
    return np.random.RandomState(3).randint(1, 8193, rows).astype(np.int64), 8192


def ours(lengths: Lengths, capacity: int) -> int:
    """Packs of the plan on the histogram, which a dataset has in its table."""
    return plan_packs(*np.unique(lengths, return_counts=True), capacity).num_packs


def by_windows(size: int) -> Callable[[Lengths, int], int]:
    """What is made of rows whose lengths the index does not have."""

    def num_packs(lengths: Lengths, capacity: int) -> int:
        windows = [lengths[start : start + size].tolist() for start in range(0, len(lengths), size)]
        return sum(len(pack_window(window, capacity, None, OnLong.RAISE, (5, 0, at))) for at, window in enumerate(windows))

    return num_packs


def cut(path: Path, names: list[str], **given: Any) -> dict[str, Any]:
    """Functions and classes of a file, without its imports."""
    space: dict[str, Any] = given
    body = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) in names]
    exec(compile(ast.Module(body, []), str(path), "exec"), space)
    return space


def trl(path: Path) -> Callable[[Lengths, int], int]:
    """What `pack_dataset(strategy="bfd")` does of each batch of `map`."""
    pa, pc = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.compute")
    names = ["_SegmentTree", "_pack_bfd", "_check_if_columns_can_be_packed"]
    space = cut(path, names, pa=pa, pc=pc, pyarrow=pa, np=np, defaultdict=defaultdict, deque=deque, Literal=Literal)

    def num_packs(lengths: Lengths, capacity: int) -> int:
        total = 0
        for start in range(0, len(lengths), TRL_BATCH):
            batch = lengths[start : start + TRL_BATCH]
            offsets = pa.array(np.concatenate(([0], np.cumsum(batch))), pa.int32())
            tokens = pa.ListArray.from_arrays(offsets, pa.array(np.zeros(int(batch.sum()), np.int8)))
            total += len(space["_pack_bfd"](pa.table({"input_ids": tokens}), capacity))
        return total

    return num_packs


def axolotl(path: Path) -> Callable[[Lengths, int], int]:
    """What `MultipackBatchSampler` does of each group."""
    numba = importlib.import_module("numba")
    pack_group = cut(path, ["pack_group"], numba=numba, np=np)["pack_group"]
    pack_group(np.array([1, 2]), 0, 4, 2, 4, True)  # it is compiled with the first call

    def num_packs(lengths: Lengths, capacity: int) -> int:
        groups = [lengths[start : start + AXOLOTL_GROUP] for start in range(0, len(lengths), AXOLOTL_GROUP)]
        return sum(len(pack_group(group, 0, capacity, len(group), AXOLOTL_ROWS, True)) for group in groups)

    return num_packs


def grain(num_bins: int) -> Callable[[Lengths, int], int]:
    """What `BestFitPackIterDataset` does with so many bins."""
    package = importlib.import_module("grain")
    packing = importlib.import_module("grain._src.python.dataset.transformations.packing")

    def num_packs(lengths: Lengths, capacity: int) -> int:
        rows = (
            package.MapDataset.source(lengths.tolist()).map(lambda length: {"x": np.zeros(length, np.int8)}).to_iter_dataset()
        )
        packed = packing.BestFitPackIterDataset(
            rows, length_struct={"x": capacity}, num_packing_bins=num_bins, shuffle_bins=False
        )
        return sum(1 for _ in packed)

    return num_packs


def measured(
    name: str, num_packs: Callable[[Lengths, int], int], lengths: Lengths, capacity: int, rounds: int
) -> dict[str, Any]:
    """A line of the table."""
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        packs = num_packs(lengths, capacity)
        seconds.append(time.process_time() - start)
    fill = int(lengths.sum()) / (packs * capacity)
    print(f"  {name:28} {len(lengths):>8} rows {packs:>8} packs {fill:9.5%} full {min(seconds):8.3f} s")
    return {"rows": len(lengths), "packs": packs, "fill": round(fill, 6), "cpu_seconds": round(min(seconds), 4)}


def plan_seconds(lengths: Lengths, capacity: int) -> float:
    """CPU time of a plan of a histogram, best of five."""
    distinct, counts = np.unique(lengths, return_counts=True)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        plan_packs(np.asarray(distinct, np.int64), counts.astype(np.int64), capacity)
        seconds.append(time.process_time() - start)
    return min(seconds)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--peer-rows", type=int, default=100_000)
    parser.add_argument("--trl", type=Path, help="trl/data_utils.py of TRL")
    parser.add_argument("--axolotl", type=Path, help="src/axolotl/utils/samplers/multipack.py of axolotl")
    parser.add_argument("--grain", action="store_true", help="grain is installed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    peers = {f"sqlstream, lookahead={size}": by_windows(size) for size in WINDOWS}
    if options.trl is not None:
        peers[f"TRL, bfd by {TRL_BATCH} rows"] = trl(options.trl)
    if options.axolotl is not None:
        peers[f"axolotl, groups of {AXOLOTL_GROUP}"] = axolotl(options.axolotl)
    if options.grain:
        peers |= {f"grain, best fit, {bins} bins": grain(bins) for bins in GRAIN_BINS}
    found: dict[str, Any] = {}
    for name, make in (("log-normal, capacity 4096", log_normal), ("uniform, capacity 8192", uniform)):
        print(name)
        lengths, capacity = make(options.rows)
        table = found[name] = {"sqlstream": measured("sqlstream", ours, lengths, capacity, 3)}
        table["sqlstream"]["plan_cpu_seconds"] = round(plan_seconds(lengths, capacity), 4)
        print(f"  {'of that the plan':28} {table['sqlstream']['plan_cpu_seconds']:>53} s")
        some, _ = make(options.peer_rows)
        table["sqlstream, as few rows"] = measured("sqlstream, as few rows", ours, some, capacity, 3)
        table |= {peer: measured(peer, num_packs, some, capacity, 1) for peer, num_packs in peers.items()}
    if options.rows >= 1_000_000:
        bar = found["log-normal, capacity 4096"]["sqlstream"]
        assert bar["fill"] >= 0.999, bar
        assert bar["plan_cpu_seconds"] <= 0.2, bar
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
