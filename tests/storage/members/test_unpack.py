"""Shards that are compressed as a whole."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import random
from collections.abc import Iterator

import pyarrow as pa
import pytest

from sqlstream.errors import SourceError, TransientStorageError
from sqlstream.storage.members.tar import read_members
from sqlstream.storage.members.unpack import MAGIC_BYTES, Compression, compression_of, decompress
from tests.storage.members.kit import FIXTURES, Bytes, expected

LISTINGS = expected("tar/expected.json")
COMPRESSED = {
    "gz.tar.gz": Compression.GZIP,
    "gz_two_streams.tar.gz": Compression.GZIP,
    "lying_name.tar": Compression.GZIP,
    "bz2.tar.bz2": Compression.BZIP2,
    "xz.tar.xz": Compression.XZ,
    "zst.tar.zst": Compression.ZSTD,
    "zst_seekable.tar.zst": Compression.ZSTD,
}
SKIPPED = b"\x5e\x2a\x4d\x18\4\0\0\0abcd"
NAME = "s3://b/x.tar.gz"


def compressed(data: bytes, compression: Compression) -> bytes:
    if compression == Compression.ZSTD:
        return bytes(pa.compress(data, codec="zstd", asbytes=True))
    if compression == Compression.GZIP:
        return gzip.compress(data)
    return bz2.compress(data) if compression == Compression.BZIP2 else lzma.compress(data)


def chunks(data: bytes, num_bytes: int = 7) -> Iterator[bytes]:
    return (data[start : start + num_bytes] for start in range(0, len(data), num_bytes))


def unpacked(data: bytes, compression: Compression, num_bytes: int = 7) -> bytes:
    return b"".join(decompress(chunks(data, num_bytes), compression, NAME))


@pytest.mark.parametrize("name", sorted(COMPRESSED))
@pytest.mark.parametrize("num_bytes", [1, 100, 1 << 20])
def test_a_compressed_shard_holds_the_members_of_the_same_shard_uncompressed(name: str, num_bytes: int) -> None:
    data = (FIXTURES / "tar" / name).read_bytes()
    compression = compression_of(data[:MAGIC_BYTES])
    assert compression == COMPRESSED[name]
    content = unpacked(data, compression, num_bytes)
    found = [
        (m.name, m.start, hashlib.sha256(content[m.offset :][: m.size]).hexdigest()) for m in read_members(Bytes(content), "x")
    ]
    assert found == [(m["name"], m["offset"], m["content"]) for m in LISTINGS["bsdtar.tar"]["tarfile"]]


@pytest.mark.parametrize("name", sorted(LISTINGS))
def test_compression_is_known_by_the_first_bytes_and_never_by_the_name(name: str) -> None:
    data = (FIXTURES / "tar" / name).read_bytes()
    assert compression_of(data[:MAGIC_BYTES]) == COMPRESSED.get(name)
    assert all(compression_of(compressed(data, kind)[:MAGIC_BYTES]) == kind for kind in Compression)


def test_a_name_that_begins_as_a_compressed_file_does_is_none() -> None:
    assert compression_of(b"BZh1.txt" + bytes(504)) is None
    assert compression_of(b"") is None
    assert compression_of(SKIPPED) == Compression.ZSTD


@pytest.mark.parametrize("compression", list(Compression))
def test_a_file_that_is_cut_anywhere_is_an_error_and_never_a_short_content(compression: Compression) -> None:
    data = compressed(random.Random(1).randbytes(3000), compression)
    for place in range(len(data)):
        with pytest.raises(SourceError, match=rf"{NAME} is damaged: as {compression}, "):
            unpacked(data[:place], compression, 500)


@pytest.mark.parametrize("compression", list(Compression))
def test_streams_that_follow_each_other_are_one_content(compression: Compression) -> None:
    parts = [b"first" * 1000, b"", b"last"]
    data = b"".join(compressed(part, compression) for part in parts)
    for num_bytes in (1, 64, len(data)):
        assert unpacked(data, compression, num_bytes) == b"".join(parts)


@pytest.mark.parametrize("compression", [Compression.GZIP, Compression.BZIP2, Compression.XZ])
def test_zeros_behind_the_last_stream_are_padding_and_other_bytes_are_damage(compression: Compression) -> None:
    data = compressed(b"content", compression)
    for num_bytes in (1, len(data), 10_000):
        assert unpacked(data + bytes(512), compression, num_bytes) == b"content"
        with pytest.raises(SourceError, match="is damaged"):
            unpacked(data + b"garbage behind the stream", compression, num_bytes)


@pytest.mark.parametrize("skipped", [SKIPPED + b"%", b"%" + SKIPPED, SKIPPED + b"%" + SKIPPED])
def test_frames_to_skip_are_no_content(skipped: bytes) -> None:
    data = skipped.replace(b"%", compressed(b"content", Compression.ZSTD))
    assert unpacked(data, Compression.ZSTD) == b"content"


@pytest.mark.parametrize("compression", [Compression.GZIP, Compression.BZIP2, Compression.XZ])
def test_a_file_with_changed_bytes_is_an_error(compression: Compression) -> None:
    content = random.Random(2).randbytes(2000)
    data = compressed(content, compression)
    rng = random.Random(3)
    for _ in range(150):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        try:
            found = unpacked(bytes(changed), compression, 300)
        except SourceError:
            continue
        assert found == content, "a date or a name in the header"


@pytest.mark.parametrize("compression", list(Compression))
def test_a_few_bytes_that_hold_many_come_in_pieces_and_end_at_the_limit(compression: Compression) -> None:
    data = compressed(bytes(20 << 20), compression)
    pieces = [len(piece) for piece in decompress([data], compression, NAME)]
    assert sum(pieces) == 20 << 20
    assert max(pieces) <= 1 << 20
    kept = decompress([data], compression, NAME, max_bytes=3 << 20)
    with pytest.raises(SourceError, match=f"{NAME} holds more than 3145728 bytes, compressed with {compression}"):
        pieces = [len(piece) for piece in kept]


@pytest.mark.parametrize("compression", list(Compression))
def test_an_error_of_the_source_is_not_taken_for_damage(compression: Compression) -> None:
    data = compressed(b"content" * 100, compression)

    def failing() -> Iterator[bytes]:
        yield data[:20]
        raise TransientStorageError("the network is away")

    with pytest.raises(TransientStorageError, match="the network is away"):
        list(decompress(failing(), compression, NAME))
