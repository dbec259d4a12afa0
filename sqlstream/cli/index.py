"""`sqlstream index`: build an index before the first run, look at the indexes of a directory, query and export one."""

from __future__ import annotations

import argparse
import contextlib
import csv
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sqlstream.cli.options import Subcommands, add_command, add_group, add_storage_option, storage_options
from sqlstream.cli.output import Size, percent, print_facts, print_json, print_table
from sqlstream.config import IndexOptions, LazyOptions
from sqlstream.errors import ConfigError, MissingDependencyError, StorageError
from sqlstream.storage.base import urls

if TYPE_CHECKING:
    from sqlstream.index.types.models import IndexInfo

T = TypeVar("T", int, float)
_SPELLING = {
    "index_col_name": "--key-column",
    "columns_to_download": "--download",
    "allow_missing_columns=True": "--allow-missing-columns",
    "lazy_index_chunk_size": "--lazy",
    "label_column": "--label-column",
    "storage_options": "--storage-option",
    "sql_engine": "--sql-engine",
    "sql_query": "--sql",
    "path_prefix": "--path-prefix",
    "data_type": "--data-type",
}
"""What options are called here, whose names in Python stand in errors."""


def register(subcommands: Subcommands) -> None:
    """Declare the group's commands and options."""
    group = add_group(subcommands, "index", "build an index, look at it, query it")
    build = add_command(group, "build", run_build, "build the index of a source, or find the one that is there")
    build.add_argument("src", metavar="SRC", help="table file, wildcard, text file of paths, or directory; local or remote")
    info = add_command(group, "info", run_info, "show the indexes of a cache directory: sources, rows, columns")
    query = add_command(group, "query", run_query, "run one SELECT on an index; its table is called dataframe")
    explain = add_command(group, "explain", run_explain, "count what a filter would keep, for each source file")
    export = add_command(group, "export", run_export, "write the rows of an index, filtered, weighted, shuffled, split")
    verify = add_command(group, "verify", run_verify, "read every index file whole; exit code 1 if one is damaged")
    verify.add_argument("--repair", action="store_true", help="remove what is damaged: the next run builds it again")
    for parser in (build, info, query, explain, export, verify):
        parser.add_argument("dst", metavar="DST", help="the cache directory, as it is given to StreamingDataset")
    build.add_argument("--data-type", metavar="TYPE", help="for a directory: which kind of file makes a sample, e.g. image")
    build.add_argument(
        "--key-column", metavar="COL", help="column that names a sample (default: index, where it can; else the row number)"
    )
    build.add_argument("--sql", metavar="QUERY", help="which rows to take: SELECT … FROM dataframe WHERE …")
    build.add_argument("--where", metavar="COND", help="one more condition on them, such as 'score > 6'")
    build.add_argument(
        "--sql-engine", metavar="NAME", default="sqlite", help="sqlite, or duckdb for what SQLite lacks (default: %(default)s)"
    )
    build.add_argument("--path-prefix", metavar="URL", help="where relative paths start, instead of the place of the source")
    build.add_argument("--label-column", metavar="COL", help="for a directory: a column for the name of each sample's folder")
    build.add_argument("--download", metavar="COL", nargs="+", default=[], help="columns whose values are URLs or paths")
    build.add_argument("--allow-missing-columns", action="store_true", help="a --download column that is not there is NULL")
    build.add_argument("--delimiter", metavar="CHAR", help="delimiter of CSV files")
    build.add_argument("--encoding", metavar="NAME", help="encoding of CSV and JSON files, such as latin-1 (default: UTF-8)")
    build.add_argument(
        "--lazy", metavar="ROWS", type=int, help="leave the rows in their Parquet files; at least so many at a time"
    )
    add_storage_option(build)
    build.set_defaults(spelling=_SPELLING)
    query.add_argument("sql", metavar="SQL", help="SELECT … FROM dataframe …; it can read the index's rows and nothing else")
    info.add_argument("--ranges", action="store_true", help="read all rows: show each column's nulls, least and greatest value")
    explain.add_argument("sql", metavar="SQL", help="SELECT * FROM dataframe WHERE …")
    _add_export_options(export)
    for parser in (query, explain, export):
        parser.add_argument(
            "--index", metavar="FINGERPRINT", help="which index, by the start of its fingerprint; needed if there are several"
        )
    query.add_argument("--csv", action="store_true", help="print CSV")


def _add_export_options(export: argparse.ArgumentParser) -> None:
    export.add_argument(
        "out",
        metavar="OUT",
        help="the file (.parquet, .arrow, .csv, .jsonl); local, or a URL that fsspec can write, such as s3://…",
    )
    export.add_argument("--overwrite", action="store_true", help="replace files that are there")
    export.add_argument("--sql", metavar="QUERY", help="which rows to take: SELECT … FROM dataframe WHERE …")
    export.add_argument("--where", metavar="COND", help="one more condition on them, such as 'score > 6'")
    export.add_argument("--weights", metavar="EXPR", help="how often each row comes, such as '1 + 3 * (score > 6)'")
    export.add_argument("--num-rows", metavar="N", type=int, help="how many rows to draw (default: as many as are selected)")
    export.add_argument("--shuffle-seed", metavar="SEED", type=int, help="shuffle them; without, they keep their order")
    export.add_argument(
        "--split", metavar="NAME=SHARE", action="append", default=[], help="a file of its own for a share of the rows, by key"
    )
    export.add_argument(
        "--max-rows",
        metavar="NAME=N",
        action="append",
        default=[],
        help="at most so many rows of a split; the others go to the rest",
    )
    export.add_argument(
        "--row-group-rows", metavar="N", type=int, default=100_000, help="rows of a row group (default: %(default)s)"
    )


def run_build(options: argparse.Namespace) -> int:
    """Build an index where a dataset with the same options looks for it."""
    from sqlstream.cache import Cache
    from sqlstream.index.build.build import open_index
    from sqlstream.index.build.lazy_build import open_lazy_index
    from sqlstream.index.info import describe

    wanted = IndexOptions(
        src=options.src,
        data_type=options.data_type,
        key_column=options.key_column,
        columns_to_download=tuple(options.download),
        sql_query=options.sql,
        where=options.where,
        sql_engine=options.sql_engine,
        path_prefix=options.path_prefix,
        label_column=options.label_column,
        allow_missing_columns=options.allow_missing_columns,
        delimiter=options.delimiter,
        encoding=options.encoding,
        lazy=None if options.lazy is None else LazyOptions(chunk_rows=options.lazy),
    )
    opener = open_index if wanted.lazy is None else open_lazy_index
    with Cache(options.dst, storage_options=storage_options(options.storage_option)) as cache:
        index = opener(wanted, cache.path / "index", cache.fetcher, identity=cache.identity)
        info = describe(index.path, index.selection)
        index.close()
    if options.json:
        print_json(_as_document(info))
    else:
        _print_info(info)
    return 0


def run_verify(options: argparse.Namespace) -> int:
    """Print which index files are damaged; return 1 if one is left."""
    from sqlstream.index.info import verify_indexes

    directory = Path(options.dst) / "index"
    if not directory.is_dir():
        raise ConfigError(f"{options.dst} holds no index: check the path")
    problems, num_files = verify_indexes(directory, repair=options.repair)
    num_left = sum(not problem.repaired for problem in problems)
    if options.json:
        print_json({"findings": problems, "num_files": num_files, "num_left": num_left})
    elif problems:
        print_table(["file", "state", "explanation"], [
            [Path(found.path).name, "removed" if found.repaired else "left", found.explanation] for found in problems
        ])  # fmt: skip
    else:
        print(f"nothing found: all {num_files} index files are as they were written")
    return 1 if num_left else 0


def run_info(options: argparse.Namespace) -> int:
    """Print what each index of a directory is."""
    from sqlstream.index.explain import column_ranges
    from sqlstream.index.file.index import Index

    infos = find_indexes(options.dst)
    ranges = [column_ranges(Index(Path(info.path))) if options.ranges and not info.is_lazy else [] for info in infos]
    if options.json:
        documents = [
            {**_as_document(info), **({"ranges": found} if found else {})} for info, found in zip(infos, ranges, strict=True)
        ]
        print_json({"indexes": documents})
        return 0
    for number, (info, found) in enumerate(zip(infos, ranges, strict=True)):
        if number:
            print()
        _print_info(info)
        if found:
            rows = [(one.name, one.num_nulls, _short(one.least), _short(one.greatest)) for one in found]
            print_table(["column", "nulls", "least", "greatest"], rows)
    return 0


def run_explain(options: argparse.Namespace) -> int:
    """Print how many rows of each source file a filter would keep."""
    from sqlstream.index.explain import explain
    from sqlstream.index.file.index import Index

    counts = explain(Index(choose_index(options.dst, options.index)), options.sql)
    num_rows, num_kept = sum(count.num_rows for count in counts), sum(count.num_kept for count in counts)
    if options.json:
        print_json({"num_rows": num_rows, "num_kept": num_kept, "sources": counts})
        return 0
    rows = [(count.source, count.num_rows, count.num_kept, percent(count.num_kept, count.num_rows)) for count in counts]
    print_table(["source", "rows", "kept", "share"], [*rows, ("all", num_rows, num_kept, percent(num_kept, num_rows))])
    return 0


def run_export(options: argparse.Namespace) -> int:
    """Write an index as files, to a temporary place first: what has its final name is whole."""
    from sqlstream.index.build.select import open_selection
    from sqlstream.index.export import REST, ExportOptions, export
    from sqlstream.index.export_formats import check_extension
    from sqlstream.index.file.index import Index
    from sqlstream.index.sql.expressions import with_where
    from sqlstream.index.weights import open_weights

    check_extension(urls.redact(options.out))
    wanted = ExportOptions(
        seed=options.shuffle_seed,
        num_rows=options.num_rows,
        splits=dict(_named("--split", text, float, "val=0.1") for text in options.split),
        max_rows=dict(_named("--max-rows", text, int, "val=10000") for text in options.max_rows),
        row_group_rows=options.row_group_rows,
        extension=Path(options.out).suffix,
    )
    targets = _targets(options.out, [*wanted.splits, REST] if wanted.splits else [""], overwrite=options.overwrite)
    index = Index(choose_index(options.dst, options.index))
    place = index.path.parent
    if (query := with_where(options.sql, options.where)) is not None:
        filtered = IndexOptions(src=index.src, key_column=index.key_column, sql_query=query)
        index = open_selection(index, filtered, place, show_progress=True)
    weights = None if options.weights is None else open_weights(index, options.weights, place, show_progress=True)
    with tempfile.TemporaryDirectory(prefix="sqlstream-export-") as directory:
        files = export(index, wanted, Path(directory), weights)
        for name, file in files.items():
            _put(file.path, targets[name])
    if options.json:
        print_json({"files": list(targets.values()), "num_rows": [file.num_rows for file in files.values()]})
    else:
        print_table(["rows", "file"], [[file.num_rows, targets[name]] for name, file in files.items()])
    return 0


def _named(option: str, text: str, number: Callable[[str], T], example: str) -> tuple[str, T]:
    """Return the name and the number of NAME=NUMBER."""
    name, _, value = text.partition("=")
    try:
        return name, number(value)
    except ValueError:
        raise ConfigError(f"{option}={text!r} is no split and number: write {option} {example}, say") from None


def _targets(out: str, splits: Iterable[str], *, overwrite: bool) -> dict[str, str]:
    """Return where the file of each split goes ('': there are none).

    Raises:
        ConfigError: One is there already.
    """
    extension = Path(out).suffix
    targets = {split: f"{out.removesuffix(extension)}-{split}{extension}" if split else out for split in splits}
    for target in targets.values():
        if not overwrite and _is_there(target):
            raise ConfigError(f"{urls.redact(target)} is there already: add --overwrite to replace it, or give another name")
    return targets


def _is_there(target: str) -> bool:
    if not urls.is_remote(target):
        return urls.local_path(target).exists()
    with _writing(target):
        filesystem, path = _filesystem(target)
        return bool(filesystem.exists(path))


def _put(path: Path, target: str) -> None:
    """Bring a finished file to its place, local or remote; big ones go in parts."""
    with _writing(target):
        if urls.is_remote(target):
            filesystem, remote_path = _filesystem(target)
            filesystem.put_file(str(path), remote_path)
        else:
            part = f"{urls.local_path(target)}.{os.getpid()}.part"
            shutil.copyfile(path, part)
            os.replace(part, urls.local_path(target))


def _filesystem(target: str) -> tuple[Any, str]:
    import fsspec

    return fsspec.core.url_to_fs(target)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _writing(target: str) -> Iterator[None]:
    """Turn the errors of writing a file into ours."""
    name = urls.redact(target)
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(f"writing to {name} needs a package ({error}): install it") from error
    except OSError as error:
        raise StorageError(f"{name} cannot be written ({error}): check the path, and your rights") from error


def run_query(options: argparse.Namespace) -> int:
    """Print the result of a query on one index file."""
    from sqlstream.index.file.index import Index
    from sqlstream.index.sql import sandbox

    if options.csv and options.json:
        raise ConfigError("--csv and --json exclude each other: give one of them")
    index = Index(choose_index(options.dst, options.index))
    try:
        names, rows = sandbox.run_query(index, options.sql)
    finally:
        index.close()
    cells = [[_cell(value) for value in row] for row in rows]
    if options.json:
        print_json({"columns": names, "rows": cells})
    elif options.csv:
        _print_csv(names, cells)
    else:
        print_table(names, cells)
    return 0


def find_indexes(dst: str) -> list[IndexInfo]:
    """Return the indexes of a cache directory, at least one.

    Raises:
        ConfigError: There is none.
    """
    from sqlstream.index.info import list_indexes

    infos = list_indexes(Path(dst) / "index")
    if not infos:
        raise ConfigError(f"{dst} holds no index: check the path, or build one with `sqlstream index build SRC {dst}`")
    return infos


def choose_index(dst: str, beginning: str | None) -> Path:
    """Return the index file whose fingerprint begins so; the only one if nothing is given.

    A selection is positions in an index file; queries run on all rows, so only files can be chosen.

    Raises:
        ConfigError: None, or several.
    """
    infos = find_indexes(dst)
    files = {Path(info.path).stem: Path(info.path) for info in infos if not info.is_lazy}
    if not files:
        raise ConfigError(
            f"{dst} holds lazy indexes only, whose rows are in {infos[0].src}: build one with `sqlstream index build SRC {dst}`"
        )
    chosen = [name for name in files if name.startswith(beginning or "")]
    if len(chosen) != 1:
        problem = "there are several" if beginning is None else f"--index={beginning!r} fits {len(chosen)} of them"
        raise ConfigError(f"which index of {dst}? {problem}: give --index with the start of one of {', '.join(files)}")
    return files[chosen[0]]


def _print_info(info: IndexInfo) -> None:
    is_selection = info.num_selected != info.num_rows or info.fingerprint != Path(info.path).stem
    print_facts(
        [
            ("index", info.fingerprint),
            ("source", info.src + (f" ({len(info.sources):,} files)" if len(info.sources) > 1 else "")),
            ("rows", f"{info.num_selected:,}" + (f" selected of {info.num_rows:,}" if is_selection else _where(info))),
            *([("query", info.query)] if info.query else []),
            ("key column", info.key_column or "none: row numbers are the keys"),
            ("columns", ", ".join(f"{column.name} ({column.type})" for column in info.columns)),
            ("size", str(Size(info.size_bytes))),
            ("created", info.created_at),
            ("file", info.path),
        ]
    )


def _where(info: IndexInfo) -> str:
    return " (lazy: they stay in their files)" if info.is_lazy else ""


def _as_document(info: IndexInfo) -> dict[str, object]:
    return {
        "fingerprint": info.fingerprint,
        "path": info.path,
        "src": info.src,
        "num_rows": info.num_rows,
        "num_selected": info.num_selected,
        "key_column": info.key_column,
        "query": info.query,
        "size_bytes": info.size_bytes,
        "created_at": info.created_at,
        "is_lazy": info.is_lazy,
        "columns": [{"name": column.name, "sql_name": column.physical, "type": column.type} for column in info.columns],
        "sources": info.sources,
    }


def _short(value: Any) -> Any:
    """Return a value short enough for a table."""
    cell = _cell(value)
    return cell[:37] + "…" if isinstance(cell, str) and len(cell) > 38 else cell


def _cell(value: Any) -> Any:
    """Return a value as JSON, CSV and tables can show it: bytes in hex; infinity, which JSON lacks, as text."""
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _print_csv(names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
