"""What 3·10^6 members of shards in the ledger cost a window of hits, against 10^6: acquire and release, in one run.

Run as `python -m benchmarks.member_entries`. CPU of a sample, the least of several rounds in turn.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.ledger import SIZE, WINDOW, Measured, light_windows, walk, windows
from sqlstream.cache import Cache
from sqlstream.cache.model.refs import ObjectParts, ObjectRef

NUM_ENTRIES = (1_000_000, 3_000_000)
MEMBERS_A_SHARD = 1000
NUM_USED = 20_000
_INSERT = (
    "INSERT INTO entry (key, url, size, charged_bytes, state, tick, ext, created_at, shard) "
    "VALUES (?, ?, ?, ?, 'ready', ?, '.tar', 0, ?)"
)


def members(shards: range) -> Iterator[ObjectRef]:
    """Members of shards, of one block each."""
    for shard in shards:
        parts = ObjectParts(f"http://nowhere/{shard:06}.tar", MEMBERS_A_SHARD * SIZE)
        yield from (parts.member((at, at + SIZE)) for at in range(0, MEMBERS_A_SHARD * SIZE, SIZE))


def filled(directory: Path, num_entries: int) -> tuple[Cache, list[ObjectRef]]:
    """A full cache of members: rows for all, files (hard links) for those that are used."""
    cache = Cache(directory, limit=num_entries * SIZE)
    shards = range(num_entries // MEMBERS_A_SHARD)
    with cache._directory.ledger.transaction() as tx:
        rows = ((ref.key, ref.url, SIZE, SIZE, at, ref.shard_key) for at, ref in enumerate(members(shards)))
        tx.connection.executemany(_INSERT, rows)
    chosen = random.Random(0).sample(shards, NUM_USED // MEMBERS_A_SHARD)
    used = [ref for shard in chosen for ref in members(range(shard, shard + 1))]
    random.Random(1).shuffle(used)
    block = directory / "index" / "block"
    block.write_bytes(bytes(SIZE))
    for ref in used:
        path = Path(cache._directory.disk.data_path(ref.key, ref.ext))
        path.parent.mkdir(exist_ok=True)
        os.link(block, path)
    return cache, used


def main() -> None:
    """Print the figures of both sizes, measured in turn, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, nargs=2, default=list(NUM_ENTRIES))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="sqlstream-bench-"))
    measured = Measured()
    caches: list[Cache] = []
    for num_entries in options.entries:
        cache, refs = filled(place / str(num_entries), num_entries)
        caches.append(cache)
        label, num = f"{num_entries:.0e} members", 60 * WINDOW
        measured.add(f"{label}: acquire + release a sample, windows of {WINDOW}", num, partial(windows, cache, walk(refs), 60))
        measured.add(f"{label}: the same for_reading", num, partial(light_windows, cache, refs, 60, WINDOW))
    os.sync()  # else checkpoints wait, under the write lock, for the files made above
    measured.run(options.rounds)
    for what in ("acquire + release", "for_reading"):
        fewer, more = (min(cpus) for name, cpus in measured.cpu_us.items() if what in name)
        print(f"{what}: {more / fewer:.2f} of {options.entries[0]:.0e}")
    for cache in caches:
        cache.close()
    shutil.rmtree(place)


if __name__ == "__main__":
    main()
