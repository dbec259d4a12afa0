"""Samples of the golden files of MosaicML Streaming, as its writers were given them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from sqlstream.storage.members.mds.decoder import MdsDecoder
from sqlstream.storage.members.mds.shards import MdsShard, offsets, parse_index
from sqlstream.storage.members.packed import decompress
from tests.goldens import FIXTURES

MDS = FIXTURES / "mds"


def shards_of(directory: Path) -> tuple[MdsShard, ...]:
    """Return what the index of a directory says."""
    return parse_index((directory / "index.json").read_bytes(), str(directory))


def content_of(directory: Path, shard: MdsShard) -> bytes:
    """Return a shard as it was before compression."""
    if shard.zip is None or shard.compression is None:
        return (directory / shard.raw.basename).read_bytes()
    data = (directory / shard.zip.basename).read_bytes()
    return decompress(data, shard.compression, shard.raw.bytes, shard.zip.basename)


def mds_samples(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of an MDS directory; images as their bytes, which no version of Pillow changes."""
    for shard in shards_of(directory):
        data = content_of(directory, shard)
        decoder = MdsDecoder(shard.columns, allow_pickle=True)
        encodings = {column.name: column.encoding for column in shard.columns}
        for start, stop in pairwise(offsets(data, shard, "shard")):
            sample = data[start:stop]
            spans = decoder.spans(sample)
            yield {
                name: value(encodings[name], sample[slice(*spans[name])], decoder, name) for name in reversed(list(encodings))
            }


def value(encoding: str, data: bytes, decoder: MdsDecoder, name: str) -> Any:
    """Return a value: encoded images as bytes."""
    if encoding in ("jpeg", "png"):
        return data
    if encoding in ("list[jpeg]", "list[png]", "jpeg_array"):
        first = 4 * encoding.startswith("list")
        (number,) = struct.unpack_from("<I", data, first)
        lengths = struct.unpack_from(f"<{number}I", data, first + 4)
        bounds = accumulate(lengths, initial=first + 4 + 4 * number)
        return [data[start:stop] for start, stop in pairwise(bounds)]
    return decoder.decode_value(name, data)


def files_of(directory: Path) -> dict[str, bytes]:
    """Return all files below a directory, hidden ones too."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}
