"""Datasets for tests: objects behind a real HTTP server, with an index that knows their hashes."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream.cache.model.refs import charged_bytes
from sqlstream.testing.servers import FaultyHttpServer


def random_bytes(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Photos:
    """`num` objects of 20 to 30 KB, their captions and hashes in a parquet index beside them."""

    server: FaultyHttpServer
    num: int

    @property
    def src(self) -> str:
        return f"{self.server.url}/photos/index.parquet"

    @property
    def total_bytes(self) -> int:
        return sum(charged_bytes(len(self.data(number))) for number in range(self.num))

    def path(self, number: int) -> str:
        return f"/photos/images/{number:04d}.jpg"

    def data(self, number: int) -> bytes:
        return self.server.objects[self.path(number)]

    def num_gets(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for request in self.server.requests():
            if request.method == "GET" and request.path.endswith(".jpg"):
                counts[request.path] = counts.get(request.path, 0) + 1
        return counts


def make_photos(server: FaultyHttpServer, folder: Path, num: int = 120) -> Photos:
    for number in range(num):
        server.objects[f"/photos/images/{number:04d}.jpg"] = random_bytes(number, 20_000 + 10_000 * number // num)
    photos = Photos(server=server, num=num)
    table = pa.table(
        {
            "index": [f"photo-{number}" for number in range(num)],
            "image": [f"images/{number:04d}.jpg" for number in range(num)],
            "caption": [None if number % 10 == 9 else f"caption {number}" for number in range(num)],
            "score": [number / num for number in range(num)],
            "sha256": [hashlib.sha256(photos.data(number)).hexdigest() for number in range(num)],
        }
    )
    path = folder / "index.parquet"
    pq.write_table(table, path)
    server.objects["/photos/index.parquet"] = path.read_bytes()
    return photos


def check_bytes(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform: the file behind `image` is the one that the index names; the path leaves, the verdict stays."""
    data = Path(sample.pop("image")).read_bytes()
    sample["is_right"] = hashlib.sha256(data).hexdigest() == sample["sha256"]
    sample.pop("caption", None)
    return sample
