"""What MosaicML Streaming says of whole files: their hashes, and how they are compressed. Pure."""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal, Protocol

from sqlstream.errors import DamagedShardError, SourceError

_LOG = logging.getLogger(__name__)
_CODECS: Mapping[str, Literal["zstd", "gzip", "brotli", "bz2"]] = {"zstd": "zstd", "gz": "gzip", "br": "brotli", "bz2": "bz2"}
"""Names of Arrow's codecs that read a stream; its Snappy does not."""
_XXHASHES = frozenset("xxh32 xxh64 xxh128 xxh3_64 xxh3_128".split())


class _Digest(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class HashCheck:
    """Compares a file that comes in chunks with its hashes.

    An algorithm that is not here is logged once in a process and not checked; the file's size still is what the index says.

    Args:
        hashes: Digests in hexadecimal, by algorithm.
        name: The file's name in messages.
    """

    def __init__(self, hashes: Mapping[str, str], name: str) -> None:
        self._name = name
        self._expected: list[tuple[str, str, _Digest]] = []
        unchecked = []
        for algorithm, expected in hashes.items():
            digest = _start(algorithm)
            if digest is None:
                unchecked.append(algorithm)
            else:
                self._expected.append((algorithm, expected, digest))
        self.unchecked = tuple(unchecked)
        """Algorithms that are not compared: neither Python nor an installed package has them."""

    def update(self, chunk: bytes | memoryview) -> None:
        """Take the next bytes of the file."""
        for _, _, digest in self._expected:
            digest.update(chunk)

    def finish(self) -> None:
        """Compare.

        Raises:
            DamagedShardError: A digest differs.
        """
        for algorithm, expected, digest in self._expected:
            if digest.hexdigest() != expected.lower():
                raise DamagedShardError(
                    f"{self._name}: its {algorithm} is {digest.hexdigest()}, the index says {expected}: it is damaged, or was "
                    "written again without its index"
                )


def check_hashes(data: bytes | memoryview | Iterable[bytes], hashes: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Compare a file with its hashes.

    Args:
        data: The file, or its chunks in order.
        hashes: Digests in hexadecimal, by algorithm.
        name: The file's name in messages.

    Returns:
        Algorithms that could not be compared, as none here has them.

    Raises:
        DamagedShardError: A digest differs.
    """
    check = HashCheck(hashes, name)
    for chunk in (data,) if isinstance(data, bytes | memoryview) else data:
        check.update(chunk)
    check.finish()
    return check.unchecked


def _start(algorithm: str) -> _Digest | None:
    make = _maker(algorithm)
    return None if make is None else make()


@cache  # and so logged once
def _maker(algorithm: str) -> Any:
    if algorithm in hashlib.algorithms_available and not algorithm.startswith("shake_"):  # those have no length of their own
        return lambda: hashlib.new(algorithm, usedforsecurity=False)
    if algorithm in _XXHASHES:
        try:
            return getattr(importlib.import_module("xxhash"), algorithm)
        except ImportError:
            pass
    cure = "pip install 'sqlstream-data[shards]'" if algorithm in _XXHASHES else "Python's hashlib does not know it"
    _LOG.warning("hashes of the algorithm %r are not checked: %s", algorithm, cure)
    return None


def decompress(data: bytes | memoryview, compression: str, raw_bytes: int, name: str) -> bytes:
    """Return a file as it was before compression.

    Args:
        data: The compressed file.
        compression: `zstd`, `gz`, `br`, `bz2` or `snappy` (raw blocks), with or without a level (`zstd:7`).
        raw_bytes: Its size before.
        name: The file's name in messages.

    Raises:
        DamagedShardError: It is damaged, cut off, or of another size; no more than `raw_bytes` + 1 are made.
    """
    import pyarrow as pa

    algorithm = compression.partition(":")[0]
    if algorithm not in (*_CODECS, "snappy"):
        raise SourceError(f"{name}: compression {compression!r} is not read: it must be one of {', '.join(_CODECS)}, snappy")
    try:
        if algorithm == "snappy":
            found = _block_bytes(data)
            if found == raw_bytes:  # Arrow leaves what follows in the buffer as it was, where it asks for more
                return bytes(pa.decompress(data, decompressed_size=raw_bytes, codec="snappy", asbytes=True))
        else:
            with pa.CompressedInputStream(pa.BufferReader(data), _CODECS[algorithm]) as stream:
                raw: bytes = stream.read(raw_bytes + 1)
            if (found := len(raw)) == raw_bytes:
                return raw
    except (OSError, pa.ArrowException) as error:
        raise DamagedShardError(f"{name}: {len(data)} bytes do not decompress as {compression}: {error}") from error
    raise DamagedShardError(
        f"{name}: decompressed it has {'more' if found > raw_bytes else found} bytes, the index says {raw_bytes}"
    )


def _block_bytes(data: bytes | memoryview) -> int:
    """Return the size that a Snappy block gives at its start: 7 bits in each byte, the lowest first."""
    size = 0
    for place, byte in enumerate(data[:5]):
        size |= (byte & 127) << (7 * place)
        if byte < 128:
            return size
    return -1
