"""`sqlstream index`: build an index before the first run, look at the indexes of a directory, query and export one."""

from __future__ import annotations

import argparse
import contextlib
import csv
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlstream.cli import export, measure
from sqlstream.cli.choice import choose_index, find_indexes, no_index
from sqlstream.cli.options import Subcommands, add_command, add_group, add_storage_option, place, storage_options
from sqlstream.cli.output import Size, percent, print_facts, print_json, print_table
from sqlstream.config import IndexOptions, JoinOptions, LazyOptions, StorageOptions
from sqlstream.errors import ConfigError

if TYPE_CHECKING:
    from sqlstream.cache.session import ChosenUnit
    from sqlstream.index.file.index import Index
    from sqlstream.index.types.models import Column, IndexInfo, JoinedTable

_SPELLING = {
    "index_col_name": "--key-column",
    "columns_to_download": "--download",
    "allow_missing_columns=True": "--allow-missing-columns",
    "lazy_index_chunk_size": "--lazy",
    "label_column": "--label-column",
    "index_members": "--index-members",
    "damaged_shards": "--damaged-shards",
    "source_options={'allow_pipes': True}": "--allow-pipes",
    "storage_options": "--storage-option",
    "index_store": "--index-store",
    "sql_engine": "--sql-engine",
    "sql_query": "--sql",
    "path_prefix": "--path-prefix",
    "data_type": "--data-type",
    "missing='null'": "--missing null",
    "missing='drop'": "--missing drop",
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
    written = export.register(group)
    measure.register(group).set_defaults(spelling=_SPELLING)
    verify = add_command(group, "verify", run_verify, "read every index file whole; exit code 1 if one is damaged")
    verify.add_argument("--repair", action="store_true", help="remove what is damaged: the next run builds it again")
    push = add_command(group, "push", run_push, "put an index into a store that nodes share")
    pull = add_command(group, "pull", run_pull, "get an index out of a store that nodes share")
    for parser in (build, info, query, explain, verify, push, pull):
        parser.add_argument("dst", metavar="DST", type=place, help="the cache directory, as it is given to StreamingDataset")
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
    build.add_argument(
        "--index-members",
        metavar="NAME",
        nargs="+",
        default=[],
        help="small parts of shards whose values are columns: json txt cls",
    )
    build.add_argument(
        "--damaged-shards", metavar="WHAT", default="raise", help="raise, skip or until_damage (default: %(default)s)"
    )
    build.add_argument("--allow-pipes", action="store_true", help="run commands that the source spells as pipe:…")
    build.add_argument("--download", metavar="COL", nargs="+", default=[], help="columns whose values are URLs or paths")
    build.add_argument("--allow-missing-columns", action="store_true", help="a --download column that is not there is NULL")
    build.add_argument("--delimiter", metavar="CHAR", help="delimiter of CSV files")
    build.add_argument("--encoding", metavar="NAME", help="encoding of CSV and JSON files, such as latin-1 (default: UTF-8)")
    build.add_argument(
        "--lazy", metavar="ROWS", type=int, help="leave the rows in their Parquet files, at least so many at a time, or shards"
    )
    store_help = "where nodes share indexes: it is looked for there before it is built, and put there after"
    build.add_argument("--index-store", metavar="URL", help=store_help)
    build.add_argument(
        "--join", metavar="NAME=TABLE", action="append", default=[], help="a table whose columns the rows get; may be repeated"
    )
    build.add_argument("--on", metavar="COL", help="column of the source and of each --join table by which they are joined")
    build.add_argument(
        "--missing", metavar="WHAT", default="raise", help="rows without a partner: raise, null or drop (default: %(default)s)"
    )
    build.set_defaults(spelling=_SPELLING)
    for parser in (push, pull):
        parser.add_argument("store", metavar="URL", help="the store, as it is given to StreamingDataset as index_store")
    for parser in (build, push, pull):
        add_storage_option(parser)
    query.add_argument("sql", metavar="SQL", help="SELECT … FROM dataframe …; it can read the index's rows and nothing else")
    info.add_argument("--ranges", action="store_true", help="read all rows: show each column's nulls, least and greatest value")
    explain.add_argument("sql", metavar="SQL", help="SELECT * FROM dataframe WHERE …")
    for parser in (query, explain, written, push, pull):
        parser.add_argument(
            "--index", metavar="FINGERPRINT", help="which index, by the start of its fingerprint; needed if there are several"
        )
    query.add_argument("--csv", action="store_true", help="print CSV")


def run_build(options: argparse.Namespace) -> int:
    """Build an index where a dataset with the same options looks for it."""
    from sqlstream.cache import Cache
    from sqlstream.index.build.build import open_index
    from sqlstream.index.build.lazy_build import open_lazy_index
    from sqlstream.index.file.store import IndexStore
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
        index_members=tuple(options.index_members),
        damaged_shards=options.damaged_shards,
        allow_pipes=options.allow_pipes,
        allow_missing_columns=options.allow_missing_columns,
        delimiter=options.delimiter,
        encoding=options.encoding,
        lazy=None if options.lazy is None else LazyOptions(chunk_rows=options.lazy),
        join=JoinOptions.of(_tables_of(options.join), options.on, options.missing),
    )
    opener = open_index if wanted.lazy is None else open_lazy_index
    with Cache(options.dst, storage_options=storage_options(options.storage_option)) as cache:
        store = None if options.index_store is None else IndexStore(options.index_store, cache.fetcher)
        index = opener(wanted, cache.path / "index", cache.fetcher, identity=cache.identity, store=store)
        info = describe(index.path, index.selection)
        index.close()
    if options.json:
        print_json(_as_document(info))
    else:
        _print_info(info)
    return 0


def run_push(options: argparse.Namespace) -> int:
    """Put an index into a store, in the place of one that is there."""
    from sqlstream.index.file.store import IndexStore
    from sqlstream.storage.fetcher import Fetcher

    path = choose_index(options.dst, options.index)
    with contextlib.closing(Fetcher(StorageOptions(storage_options=storage_options(options.storage_option)))) as fetcher:
        store = IndexStore(options.store, fetcher)
        manifest = store.put(path)
    if options.json:
        print_json({"fingerprint": manifest.key, "store": str(store), "size_bytes": manifest.size_bytes})
    else:
        print(f"{store} has the index {manifest.key} of {manifest.src} now, {Size(manifest.size_bytes)}")
    return 0


def run_pull(options: argparse.Namespace) -> int:
    """Get an index out of a store, to where a dataset with the options that it was built with looks for it."""
    from sqlstream.cache import Cache
    from sqlstream.index.file.index import Index
    from sqlstream.index.file.room import IndexRoom
    from sqlstream.index.file.store import IndexStore
    from sqlstream.index.file.workplace import Workplace, build_once
    from sqlstream.index.info import describe

    with Cache(options.dst, storage_options=storage_options(options.storage_option)) as cache:
        store, directory = IndexStore(options.store, cache.fetcher), cache.path / "index"
        manifest = store.choose(options.index)
        path = directory / f"{manifest.key}.sqlite"

        def find() -> Path | None:
            with contextlib.closing(Index(path)) as index:
                return path if index.is_usable() else None

        def take(place: Workplace) -> Path:
            return store.take(manifest, place, IndexRoom(directory, IndexOptions(src=manifest.src)))

        info = describe(build_once(directory, manifest.key, find, take, show_progress=True))
    if options.json:
        print_json(_as_document(info))
    else:
        _print_info(info)
    return 0


def _tables_of(joins: Sequence[str]) -> dict[str, str]:
    """Return the tables that are given as NAME=TABLE, by name.

    Raises:
        ConfigError: One has no name, or two have the same.
    """
    tables: dict[str, str] = {}
    for given in joins:
        name, mark, table = given.partition("=")
        if not mark or not name or not table or name in tables:
            problem = "comes twice" if name in tables else "is no NAME=TABLE"
            raise ConfigError(f"--join {given} {problem}: give each table a name of its own, --join latents=latents.parquet")
        tables[name] = table
    return tables


def run_verify(options: argparse.Namespace) -> int:
    """Print which index files are damaged; return 1 if one is left."""
    from sqlstream.index.info import verify_indexes

    directory = Path(options.dst) / "index"
    if not directory.is_dir():
        raise no_index(options.dst)
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

    index = Index(choose_index(options.dst, options.index))
    counts = explain(index, options.sql)
    num_rows, num_kept = sum(count.num_rows for count in counts), sum(count.num_kept for count in counts)
    if options.json:
        print_json({"num_rows": num_rows, "num_kept": num_kept, "sources": counts})
        return 0
    rows = [(count.source, count.num_rows, count.num_kept, percent(count.num_kept, count.num_rows)) for count in counts]
    print_table(["source", "rows", "kept", "share"], [*rows, ("all", num_rows, num_kept, percent(num_kept, num_rows))])
    if (chosen := _shard_unit(index, num_kept / max(1, num_rows), Path(options.dst))) is not None:
        print(f"shards: {chosen.unit.value}, since {chosen.reason} (one node, all columns, the default shuffle_window)")
    return 0


def _shard_unit(index: Index, share: float, directory: Path) -> ChosenUnit | None:
    """Return in what unit a dataset with defaults fetches the shards of such a share of the rows; None: there are none."""
    from sqlstream.cache import Cache
    from sqlstream.config import ShardUnit
    from sqlstream.index.build.shards import has_members
    from sqlstream.stream.engine.units import ShardUse, choose_unit
    from sqlstream.stream.run.order_options import OrderOptions

    if not has_members(index):
        return None
    sizes = sorted((size or 0 for (size,) in index.stored("SELECT size_bytes FROM sources")), reverse=True)
    with Cache(directory) as cache:
        limit_bytes = cache.session.limit_in_force()
    use = ShardUse(
        num_bytes=sum(sizes),
        window_bytes=sum(sizes[: OrderOptions().shuffle_window]),
        wanted_share=share,
        num_nodes=1,
    )
    return choose_unit(ShardUnit.AUTO, use, limit_bytes)


def run_query(options: argparse.Namespace) -> int:
    """Print the result of a query on one index file."""
    from sqlstream.index.file.index import Index
    from sqlstream.index.sql import sandbox

    if options.csv and options.json:
        raise ConfigError("--csv and --json exclude each other: give one of them")
    with contextlib.closing(Index(choose_index(options.dst, options.index))) as index:
        names, rows = sandbox.run_query(index, options.sql)
    cells = [[_cell(value) for value in row] for row in rows]
    if options.json:
        print_json({"columns": names, "rows": cells})
    elif options.csv:
        _print_csv(names, cells)
    else:
        print_table(names, cells)
    return 0


def _print_info(info: IndexInfo) -> None:
    is_selection = info.num_selected != info.num_rows or info.fingerprint != Path(info.path).stem
    print_facts(
        [
            ("index", info.fingerprint),
            ("source", info.src + (f" ({len(info.sources):,} files)" if len(info.sources) > 1 else "")),
            *(("joined", f"{join.name}: {_files(join)}, for {', '.join(join.columns) or 'no column'}") for join in info.joined),
            ("rows", f"{info.num_selected:,}" + (f" selected of {info.num_rows:,}" if is_selection else _where(info))),
            *([("query", info.query)] if info.query else []),
            ("key column", info.key_column or "none: row numbers are the keys"),
            ("columns", ", ".join(map(_column, info.columns))),
            ("size", str(Size(info.size_bytes))),
            *((f"shard {some.shard}", f"{some.num_samples:,} samples are used: {some.damage}") for some in info.damaged),
            ("created", info.created_at),
            ("file", info.path),
        ]
    )


def _column(column: Column) -> str:
    return f"{column.name} ({column.type}{', stays in its files' if column.is_in_place else ''})"


def _files(join: JoinedTable) -> str:
    more = len(join.sources) - 1
    return join.sources[0].url + (f" and {more:,} more files" if more else "")


def _where(info: IndexInfo) -> str:
    if not info.is_lazy:
        return ""
    uncounted = f", of which {info.num_uncounted:,} are not counted" if info.num_uncounted else ""
    return f" (lazy: they stay in their files{uncounted})"


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
        "joined": info.joined,
        "damaged": info.damaged,
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
