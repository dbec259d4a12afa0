"""`sqlstream shards write`: any source of ours as MDS, tar, ZIP or Parquet."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from sqlstream.cli.options import Subcommands, add_command, add_storage_option, storage_options
from sqlstream.cli.output import print_facts, print_json, printable
from sqlstream.errors import ConfigError, OutputExistsError
from sqlstream.sizes import AS_IT_IS

if TYPE_CHECKING:
    from sqlstream.cli.shards.fields import Field
    from sqlstream.stream.dataset import StreamingDataset
    from sqlstream.write import WriteOptions
    from sqlstream.write.base.writer import SampleWriter

_FORMATS = ("mds", "tar", "zip", "parquet")
_ONLY: Mapping[str, tuple[str, ...]] = {
    "compression": ("mds",),
    "hashes": ("mds", "tar"),
    "max_samples": ("tar", "zip"),
    "key": ("tar", "zip"),
}
"""Options that some formats have."""
_SPELLING = {
    "columns_to_download": "--download",
    "index_cols_to_keep": "--columns",
    "exist_ok": "--overwrite",
    "data_type": "--data-type",
    "label_column": "--label-column",
    "size_limit": "--size-limit",
    "max_samples": "--max-samples",
    "epoch_size": "--num-samples",
    "num_uploads": "--uploads",
    "cache_limit": "--cache-limit",
    "shuffle_seed": "--shuffle",
    "sql_query": "--sql",
    "part=": "--part ",
    ", or resume to": ", or --resume to",
    ": give a schema": ": give a schema, in Python, ParquetWriter(schema=…)",
    ", or set allow_missing_columns=True to read it as None": "",
    "pass allow_missing_columns=True": "leave them out with --on-error skip",
}


def register(group: Subcommands) -> None:
    """Declare the command."""
    parser = add_command(group, "write", run, "write a dataset as shards: filtered, weighted, shuffled, in parts")
    parser.add_argument("src", metavar="SRC", help="what to read, as it is given to StreamingDataset")
    parser.add_argument("out", metavar="OUT", help="where the shards go: a directory, or a URL such as s3://…")
    parser.add_argument("--format", metavar="NAME", choices=_FORMATS, required=True, help="mds, tar, zip or parquet")
    parser.add_argument("--cache", metavar="DST", help="the cache directory (default: that of the user)")
    parser.add_argument("--cache-limit", metavar="SIZE", help="most bytes of it, such as 100gb (default: as it is)")
    parser.add_argument(
        "--columns",
        metavar="COL[=NAME][:ENC]",
        nargs="+",
        default=[],
        help="what is written, under which name, and for mds in which encoding (default: all)",
    )
    parser.add_argument("--download", metavar="COL", nargs="+", default=[], help="columns whose values are URLs or paths")
    parser.add_argument("--label-column", metavar="COL", help="for a directory: a column for the name of each sample's folder")
    parser.add_argument("--data-type", metavar="TYPE", help="for a directory: which kind of file makes a sample, e.g. image")
    parser.add_argument(
        "--key", metavar="COL", help="column of the keys of tar and zip (default: that of an archive, or numbers)"
    )
    parser.add_argument("--sql", metavar="QUERY", help="which rows to take: SELECT … FROM dataframe WHERE …")
    parser.add_argument("--where", metavar="COND", help="one more condition on them, such as 'score > 6'")
    parser.add_argument("--weights", metavar="EXPR", help="how often each row comes, such as '1 + 3 * (score > 6)'")
    parser.add_argument("--num-samples", metavar="N", type=int, help="how many to draw (default: as many as are selected)")
    parser.add_argument("--shuffle", metavar="SEED", type=int, help="shuffle them; without, they keep their order")
    parser.add_argument(
        "--transform", metavar="MODULE:FUNCTION", help="makes what is written of each sample: one, several, none"
    )
    parser.add_argument("--part", metavar="I/N", help="write part I of N, counted from 0; `sqlstream shards merge` joins them")
    parser.add_argument("--size-limit", metavar="SIZE", help="most bytes of a shard (default: by format)")
    parser.add_argument("--max-samples", metavar="N", type=int, help="most samples of a shard of tar or zip")
    parser.add_argument("--compression", metavar="NAME", help="of mds: zstd, gz, br, bz2 or snappy, or with a level, zstd:7")
    parser.add_argument("--hashes", metavar="NAME", nargs="+", default=[], help="of the index of mds; md5 for that of tar")
    parser.add_argument(
        "--on-error", metavar="WHAT", choices=("raise", "skip"), default="raise", help="raise, or skip the sample"
    )
    parser.add_argument("--resume", action="store_true", help="go on with a writing that ended early")
    parser.add_argument("--overwrite", action="store_true", help="write where something is already")
    parser.add_argument("--uploads", metavar="N", type=int, default=4, help="shards stored at a time (default: %(default)s)")
    add_storage_option(parser)
    parser.add_argument(
        "--out-option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="an entry of storage_options for OUT alone, where it is another store",
    )
    parser.set_defaults(spelling=_SPELLING)


def run(options: argparse.Namespace) -> int:
    """Write the shards; with `--resume` a place that is complete is left as it is: a batch queue may ask twice."""
    try:
        facts = _write(options)
    except OutputExistsError as error:
        if not (options.resume and error.context.get("is_complete")):
            raise
        facts = {"out": options.out, "format": options.format, "samples": None, "left_out": None}
    if options.json:
        print_json(facts)
    elif facts["samples"] is None:
        print(f"{printable(options.out)} is complete: nothing is written")
    else:
        print_facts([(name.replace("_", " "), str(value)) for name, value in facts.items()])
    return 0


def _write(options: argparse.Namespace) -> dict[str, object]:
    """Write the shards, and return what was written."""
    from sqlstream.cli.shards.fields import Files, Rows, parse_fields
    from sqlstream.stream.writing import write_dataset
    from sqlstream.write import WriteOptions

    for name, formats in _ONLY.items():
        if getattr(options, name) and options.format not in formats:
            raise ConfigError(
                f"--{name.replace('_', '-')} is of {' and '.join(formats)}, and not of {options.format}: leave it out"
            )
    fields = parse_fields(options.columns)
    if options.transform is not None and (named := [field for field in fields if field.name is not None]):
        cure = f"have it return {named[0].name!r}, and leave the name out"
        if options.format in ("tar", "zip"):
            cure = "what it returns is in `json`, and bytes are files named by their kind: else use sqlstream.write"
        raise ConfigError(
            f"--columns {named[0].column}={named[0].name}: with --transform its function names what is written: {cure}"
        )
    part = _part(options.part)
    write_options = WriteOptions(
        exist_ok=options.overwrite,
        resume=options.resume,
        part=part,
        num_uploads=options.uploads,
        storage_options=storage_options(options.out_option, "--out-option") or storage_options(options.storage_option),
        show_progress=not options.json,
    )
    make = _function(options.transform)
    with _dataset(options, fields, make) as dataset:
        _check_place(options, write_options.part_name, dataset)
        write_options = replace(write_options, source=_source_of(options, dataset))
        if options.format in ("tar", "zip"):
            are_members = "__key__" in dataset.columns
            key = options.key or ("__key__" if are_members and options.weights is None and make is None else None)
            convert: Callable[[int, Mapping[str, Any]], dict[str, Any]] = Files(
                () if make else fields, options.download, key, are_extensions=are_members
            )
            writer = _archive_writer(options, write_options)
        else:
            rows = Rows(() if make else fields, options.download, has_times=options.format == "parquet")
            convert = rows
            writer = _row_writer(options, write_options, rows, dataset, fields, is_made=make is not None)
        made = _made if make is not None else _as_it_is

        def samples_of(position: int, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
            return [_keyed(convert(position, item), item, position, number) for number, item in enumerate(made(sample))]

        with writer:
            done = write_dataset(dataset, writer, samples_of, part=part, may_skip=options.on_error == "skip")
    return {"out": writer.place, "format": options.format, "samples": done.num_written, "left_out": done.num_left_out}


def _check_place(options: argparse.Namespace, part: str, dataset: StreamingDataset) -> None:
    """Raise OutputExistsError where shards would be written over those that are read, or over their index."""
    from sqlstream.index.info import describe
    from sqlstream.storage.base import urls
    from sqlstream.write.base.place import place_of

    def directory(url: str) -> str:
        return url.rstrip("/") if urls.is_remote(url) else os.path.realpath(urls.local_path(url))

    place = place_of(options.out).part(part)
    out = directory(place.remote or str(place.local))
    src = os.path.expanduser(options.src)
    own = src if src.endswith("/") or os.path.isdir(src) else urls.parent(src)  # an index may name shards elsewhere
    for url in (own, *(urls.parent(file.url) for file in describe(dataset.index.path).sources)):
        if directory(url) == out:
            raise OutputExistsError(f"{place} holds what is read of {urls.redact(options.src)}: write elsewhere")


def _source_of(options: argparse.Namespace, dataset: StreamingDataset) -> str:
    """Return what a resumed writing must have in common beside the format: the rows, their order, what is made of them."""
    names = ("columns", "download", "key", "weights", "num_samples", "shuffle", "transform")
    content = dataset.state_dict()["content"]
    return json.dumps({**{name: getattr(options, name) for name in names}, "content": content}, sort_keys=True)


def _part(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    number, slash, total = text.partition("/")
    if not (slash and number.isdecimal() and total.isdecimal() and int(number) < int(total)):
        raise ConfigError(f"--part {text!r} is no part: write I/N, counted from 0, such as 0/8")
    return int(number), int(total)


def _function(name: str | None) -> Callable[[Any], Any] | None:
    """Return the function of `--transform`, which may be in the current directory."""
    if name is None:
        return None
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ConfigError(f"--transform {name!r} is not MODULE:FUNCTION, such as prepare:to_sample")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Callable[[Any], Any] = attrgetter(function)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--transform {name}: {error}") from error
    if not callable(found):
        raise ConfigError(f"--transform {name} is a {type(found).__name__}, and nothing that can be called")
    return found


class Collected:
    """A transform whose samples, one, several or none, become one: so each position of the epoch gives one.

    Args:
        function: From a sample to a sample, a list of samples, or None.
        name: Of the function, as `--transform` has it, for errors.
    """

    def __init__(self, function: Callable[[Any], Any], name: str) -> None:
        self._function = function
        self.__name__ = name

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return them under one name.

        Raises:
            TypeError: They are no samples.
        """
        key = sample["__sample_key__"]
        made = self._function(sample)
        samples = [] if made is None else [made] if isinstance(made, Mapping) or not isinstance(made, Iterable) else list(made)
        for one in samples:
            if not isinstance(one, Mapping):
                raise TypeError(f"it returned a {type(one).__name__}: give a dict, a list of dicts, or None")
            if unnamed := [name for name in one if not isinstance(name, str)]:
                raise TypeError(f"it returned a field {unnamed[0]!r}, which is no text: give names of columns")
        return {_MADE: samples, "__sample_key__": key}


_MADE = "__made__"


def _made(sample: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = sample[_MADE]
    return found


def _as_it_is(sample: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return (sample,)


def _keyed(made: dict[str, Any], item: Mapping[str, Any], position: int, number: int) -> dict[str, Any]:
    """Return a sample of an archive with the key that a transform gave it; the second of a position has a key of its own."""
    if "__key__" in made and isinstance(item.get("__key__"), str):
        return {**made, "__key__": item["__key__"]}
    return {**made, "__key__": f"{position:09}-{number}"} if number and "__key__" in made else made


def _dataset(options: argparse.Namespace, fields: Sequence[Field], make: Callable[[Any], Any] | None) -> StreamingDataset:
    from sqlstream.stream.dataset import StreamingDataset
    from sqlstream.world import World

    wanted = [field.column for field in fields if make is None and not field.column.startswith("__")]
    reads_others = any(text is not None for text in (options.where, options.sql, options.weights))  # SQL sees what is kept
    return StreamingDataset(
        options.src,
        options.cache,
        options.data_type,
        shuffle_seed=options.shuffle,
        transforms=None if make is None else [Collected(make, options.transform)],
        columns_to_download=options.download or None,
        index_cols_to_keep=sorted({*wanted, *([options.key] if options.key else [])})
        if wanted and not options.download and not reads_others
        else None,
        cache_limit=options.cache_limit if options.cache_limit is not None else AS_IT_IS,
        sql_query=options.sql,
        where=options.where,
        source_options=None if options.label_column is None else {"label_column": options.label_column},
        weights=options.weights,
        epoch_size=options.num_samples,
        on_error=options.on_error,
        max_failure_ratio=1.0 if options.on_error == "skip" else 0.1,
        world=World(),
        storage_options=storage_options(options.storage_option),
        show_progress=not options.json,
    )


def _archive_writer(options: argparse.Namespace, write_options: WriteOptions) -> SampleWriter[Any]:
    from sqlstream.write import TarWriter, ZipWriter

    sizes: dict[str, Any] = {"size_limit": options.size_limit, "max_samples": options.max_samples}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    if options.format == "zip":
        return ZipWriter(options.out, **sizes, options=write_options)
    if options.hashes not in ([], ["md5"]):
        raise ConfigError(f"--hashes {' '.join(options.hashes)}: the index of tars has md5 alone")
    return TarWriter(options.out, **sizes, extras=("md5",) if options.hashes else (), options=write_options)


def _row_writer(
    options: argparse.Namespace, write_options: WriteOptions, rows: Any, dataset: Any, fields: Sequence[Field], *, is_made: bool
) -> SampleWriter[Any]:
    """Return a writer of MDS or Parquet; the first sample of the epoch tells encodings, so they are those of all parts."""
    from sqlstream.write import MdsWriter, ParquetWriter

    sizes = {} if options.size_limit is None else {"size_limit": options.size_limit}
    given = {field.name or field.column: field.encoding for field in fields if field.encoding}
    if options.format == "parquet":
        types = {} if is_made else rows.types(dataset.index)
        return ParquetWriter(options.out, media=given, types=types, **sizes, options=write_options)
    dataset.set_progress(0, 0)
    first = next((one for sample in dataset for one in (_made(sample) if is_made else _as_it_is(sample))), None)
    if first is None:
        raise ConfigError(f"{options.src} gives no sample, which would tell the columns: look at --where and --transform")
    columns = rows.encodings({name: value for name, value in rows(0, first).items() if name not in given}) | given
    return MdsWriter(
        options.out, columns, compression=options.compression, hashes=options.hashes, **sizes, options=write_options
    )
