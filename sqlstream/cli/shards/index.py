"""`sqlstream shards index`: what other programs want beside tars: the index of wids, offsets of samples, `.nv-meta`."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sqlstream.cli.options import Subcommands, add_command, add_storage_option, place, storage_options
from sqlstream.cli.output import print_facts, print_json
from sqlstream.cli.shards.opening import shard_reader
from sqlstream.errors import ConfigError

if TYPE_CHECKING:
    from sqlstream.write.check import ShardReader


def register(group: Subcommands) -> None:
    """Declare the command."""
    parser = add_command(group, "index", run, "write what other programs want beside tars: indexes and offsets")
    parser.add_argument(
        "tars",
        metavar="TAR",
        nargs="+",
        type=place,
        help="tars, or directories of them: local or remote, with braces",
    )
    parser.add_argument(
        "--wids", metavar="OUT", type=place, help="the index to write; names are relative to it where they can be"
    )
    parser.add_argument("--name", metavar="NAME", default="", help="of the dataset, in the index of wids")
    parser.add_argument("--idx", action="store_true", help="write TAR.idx beside each tar, the offsets of its samples")
    parser.add_argument("--energon", action="store_true", help="write .nv-meta beside the tars, for Megatron-Energon")
    add_storage_option(parser)


def run(options: argparse.Namespace) -> int:
    """Write them."""
    from sqlstream.storage.base.urls import redact

    if not (options.wids or options.idx or options.energon):
        raise ConfigError("what is to be written? give --wids OUT, --idx, --energon, or several")
    from sqlstream.write.base.disk import temporary_disk

    with (
        shard_reader(options, options.tars) as reader,
        temporary_disk("what is made of the tars lies there first"),
        tempfile.TemporaryDirectory(prefix="sqlstream-shards-") as folder,
    ):
        shards = [shard for place in options.tars for shard in reader.find(place)]
        for shard in shards:
            if shard.kind != "tar":
                raise ConfigError(f"{redact(shard.url)} is no tar: the index of wids, offsets and .nv-meta are of tars")
        files, num_samples = _made(options, reader, [shard.url for shard in shards], Path(folder))
        _store(options, files)
    if options.json:
        print_json({"written": [redact(url) for url in files], "samples": num_samples})
    else:
        print_facts([("written", redact(url)) for url in files])
    return 0


def _made(options: argparse.Namespace, reader: ShardReader, tars: list[str], folder: Path) -> tuple[dict[str, Path], int]:
    """Return the files by where they belong, and the number of samples; each tar is read once, and held one at a time."""
    from sqlstream.storage.base.urls import redact
    from sqlstream.write.check import tar_entry, tar_offsets
    from sqlstream.write.energon import ENERGON_FILES, FOLDER, write_energon
    from sqlstream.write.formats.wids import wids_index

    files: dict[str, Path] = {}
    entries = []
    base = _common(tars)

    def looked_at() -> Iterator[tuple[str, Path]]:
        for number, url in enumerate(tars):
            with reader.held(url) as path:
                if options.wids:
                    entries.append(tar_entry(path, _named(url, options.wids)))
                if options.idx:
                    files[f"{url}.idx"] = folder / f"{number}.idx"
                    files[f"{url}.idx"].write_bytes(tar_offsets(path, redact(url)))
                yield url.removeprefix(base), path

    if options.energon:
        (folder / FOLDER).mkdir()
        num_samples = write_energon(looked_at(), folder / FOLDER)
        files |= {f"{base}{FOLDER}/{name}": folder / FOLDER / name for name in ENERGON_FILES}
    else:
        for _ in looked_at():
            pass
        num_samples = sum(entry["nsamples"] for entry in entries)
    if options.wids:
        files[options.wids] = folder / "wids.json"
        files[options.wids].write_bytes(wids_index(entries, options.name))
    return files, num_samples


def _named(tar: str, index: str) -> str:
    """Return how an index names a tar: from its own place on where the tar is below it, else as an absolute path or a URL."""
    from sqlstream.storage.base import urls

    if urls.is_remote(index) or urls.is_remote(tar):
        return tar.removeprefix(index[: index.rfind("/") + 1])
    place, path = (os.path.abspath(urls.local_path(url)) for url in (os.path.dirname(index), tar))
    return os.path.relpath(path, place) if Path(path).is_relative_to(place) else path


def _common(tars: list[str]) -> str:
    """Return the directory that all tars are below, with `/` at its end."""
    first, last = min(tars), max(tars)
    same = next((at for at, (one, two) in enumerate(zip(first, last, strict=False)) if one != two), len(min(first, last)))
    return first[: first.rfind("/", 0, same + 1) + 1] if len(tars) > 1 else first[: first.rfind("/") + 1]


def _store(options: argparse.Namespace, files: Mapping[str, Path]) -> None:
    from sqlstream.config import StorageOptions
    from sqlstream.storage.base import urls
    from sqlstream.storage.fetcher import Fetcher
    from sqlstream.write.base.journal import put_bytes
    from sqlstream.write.energon import ENERGON_FILES, FOLDER

    is_remote = any(urls.is_remote(url) for url in files)
    fetcher = Fetcher(StorageOptions(storage_options=storage_options(options.storage_option))) if is_remote else None
    try:
        for url in files:  # what says that a `.nv-meta` is whole goes first, and comes last
            if url.endswith(f"{FOLDER}/{ENERGON_FILES[-1]}") and not urls.is_remote(url):
                urls.local_path(url).unlink(missing_ok=True)
        for url, path in files.items():
            if fetcher is not None and urls.is_remote(url):
                fetcher.upload(path, url)
            else:
                put_bytes(None, url, path.read_bytes())
    finally:
        if fetcher is not None:
            fetcher.close()
