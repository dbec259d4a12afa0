"""Joins at index build: n rows by n rows whose keys are shuffled against each other, beside the build of the source alone.

    .venv/bin/python benchmarks/joins.py [--rows 1000000 10000000] [--keep DIR]

Prints a line a size: seconds and peak memory of a new process that builds the index, without and with the join. Memory must not
grow with the rows. Times are of this machine; compare ratios.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.index import CHUNK_ROWS, build, in_new_process, peak_mib, timed
from sqlstream.config import JoinOptions


def make_table(path: Path, num_rows: int, seed: int, name: str) -> None:
    """Write rows of a text key, each once and in an order of its own, a path and a number."""
    keys = np.random.default_rng(seed).permutation(num_rows)  # [num_rows]
    schema = pa.schema([("id", pa.string()), (name, pa.string()), (f"{name}_score", pa.float64())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, CHUNK_ROWS):
            some = keys[start : start + CHUNK_ROWS]
            columns: list[Any] = [
                [f"{key:016x}" for key in some.tolist()],
                [f"{name}/{key % 1000:03d}/{key:010d}" for key in some.tolist()],
                some / num_rows,
            ]
            writer.write_table(pa.table(dict(zip(schema.names, columns, strict=True)), schema=schema))


def measure(source: Path, directory: Path, table: Path | None) -> dict[str, float]:
    """Build once, with the table joined if there is one."""
    join = None if table is None else JoinOptions.of({"latents": str(table)}, "id", "raise")
    seconds = timed(lambda: build(source, directory, join=join, index_limit=None))
    return {"seconds": seconds, "peak_mib": peak_mib()}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--keep", type=Path, help="a directory for the tables, which the next run finds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.keep) as scratch:
        for num_rows in options.rows:
            tables = [(options.keep or Path(scratch)) / f"{name}-{num_rows}.parquet" for name in ("image", "latent")]
            for seed, path in enumerate(tables):
                if not path.exists():
                    make_table(path.with_suffix(".part"), num_rows, seed, path.name.partition("-")[0])
                    path.with_suffix(".part").rename(path)
            for what, table in (("alone", None), ("joined", tables[1])):
                found = in_new_process(measure, tables[0], Path(scratch) / f"{what}-{num_rows}", table)
                print(
                    f"{num_rows:>10,} rows, {what:>6}: {found['seconds']:7.1f} s, peak {found['peak_mib']:6.0f} MiB", flush=True
                )


if __name__ == "__main__":
    main()
