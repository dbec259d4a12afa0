"""How subcommands are declared, and the options that all of them take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

Run = Callable[[argparse.Namespace], int]
"""A subcommand's body: parsed options in, exit code out."""

if TYPE_CHECKING:  # a private name of argparse, generic for type checkers only
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subcommands = object


def add_group(subcommands: Subcommands, name: str, summary: str) -> Subcommands:
    """Return the place for the subcommands of group `name`."""
    group = subcommands.add_parser(name, help=summary, description=summary)
    return group.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)


def add_command(subcommands: Subcommands, name: str, run: Run, summary: str) -> argparse.ArgumentParser:
    """Return the parser of a new subcommand that calls `run`; it takes `--json` and `--traceback` as all do."""
    parser = subcommands.add_parser(name, help=summary, description=summary)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text for people")
    parser.add_argument("--traceback", action="store_true", help="on an error, print Python's traceback too")
    parser.set_defaults(run=run)
    return parser
