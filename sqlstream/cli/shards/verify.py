"""`sqlstream shards verify`: reads shards as a whole, and compares them with what their index says."""

from __future__ import annotations

import argparse

from sqlstream.cli.options import Subcommands, add_command, add_storage_option, place
from sqlstream.cli.output import Size, print_facts, print_json, print_section
from sqlstream.cli.shards.opening import find_shards, shard_reader

DAMAGED = 1
"""Exit code of a finding."""


def register(group: Subcommands) -> None:
    """Declare the command."""
    parser = add_command(group, "verify", run, "read shards whole; exit code 1 if one is damaged, or not what its index says")
    parser.add_argument(
        "src",
        metavar="SRC",
        type=place,
        help="a directory, an index.json, or shards: local or remote, with braces or a wildcard",
    )
    add_storage_option(parser)


def run(options: argparse.Namespace) -> int:
    """Check the shards."""
    from sqlstream.errors import SourceError, StorageError
    from sqlstream.progress import progress
    from sqlstream.storage.base.urls import redact

    damaged: list[dict[str, str]] = []
    samples = size = 0
    with shard_reader(options, [options.src]) as reader:
        shards = find_shards(reader, options.src)
        with progress(len(shards), " shards", "checking", show=not options.json) as bar:
            for shard in shards:
                try:
                    counted = reader.check(shard)
                    samples, size = samples + counted.num_samples, size + counted.size_bytes
                except (SourceError, StorageError) as error:
                    if error.context.get("is_temporary"):  # of this machine's disk: it says nothing of the shard
                        raise
                    damaged.append({"shard": redact(shard.url), "problem": str(error)})
                bar.update(1)
    if options.json:
        print_json({"shards": len(shards), "samples": samples, "bytes": size, "damaged": damaged})
    else:
        facts = [("shards", str(len(shards))), ("sound", str(len(shards) - len(damaged))), ("samples in them", str(samples))]
        print_facts([*facts, ("their size", str(Size(size)))])
        print_section(("damaged shard", "problem"), [(found["shard"], found["problem"]) for found in damaged])
    return DAMAGED if damaged else 0
