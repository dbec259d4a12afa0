"""`sqlstream doctor`: what this machine, a source and a cache directory are like, and what to change."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlstream import __version__
from sqlstream.cli.options import Subcommands, add_command, add_storage_option, storage_options
from sqlstream.cli.output import Size, print_json, print_table
from sqlstream.config import StorageOptions
from sqlstream.environment import default_cache_directory
from sqlstream.errors import SqlStreamError
from sqlstream.storage.base import urls

OK, NOTE, WRONG = "ok", "note", "wrong"
PACKAGES = {name: name for name in ("torch", "numpy", "pyarrow", "sqlalchemy", "sqlglot", "fsspec", "obstore", "urllib3")}
"""What always has to be there: import names and distributions."""
EXTRAS = {
    "s3": {"s3fs": "s3fs"},
    "gcs": {"gcsfs": "gcsfs"},
    "image": {"PIL.Image": "pillow"},
    "fast": {"simplejpeg": "simplejpeg"},
    "latent": {"safetensors.torch": "safetensors"},
    "shards": {"cbor2": "cbor2", "msgpack": "msgpack", "xxhash": "xxhash"},
    "video": {"av": "av", "decord": "decord", "PIL.Image": "pillow"},
    "torchcodec": {"torchcodec.decoders": "torchcodec"},
    "audio": {"av": "av", "soundfile": "soundfile", "soxr": "soxr"},
    "torchaudio": {"torchaudio": "torchaudio"},
    "yaml": {"yaml": "pyyaml"},
    "postgres": {"adbc_driver_postgresql": "adbc-driver-postgresql", "psycopg": "psycopg"},
    "bigquery": {
        "google.cloud.bigquery": "google-cloud-bigquery",
        "google.cloud.bigquery_storage": "google-cloud-bigquery-storage",
    },
    "duckdb": {"duckdb": "duckdb"},
}
"""What the extras of pyproject.toml bring, by import name."""
MIN_FILES = 1024
"""Open files that a process with a few workers, each with its reads ahead, comes near to."""
MIN_SHARED_BYTES = 1 << 30
"""Shared memory below which batches of workers of a few hundred MB may not fit."""
MAX_SKEW_SECONDS = 5.0
"""A clock and a file system that are farther apart than this mislead ages and expiries."""
MAX_SERVER_SKEW_SECONDS = 300.0
"""S3 refuses requests that are signed 15 minutes off, and tokens end early; below this a clock may be drifting."""


@dataclass(frozen=True)
class Fact:
    """One thing that was looked at."""

    what: str
    found: str
    state: str = OK
    """`ok`, `note` (it works, and could be better) or `wrong`."""
    cure: str = ""


def register(subcommands: Subcommands) -> None:
    """Declare the command and its options."""
    doctor = add_command(
        subcommands, "doctor", run_doctor, "look at this machine, a source and a cache; exit code 1 if something is wrong"
    )
    doctor.add_argument(
        "src", metavar="SRC", nargs="?", help="a source as it is given to StreamingDataset: it is asked for once"
    )
    doctor.add_argument("dst", metavar="DST", nargs="?", help="the cache directory (default: that of StreamingDataset)")
    add_storage_option(doctor)


def run_doctor(options: argparse.Namespace) -> int:
    """Print what was found, then what to change; return 1 if something is wrong."""
    directory = default_cache_directory() if options.dst is None else Path(options.dst).expanduser()
    facts = [*_packages(), *_extras(), *_limits(), *_disk(directory), *_cache(directory)]
    if options.src is not None:
        asked_with = storage_options(options.storage_option)
        facts += [_source(options.src, asked_with), *_server_clock(options.src, asked_with)]
    if options.json:
        print_json({"facts": facts})
    else:
        print_table(["state", "what", "found"], [[fact.state, fact.what, fact.found] for fact in facts])
        changes = [fact for fact in facts if fact.cure]
        print("\nWhat to change:" if changes else "\nNothing to change.")
        for fact in changes:
            print(f"- {fact.what}: {fact.cure}")
    return 1 if any(fact.state == WRONG for fact in facts) else 0


def _packages() -> Iterator[Fact]:
    from sqlstream.cache.ledger.database import SQLITE_VERSION

    yield Fact("sqlstream", __version__)
    yield Fact("Python", f"{platform.python_version()} ({sys.executable})")
    yield Fact("SQLite", SQLITE_VERSION)
    for module, distribution in PACKAGES.items():
        if (problem := _problem(module)) is None:
            yield Fact(module, _version(distribution))
        else:
            yield Fact(module, f"does not import: {problem}", WRONG, f"pip install --force-reinstall {distribution}")


def _extras() -> Iterator[Fact]:
    for extra, modules in EXTRAS.items():
        there = {module: version for module, distribution in modules.items() if (version := _version(distribution))}
        broken = [f"{module} does not import: {problem}" for module in there if (problem := _problem(module)) is not None]
        if broken:
            yield Fact(f"extra {extra}", "; ".join(broken), NOTE, "install the system libraries that it names, or uninstall it")
        elif there:
            yield Fact(f"extra {extra}", ", ".join(f"{modules[module]} {version}" for module, version in there.items()))
        else:
            yield Fact(f"extra {extra}", f"not installed: pip install 'sqlstream-data[{extra}]'")


def _version(distribution: str) -> str:
    """Return the version of an installed distribution, '' where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _problem(module: str) -> str | None:
    """Return the first line of why a module does not import, None if it does."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a decoder whose libraries are missing raises what it likes
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None


def _limits() -> Iterator[Fact]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < MIN_FILES
    yield Fact(
        "open files", f"{files} (ulimit -n; at most {most})", NOTE if few else OK, f"ulimit -n {MIN_FILES}" if few else ""
    )
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        yield Fact(
            "address space", f"{Size(space)} (ulimit -v)", NOTE, "ulimit -v unlimited: workers reserve more than they use"
        )
    try:
        shared = os.statvfs("/dev/shm")  # noqa: S108 - a mount is looked at, no file is made
    except OSError:
        return
    free = shared.f_bavail * shared.f_frsize
    cure = "batches of workers go through it: start a container with --shm-size=8g" if free < MIN_SHARED_BYTES else ""
    yield Fact("shared memory", f"{Size(free)} free in /dev/shm", NOTE if cure else OK, cure)


def _disk(directory: Path) -> Iterator[Fact]:
    """Yield what the file system of a cache directory, which may not be there yet, is like."""
    from sqlstream.cache.files.layout import filesystem_kind, is_network

    place = _existing(directory)
    kind = filesystem_kind(place)
    cure = "give a directory on a local disk: locks of a network file system do not hold" if is_network(kind) else ""
    yield Fact("file system", f"{kind or 'unknown'} at {place}", WRONG if cure else OK, cure)
    found = os.statvfs(place)
    inodes = f", {found.f_favail:,} inodes" if found.f_files else ""
    yield Fact("free space", f"{Size(found.f_bavail * found.f_frsize)}{inodes}")
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            skew = os.fstat(file.fileno()).st_mtime - time.time()
    except OSError as error:
        yield Fact(
            "rights", f"no file can be made in {place} ({error.strerror})", WRONG, "mend its rights, or give another one"
        )
        return
    cure = "set the clock (NTP) of this machine: ages and expiries go by it" if abs(skew) > MAX_SKEW_SECONDS else ""
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    yield Fact("clock", f"{now}, {skew:+.1f} s to that of the file system", WRONG if cure else OK, cure)


def _existing(directory: Path) -> Path:
    """Return the directory, or the nearest one above it that is there."""
    return next(
        path for path in (directory.absolute(), *directory.absolute().parents) if os.path.isdir(path)
    )  # False where we may not look


def _cache(directory: Path) -> Iterator[Fact]:
    """Yield the health of a cache, if there is one."""
    from sqlstream.cache import Cache

    if not os.path.exists(directory / "FORMAT"):
        yield Fact("cache", f"none at {directory} yet")
        return
    try:
        with Cache(directory, create=False) as cache:
            statistics, findings = cache.statistics(), cache.verify()
    except SqlStreamError as error:
        yield Fact("cache", _line(error), WRONG, "do as the message says")
        return
    limit = "no limit" if statistics.limit_bytes is None else f"limit {Size(statistics.limit_bytes)}"
    used = f"{statistics.entries:,} entries, {Size(statistics.used_bytes)}, {limit}, {len(statistics.owners)} processes"
    yield Fact("cache", used)
    cure = f"sqlstream cache verify --repair {directory}" if findings else ""
    yield Fact("ledger", f"{len(findings):,} disagreements with the disk", WRONG if findings else OK, cure)
    if statistics.failures:
        yield Fact("failures", f"{statistics.failures:,}", NOTE, f"sqlstream cache failures {directory}")


def _source(src: str, options: dict[str, Any]) -> Fact:
    """Ask for a source once: a table is looked up; of a directory or a wildcard the first object is listed."""
    from sqlstream.index.sources.formats.by_extension import is_table
    from sqlstream.index.sources.places.wildcard import fixed_part, has_wildcard
    from sqlstream.storage.fetcher import Fetcher

    name = f"source {urls.redact(src)}"
    if not urls.is_remote(src):
        found = os.path.exists(urls.local_path(fixed_part(src) if has_wildcard(src) else src))
        return Fact(name, "is there") if found else Fact(name, "does not exist", WRONG, "check the path")
    began = time.monotonic()
    try:
        fetcher = Fetcher(StorageOptions(storage_options=options))
        try:
            if is_table(src) and not has_wildcard(src):
                size_bytes = fetcher.head(src).size_bytes
                found_there = "size not told" if size_bytes is None else str(Size(size_bytes))
            else:
                prefix = fixed_part(src) if has_wildcard(src) else f"{src.rstrip('/')}/"
                first = next(iter(fetcher.list(prefix)), None)
                if first is None:
                    return Fact(name, "holds nothing", WRONG, "check the URL, and its prefix")
                found_there = f"first object {urls.redact(first.url)}"
        finally:
            fetcher.stop()
    except SqlStreamError as error:
        return Fact(name, _line(error), WRONG, "do as the message says")
    return Fact(name, f"{found_there}, answered in {1000 * (time.monotonic() - began):.0f} ms with the helper's start")


def _server_clock(src: str, options: dict[str, Any]) -> Iterator[Fact]:
    """Yield how far the clock of a source's server is from this machine's; nothing where no server is named."""
    import urllib3.exceptions

    from sqlstream.cli.server_clock import seconds_ahead, server_of

    try:
        if (server := server_of(src, options)) is None:
            return
        ahead = seconds_ahead(server, options)
    except (SqlStreamError, urllib3.exceptions.HTTPError, OSError, ValueError):
        return  # the line of the source says what is wrong
    if ahead is None:
        yield Fact("server clock", f"{server} does not tell the time")
        return
    is_far = abs(ahead) > MAX_SERVER_SKEW_SECONDS
    cure = "set the clock (NTP) of this machine, or of the server: S3 refuses what is signed 15 minutes off" if is_far else ""
    yield Fact("server clock", f"{server} is {ahead:+.0f} s from this machine", WRONG if cure else OK, cure)


def _line(error: SqlStreamError) -> str:
    return " ".join(str(error).split())
