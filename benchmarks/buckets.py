"""Batches by bucket: what is cropped and padded, which rows come, and what it costs; beside the rules of kohya and NovelAI.

    python benchmarks/buckets.py [--pictures 100000] [--rows 100000] [--json FILE]

**Crops.** Made-up sizes, 60 % of them of the usual aspects of photographs (4:3, 3:2, 16:9, 1:1 and on their side, cut by up to
3 %), the others log-normal around 1. All rules have one list of buckets, kohya's of 512 x 512. kohya and NovelAI take the one
with the least |w / h - W / H|; NovelAI crops what fills no batch of its bucket to the square, and drops what then is left over.
A crop is the share of a picture that is cut away when it is scaled to cover its bucket. The rules are written down here from
their sources.

**Rows seen.** Of one epoch, and of 8 together: samples for each row, and the share of rows that no epoch had.

**Padding.** Log-normal lengths: the share of a batch that is no padding.

**Time.** Process time of this machine: a step at 10^9 rows in 4096 buckets (median), and epochs with and without buckets in
alternated pairs (median of the ratios), of rows without objects, and of rows for each of which a JPEG of 256 x 256 is decoded.
Quote ratios.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from sqlstream import AspectBuckets, Buckets, StreamingDataLoader, StreamingDataset
from sqlstream.order import Bucketed, Int64Array

BUCKETS = AspectBuckets.kohya(512 * 512)
BATCH, NUM_EPOCHS = 64, 8
ASPECTS = (4 / 3, 3 / 2, 16 / 9, 1.0, 3 / 4, 2 / 3, 9 / 16, 4 / 5)
NUM_BUCKETS, NUM_ROWS, STEP_SAMPLES = 4096, 10**9, 256
Sizes = NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """Row r is at place r."""

    sizes: tuple[int, ...]
    digest: str = "table"
    values: tuple[object, ...] = ()

    def rows_at(self, places: Int64Array) -> Int64Array:
        """Return the places."""
        return places


def picture_sizes(num: int, rng: np.random.Generator) -> Sizes:
    """Return widths and heights: [n, 2]."""
    usual = np.array(ASPECTS)[rng.integers(len(ASPECTS), size=num)] * rng.uniform(0.97, 1.03, num)  # [n]
    aspect = np.where(rng.random(num) < 0.6, usual, rng.lognormal(0, 0.45, num))  # [n]
    pixels = rng.lognormal(np.log(700 * 700), 0.8, num)  # [n]
    width = np.clip(np.sqrt(pixels * aspect), 64, 8000)  # [n]
    return np.stack((width, np.clip(width / aspect, 64, 8000)), axis=1).astype(np.int64)


def crops(sizes: Sizes, buckets: Sizes) -> NDArray[np.float64]:
    """Return the share of each picture that its bucket cuts away: [n]."""
    products = np.stack((sizes[:, 0] * buckets[:, 1], sizes[:, 1] * buckets[:, 0]), axis=1)  # [n, 2]
    shares: NDArray[np.float64] = 1 - products.min(axis=1) / products.max(axis=1)  # [n]
    return shares


def nearest_by_quotient(sizes: Sizes) -> Sizes:
    """Return the bucket of each picture by the rule of kohya's and NovelAI's code: [n, 2]."""
    listed = np.array(BUCKETS.sizes)  # [B, 2]
    errors = np.abs((sizes[:, 0] / sizes[:, 1])[:, None] - listed[:, 0] / listed[:, 1])  # [n, B]
    chosen: Sizes = listed[errors.argmin(axis=1)]  # [n, 2]
    return chosen


def novelai(sizes: Sizes, rng: np.random.Generator) -> dict[str, float]:
    """Return crops and rows of NovelAI's rule, whose leftovers are other ones in each epoch."""
    chosen, seen, cut = nearest_by_quotient(sizes), np.zeros(len(sizes), np.int64), 0.0
    for epoch in range(NUM_EPOCHS):
        order, square = rng.permutation(len(sizes)), list[int]()
        for bucket in np.unique(chosen, axis=0):
            members = order[(chosen[order] == bucket).all(axis=1)]  # [m]
            whole = len(members) // BATCH * BATCH
            cut += crops(sizes[members[:whole]], np.broadcast_to(bucket, (whole, 2))).sum()
            seen[members[:whole]] += 1
            square += members[whole:].tolist()
        rest = np.array(square[: len(square) // BATCH * BATCH], dtype=np.int64)  # [m]
        cut += crops(sizes[rest], np.full((len(rest), 2), 512)).sum()
        seen[rest] += 1
        if not epoch:
            first = float((seen > 0).mean())
    taken = int(seen.sum())
    return {
        "mean crop": cut / taken,
        "rows seen in an epoch": first,
        "samples a row and epoch": taken / len(sizes) / NUM_EPOCHS,
        "rows never seen": float((seen == 0).mean()),
    }


def kohya(sizes: Sizes) -> dict[str, float]:
    """Return crops and rows of kohya's rule: the last batch of each bucket is short, so all rows come."""
    mean = float(crops(sizes, nearest_by_quotient(sizes)).mean())
    return {"mean crop": mean, "rows seen in an epoch": 1.0, "samples a row and epoch": 1.0, "rows never seen": 0.0}


def ours(sizes: Sizes) -> dict[str, float]:
    """Return crops and rows of `Buckets`."""
    chosen = np.array([BUCKETS.bucket_of((width, height)) for width, height in sizes.tolist()])  # [n, 2]
    counts = tuple(Counter(map(tuple, chosen.tolist())).values())
    order, seen = Bucketed(rows=Table(counts), batch_size=BATCH, seed=3), np.zeros(len(sizes), np.int64)
    for epoch in range(NUM_EPOCHS):
        np.add.at(seen, order.rows_at(epoch, np.arange(order.num_positions(epoch))).row, 1)
        if not epoch:
            first = float((seen > 0).mean())
    return {
        "mean crop": float(crops(sizes, chosen).mean()),
        "rows seen in an epoch": first,
        "samples a row and epoch": float(seen.sum() / len(sizes) / NUM_EPOCHS),
        "rows never seen": float((seen == 0).mean()),
    }


def fill(num: int, rng: np.random.Generator) -> dict[str, float]:
    """Return the share of tokens that are no padding, by what shares a batch."""
    lengths = np.clip(rng.lognormal(np.log(300), 0.9, num), 1, 4096).astype(np.int64)  # [n]
    bounds = np.array([128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096])  # [B]
    bucket = bounds[np.searchsorted(bounds, lengths)]  # [n]
    shuffled = rng.permutation(lengths)[: num // BATCH * BATCH].reshape(-1, BATCH)  # [batches, b]
    together = np.concatenate(
        [
            members[: len(members) // BATCH * BATCH].reshape(-1, BATCH)
            for bound in bounds
            for members in (rng.permutation(lengths[bucket == bound]),)
        ]
    )  # [batches, b]
    return {
        "batches of any rows, to their longest": float(shuffled.sum() / (shuffled.max(axis=1) * BATCH).sum()),
        "buckets, to their bound": float(lengths.sum() / bucket.sum()),
        "buckets, to their longest": float(together.sum() / (together.max(axis=1) * BATCH).sum()),
    }


def lookup_seconds() -> dict[str, float]:
    """Return the process time of a step's rows at 10^9 rows in 4096 buckets: of one rank, and of one of 8."""
    rng = np.random.default_rng(0)
    weights = rng.lognormal(0, 1.5, NUM_BUCKETS)  # [B]
    sizes = tuple(np.maximum(1, weights / weights.sum() * NUM_ROWS).astype(np.int64).tolist())
    order, found = Bucketed(rows=Table(sizes), batch_size=STEP_SAMPLES, seed=3), dict[str, float]()
    steps = rng.integers(0, order.num_positions(0) // STEP_SAMPLES, 2000).tolist()
    for width in (STEP_SAMPLES, STEP_SAMPLES // 8):
        times = []
        for step in steps:
            positions = np.arange(step * STEP_SAMPLES, step * STEP_SAMPLES + width)  # [n]
            begin = time.process_time_ns()
            order.rows_at(0, positions)
            times.append((time.process_time_ns() - begin) / 1e9)
        found[f"{width} samples"] = statistics.median(times)
    return found


class Decode:
    """Decodes one JPEG of noise for each sample."""

    def __init__(self) -> None:
        file = io.BytesIO()
        noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)  # [h, w, c]
        Image.fromarray(noise).resize((256, 256)).save(file, "JPEG")
        self._jpeg = file.getvalue()

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Put the picture into a sample."""
        sample["image"] = np.asarray(Image.open(io.BytesIO(self._jpeg)))  # [h, w, c]
        return sample


def epoch_ratios(num_rows: int, num_pairs: int = 7, *, decodes: bool = False) -> dict[str, Any]:
    """Return the process time of a sample with buckets by that without."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = picture_sizes(num_rows, np.random.default_rng(1))
        columns = {"width": sizes[:, 0], "height": sizes[:, 1], "caption": [f"picture {row}" for row in range(num_rows)]}
        pq.write_table(pa.table(columns), Path(folder) / "rows.parquet")
        buckets = Buckets("width, height", BUCKETS, global_batch_size=BATCH)
        datasets = [
            StreamingDataset(
                Path(folder) / "rows.parquet",
                Path(folder) / "cache",
                shuffle_seed=3,
                batches=batches,
                transforms=[Decode()] if decodes else [],
            )
            for batches in (None, buckets)
        ]
        plain = StreamingDataLoader(datasets[0], batch_size=BATCH, collate_fn=list)
        bucketed = StreamingDataLoader(datasets[1], collate_fn=list)
        ratios = []
        for _ in range(num_pairs + 1):  # the first opens files
            gc.collect()  # else one of the two pays for the other's garbage
            without = seconds_of(plain)
            gc.collect()
            with_buckets = seconds_of(bucketed)
            ratios.append(with_buckets / without)
        for dataset in datasets:
            dataset.close()
    return {"rows": num_rows, "ratios": sorted(ratios[1:]), "median": statistics.median(ratios[1:])}


def seconds_of(loader: StreamingDataLoader) -> float:
    """Return the process time of a sample of an epoch."""
    begin, num_samples = time.process_time(), 0
    for batch in loader:
        num_samples += len(batch)
    return (time.process_time() - begin) / num_samples


def main() -> None:
    """Measure, print, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sizes = picture_sizes(given.pictures, np.random.default_rng(0))
    result = {
        "pictures": given.pictures,
        "crops": {"sqlstream": ours(sizes), "kohya": kohya(sizes), "NovelAI": novelai(sizes, np.random.default_rng(2))},
        "fill": fill(given.pictures, np.random.default_rng(3)),
        "lookup seconds": lookup_seconds(),
        "epoch of rows": epoch_ratios(given.rows),
        "epoch of pictures": epoch_ratios(given.rows // 20, decodes=True),
    }
    print(json.dumps(result, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
