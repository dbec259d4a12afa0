"""Writes MDS, and MosaicML Streaming's split formats: byte for byte as its own writers, where a shard is not compressed.

Differences: an exception leaves no index; a first sample above the limit makes no empty shard before it; a shard never passes
4 GiB, where its offsets of 32 bits would wrap, whatever its limit.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlstream.config import parse_bytes
from sqlstream.errors import ConfigError, EncodeError
from sqlstream.write.base.journal import StoredShard
from sqlstream.write.base.options import Out, WriteOptions
from sqlstream.write.base.output import FinishedShard
from sqlstream.write.base.writer import PartFiles, SampleWriter
from sqlstream.write.formats.mds_encoder import MdsEncoder, column_lists
from sqlstream.write.formats.whole_files import (
    SampleBuffer,
    checked_compression,
    checked_hashes,
    compress,
    digests_of,
    write_file,
)

INDEX_NAME = "index.json"
_VERSION = 2
MOST_BYTES = 2**32 - 1
"""Largest offset."""
DEFAULT_SIZE_LIMIT = 1 << 26
"""Bytes of a shard, as MosaicML Streaming has it."""
Pieces = tuple[list[bytes], int]
"""The pieces of an encoded sample, and their bytes in all."""


class MosaicFiles:
    """What the formats of MosaicML Streaming have in common: sizes, hashes, compression, index.

    Args:
        layout: The format's name in the index.
        compression: `zstd`, `gz`, `br`, `bz2` or `snappy`, with or without a level (`zstd:7`).
        hashes: Names of hash algorithms, sorted.
        size_limit: Most bytes of a shard before compression; None: 4 GiB.

    Raises:
        ConfigError: One of them is wrong.
    """

    def __init__(
        self, layout: str, compression: str | None, hashes: Sequence[str] | None, size_limit: int | str | None
    ) -> None:
        self.layout = layout
        self._algorithm = checked_compression(compression)
        self._hashes = checked_hashes(hashes)
        limit = parse_bytes(size_limit, "size_limit") or None
        if limit is not None and limit > MOST_BYTES:
            raise ConfigError(f"size_limit={size_limit!r}: offsets have 32 bits: give at most {MOST_BYTES}, or None")
        self.limit_bytes = MOST_BYTES if limit is None else limit
        """Most bytes of a shard."""
        self.config: dict[str, Any] = {
            "version": _VERSION,
            "format": layout,
            "compression": compression or None,
            "hashes": self._hashes,
            "size_limit": limit,
        }
        """What each shard says of all."""

    def config_bytes(self) -> bytes:
        """Return the configuration as it is stored in shards."""
        return json.dumps(self.config, sort_keys=True).encode()

    def write(self, name: str, chunks: Iterable[bytes], files: PartFiles) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Write a file, and return what the index says of it: as it is, and compressed."""
        if self._algorithm is None:
            size, digests = write_file(files.part_path(name), chunks, self._hashes)
            return _file(name, size, digests), None
        data = b"".join(chunks)
        raw = _file(name, *digests_of([data], self._hashes))
        algorithm, level = self._algorithm
        stored = f"{name}.{algorithm}"
        return raw, _file(stored, *write_file(files.part_path(stored), [compress(data, algorithm, level)], self._hashes))


def _file(name: str, size: int, digests: dict[str, str]) -> dict[str, Any]:
    return {"basename": name, "bytes": size, "hashes": digests}


def finished_shard(record: Mapping[str, Any]) -> FinishedShard:
    """Return a shard of which an index says this."""
    stored = [record.get(f"zip_{kind}") or record[f"raw_{kind}"] for kind in ("data", "meta") if record.get(f"raw_{kind}")]
    files = {file["basename"]: file["bytes"] for file in stored}
    return FinishedShard(num_samples=record["samples"], files=files, record=record)


def index_of(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Return an index of shards."""
    return json.dumps({"version": _VERSION, "shards": list(records)}, sort_keys=True).encode()


def offset_table(lengths: array[int], first: int) -> bytes:
    """Return u32 number of samples, u32 offset of each and of the end."""
    import numpy as np

    offsets = np.zeros(len(lengths) + 2, "<u4")  # [n + 2]
    offsets[0] = len(lengths)
    offsets[1:] = first
    offsets[2:] += np.cumsum(np.frombuffer(lengths, "u4"), dtype="<u4") if lengths else 0
    return offsets.tobytes()


class RowsDraft:
    """A shard whose samples are collected, since their table comes before them, or beside them.

    Args:
        mosaic: Sizes, hashes, compression.
        number: Of the shard.
        files: Where it is written.
    """

    def __init__(self, mosaic: MosaicFiles, number: int, files: PartFiles) -> None:
        self._name = f"shard.{number:05}.{mosaic.layout}"
        self._mosaic, self._files = mosaic, files
        self._buffer = SampleBuffer(files.part_path(f"{self._name}.samples"))
        self._lengths = array("I")

    @property
    def num_samples(self) -> int:
        """Samples in it."""
        return len(self._lengths)

    def add(self, item: Pieces) -> None:
        """Add a sample."""
        pieces, num_bytes = item
        self._buffer.add(pieces, num_bytes)
        self._lengths.append(num_bytes)

    def chunks(self, head: bytes) -> Iterator[bytes]:
        """Yield a head and all samples."""
        yield head
        yield from self._buffer.chunks()

    def discard(self) -> None:
        """Give it up."""
        self._buffer.close()


class MdsDraft(RowsDraft):
    """An MDS shard: table, configuration, samples."""

    def __init__(self, mosaic: MosaicFiles, number: int, files: PartFiles) -> None:
        super().__init__(mosaic, number, files)
        self._config = mosaic.config_bytes()

    def takes(self, item: Pieces) -> bool:
        """Return whether there is room for a sample."""
        size = 8 + len(self._config) + 4 * (self.num_samples + 1) + self._buffer.num_bytes + item[1]
        return not self.num_samples or size <= self._mosaic.limit_bytes

    def add(self, item: Pieces) -> None:
        """Add a sample."""
        if item[1] + len(self._config) + 12 > MOST_BYTES:
            raise EncodeError(f"a sample of {item[1]} bytes: a shard has at most 4 GiB")
        super().add(item)

    def finish(self) -> FinishedShard:
        """Write the shard."""
        first = 4 + 4 * (self.num_samples + 1) + len(self._config)
        head = offset_table(self._lengths, first) + self._config
        raw, stored = self._mosaic.write(self._name, self.chunks(head), self._files)
        self._buffer.close()
        record = {"samples": self.num_samples, "raw_data": raw, "zip_data": stored, **self._mosaic.config}
        return finished_shard(record)


class MdsFormat:
    """MDS.

    Args:
        mosaic: Sizes, hashes, compression.
        encoder: Of the columns.
    """

    index_names = (INDEX_NAME,)

    def __init__(self, mosaic: MosaicFiles, encoder: MdsEncoder) -> None:
        self._mosaic = mosaic
        self.encode = encoder.encode
        mosaic.config |= column_lists(encoder.columns)
        self.settings: Mapping[str, Any] = mosaic.config
        """What decides the bytes."""

    def adopt(self, shards: Sequence[StoredShard]) -> None:
        """Take over nothing: the settings say all."""

    def start(self, number: int, files: PartFiles) -> MdsDraft:
        """Begin a shard."""
        return MdsDraft(self._mosaic, number, files)

    def index(self, shards: Sequence[StoredShard]) -> dict[str, bytes]:
        """Return `index.json`."""
        return {INDEX_NAME: index_of([shard.record for shard in shards])}


class MdsWriter(SampleWriter[Pieces]):
    """Writes samples as MDS, the format of MosaicML Streaming.

    Args:
        out: A directory, a URL, or (directory, URL).
        columns: Encodings by name: `bytes`, `str`, `int`, `uint8` … `float64`, `str_int`, `str_float`, `str_decimal`,
            `json`, `ndarray`, `ndarray:int16`, `ndarray:int16:2,3`, `pil`, `jpeg`, `png`, `jpeg_array`, `list[pil]`,
            `list[jpeg]`, `list[png]`; `pkl` where it is allowed.
        compression: `zstd`, `gz`, `br`, `bz2` or `snappy`, with or without a level (`zstd:7`); None: none.
        hashes: Names of hash algorithms for the index, sorted: those of `hashlib`, and `xxh64` and the like.
        size_limit: Most bytes of a shard before compression, such as `"64mb"`; None: 4 GiB.
        allow_pickle: Take the encoding `pkl`, whose samples can run any code where they are read.
        options: How it is stored: `exist_ok`, `resume`, `keep_local`, `part`, …

    Raises:
        ConfigError: An argument is wrong.
        OutputExistsError: Something is there.

    Example:
        >>> import tempfile
        >>> with MdsWriter(tempfile.mkdtemp(), {"text": "str", "label": "int"}) as writer:
        ...     writer.write({"text": "a", "label": 1})
        >>> writer.num_samples
        1
    """

    def __init__(
        self,
        out: Out,
        columns: Mapping[str, str],
        *,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = DEFAULT_SIZE_LIMIT,
        allow_pickle: bool = False,
        options: WriteOptions | None = None,
    ) -> None:
        mosaic = MosaicFiles("mds", compression, hashes, size_limit)
        super().__init__(MdsFormat(mosaic, MdsEncoder(columns, allow_pickle=allow_pickle)), out, options or WriteOptions())
