"""`sqlstream cache`: what is in a cache directory, clear it, check it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sqlstream.cli import top
from sqlstream.cli.options import Subcommands, add_command, add_group
from sqlstream.cli.output import Size, moment, percent, print_facts, print_json, print_section, print_table
from sqlstream.config import parse_duration
from sqlstream.errors import ConfigError

if TYPE_CHECKING:
    from sqlstream.cache import CacheStatistics, ClearReport, Finding


def register(subcommands: Subcommands) -> None:
    """Declare the group's commands and options."""
    group = add_group(subcommands, "cache", "look at a cache directory, clear it, check it")
    stats = add_command(group, "stats", run_stats, "show the account of a cache: sizes, counters, datasets, who pins what")
    clear = add_command(group, "clear", run_clear, "remove files from a cache; never one that is pinned")
    clear.add_argument("--dataset", metavar="NAME", help="only files of this dataset")
    clear.add_argument("--older-than", metavar="AGE", help="only files not used for this long, e.g. 90s, 12h, 7d")
    clear.add_argument("--index", action="store_true", help="the index files too")
    clear.add_argument("--yes", action="store_true", help="do not ask; needed when there is no terminal")
    verify = add_command(group, "verify", run_verify, "compare the ledger with the disk; exit code 1 if something is wrong")
    verify.add_argument("--repair", action="store_true", help="mend what is found")
    verify.add_argument("--deep", action="store_true", help="read all files, too, and compare them with their checksums")
    failures = add_command(
        group, "failures", run_failures, "list the downloads and samples that failed, the most frequent first"
    )
    top.register(group)
    for parser in (stats, clear, verify, failures):
        parser.add_argument("dst", metavar="DST", help="the cache directory, as it was given to StreamingDataset")


def run_stats(options: argparse.Namespace) -> int:
    """Print the statistics of a cache."""
    from sqlstream.cache import Cache

    with Cache(options.dst, create=False) as cache:
        statistics = cache.statistics()
    if options.json:
        print_json(dataclasses.asdict(statistics) | {"free_bytes": free_bytes(statistics)})
    else:
        print_statistics(statistics)
    return 0


def print_statistics(statistics: CacheStatistics) -> None:
    """Print the account of a cache: its facts, then its datasets and its owners."""
    print_facts(_facts(statistics))
    print_section(
        ["dataset", "entries", "bytes", "last used", "source"],
        ([use.name, use.entries, Size(use.bytes), moment(use.last_used), use.src] for use in statistics.datasets),
    )
    print_section(
        ["storage", "requests", "downloaded", "retries", "wait s"],
        ([use.host, use.requests, Size(use.downloaded_bytes), use.retries, use.wait_seconds] for use in statistics.hosts),
    )
    print_section(
        ["shards of", "epoch", "unit", "why"],
        ([use.dataset, use.epoch, use.unit, use.reason] for use in statistics.shard_units),
    )
    print_section(
        ["process", "host", "name", "pinned entries", "since"],
        ([use.pid, use.host, use.name, use.pinned_entries, moment(use.started_at)] for use in statistics.owners),
    )


def free_bytes(statistics: CacheStatistics) -> int | None:
    """Return what is left of the limit; None without a limit."""
    if statistics.limit_bytes is None:
        return None
    return max(0, statistics.limit_bytes - statistics.used_bytes - statistics.filling_bytes)


def _facts(statistics: CacheStatistics) -> Iterator[tuple[str, str]]:
    limit, free = statistics.limit_bytes, free_bytes(statistics)
    used = statistics.used_bytes + statistics.filling_bytes
    yield "limit", "none" if limit is None else str(Size(limit))
    yield "evicts by", statistics.eviction_policy
    yield (
        "used",
        str(Size(statistics.used_bytes)) + ("" if limit is None else f" ({percent(used, limit)} with what is filling)"),
    )
    yield "filling", str(Size(statistics.filling_bytes))
    yield "free", "no limit" if free is None else str(Size(free))
    yield "entries", f"{statistics.entries:,}"
    yield "pinned entries", f"{statistics.pinned_entries:,}"
    if statistics.stored_samples or statistics.unstored_samples:
        yield "stored samples", f"{statistics.stored_samples:,} ({Size(statistics.stored_sample_bytes)})"
        yield "not stored", f"{statistics.unstored_samples:,} (no room for them)"
    yield "hits", f"{statistics.hits:,} ({percent(statistics.hits, statistics.hits + statistics.misses)})"
    yield "misses", f"{statistics.misses:,}"
    yield "evictions", f"{statistics.evictions:,} ({Size(statistics.evicted_bytes)})"
    if statistics.quarantined:
        yield "quarantined", f"{statistics.quarantined:,} (files that were not what came)"
    yield "requests", f"{statistics.requests:,}"
    yield "downloaded", str(Size(statistics.downloaded_bytes))
    yield "retries", f"{statistics.retries:,}"
    yield "failures", f"{statistics.failures:,}"
    yield "download time", f"{statistics.wait_seconds:.1f} s (added up over downloads side by side)"
    yield "overhead", f"{Size(statistics.overhead_bytes)} (ledger, locks; beside the limit)"
    yield "index files", f"{Size(statistics.index_bytes)} (beside the limit)"


def run_clear(options: argparse.Namespace) -> int:
    """Remove what the options name, after asking."""
    from sqlstream.cache import Cache

    age_seconds = None if options.older_than is None else parse_duration(options.older_than)
    with Cache(options.dst, create=False) as cache:
        if not (options.yes or _confirmed(options, cache.statistics())):
            return 0
        report = cache.clear(dataset=options.dataset, older_than_seconds=age_seconds, index=options.index)
    if options.json:
        print_json(report)
    else:
        _print_report(report)
    return 0


def _confirmed(options: argparse.Namespace, statistics: CacheStatistics) -> bool:
    """Ask on the terminal; the question goes to standard error, which `--json` leaves to people."""
    if sys.stdin is None or not sys.stdin.isatty():  # None: `<&-`, some daemons
        raise ConfigError("cache clear removes files and there is no terminal to ask on: add --yes to confirm")
    what = "the files" if options.dataset is None else f"the files of dataset {options.dataset!r}"
    age = "" if options.older_than is None else f" not used for {options.older_than}"
    index = " and the index files" if options.index else ""
    held = f"{statistics.entries:,} files, {Size(statistics.used_bytes)}"
    print(f"Remove {what}{age}{index} from {options.dst} (it holds {held})? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    print("nothing removed", file=sys.stderr)
    return False


def _print_report(report: ClearReport) -> None:
    print(
        f"removed {report.removed_entries:,} files ({Size(report.removed_bytes)}), {report.removed_index_files:,} index files"
    )
    if report.kept_pinned_entries:
        print(
            f"left {report.kept_pinned_entries:,} pinned files ({Size(report.kept_pinned_bytes)}): a running process uses them"
        )
    if report.kept_filling_entries:
        print(f"left {report.kept_filling_entries:,} files that are being downloaded")


def run_failures(options: argparse.Namespace) -> int:
    """Print what failed, how and how often."""
    from sqlstream.cache import Cache

    with Cache(options.dst, create=False) as cache:
        records = cache.failures()
    if options.json:
        print_json({"failures": records})
    elif not records:
        print("nothing has failed")
    else:
        rows = ([found.count, moment(found.last_at), found.row, found.step, found.url, found.error] for found in records)
        print_table(["count", "last", "row", "step", "url", "error"], rows)
    return 0


def run_verify(options: argparse.Namespace) -> int:
    """Print what is wrong; return 1 if something stays wrong."""
    from sqlstream.cache import Cache

    with Cache(options.dst, create=False) as cache:
        findings = cache.verify(repair=options.repair, deep=options.deep)
        num_unread = cache.num_without_checksum() if options.deep else 0
    num_left = sum(not finding.repaired for finding in findings)
    if options.json:
        print_json({"findings": findings, "num_left": num_left} | ({"num_unread": num_unread} if options.deep else {}))
    else:
        _print_findings(findings, num_left, options)
        if num_unread:
            print(f"{num_unread:,} files have no checksum and were not read: verify_reads='crc' notes them")
    return 1 if num_left else 0


def _print_findings(findings: list[Finding], num_left: int, options: argparse.Namespace) -> None:
    if not findings:
        print("nothing found: the ledger and the disk agree")
        return
    rows = (
        [found.kind, found.key, Size(found.bytes), "repaired" if found.repaired else "left", found.url, found.explanation]
        for found in findings
    )
    print_table(["kind", "key", "bytes", "state", "url", "explanation"], rows)
    cure = f"; `sqlstream cache verify {options.dst} --repair` mends it" if num_left and not options.repair else ""
    print(f"\n{len(findings)} found, {len(findings) - num_left} repaired, {num_left} left{cure}")
