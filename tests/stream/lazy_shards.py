"""Shards without an index, for tests of lazy indexes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlstream import StreamingDataset
from sqlstream.testing.servers import FaultyHttpServer
from tests.stream.shards import opened, samples, tar_of

NUM_SHARDS, NUM_SAMPLES = 12, 20
NUM_ROWS = NUM_SHARDS * NUM_SAMPLES
NAMED = "s-{000..011}.tar"
WINDOW = 4


def lazily(src: Any, folder: Path, **options: Any) -> StreamingDataset:
    return opened(src, folder, **({"lazy_index_chunk_size": 1, "shuffle_window": WINDOW} | options))


def by_key(made: list[dict[str, bytes]]) -> list[tuple[bytes, ...]]:
    return sorted(tuple(value for _, value in sorted(sample.items())) for sample in made)


def asked(server: FaultyHttpServer, method: str = "GET") -> list[str]:
    return [request.path for request in server.requests() if request.method == method]


def written(folder: Path) -> str:
    """Local shards, and what names them."""
    folder.mkdir()
    for shard in range(NUM_SHARDS):
        (folder / f"s-{shard:03}.tar").write_bytes(tar_of(samples(shard, NUM_SAMPLES, 700)))
    return f"{folder}/{NAMED}"
