"""`sqlstream shards`: write a dataset as shards, join parts, look at shards, check them. A file for each command."""

from __future__ import annotations

from sqlstream.cli.options import Subcommands, add_group
from sqlstream.cli.shards import index, info, merge, verify, write


def register(subcommands: Subcommands) -> None:
    """Declare the group's commands and options."""
    group = add_group(subcommands, "shards", "write a dataset as shards, look at shards, check them")
    for command in (write, merge, info, verify, index):
        command.register(group)
