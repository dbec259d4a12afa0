"""Whole files as MosaicML Streaming has them: hashes, five compressions, and samples that are held until they are written."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import importlib
import io
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from sqlstream.config import names_of
from sqlstream.errors import ConfigError, MissingDependencyError
from sqlstream.storage.members.mds.shards import COMPRESSIONS

_LEVELS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {"zstd": (1, 22, 3), "gz": (0, 9, 9), "br": (0, 11, 11), "bz2": (1, 9, 9)}
)
"""Lowest and highest level, and the one without a level, as MosaicML Streaming has them; snappy has none."""
XXHASHES = frozenset("xxh32 xxh64 xxh128 xxh3_64 xxh3_128".split())
_COPIED_BYTES = 1 << 20
"""Arbitrary: bytes that are read again at a time."""
_MEMORY_BYTES = 128 << 20
"""Samples of a shard up to this size are held in memory; shards of the usual 64 MiB never touch the disk twice."""


def checked_compression(compression: str | None) -> tuple[str, int | None] | None:
    """Return the algorithm and the level of `zstd:7`; None: no compression.

    Raises:
        ConfigError: There is no such algorithm, or no such level of it.
    """
    if not compression:
        return None
    name, colon, level = compression.partition(":") if isinstance(compression, str) else ("", "", "")
    if name not in COMPRESSIONS:
        raise ConfigError(f"compression={compression!r} is unknown: give one of {', '.join(COMPRESSIONS)}")
    if name not in _LEVELS:
        if colon:
            raise ConfigError(f"compression={compression!r}: {name} has no levels: give {name!r}")
        return name, None
    least, most, usual = _LEVELS[name]
    if colon and not (level.isascii() and level.isdigit() and least <= int(level) <= most):
        raise ConfigError(f"compression={compression!r}: levels of {name} are {least} to {most}")
    return name, int(level) if colon else usual


def compress(data: bytes, algorithm: str, level: int | None) -> bytes:
    """Return the compressed form of a whole file, which says its size where its format can, without a time."""
    if algorithm == "gz":
        return gzip.compress(data, level if level is not None else 9, mtime=0)
    if algorithm == "bz2":
        return bz2.compress(data, level if level is not None else 9)
    import pyarrow as pa

    if algorithm == "snappy":
        return bytes(pa.Codec("snappy").compress(data, asbytes=True))
    codec = pa.Codec("brotli" if algorithm == "br" else "zstd", compression_level=level)
    return bytes(codec.compress(data, asbytes=True))


def checked_hashes(hashes: Sequence[str] | None) -> list[str]:
    """Return names of hash algorithms.

    Raises:
        ConfigError: One is not known, or they are not sorted, or one comes twice.
        MissingDependencyError: One needs a package that is not installed.
    """
    names = [hashes] if isinstance(hashes, str) else list(names_of("hashes", hashes, "names of hash algorithms"))
    if isinstance(hashes, str) or names != sorted(set(names)):
        raise ConfigError(
            f"hashes={hashes!r}: give a sorted list of names, each once, such as {sorted(set(names)) or ['sha1']!r}"
        )
    for name in names:
        digest_of(name)
    return names


def digest_of(algorithm: str) -> Any:
    """Return a new digest of an algorithm, of hashlib or xxhash.

    Raises:
        ConfigError: It is not known.
        MissingDependencyError: It needs xxhash, which is not installed.
    """
    if algorithm in hashlib.algorithms_available and not algorithm.startswith("shake_"):  # those have no length of their own
        return hashlib.new(algorithm, usedforsecurity=False)
    if algorithm not in XXHASHES:
        known = ", ".join(sorted(name for name in hashlib.algorithms_guaranteed if not name.startswith("shake_")))
        raise ConfigError(f"hashes has {algorithm!r}, which is unknown: give names of {known}, {', '.join(sorted(XXHASHES))}")
    try:
        return getattr(importlib.import_module("xxhash"), algorithm)()
    except ImportError as error:
        raise MissingDependencyError(f"xxhash is needed for {algorithm}: pip install 'sqlstream-data[shards]'") from error


def write_file(path: Path, chunks: Iterable[bytes], hashes: Sequence[str]) -> tuple[int, dict[str, str]]:
    """Write a file, and return its size and its digests."""
    digests = {name: digest_of(name) for name in hashes}
    with open(path, "wb", buffering=_COPIED_BYTES) as file:
        size = _write(file.write, digests.values(), chunks)
    return size, {name: digest.hexdigest() for name, digest in digests.items()}


def digests_of(chunks: Iterable[bytes], hashes: Sequence[str]) -> tuple[int, dict[str, str]]:
    """Return the size and the digests of a file that is not stored."""
    digests = {name: digest_of(name) for name in hashes}
    size = _write(len, digests.values(), chunks)
    return size, {name: digest.hexdigest() for name, digest in digests.items()}


def _write(write: Callable[[bytes], object], digests: Iterable[Any], chunks: Iterable[bytes]) -> int:
    all_digests, size = list(digests), 0
    for chunk in chunks:
        write(chunk)
        for digest in all_digests:
            digest.update(chunk)
        size += len(chunk)
    return size


class SampleBuffer:
    """The samples of a shard, one behind another: in memory, and beyond 128 MiB in a file.

    Args:
        path: That file, if one is needed.
        memory_bytes: Most bytes in memory.
    """

    def __init__(self, path: Path, memory_bytes: int = _MEMORY_BYTES) -> None:
        self._path, self._memory_bytes = path, memory_bytes
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._file: BinaryIO | None = None
        self.num_bytes = 0
        """Bytes in it."""

    def add(self, pieces: Sequence[bytes], num_bytes: int) -> None:
        """Append the pieces of a sample; they are not copied."""
        self._pieces.extend(pieces)
        self._held_bytes += num_bytes
        self.num_bytes += num_bytes
        if self._held_bytes > self._memory_bytes:
            if self._file is None:
                self._file = open(self._path, "w+b", buffering=_COPIED_BYTES)  # noqa: SIM115 - close() closes it
            self._file.writelines(self._pieces)
            self._pieces, self._held_bytes = [], 0

    def chunks(self) -> Iterator[bytes]:
        """Yield all bytes in order."""
        if self._file is not None:
            self._file.seek(0)
            while chunk := self._file.read(_COPIED_BYTES):
                yield chunk
            self._file.seek(0, io.SEEK_END)
        yield from self._pieces

    def close(self) -> None:
        """Give all up."""
        self._pieces = []
        if self._file is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)
            self._file = None


def little_endian(numbers: array[int]) -> bytes:
    """Return numbers as bytes, the lowest first."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()
