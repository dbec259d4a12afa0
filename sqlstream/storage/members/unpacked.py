"""What an object holds that is compressed as a whole, or a member of a ZIP, from their bytes as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sqlstream.errors import DamagedShardError
from sqlstream.storage.base.protocols import Unpack, ZipRecord
from sqlstream.storage.members import packed
from sqlstream.storage.members.unpack import Compression, decompress
from sqlstream.storage.members.zip.record import record_content


def unpacked(chunks: Iterable[bytes | memoryview], unpack: Unpack | ZipRecord, name: str) -> Iterator[bytes]:
    """Yield the content of an object, after its hashes were compared as far as they can be.

    Args:
        chunks: The object, or the record of a member, in order.
        unpack: How it is unpacked.
        name: The object's URL for messages, without credentials.

    Raises:
        DamagedShardError: It is damaged, ends early, or has another hash or size than its index says.
        DamagedMemberError: It is a member.
    """
    if isinstance(unpack, ZipRecord):
        yield from record_content(chunks, unpack, name)
        return
    stored, raw, num_bytes = packed.HashCheck(dict(unpack.hashes), name), packed.HashCheck(dict(unpack.raw_hashes), name), 0
    for piece in _pieces(_checked(chunks, stored), unpack, name):
        raw.update(piece)
        num_bytes += len(piece)
        yield piece
    raw.finish()
    if unpack.raw_bytes is not None and num_bytes != unpack.raw_bytes:
        raise DamagedShardError(
            f"{name} holds {num_bytes} bytes, and its index says {unpack.raw_bytes}: one of them is of another version"
        )


def _checked(chunks: Iterable[bytes | memoryview], check: packed.HashCheck) -> Iterator[bytes]:
    for chunk in chunks:
        check.update(chunk)
        yield bytes(chunk)
    check.finish()


def _pieces(chunks: Iterator[bytes], unpack: Unpack, name: str) -> Iterator[bytes]:
    if not unpack.compression:
        yield from chunks
    elif unpack.compression in tuple(Compression):
        yield from decompress(chunks, Compression(unpack.compression), name, unpack.raw_bytes)
    else:  # of MosaicML Streaming, whose shards fit memory: some of its compressions know no pieces
        assert unpack.raw_bytes is not None, "its index says sizes"
        yield packed.decompress(b"".join(chunks), unpack.compression, unpack.raw_bytes, name)
