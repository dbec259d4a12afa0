"""The command: its options, and what it prints."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sqlstream.cli.measure.columns import Share, measure_columns
from sqlstream.cli.measure.part import Measure
from sqlstream.cli.options import Subcommands, add_command, add_storage_option, place, storage_options
from sqlstream.cli.output import print_facts, print_json
from sqlstream.errors import ConfigError
from sqlstream.storage.base import urls


def register(group: Subcommands) -> argparse.ArgumentParser:
    """Declare the command and its options, and return its parser."""
    measure = add_command(
        group, "measure", run_measure, "compute columns once, such as lengths, as a table that later runs join"
    )
    measure.add_argument("src", metavar="SRC", type=place, help="the source, as it is given to StreamingDataset")
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
    measure.add_argument("--out", metavar="FILE", type=place, help="where the table goes (default: DST/measured/…)")
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
    if options.out and urls.is_remote(options.out):
        raise ConfigError(
            f"--out {urls.redact(options.out)} is of another machine, and the table is written to this one: give a file "
            "here, and copy it"
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
        name = Path(document["path"]).stem.partition("-")[0]
        print(f"join it: StreamingDataset(…, join={{{name!r}: {document['path']!r}}}, on={document['on']!r})")
    return 0
