"""`sqlstream shards index`: what other programs want beside tars: the index of wids, and offsets of samples."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from sqlstream.cli.options import Subcommands, add_command, add_storage_option, storage_options
from sqlstream.cli.output import print_facts, print_json
from sqlstream.cli.shards.opening import shard_reader
from sqlstream.errors import ConfigError


def register(group: Subcommands) -> None:
    """Declare the command."""
    parser = add_command(group, "index", run, "write the index of wids for tars, or the offsets of their samples")
    parser.add_argument("tars", metavar="TAR", nargs="+", help="tars, or directories of them: local or remote, with braces")
    parser.add_argument("--wids", metavar="OUT", help="the index to write; names are relative to it where they can be")
    parser.add_argument("--name", metavar="NAME", default="", help="of the dataset, in the index of wids")
    parser.add_argument("--idx", action="store_true", help="write TAR.idx beside each tar, the offsets of its samples")
    add_storage_option(parser)


def run(options: argparse.Namespace) -> int:
    """Write them."""
    from sqlstream.config import StorageOptions
    from sqlstream.storage.base.urls import redact
    from sqlstream.storage.fetcher import Fetcher
    from sqlstream.write.check import tar_entry, tar_offsets
    from sqlstream.write.formats.wids import wids_index

    if not (options.wids or options.idx):
        raise ConfigError("what is to be written? give --wids OUT, --idx, or both")
    texts: list[tuple[str, bytes]] = []
    entries = []
    base = "" if options.wids is None else str(options.wids).rpartition("/")[0] + "/" * ("/" in options.wids)
    with shard_reader(options, options.tars) as reader:
        for place in options.tars:
            for shard in reader.find(place):
                if shard.kind != "tar":
                    raise ConfigError(f"{redact(shard.url)} is no tar: --wids and --idx are for tars")
                with reader.held(shard.url) as path:
                    if options.wids:
                        name = shard.url.removeprefix(base) if base else shard.url
                        entries.append(tar_entry(path, name))
                    if options.idx:
                        texts.append((f"{shard.url}.idx", tar_offsets(path)))
    if options.wids:
        texts.append((options.wids, wids_index(entries, options.name)))
    fetcher = Fetcher(StorageOptions(storage_options=storage_options(options.storage_option)))
    try:
        for url, content in texts:
            with tempfile.NamedTemporaryFile(prefix="sqlstream-shards-") as file:
                file.write(content)
                file.flush()
                fetcher.upload(Path(file.name), url)
    finally:
        fetcher.close()
    facts = {"written": [redact(url) for url, _ in texts], "samples": sum(entry["nsamples"] for entry in entries)}
    if options.json:
        print_json(facts)
    else:
        print_facts([("written", redact(url)) for url, _ in texts])
    return 0
