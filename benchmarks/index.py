"""The index: building, filtering, lookups, opening; beside adbc-driver-sqlite and DuckDB in the same run.

    .venv/bin/python benchmarks/index.py [--rows 2000000] [--keep DIR] [--only start]

`start` is the time from a fresh process to its first batch: of an index that is built, and of a lazy one behind nginx, each
answer 20 ms late. Prints one line a figure, then one JSON document. Times are of this machine; compare ratios.
adbc-driver-sqlite and duckdb are in the `dev` extra; what is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream.config import IndexOptions, StorageOptions
from sqlstream.index.build.build import open_index
from sqlstream.index.file.index import Index
from sqlstream.index.weights import open_weights
from sqlstream.order.weights import WeightedRows
from sqlstream.storage.fetcher import Fetcher
from sqlstream.testing.nginx import Nginx, find_nginx

FILTER = "SELECT * FROM dataframe WHERE aesthetic > 0.75 AND width * 1.0 / height > 0.8 AND caption LIKE '%7%'"
NUM_LOOKUPS, LOOKUP_ROWS = 300, 64
CHUNK_ROWS = 100_000
NUM_STARTS, LATENCY_SECONDS = 5, 0.02


def make_table(path: Path, num_rows: int) -> None:
    """Write rows of 8 columns: 4 integers, 2 floats, a URL, a caption."""
    rng = np.random.default_rng(0)
    kinds = {"index width height label": pa.int64(), "aesthetic clip": pa.float64(), "url caption": pa.string()}
    schema = pa.schema([(name, kind) for names, kind in kinds.items() for name in names.split()])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, CHUNK_ROWS):
            ids = np.arange(start, min(start + CHUNK_ROWS, num_rows))
            count = len(ids)
            columns: list[Any] = [
                ids,
                rng.integers(64, 2048, count),
                rng.integers(64, 2048, count),
                rng.integers(0, 1000, count),
            ]
            columns += [rng.random(count), rng.random(count)]
            columns += [[f"images/{at % 1000:03d}/{at:010d}.jpg" for at in ids.tolist()]]
            columns += [[f"a photo of thing number {at} in a room with a view" for at in ids.tolist()]]
            writer.write_table(pa.table(dict(zip(schema.names, columns, strict=True)), schema=schema))


def build(src: Path, directory: Path, **changes: Any) -> Index:
    """Open the index of `src`; local sources ask the fetcher nothing."""
    directory.mkdir(exist_ok=True)
    return open_index(IndexOptions(src=str(src), **changes), directory, Fetcher(StorageOptions()), show_progress=False)


def timed(work: Callable[[], object]) -> float:
    """Return seconds of `work`."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def in_new_process(work: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """Return what `work` measures in a fresh interpreter, so that memory and imports are its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def peak_mib() -> float:
    """Return the highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 10 if sys.platform == "linux" else 1 << 20)


def resident_mib() -> float:
    """Return the memory of this process as it is."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / (1 << 20)


def measure_build(src: Path, directory: Path) -> dict[str, float]:
    """Build once."""
    seconds = timed(lambda: build(src, directory))
    return {"seconds": seconds, "peak_mib": peak_mib()}


def measure_adbc(src: Path, path: Path) -> dict[str, float]:
    """Bring the same rows into SQLite with adbc's own Arrow ingest."""
    dbapi = importlib.import_module("adbc_driver_sqlite.dbapi")

    def ingest() -> None:
        with dbapi.connect(str(path)) as connection, connection.cursor() as cursor:
            cursor.execute("PRAGMA journal_mode=OFF")  # its fastest way; synchronous cannot be changed within its transaction
            file = pq.ParquetFile(src)
            reader = pa.RecordBatchReader.from_batches(file.schema_arrow, file.iter_batches(65_536))
            cursor.adbc_ingest("rows", reader, mode="create")
            connection.commit()

    return {"seconds": timed(ingest), "peak_mib": peak_mib()}


def measure_open(path: Path) -> dict[str, float]:
    """Open a built index as a worker does, whose modules are there already: read one row, then random windows."""
    Index(path).columns[0].field.type  # noqa: B018 - what a worker has imported before
    before = resident_mib()
    index = Index(path)
    seconds = timed(lambda: index.rows([len(index) // 2]))
    opened = resident_mib() - before
    for window in np.random.default_rng(3).integers(0, len(index), (NUM_LOOKUPS, LOOKUP_ROWS)):
        index.rows(window.tolist())
    return {"milliseconds": seconds * 1e3, "mib": opened, "mib_after_lookups": resident_mib() - before}


def measure_lookups(index: Index) -> float:
    """Return microseconds a row of random lookups, one window at a time."""
    rng = np.random.default_rng(1)
    windows = [rng.integers(0, len(index), LOOKUP_ROWS) for _ in range(NUM_LOOKUPS)]
    for window in windows:  # the kernel then has the pages, as in an epoch that is under way
        index.rows(window.tolist())
    best = min(timed(lambda: [index.rows(window.tolist()) for window in windows]) for _ in range(5))
    return best / NUM_LOOKUPS / LOOKUP_ROWS * 1e6


def measure_weights(index: Index, directory: Path) -> dict[str, float]:
    """Return seconds to make a table of weights, and microseconds a drawn row."""
    seconds = timed(lambda: open_weights(index, "1 + 3 * (aesthetic > 0.6)", directory))
    table = open_weights(index, "1 + 3 * (aesthetic > 0.6)", directory)
    rows = WeightedRows(num_rows=len(index), num_positions=len(index), cumulative=table.cumulative())
    slots = np.random.default_rng(2).integers(0, len(index), (NUM_LOOKUPS, LOOKUP_ROWS))
    drawn = timed(lambda: [rows.rows_at(1, 0, window) for window in slots])
    return {"seconds": seconds, "microseconds_a_row": drawn / slots.size * 1e6}


def measure_start(src: str, directory: Path, lazy_rows: int | None) -> dict[str, float]:
    """Open a dataset and take one batch of 64 samples; what is imported is timed apart."""
    seconds = timed(lambda: importlib.import_module("sqlstream.stream.loader"))
    from sqlstream import StreamingDataLoader, StreamingDataset

    def take() -> None:
        with StreamingDataset(src, directory, shuffle_seed=1, show_progress=False, lazy_index_chunk_size=lazy_rows) as dataset:
            opened.append(time.perf_counter())
            next(iter(StreamingDataLoader(dataset, batch_size=64)))
            opened.append(time.perf_counter())

    opened = [time.perf_counter()]
    take()
    return {"imports": seconds, "open": opened[1] - opened[0], "batch": opened[2] - opened[1], "peak_mib": peak_mib()}


def start_figures(root: Path, num_rows: int) -> Iterator[tuple[str, float, str]]:
    """Yield (name, value, unit) of starts, medians of five."""
    path = root / "served" / "table.parquet"
    if not path.exists():
        path.parent.mkdir()
        make_table(path, num_rows)
    rounds = [in_new_process(measure_start, str(path), root / "cache", None) for _ in range(NUM_STARTS + 1)][
        1:
    ]  # the first one builds
    yield from medians("built", rounds)
    if find_nginx() is None:
        return
    log = root / "served.log"
    with Nginx(root / "served", latency_seconds=LATENCY_SECONDS, log=log) as server:
        rounds = []
        for number in range(NUM_STARTS):
            log.write_text("")
            url = f"{server.url}/table.parquet"
            rounds.append(in_new_process(measure_start, url, root / f"lazy-{number}", CHUNK_ROWS))
            rounds[-1] |= {
                "answers": len(lines := log.read_text().splitlines()),
                "bytes": sum(int(line.split()[0]) for line in lines),
            }
    yield from medians("lazy", rounds)
    yield "lazy_share_of_the_file", median(one["bytes"] for one in rounds) / path.stat().st_size, "x"


def medians(name: str, rounds: list[dict[str, float]]) -> Iterator[tuple[str, float, str]]:
    """Yield the median of each figure of several rounds."""
    for what, unit in (
        ("imports", "s"),
        ("open", "s"),
        ("batch", "s"),
        ("peak_mib", "MiB"),
        ("answers", ""),
        ("bytes", "bytes"),
    ):
        if what in rounds[0]:
            yield f"start_{name}_{what}", median(one[what] for one in rounds), unit


def figures(root: Path, num_rows: int) -> Iterator[tuple[str, float, str]]:
    """Yield (name, value, unit)."""
    small, large = root / "half.parquet", root / "table.parquet"
    for path, count in ((small, num_rows // 2), (large, num_rows)):
        if not path.exists():
            make_table(path, count)
    half = in_new_process(measure_build, small, root / "half")
    whole = in_new_process(measure_build, large, root / "index")
    yield "build", num_rows / whole["seconds"], "rows/s"
    yield "build_peak_memory", whole["peak_mib"], "MiB"
    yield "build_peak_memory_of_half_the_rows", half["peak_mib"], "MiB"
    if importlib.util.find_spec("adbc_driver_sqlite"):
        adbc = in_new_process(measure_adbc, large, root / "adbc.sqlite")
        yield "adbc_ingest", num_rows / adbc["seconds"], "rows/s"
        yield "build_beside_adbc", adbc["seconds"] / whole["seconds"], "x"
    index = build(large, root / "index")
    yield "index_file", index.path.stat().st_size / num_rows, "bytes/row"
    seconds = timed(lambda: build(large, root / "index", sql_query=FILTER))
    yield "filter", num_rows / seconds, "rows/s"
    if importlib.util.find_spec("duckdb"):
        duckdb = importlib.import_module("duckdb")
        query = FILTER.replace("SELECT *", "SELECT index").replace("dataframe", f"'{large}'")
        theirs = timed(lambda: duckdb.sql(query).fetchall())
        yield "duckdb_filter_on_parquet", num_rows / theirs, "rows/s"
        yield "filter_beside_duckdb", theirs / seconds, "x"
    yield "lookup", measure_lookups(index), "us/row"
    opened = in_new_process(measure_open, index.path)
    yield "open", opened["milliseconds"], "ms"
    yield "open_memory", opened["mib"], "MiB"
    yield "memory_after_lookups", opened["mib_after_lookups"], "MiB"
    weights = measure_weights(index, root / "index")
    yield "weights", num_rows / weights["seconds"], "rows/s"
    yield "weighted_row", weights["microseconds_a_row"], "us/row"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--only", choices=["start", "index"], help="one half of the figures")
    parser.add_argument("--keep", type=Path, help="keep tables here; a second run finds them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = options.keep or Path(temporary)
        root.mkdir(exist_ok=True)
        found = {}
        chosen = {"index": figures, "start": start_figures}
        parts = [part(root, options.rows) for name, part in chosen.items() if options.only in (None, name)]
        for name, value, unit in itertools.chain.from_iterable(parts):
            print(f"{name:40} {value:14,.2f} {unit}", flush=True)
            found[f"{name} [{unit}]"] = round(value, 4)
    print(json.dumps({"rows": options.rows, **found}))


if __name__ == "__main__":
    main()
