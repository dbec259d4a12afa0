"""`sqlstream index`: build an index before the first run, look at the indexes of a directory, query one."""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlstream.cli.options import Subcommands, add_command, add_group
from sqlstream.cli.output import Size, print_facts, print_json, print_table
from sqlstream.config import IndexOptions
from sqlstream.errors import ConfigError

if TYPE_CHECKING:
    from sqlstream.index.models import IndexInfo


def register(subcommands: Subcommands) -> None:
    """Declare the group's commands and options."""
    group = add_group(subcommands, "index", "build an index, look at it, query it")
    build = add_command(group, "build", run_build, "build the index of a source, or find the one that is there")
    build.add_argument("src", metavar="SRC", help="table file, wildcard, text file of paths, or directory; local or remote")
    info = add_command(group, "info", run_info, "show the indexes of a cache directory: sources, rows, columns")
    query = add_command(group, "query", run_query, "run one SELECT on an index; its table is called dataframe")
    for parser in (build, info, query):
        parser.add_argument("dst", metavar="DST", help="the cache directory, as it is given to StreamingDataset")
    build.add_argument("--data-type", metavar="TYPE", help="for a directory: which kind of file makes a sample, e.g. image")
    build.add_argument("--key-column", metavar="COL", default="index", help="column that names a sample (default: %(default)s)")
    build.add_argument("--sql", metavar="QUERY", help="which rows to take: SELECT … FROM dataframe WHERE …")
    build.add_argument("--download", metavar="COL", nargs="+", default=[], help="columns whose values are URLs or paths")
    query.add_argument("sql", metavar="SQL", help="SELECT … FROM dataframe …; it can read the index's rows and nothing else")
    query.add_argument(
        "--index", metavar="FINGERPRINT", help="which index, by the start of its fingerprint; needed if there are several"
    )
    query.add_argument("--csv", action="store_true", help="print CSV")


def run_build(options: argparse.Namespace) -> int:
    """Build an index where a dataset with the same options looks for it."""
    from sqlstream.cache import Cache
    from sqlstream.index.build import open_index
    from sqlstream.index.info import describe

    wanted = IndexOptions(
        src=options.src,
        data_type=options.data_type,
        key_column=options.key_column,
        columns_to_download=tuple(options.download),
        sql_query=options.sql,
    )
    with Cache(options.dst) as cache:
        index = open_index(wanted, cache.path / "index", cache.fetcher)
        info = describe(index.path, index.selection)
        index.close()
    if options.json:
        print_json(_as_document(info))
    else:
        _print_info(info)
    return 0


def run_info(options: argparse.Namespace) -> int:
    """Print what each index of a directory is."""
    infos = find_indexes(options.dst)
    if options.json:
        print_json({"indexes": [_as_document(info) for info in infos]})
        return 0
    for number, info in enumerate(infos):
        if number:
            print()
        _print_info(info)
    return 0


def run_query(options: argparse.Namespace) -> int:
    """Print the result of a query on one index file."""
    from sqlstream.index import sandbox
    from sqlstream.index.store import Index

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
    files = {Path(info.path).stem: Path(info.path) for info in find_indexes(dst)}
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
            ("rows", f"{info.num_selected:,}" + (f" selected of {info.num_rows:,}" if is_selection else "")),
            *([("query", info.query)] if info.query else []),
            ("key column", info.key_column),
            ("columns", ", ".join(f"{column.name} ({column.type})" for column in info.columns)),
            ("size", str(Size(info.size_bytes))),
            ("created", info.created_at),
            ("file", info.path),
        ]
    )


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
        "columns": [{"name": column.name, "sql_name": column.physical, "type": column.type} for column in info.columns],
        "sources": info.sources,
    }


def _cell(value: Any) -> Any:
    """Return a value as JSON, CSV and tables can show it: bytes in hex; infinity, which JSON lacks, as text."""
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _print_csv(names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
