"""The command line's entry: parses, runs, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence

from sqlstream import __version__
from sqlstream.cli import cache, demo, doctor, index, shards
from sqlstream.cli.output import printable
from sqlstream.errors import SqlStreamError
from sqlstream.logs import configure_logs

WRONG_USE = 2
"""Exit code of wrong use and of errors; argparse uses the same."""
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells have it."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What the system says of an output that takes no more."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = argparse.ArgumentParser(prog="sqlstream", description="Look at sqlstream's caches and indexes.")
    parser.add_argument("--version", action="version", version=f"sqlstream {__version__}", help="print the version and exit")
    groups = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for group in (cache, index, shards, doctor, demo):
        group.register(groups)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `sqlstream ARGUMENTS`; return its exit code.

    Args:
        arguments: Words after the program's name; None takes this process's own.
    """
    _prepare_streams()
    options, unknown = build_parser().parse_known_args(arguments)
    if unknown:  # argparse would show the usage of `sqlstream`, without the subcommand's options
        options.parser.error(f"unrecognized arguments: {' '.join(map(printable, unknown))}")
    try:
        configure_logs()
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has what it wanted (`… | head`)
        _give_output_up()
        return 0
    except (SqlStreamError, OSError) as error:  # such as a directory of another user
        if options.traceback:
            traceback.print_exc()
        text = " ".join(str(error).split())
        if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:  # other files are named
            _give_output_up()
            text = (
                f"standard output takes no more ({error.strerror}), and is not whole: make room where it goes, and run it again"
            )
        for name, flag in getattr(options, "spelling", {}).items():
            text = text.replace(name, flag)
        if "surrogates not allowed" in text and (encoding := sys.getfilesystemencoding()) != "utf-8":
            text += f". The words of this command are not in {encoding}, the encoding of the locale: set PYTHONUTF8=1"
        print(f"sqlstream: {printable(text)}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _give_output_up() -> None:
    """Have what was printed go nowhere: the interpreter flushes once more at its end, which would be a second error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _prepare_streams() -> None:
    """Have standard output take captions in any script on terminals in any encoding, and have closed streams take all."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # `>&-`, some daemons: what is printed to it would be an error, or go to the other one
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w"), errors="backslashreplace"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
