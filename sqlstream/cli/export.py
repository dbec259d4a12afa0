"""`sqlstream index export`: the rows of an index as files of their own."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sqlstream.cli.choice import choose_index
from sqlstream.cli.export_config import ROW_GROUP_ROWS, read_config
from sqlstream.cli.options import Subcommands, add_command, add_storage_option, place, storage_options
from sqlstream.cli.output import print_json, print_table
from sqlstream.config import IndexOptions, StorageOptions
from sqlstream.errors import ConfigError, MissingDependencyError, ObjectNotFoundError, StorageError
from sqlstream.storage.base import urls

if TYPE_CHECKING:
    from sqlstream.index.export import ExportOptions
    from sqlstream.index.file.index import Index
    from sqlstream.index.weights import WeightTable
    from sqlstream.storage.fetcher import Fetcher

T = TypeVar("T", int, float)
_NOT_WITH_CONFIG: dict[str, object] = {
    **dict.fromkeys(("dst", "out", "index", "sql", "where", "weights", "num_rows", "shuffle_seed")),
    "split": [],
    "max_rows": [],
    "row_group_rows": ROW_GROUP_ROWS,
    "overwrite": False,
}
"""What the file of `--config` says instead, with the values that say nothing."""


def register(group: Subcommands) -> argparse.ArgumentParser:
    """Declare the command and its options, and return its parser."""
    export = add_command(group, "export", run_export, "write the rows of an index, filtered, weighted, shuffled, split")
    export.add_argument(
        "dst", metavar="DST", nargs="?", type=place, help="the cache directory, as it is given to StreamingDataset"
    )
    export.add_argument(
        "out",
        metavar="OUT",
        type=place,
        nargs="?",
        help="the file (.parquet, .arrow, .csv, .jsonl); local, or a URL such as s3://…",
    )
    export.add_argument(
        "--config", metavar="FILE", help="a YAML file instead of DST and OUT: query → train.parquet and val.parquet"
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
        "--row-group-rows", metavar="N", type=int, default=ROW_GROUP_ROWS, help="rows of a row group (default: %(default)s)"
    )
    add_storage_option(export)
    return export


def run_export(options: argparse.Namespace) -> int:
    """Write an index as files, to a temporary place first: what has its final name is whole."""
    if options.config is not None:
        return _run_config(options)
    if options.dst is None or options.out is None:
        raise ConfigError("export needs DST and OUT, or --config FILE, which says both: give them")
    from sqlstream.index.build.select import computes_columns, open_selection
    from sqlstream.index.export import ExportOptions
    from sqlstream.index.export_formats import check_extension
    from sqlstream.index.file.index import Index
    from sqlstream.index.splits import REST
    from sqlstream.index.sql.expressions import with_where
    from sqlstream.index.weights import open_weights

    check_extension(urls.redact(options.out))
    wanted = ExportOptions(
        seed=options.shuffle_seed,
        num_rows=options.num_rows,
        splits=_by_name("--split", options.split, float, "val=0.1"),
        max_rows=_by_name("--max-rows", options.max_rows, int, "val=10000"),
        row_group_rows=options.row_group_rows,
        extension=Path(options.out).suffix,
    )
    targets = _targets(options.out, [*wanted.splits, REST] if wanted.splits else [""])
    with contextlib.ExitStack() as stack:
        fetcher = stack.enter_context(_fetching(storage_options(options.storage_option)))
        if not options.overwrite and (there := [target for target in targets.values() if _is_there(target, fetcher)]):
            raise ConfigError(f"{urls.redact(there[0])} is there already: add --overwrite to replace it, or give another name")
        index = Index(choose_index(options.dst, options.index))
        place = index.path.parent
        if (query := with_where(options.sql, options.where)) is not None:
            key = index.key_column if wanted.splits else None  # it says which split a row is in; else nothing asks for it
            filtered = IndexOptions(src=index.src, key_column=key, sql_query=query)
            if computes_columns(filtered):  # the result is an index of its own, which later commands would have to choose from
                place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sqlstream-export-")))
            index = open_selection(index, filtered, place, show_progress=True)
        weights = None if options.weights is None else open_weights(index, options.weights, place, show_progress=True)
        num_rows = _write(index, wanted, targets, fetcher, weights=weights)
    _report(targets, num_rows, as_json=options.json)
    return 0


def _run_config(options: argparse.Namespace) -> int:
    """Write train.parquet and val.parquet of a query, as a file says it."""
    from sqlstream.index.build.build import open_index
    from sqlstream.index.export import ExportOptions
    from sqlstream.index.splits import REST

    given = [name for name, usual in _NOT_WITH_CONFIG.items() if getattr(options, name) != usual]
    if given:
        shown = given[0].upper() if given[0] in ("dst", "out") else "--" + given[0].replace("_", "-")
        raise ConfigError(f"--config and {shown} exclude each other: the file says all but --storage-option")
    config = read_config(options.config)
    wanted = ExportOptions(
        seed=config.shuffle_seed,
        splits={"val": config.val_ratio} if config.val_ratio else {},
        max_rows={"val": config.max_val_rows} if config.max_val_rows else {},
        row_group_rows=config.row_group_rows,
    )
    splits = {split: split for split in [*wanted.splits, REST]} if wanted.splits else {"": REST}
    targets = {split: f"{config.destination}/{name}.parquet" for split, name in splits.items()}
    with _fetching({**config.storage_options, **storage_options(options.storage_option)}) as fetcher:
        there = [] if config.recompute else [target for target in targets.values() if _is_there(target, fetcher)]
        if there and len(there) == len(targets):
            _report(targets, dict.fromkeys(targets), as_json=options.json)
            return 0
        if there:
            missing = next(target for target in targets.values() if target not in there)
            raise ConfigError(
                f"{urls.redact(there[0])} is there, and {urls.redact(missing)} is not: an earlier export was not finished, or "
                "was another one. Set recompute: true to write both anew, or give another destination"
            )
        if not urls.is_remote(config.destination):
            with _writing(config.destination):
                urls.local_path(config.destination).mkdir(parents=True, exist_ok=True)
        if config.scratch is not None:
            config.scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="sqlstream-export-", dir=config.scratch) as place:
            index = open_index(config.index, Path(place), fetcher)
            num_rows = _write(index, wanted, targets, fetcher, scratch=config.scratch)
            index.close()
    _report(targets, num_rows, as_json=options.json)
    return 0


def _write(
    index: Index,
    wanted: ExportOptions,
    targets: Mapping[str, str],
    fetcher: Fetcher,
    *,
    weights: WeightTable | None = None,
    scratch: Path | None = None,
) -> dict[str, int]:
    """Write the files of an export, and bring each to its place when all are whole; return their numbers of rows."""
    from sqlstream.index.export import export

    with tempfile.TemporaryDirectory(prefix="sqlstream-export-", dir=scratch) as directory:
        files = export(index, wanted, Path(directory), weights)
        for name, file in files.items():
            _put(file.path, targets[name], fetcher)
    return {name: file.num_rows for name, file in files.items()}


def _report(targets: Mapping[str, str], num_rows: Mapping[str, int | None], *, as_json: bool) -> None:
    """Say what went where; None rows: the file was there, and was left as it is."""
    if as_json:
        print_json({"files": list(targets.values()), "num_rows": [num_rows[name] for name in targets]})
    elif None in num_rows.values():
        shown = " and ".join(map(urls.redact, targets.values()))
        print(f"nothing was done: {shown} {'are' if len(targets) > 1 else 'is'} there (recompute: true writes anew)")
    else:
        print_table(["rows", "file"], [[num_rows[name], target] for name, target in targets.items()])


def _by_name(option: str, given: Sequence[str], number: Callable[[str], T], example: str) -> dict[str, T]:
    """Return the numbers of NAME=NUMBER by their names."""
    found: dict[str, T] = {}
    for text in given:
        name, _, value = text.partition("=")
        if name in found:
            raise ConfigError(f"{option} names {name!r} twice: give each split once")
        try:
            found[name] = number(value)
        except ValueError:
            raise ConfigError(f"{option}={text!r} is no split and number: write {option} {example}, say") from None
    return found


def _targets(out: str, splits: Iterable[str]) -> dict[str, str]:
    """Return where the file of each split goes ('': there are none)."""
    extension = Path(out).suffix
    return {split: f"{out.removesuffix(extension)}-{split}{extension}" if split else out for split in splits}


@contextlib.contextmanager
def _fetching(given: Mapping[str, Any]) -> Iterator[Fetcher]:
    """Give what reads and writes with these `storage_options`; it starts nothing for local files."""
    from sqlstream.storage.fetcher import Fetcher

    with contextlib.closing(Fetcher(StorageOptions(storage_options=given))) as fetcher:
        yield fetcher


def _is_there(target: str, fetcher: Fetcher) -> bool:
    if not urls.is_remote(target):
        return urls.local_path(target).exists()
    with _writing(target):
        try:
            fetcher.head(target)
        except ObjectNotFoundError:
            return False
    return True


def _put(path: Path, target: str, fetcher: Fetcher) -> None:
    """Bring a finished file to its place, local or remote; big ones go in parts."""
    with _writing(target):
        if urls.is_remote(target):
            fetcher.upload(path, target)
        else:
            part = Path(f"{urls.local_path(target)}.{os.getpid()}.part")
            try:
                shutil.copyfile(path, part)
                part.replace(urls.local_path(target))
            finally:
                part.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(target: str) -> Iterator[None]:
    """Say of an error that it stopped the writing of a file."""
    name = urls.redact(target)
    try:
        yield
    except MissingDependencyError:
        raise
    except OSError as error:
        raise StorageError(f"{name} cannot be written ({error}): check the path, and your rights") from error
