"""`sqlstream index measure`: columns that a function computes once for each row, as a table that later runs join.

    rows of the index ─ parts of `PART_ROWS` rows, some processes → <dst>/measured/<name>.parts/*.parquet → <name>.parquet

A part is there whole or not at all, and is named by its rows: a run that was stopped goes on with those that are missing. With
`--part i/n` a machine makes its share of the parts, beside a file that all machines see (`--out`), and `--merge` joins them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlstream.cli.options import Subcommands, add_command, add_storage_option, storage_options
from sqlstream.cli.output import print_facts, print_json
from sqlstream.errors import ConfigError, SampleError, StorageError, TransformError

if TYPE_CHECKING:
    from sqlstream.stream.dataset import StreamingDataset

PART_ROWS = 4096
"""Rows of a part: what is computed again after a crash, at most, by each process. Arbitrary."""
TOGETHER = 64
"""Rows whose objects are downloaded together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What is measured, and how; sent to the processes that do it."""

    src: str
    dst: str
    columns: tuple[str, ...]
    """The columns that are computed."""
    transform: str
    """`module:function`."""
    on: str
    """The column by which the result is joined."""
    options: dict[str, Any]
    """Further options of the dataset."""
    makes_null: bool
    """A row that fails has NULL; else it is an error."""
    part_rows: int = PART_ROWS
    """Rows of a part."""
    parts: str = ""
    """The directory of the parts."""

    def open(self) -> StreamingDataset:
        """Return the dataset of the rows, whose samples are not transformed."""
        from sqlstream.stream.dataset import StreamingDataset

        return StreamingDataset(self.src, self.dst, show_progress=False, **self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The parts that one of several machines makes: every n-th."""

    number: int
    """From 1 on."""
    count: int

    @classmethod
    def of(cls, text: str) -> Share:
        """Return the share that `i/n` says.

        Raises:
            ConfigError: It says none.
        """
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise ConfigError(f"--part {text} is no share: give i/n, such as 1/4 to 4/4 on four machines")
        return cls(number=int(number), count=int(count))

    def has(self, part: int) -> bool:
        """Return whether a part is one of them."""
        return part % self.count == self.number - 1


ALL = Share(number=1, count=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPart:
    """What became of a part."""

    num_rows: int
    num_computed: int
    """Rows for which the function was asked."""
    num_failed: int


def register(group: Subcommands) -> argparse.ArgumentParser:
    """Declare the command and its options, and return its parser."""
    measure = add_command(
        group, "measure", run_measure, "compute columns once, such as lengths, as a table that later runs join"
    )
    measure.add_argument("src", metavar="SRC", help="the source, as it is given to StreamingDataset")
    measure.add_argument("dst", metavar="DST", help="the cache directory, as it is given to StreamingDataset")
    measure.add_argument("--column", metavar="COL", nargs="+", required=True, help="columns that are computed")
    measure.add_argument(
        "--transform",
        metavar="MODULE:FUNCTION",
        required=True,
        help="from a sample to the value, or to a dict with all columns",
    )
    measure.add_argument("--on", metavar="COL", help="column that names a row (default: the key column)")
    measure.add_argument("--download", metavar="COL", nargs="+", default=[], help="columns whose objects the function reads")
    measure.add_argument("--sql", metavar="QUERY", help="which rows to take: SELECT … FROM dataframe WHERE …")
    measure.add_argument("--where", metavar="COND", help="one more condition on them")
    measure.add_argument("--num-workers", metavar="N", type=int, default=0, help="processes beside this one (default: none)")
    measure.add_argument(
        "--on-error", metavar="WHAT", default="raise", help="rows that fail: raise, or null (default: %(default)s)"
    )
    measure.add_argument("--data-type", metavar="TYPE", help="for a directory: which kind of file makes a sample, e.g. image")
    measure.add_argument(
        "--part", metavar="I/N", help="compute the I-th of N shares of the rows, on one of several machines; --merge joins them"
    )
    measure.add_argument("--merge", action="store_true", help="compute nothing: make the table of what --part runs have left")
    measure.add_argument("--out", metavar="FILE", help="where the table goes (default: DST/measured/…)")
    measure.add_argument("--overwrite", action="store_true", help="compute all rows again")
    add_storage_option(measure)
    return measure


def run_measure(options: argparse.Namespace) -> int:
    """Compute columns of all rows that lack them, and write them as one table."""
    if options.on_error not in ("raise", "null"):
        raise ConfigError(f"--on-error {options.on_error} is unknown: give raise or null")
    if options.num_workers < 0:
        raise ConfigError(f"--num-workers {options.num_workers} is out of range: give 0 or more")
    if (options.part or options.merge) and not options.out:
        raise ConfigError(
            "--part and --merge need --out FILE, on a file system that all machines see: the shares are kept beside it"
        )
    if options.part and options.merge:
        raise ConfigError("--part computes a share and --merge joins all of them: run --merge when every --part has ended")
    share = Share.of(options.part) if options.part else None
    if "" not in sys.path:
        sys.path.insert(0, "")  # functions are found where the command is started, as by `python -m`
    measure = Measure(
        src=options.src,
        dst=options.dst,
        columns=tuple(options.column),
        transform=options.transform,
        on=options.on or "",
        options={
            "columns_to_download": options.download,
            "sql_query": options.sql,
            "where": options.where,
            "data_type": options.data_type,
            "storage_options": storage_options(options.storage_option),
        },
        makes_null=options.on_error == "null",
    )
    document = measure_columns(
        measure, options.num_workers, out=options.out, overwrite=options.overwrite, share=share, merges=options.merge
    )  # fmt: skip
    if options.json:
        print_json(document)
    elif share is not None:
        print_facts([(name.replace("_", " "), str(value)) for name, value in document.items()])
    else:
        print_facts([(name.replace("_", " "), str(value)) for name, value in document.items()])
        name = Path(document["path"]).name.partition("-")[0]
        print(f"join it: StreamingDataset(…, join={{{name!r}: {document['path']!r}}}, on={document['on']!r})")
    return 0


def measure_columns(
    measure: Measure,
    num_workers: int,
    *,
    out: str | None,
    overwrite: bool,
    share: Share | None = None,
    merges: bool = False,
) -> dict[str, Any]:
    """Measure all rows, or a share of them, and return what is said of it.

    Args:
        measure: What is measured.
        num_workers: Processes; 0: this one.
        out: The file; None: in the cache directory, under a name that belongs to rows, columns and function.
        overwrite: What is there is computed again.
        share: Make no table, but these parts of it.
        merges: Compute nothing: make the table of the parts.

    Raises:
        ConfigError: No column names the rows, or the function is not there, or parts that are merged.
        SampleError, StorageError: A row cannot be measured.
    """
    from sqlstream.index.types.models import fingerprint

    _function(measure)
    with measure.open() as dataset:
        on = measure.on or dataset.index.key_column
        if on is None or on not in dataset.columns:
            known = ", ".join(dataset.columns)
            raise ConfigError(
                f"{measure.on or 'no column'} names the rows of {measure.src}: give --on one of {known}, without repeats"
            )
        num_rows = len(dataset)
        facts: dict[str, object] = {
            "rows": dataset.index.fingerprint,
            "columns": measure.columns,
            "function": measure.transform,
            "on": on,
        }
        content = dataset.index.content
        key = fingerprint(facts)
        path = Path(out) if out else dataset.cache.path / "measured" / f"{'-'.join(measure.columns)}-{key[:16]}.parquet"
        parts = path.with_suffix(".parts")
        if out:  # a name of the user's does not tell rows and functions apart, and other machines have the rows elsewhere
            facts["rows"] = dataset.index.fingerprint if content is None else content.to_dict()
            parts = path.with_name(f"{path.stem}-{fingerprint(facts)[:16]}.parts")
    measure = replace(measure, on=on, parts=str(parts))
    bounds = [bound for number, bound in enumerate(_bounds(measure, num_rows)) if (share or ALL).has(number)]
    if overwrite and not merges:
        path.unlink(missing_ok=True)
        for bound in bounds:
            _path_of(measure, *bound).unlink(missing_ok=True)
    done: list[MeasuredPart] = []
    if not path.exists() or (merges and overwrite):
        if not merges:
            parts.mkdir(parents=True, exist_ok=True)
            done = list(_run(measure, bounds, num_workers))
        if share is None:
            _check_whole(measure, num_rows)
            _merge(parts, path)
    return {
        "path": str(path),
        "on": on,
        "columns": ", ".join(measure.columns),
        "rows": num_rows if share is None else sum(stop - start for start, stop in bounds),
        "computed": sum(part.num_computed for part in done),
        "failed": sum(part.num_failed for part in done),
    }


def _bounds(measure: Measure, num_rows: int) -> list[tuple[int, int]]:
    """Return the rows of each part."""
    size = measure.part_rows
    return [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _check_whole(measure: Measure, num_rows: int) -> None:
    """Raise ConfigError if parts are missing."""
    missing = [bound for bound in _bounds(measure, num_rows) if not _path_of(measure, *bound).exists()]
    if missing:
        (start, stop), others = missing[0], len(missing) - 1
        raise ConfigError(
            f"rows {start} to {stop - 1} of {measure.src}{f', and {others} more such parts,' if others else ''} are not in "
            f"{measure.parts}: run every --part i/n with these options to its end, then --merge"
        )


def _function(measure: Measure) -> Any:
    from sqlstream.storage.backends.functions import load_function

    return load_function("--transform", measure.transform, [])


def _run(measure: Measure, bounds: list[tuple[int, int]], num_workers: int) -> Iterator[MeasuredPart]:
    """Yield what became of the parts that are not there yet."""
    from sqlstream.progress import progress

    num_rows = sum(stop - start for start, stop in bounds)
    missing = [bound for bound in bounds if not _path_of(measure, *bound).exists()]
    with progress(num_rows, " rows", "measuring", True) as bar, contextlib.ExitStack() as stack:
        bar.update(num_rows - sum(stop - start for start, stop in missing))
        if num_workers:
            context = get_context("fork")
            pool = stack.enter_context(
                ProcessPoolExecutor(min(num_workers, max(1, len(missing))), context, _begin_worker, (measure,))
            )
            found = pool.map(_measure_in_worker, missing)
        else:
            dataset = stack.enter_context(measure.open())
            found = (_measure_part(measure, dataset, bound) for bound in missing)
        for part in found:
            bar.update(part.num_rows)
            yield part


_worker: tuple[Measure, StreamingDataset] | None = None
"""What a process of the pool measures, and the dataset that it has opened."""


def _begin_worker(measure: Measure) -> None:
    global _worker
    _worker = (measure, measure.open())


def _measure_in_worker(bound: tuple[int, int]) -> MeasuredPart:
    assert _worker is not None, "the pool has begun"
    return _measure_part(*_worker, bound)


def _measure_part(measure: Measure, dataset: StreamingDataset, bound: tuple[int, int]) -> MeasuredPart:
    """Write the table of some rows."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    start, stop = bound
    num_computed = num_failed = 0
    columns: dict[str, list[Any]] = {name: [] for name in (measure.on, *measure.columns)}
    for first in range(start, stop, TOGETHER):
        numbers = range(first, min(first + TOGETHER, stop))
        ids = dataset.index.row_ids(np.array(numbers)).tolist()
        rows = dict(zip(numbers, dataset.index.rows(ids), strict=True))
        lacking = [number for number, row in rows.items() if any(row.get(name) is None for name in measure.columns)]
        for number, found in zip(lacking, _computed(measure, dataset, lacking), strict=True):
            num_computed, num_failed = num_computed + (found is not None), num_failed + (found is None)
            rows[number] |= found if found is not None else dict.fromkeys(measure.columns)
        for name, values in columns.items():
            values += [row[name] for row in rows.values()]
    path = _path_of(measure, start, stop)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    pq.write_table(pa.table(columns), temporary)
    os.replace(temporary, path)
    return MeasuredPart(num_rows=stop - start, num_computed=num_computed, num_failed=num_failed)


def _computed(measure: Measure, dataset: StreamingDataset, numbers: list[int]) -> Iterator[dict[str, Any] | None]:
    """Yield the values of rows; None for one that fails and may."""
    function = _function(measure)
    if not measure.makes_null:
        for number, sample in zip(numbers, dataset[numbers], strict=True):
            yield _values(measure, function, sample, number)
        return
    for number in numbers:
        try:
            yield _values(measure, function, dataset[number], number)
        except (SampleError, StorageError):
            yield None


def _values(measure: Measure, function: Callable[..., Any], sample: dict[str, Any], number: int) -> dict[str, Any]:
    """Return what a function gives for a row.

    Raises:
        TransformError: It fails, or gives no value.
    """
    try:
        found = function(sample)
    except Exception as error:
        raise TransformError(
            f"--transform {measure.transform} failed on row {number}: {type(error).__name__}: {error}"
        ) from error
    values = found if isinstance(found, dict) else dict.fromkeys(measure.columns if len(measure.columns) == 1 else (), found)
    missing = [name for name in measure.columns if values.get(name) is None]
    if missing:
        raise TransformError(
            f"--transform {measure.transform} gave no {', '.join(missing)} for row {number}: return the value of a single "
            "--column, or a dict that has all of them"
        )
    return {name: value.item() if hasattr(value := values[name], "item") else value for name in measure.columns}


def _path_of(measure: Measure, start: int, stop: int) -> Path:
    """Return the file of a part."""
    return Path(measure.parts) / f"{start:012d}-{stop:012d}.parquet"


def _merge(parts: Path, path: Path) -> None:
    """Write all parts as one table, in the order of their rows, and remove them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = sorted(parts.glob("*.parquet"))
    schema = pa.unify_schemas([pq.read_schema(file) for file in files], promote_options="permissive")
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    with pq.ParquetWriter(temporary, schema) as writer:
        for file in files:
            writer.write_table(pq.read_table(file).cast(schema))
    os.replace(temporary, path)
    shutil.rmtree(parts, ignore_errors=True)
