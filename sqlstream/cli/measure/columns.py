"""The parts of all rows, or of a share of them, computed by some processes and joined to one table."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlstream.cli.measure.part import Measure, MeasuredPart, function_of, measure_part, path_of
from sqlstream.errors import ConfigError, OutputExistsError, TransformError
from sqlstream.sample_types import SAMPLE_FIELDS

if TYPE_CHECKING:
    from sqlstream.stream.dataset import StreamingDataset

_MADE_OF = "sqlstream.measured"
"""What a table says of itself in its metadata: a fingerprint of rows, columns, function and key."""
_NAME_BYTES = 200
"""Most bytes of columns in the name of a file, which has 255, with those of the fingerprint and the extension."""
_LOOK_SECONDS = 2.0
"""How often a process of the pool looks whether the one that gives it work lives; as helpers do."""


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
        ConfigError: No column names the rows, the function is not there, or parts that are merged; columns or `out` have
            names under which nothing can be joined.
        OutputExistsError: `out` is another table, or of the files that the rows are read from.
        SampleError, StorageError: A row cannot be measured.
    """
    from sqlstream.index.types.models import fingerprint

    function_of(measure)
    with measure.open() as dataset:
        on = measure.on or dataset.index.key_column
        if on is None or on not in dataset.columns:
            known = ", ".join(dataset.columns)
            raise ConfigError(
                f"{measure.on or 'no column'} names the rows of {measure.src}: give --on one of {known}, without repeats"
            )
        if on != dataset.index.key_column:  # which is looked at as the index is made
            _check_keys(dataset, on)
        num_rows = len(dataset)
        facts: dict[str, object] = {
            "rows": dataset.index.fingerprint,
            "columns": measure.columns,
            "function": measure.transform,
            "on": on,
        }
        content = dataset.index.content
        key = fingerprint(facts)
        _check_columns(measure.columns, on)
        if out:
            _check_place(measure, Path(out), dataset.index.path)
        path = Path(out) if out else dataset.cache.path / "measured" / f"{_file_name(measure.columns)}-{key[:16]}.parquet"
        parts = path.with_suffix(".parts")
        if out:  # a name of the user's does not tell rows and functions apart, and other machines have the rows elsewhere
            facts["rows"] = dataset.index.fingerprint if content is None else content.to_dict()
            parts = path.with_name(f"{path.stem}-{fingerprint(facts)[:16]}.parts")
    measure = replace(measure, on=on, parts=str(parts))
    if out and path.exists() and not overwrite:
        _check_there(measure, path, fingerprint(facts))
    bounds = [bound for number, bound in enumerate(_bounds(measure, num_rows)) if (share or ALL).has(number)]
    if overwrite and not merges:
        path.unlink(missing_ok=True)
        for bound in bounds:
            path_of(measure, *bound).unlink(missing_ok=True)
    done: list[MeasuredPart] = []
    if not path.exists() or (merges and overwrite):
        if not merges:
            parts.mkdir(parents=True, exist_ok=True)
            done = list(_run(measure, bounds, num_workers))
        if share is None:
            _check_whole(measure, num_rows)
            _merge(measure, path, fingerprint(facts))
    if share is None:  # also those that a run which was killed behind its table has left
        shutil.rmtree(parts, ignore_errors=True)
    return {
        "path": str(path),
        "on": on,
        "columns": ", ".join(measure.columns),
        "rows": num_rows if share is None else sum(stop - start for start, stop in bounds),
        "computed": sum(part.num_computed for part in done),
        "failed": sum(part.num_failed for part in done),
    }


def _check_columns(columns: tuple[str, ...], on: str) -> None:
    """Raise ConfigError where no run could join columns of these names."""
    for name in columns:
        if not name or name in SAMPLE_FIELDS:
            raise ConfigError(f"--column {name!r} is no name of a column: give one that is not empty, and no field of samples")
    if on in columns or len(set(columns)) < len(columns):
        raise ConfigError(
            f"--column {' '.join(columns)} beside --on {on} names a column twice: compute each one once, and not the key"
        )


def _file_name(columns: tuple[str, ...]) -> str:
    """Return the start of a file's name: names of columns may be paths, and longer than a file's."""
    return "-".join(columns).replace("/", "_").encode()[:_NAME_BYTES].decode(errors="ignore")


def _check_keys(dataset: StreamingDataset, on: str) -> None:
    """Raise ConfigError where a column cannot name rows: no run could join what is computed."""
    from sqlstream.index.build.join import can_be_key
    from sqlstream.index.types.models import quote

    column = next(column for column in dataset.index.columns if column.name == on)
    if column.is_in_place or not can_be_key(column.field.type):
        raise ConfigError(
            f"--on {on} has values of type {column.type}, which cannot name rows: give a column of integers or text"
        )
    key = quote(column.physical)
    query = f"SELECT {key} AS value FROM dataframe WHERE {key} IS NOT NULL GROUP BY {key} HAVING count(*) > 1 LIMIT 1"
    for value in dataset.query(query).to_pylist():
        raise ConfigError(f"--on {on} names no row: several rows have {value['value']!r} there: give a column without repeats")


def _check_place(measure: Measure, path: Path, index: Path) -> None:
    """Raise OutputExistsError where a table would be, or replace, one of the files that the rows are read from.

    Raises:
        ConfigError: No run could join a table of this name.
    """
    from sqlstream.index.info import describe
    from sqlstream.index.sources.places.database import file_of
    from sqlstream.index.sources.places.wildcard import anchored, has_wildcard, matcher
    from sqlstream.storage.base import urls

    place = Path(os.path.realpath(path))
    for url in [file.url for file in describe(index).sources]:
        file = file_of(url) if urls.is_remote(url) else urls.local_path(url)
        if file is None:
            continue
        source = Path(os.path.realpath(file))
        if place == source or (url.endswith("/") and place.is_relative_to(source)):
            is_all = urls.is_remote(url) or place == Path(os.path.realpath(measure.src))
            where = "is the source" if is_all else f"is of the source {measure.src}"
            raise OutputExistsError(f"--out {path} {where}: give another file")
    is_wildcard = not urls.is_remote(measure.src) and has_wildcard(measure.src)
    if is_wildcard and matcher(anchored(measure.src)).fullmatch(os.path.abspath(path)):
        raise OutputExistsError(f"--out {path} would be read as a file of the source {measure.src}: give another file")
    if path.suffix != ".parquet":
        raise ConfigError(
            f"--out {path} would not be read as what it is: a table of Parquet: give a name that ends in .parquet"
        )


def _check_there(measure: Measure, path: Path, made_of: str) -> None:
    """Raise OutputExistsError where a file is not the table that is asked for."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError):
        schema = pa.schema([])
    said = (schema.metadata or {}).get(_MADE_OF.encode())
    is_it = schema.names == [measure.on, *measure.columns] if said is None else said.decode() == made_of
    if not is_it:  # earlier versions said nothing
        raise OutputExistsError(
            f"--out {path} is there, and is no table of {', '.join(measure.columns)} by {measure.transform} for the rows of "
            f"{measure.src}: give another file, or --overwrite to replace it"
        )


def _bounds(measure: Measure, num_rows: int) -> list[tuple[int, int]]:
    """Return the rows of each part."""
    size = measure.part_rows
    return [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _check_whole(measure: Measure, num_rows: int) -> None:
    """Raise ConfigError if parts are missing."""
    missing = [bound for bound in _bounds(measure, num_rows) if not path_of(measure, *bound).exists()]
    if missing:
        (start, stop), others = missing[0], len(missing) - 1
        raise ConfigError(
            f"rows {start} to {stop - 1} of {measure.src}{f', and {others} more such parts,' if others else ''} are not in "
            f"{measure.parts}: run every --part i/n with these options to its end, then --merge"
        )


def _run(measure: Measure, bounds: list[tuple[int, int]], num_workers: int) -> Iterator[MeasuredPart]:
    """Yield what became of the parts that are not there yet."""
    from sqlstream.progress import progress

    num_rows = sum(stop - start for start, stop in bounds)
    missing = [bound for bound in bounds if not path_of(measure, *bound).exists()]
    with progress(num_rows, " rows", "measuring", True) as bar, contextlib.ExitStack() as stack:
        bar.update(num_rows - sum(stop - start for start, stop in missing))
        if num_workers:
            context = get_context("fork")
            pool = stack.enter_context(
                ProcessPoolExecutor(min(num_workers, max(1, len(missing))), context, _begin_worker, (measure, os.getpid()))
            )
            found = pool.map(_measure_in_worker, missing)
        else:
            dataset = stack.enter_context(measure.open())
            found = (measure_part(measure, dataset, bound) for bound in missing)
        try:
            for part in found:
                bar.update(part.num_rows)
                yield part
        except BrokenProcessPool as error:
            raise TransformError(
                f"a process of --num-workers that ran --transform {measure.transform} died (killed, for want of memory, say): "
                "the same command goes on with the parts that are missing; give fewer --num-workers if it dies again"
            ) from error


_worker: tuple[Measure, StreamingDataset] | None = None
"""What a process of the pool measures, and the dataset that it has opened."""


def _begin_worker(measure: Measure, parent_pid: int) -> None:
    global _worker
    threading.Thread(target=_end_with, args=(parent_pid,), name="parent", daemon=True).start()
    _worker = (measure, measure.open())


def _end_with(parent_pid: int) -> None:
    """End this process when its parent has died: it would wait for work for ever, since its siblings keep the pool's pipes."""
    while os.getppid() == parent_pid:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


def _measure_in_worker(bound: tuple[int, int]) -> MeasuredPart:
    assert _worker is not None, "the pool has begun"
    return measure_part(*_worker, bound)


def _merge(measure: Measure, path: Path, made_of: str) -> None:
    """Write all parts as one table, in the order of their rows.

    Raises:
        TransformError: Parts have values of different types.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = Path(measure.parts)
    files = sorted(parts.glob("*.parquet"))
    try:
        schema = pa.unify_schemas([pq.read_schema(file) for file in files], promote_options="permissive")
    except pa.ArrowException as error:
        raise TransformError(
            f"--transform {measure.transform} gave values of several types ({error}): return one type for all rows, and give "
            "--overwrite"
        ) from error
    schema = schema.with_metadata({_MADE_OF: made_of})
    temporary = parts / f"{uuid.uuid4().hex[:8]}.tmp"  # what a kill leaves of it goes with the parts
    with pq.ParquetWriter(temporary, schema) as writer:
        for file in files:
            writer.write_table(pq.read_table(file).cast(schema))
    os.replace(temporary, path)
