"""`sqlstream index export`: the rows of an index as files of their own."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from sqlstream.cli.choice import choose_index
from sqlstream.cli.options import Subcommands, add_command
from sqlstream.cli.output import print_json, print_table
from sqlstream.config import IndexOptions
from sqlstream.errors import ConfigError, MissingDependencyError, StorageError
from sqlstream.storage.base import urls

T = TypeVar("T", int, float)


def register(group: Subcommands) -> argparse.ArgumentParser:
    """Declare the command and its options, and return its parser."""
    export = add_command(group, "export", run_export, "write the rows of an index, filtered, weighted, shuffled, split")
    export.add_argument("dst", metavar="DST", help="the cache directory, as it is given to StreamingDataset")
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
    return export


def run_export(options: argparse.Namespace) -> int:
    """Write an index as files, to a temporary place first: what has its final name is whole."""
    from sqlstream.index.build.select import open_selection
    from sqlstream.index.export import ExportOptions, export
    from sqlstream.index.export_formats import check_extension
    from sqlstream.index.file.index import Index
    from sqlstream.index.splits import REST
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
