"""`sqlstream cache top`: a cache directory at work, in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sqlstream.cli.options import Subcommands, add_command
from sqlstream.cli.output import Size, percent, print_facts, print_json, print_section
from sqlstream.errors import ConfigError

if TYPE_CHECKING:
    from sqlstream.cache.admin.activity import CacheActivity, DownloadActivity, OwnerActivity

_OPEN = "\x1b[?1049h\x1b[?25l"
"""Switches to the terminal's other screen, without a cursor; `_CLOSE` brings the first one back as it was."""
_CLOSE = "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K\n", "\x1b[J"
_BAR_WIDTH = 20


def register(subcommands: Subcommands) -> None:
    """Declare the command and its options."""
    top = add_command(subcommands, "top", run_top, "watch a cache at work: processes, downloads, pins, rates; Ctrl-C ends it")
    top.add_argument("dst", metavar="DST", help="the cache directory, as it was given to StreamingDataset")
    top.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="look so often; 1 if not given")
    top.add_argument("--once", action="store_true", help="print one look and end, as off a terminal and with --json")


def run_top(options: argparse.Namespace) -> int:
    """Show what goes on in a cache, once or until Ctrl-C."""
    from sqlstream.cache.admin.activity import look

    if not 0 < options.interval <= threading.TIMEOUT_MAX:
        raise ConfigError(
            f"--interval={options.interval} is out of range: give seconds above 0, and no more than a wait can take"
        )
    directory = Path(options.dst).absolute()
    activity = look(directory)
    if options.json:
        print_json(activity)
    elif options.once or not sys.stdout.isatty():
        print_activity(activity)
    else:
        with _screen():
            before = None
            while True:
                _draw(activity, before)
                before = activity
                time.sleep(options.interval)
                activity = look(directory)
    return 0


def print_activity(activity: CacheActivity, before: CacheActivity | None = None) -> None:
    """Print one look: facts, then processes, then downloads; with an earlier look, what happened since in a second."""
    print_facts([*_facts(activity), *(_rates(activity, before) if before is not None else ())])
    print_section(["process", "name", "pinned", "bytes", "limit", "state"], map(_owner_cells, activity.owners))
    print_section(["leader", "received", "of", "progress", "url"], map(_download_cells, activity.downloads))


def _facts(activity: CacheActivity) -> Iterator[tuple[str, str]]:
    limit, charged = activity.limit_bytes, activity.used_bytes + activity.filling_bytes
    share = "" if limit is None else f" of {Size(limit)} {_bar(charged, limit)}"
    yield "used", f"{Size(charged)}{share}"
    yield "entries", f"{activity.entries:,}, {activity.pinned_entries:,} of them pinned ({Size(activity.pinned_bytes)})"
    hits = percent(activity.hits, activity.hits + activity.misses)
    yield "hits", f"{activity.hits:,} ({hits}), misses {activity.misses:,}, evictions {activity.evictions:,}"
    yield "downloaded", f"{Size(activity.downloaded_bytes)}, failures {activity.failures:,}"


def _rates(activity: CacheActivity, before: CacheActivity) -> Iterator[tuple[str, str]]:
    seconds = activity.seen_at - before.seen_at
    hits, misses, evictions = (
        (getattr(activity, name) - getattr(before, name)) / seconds for name in ("hits", "misses", "evictions")
    )
    downloaded = Size(int((activity.downloaded_bytes - before.downloaded_bytes) / seconds))
    yield (
        "a second",
        f"{hits:,.0f} hits, {misses:,.0f} misses, {evictions:,.0f} evictions, {downloaded} downloaded",
    )


def _owner_cells(owner: OwnerActivity) -> list[object]:
    limit = "" if owner.limit_bytes is None else str(Size(owner.limit_bytes))
    state = "" if owner.is_alive else "dead"
    if owner.is_alive and owner.waiting_bytes is not None:
        state = f"waits for room for {Size(owner.waiting_bytes)}"
    return [owner.pid, owner.name, owner.pinned_entries, Size(owner.pinned_bytes), limit, state]


def _download_cells(download: DownloadActivity) -> list[object]:
    received, reserved = download.received_bytes, download.reserved_bytes
    return [download.pid, Size(received), Size(reserved), _bar(received, reserved), download.url]


def _bar(part: int, whole: int) -> str:
    num_full = min(_BAR_WIDTH, _BAR_WIDTH * part // whole) if whole else 0
    return f"[{'#' * num_full}{'.' * (_BAR_WIDTH - num_full)}] {percent(part, whole)}"


# -- the terminal ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """The terminal's other screen, until Ctrl-C, which is how one leaves."""
    print(_OPEN, end="", flush=True)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        print(_CLOSE, end="", flush=True)


def _draw(activity: CacheActivity, before: CacheActivity | None) -> None:
    """Write over what is there, line by line, as far as the terminal is wide and high; nothing flickers."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        print_activity(activity, before)
    columns, num_lines = shutil.get_terminal_size()
    lines = text.getvalue().splitlines()
    if len(lines) >= num_lines:
        lines = [*lines[: num_lines - 2], f"… {len(lines) - num_lines + 2} more lines"]
    print(_HOME + "".join(line[:columns] + _END_OF_LINE for line in lines) + _END_OF_SCREEN, end="", flush=True)
