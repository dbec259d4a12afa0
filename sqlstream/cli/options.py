"""How subcommands are declared, and the options that all of them take."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sqlstream.errors import ConfigError

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
    parser.set_defaults(run=run, parser=parser)
    return parser


def place(text: str) -> str:
    """Return the path, or the URL, of an argument, with `~` as the home directory.

    Raises:
        ArgumentTypeError: It is empty, as of a variable that is not set: neither `/` nor the working directory is meant.
    """
    if not text:
        raise argparse.ArgumentTypeError("it is empty: give a path")
    return os.path.expanduser(text)


def add_storage_option(parser: argparse.ArgumentParser) -> None:
    """Declare `--storage-option KEY=VALUE`, which may be given more than once."""
    parser.add_argument(
        "--storage-option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="an entry of storage_options, such as endpoint_url=…; true, false and JSON objects are read as such",
    )


def storage_options(pairs: Sequence[str], option: str = "--storage-option") -> dict[str, Any]:
    """Return what `--storage-option`, or another option like it, was given.

    Raises:
        ConfigError: A pair has no `=`, or broken JSON.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, is_pair, value = pair.partition("=")
        if not (key and is_pair):
            raise ConfigError(f"{option} {key!r} is no KEY=VALUE: write endpoint_url=http://…, say")
        try:
            options[key] = json.loads(value) if value in ("true", "false") or value.startswith(("{", "[")) else value
        except json.JSONDecodeError as error:
            raise ConfigError(f"{option} {key}: its value is broken JSON ({error}): correct it") from None
    return options
