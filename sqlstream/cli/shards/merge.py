"""`sqlstream shards merge`: one index over the parts of a dataset."""

from __future__ import annotations

import argparse

from sqlstream.cli.options import Subcommands, add_command, add_storage_option, storage_options
from sqlstream.cli.output import print_facts, print_json


def register(group: Subcommands) -> None:
    """Declare the command."""
    parser = add_command(group, "merge", run, "write one index over the parts of a dataset of mds or tar")
    parser.add_argument("out", metavar="OUT", help="the directory or URL that the parts were written to")
    add_storage_option(parser)


def run(options: argparse.Namespace) -> int:
    """Merge the indexes."""
    from sqlstream.write import merge

    merged = merge(options.out, storage_options=storage_options(options.storage_option))
    facts = {"index": merged.url, "parts": merged.num_parts, "shards": merged.num_shards, "samples": merged.num_samples}
    if options.json:
        print_json(facts)
    else:
        print_facts([(name, str(value)) for name, value in facts.items()])
    return 0
