"""`sqlstream shards info`: what an index of shards says, or which archives there are."""

from __future__ import annotations

import argparse

from sqlstream.cli.options import Subcommands, add_command, add_storage_option, place
from sqlstream.cli.output import Size, print_facts, print_json, print_section
from sqlstream.cli.shards.opening import find_shards, shard_reader

_MOST_SHOWN = 20
"""Arbitrary: shards in the text for people; `--json` has all."""


def register(group: Subcommands) -> None:
    """Declare the command."""
    parser = add_command(group, "info", run, "show the shards of a dataset: format, samples, bytes, columns")
    parser.add_argument(
        "src",
        metavar="SRC",
        type=place,
        help="a directory, an index.json, or shards: local or remote, with braces or a wildcard",
    )
    add_storage_option(parser)


def run(options: argparse.Namespace) -> int:
    """Show the shards."""
    from sqlstream.errors import ObjectNotFoundError
    from sqlstream.storage.base.urls import redact
    from sqlstream.storage.members.braces import expand
    from sqlstream.write.check import totals

    with shard_reader(options, [options.src]) as reader:
        shards = find_shards(reader, options.src)
        named = expand(options.src)
        lost = [
            shard.url for shard in shards if shard.size_bytes is None and shard.url in named and not reader.is_there(shard.url)
        ]
    if lost:
        raise ObjectNotFoundError(f"{redact(lost[0])} is not there: check the path")
    samples, size = totals(shards)
    mosaic = shards[0].mosaic
    columns = {} if mosaic is None else {column.name: column.encoding for column in mosaic.columns}
    listed = [
        {"url": redact(shard.url), "samples": shard.num_samples, "bytes": shard.size_bytes, "format": shard.kind}
        for shard in shards
    ]
    formats = ", ".join(sorted({shard.kind for shard in shards}))
    if options.json:
        print_json({"format": formats, "samples": samples, "bytes": size, "columns": columns, "shards": listed})
        return 0
    facts = [("format", formats), ("shards", str(len(shards)))]
    facts.append(("samples", "not known: `sqlstream shards verify` counts them" if samples is None else str(samples)))
    facts.append(("size", "not known" if size is None else str(Size(size))))
    if mosaic is not None:
        facts.append(("compression", mosaic.compression or "none"))
        facts.append(("columns", ", ".join(f"{name} ({encoding})" for name, encoding in columns.items())))
    print_facts(facts)
    rows = [
        (redact(shard.url), shard.num_samples, "" if shard.size_bytes is None else Size(shard.size_bytes))
        for shard in shards[:_MOST_SHOWN]
    ]
    print_section(("shard", "samples", "size"), rows)
    if len(shards) > _MOST_SHOWN:
        print(f"… and {len(shards) - _MOST_SHOWN} more: --json shows all")
    return 0
