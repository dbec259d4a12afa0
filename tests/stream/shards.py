"""Shards for tests: made here, with the content that a reader must find in them."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlstream import StreamingDataset
from sqlstream.testing.servers import FaultyHttpServer

Made = Sequence[tuple[str, Mapping[str, bytes]]]
"""Samples of a shard: key, and content by extension."""


def samples(shard: int, num_samples: int, num_bytes: int = 3000) -> list[tuple[str, dict[str, bytes]]]:
    """Samples of pictures, classes and, of every third one, a text."""
    made: list[tuple[str, dict[str, bytes]]] = []
    for number in range(num_samples):
        content = random.Random(shard << 16 | number).randbytes(num_bytes + number)
        sample = {"jpg": content, "cls": b"%d" % (number % 7)}
        if number % 3 == 0:
            sample["txt"] = b"sample %d of %d" % (number, shard)
        made.append((f"dir{shard}/{number:05}", sample))
    return made


def tar_of(made: Made) -> bytes:
    """The archive of samples."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for key, parts in made:
            for extension, content in parts.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


def serve(server: FaultyHttpServer, num_shards: int, num_samples: int, num_bytes: int = 3000) -> list[dict[str, bytes]]:
    """Put tar shards on a server, and return the content of all samples."""
    expected: list[dict[str, bytes]] = []
    for shard in range(num_shards):
        made = samples(shard, num_samples, num_bytes)
        server.objects[f"/data/s-{shard:03}.tar"] = tar_of(made)
        expected += [{"__key__": key.encode(), **parts} for key, parts in made]
    return expected


def opened(src: Any, folder: Path, **options: Any) -> StreamingDataset:
    given: dict[str, Any] = {"show_progress": False, "cache_limit": "100mb"} | options
    return StreamingDataset(src, folder / "cache", **given)


def content(sample: Mapping[str, Any]) -> dict[str, bytes]:
    """Key and parts of a sample, as `shards.serve` returns them."""
    parts = {name: value for name, value in sample.items() if isinstance(value, bytes)}
    return {"__key__": sample["__key__"].encode(), **parts}


def ranges(server: FaultyHttpServer, shard: int) -> list[int]:
    """How many bytes of a shard each request asked for; 0: all."""
    asked = [request for request in server.requests(f"/data/s-{shard:03}.tar") if request.method == "GET"]
    spans = [str(request.range).removeprefix("bytes=").split("-") for request in asked]
    return [int(span[1]) + 1 - int(span[0]) if span[0] != "None" else 0 for span in spans]
