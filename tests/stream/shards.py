"""Shards for tests: made here, with the content that a reader must find in them."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Mapping, Sequence

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
